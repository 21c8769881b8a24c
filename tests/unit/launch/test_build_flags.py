"""The build asks the compiler whether it has OpenMP."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROBE = """
import sys
sys.argv = ["setup.py"]
import setuptools
from distutils.ccompiler import new_compiler
from distutils.core import run_setup
build = run_setup("setup.py", stop_after="init").get_command_obj("build_ext")
build.compiler = new_compiler()
build.compiler.set_executables(compiler_so=[sys.executable, COMPILER], linker_exe=[sys.executable, COMPILER])
print("answer", build.has_openmp())
"""


@pytest.mark.parametrize("knows_openmp", [True, False])
def test_openmp_is_probed(tmp_path, knows_openmp):
    compiler = tmp_path / "cc.py"
    compiler.write_text(f"import sys\nsys.exit('-fopenmp' in sys.argv and not {knows_openmp})")
    code = f"COMPILER = {str(compiler)!r}\n{PROBE}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == [f"answer {knows_openmp}"], done.stderr
