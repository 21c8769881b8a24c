"""Builds the compiled modules and ships the kernel sources and batch templates; the rest is in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from Cython.Build import cythonize  # capital C: the folder ./cython cannot shadow it
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CCompilerError

# module name under mpispeed._native -> source under cython/
SOURCES = {
    "cpu_optim": "optim/cpu_optim.pyx",
    "coded_optim": "optim/coded_optim.pyx",
    "fp_sum": "reduce/fp_sum.pyx",
    "crc32c": "bits/crc32c.pyx",
    "block_quant": "bits/block_quant.pyx",
    "weight_codes": "bits/weight_codes.pyx",
    "one_bit": "bits/one_bit.pyx",
    "state_codes": "bits/state_codes.pyx",
    "permute": "rows/permute.pyx",
    "token_choice": "rows/token_choice.pyx",
    "meeting": "node/meeting.pyx",
    "layer_loops": "layer/layer_loops.pyx",
    "block_io": "io/block_io.pyx",
    "token_reads": "io/token_reads.pyx",
    "launch": "device/launch.pyx",
}
# top-level folder -> suffixes that go into a wheel, as mpispeed/_<folder>
ASSETS = {
    "cuda": {".cu", ".cuh", ".h"},
    "slurm": {".sbatch", ".sh", ".toml", ".md"},
}
# No -march: the loops carry their own target clones, and a wheel has to run on every node of a site.
# No contraction: the same source must give the same bits at every vector width.
# No debugging information, though Python's own flags ask for it: it is four fifths of a file, and names folders.
LINK = ["-fopenmp"]
COMPILE = ["-O3", "-g0", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fvisibility=hidden", *LINK]
# https://reproducible-builds.org/specs/source-date-epoch: who sets it wants the same bytes from every build.
IS_REPRODUCIBLE = "SOURCE_DATE_EPOCH" in os.environ
# One build for Python 3.11 and all later ones (docs/hpc/install.md).
IS_ABI3 = os.environ.get("MPISPEED_ABI3") == "1"
ABI3_MACROS = [("Py_LIMITED_API", "0x030B0000")]  # buffers are in the limited API since 3.11


def extension(name: str, source: str) -> Extension:
    """The compiled module mpispeed._native.<name>."""
    return Extension(
        f"mpispeed._native.{name}",
        [f"cython/{source}"],
        include_dirs=["cython/include"],
        depends=sorted(str(path) for path in Path("cython/include").iterdir()),
        extra_compile_args=COMPILE,
        extra_link_args=LINK,
        define_macros=ABI3_MACROS if IS_ABI3 else [],
        py_limited_api=IS_ABI3,
    )


def even_modes(folder: Path) -> None:
    """Give all files below `folder` the modes that a umask of 022 gives: a wheel keeps them."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o755 if path.suffix == ".so" else 0o644)


class BuildPy(build_py):
    """Copies the asset folders into the package; an editable install reads them from the checkout."""

    def asset_pairs(self) -> list[tuple[Path, Path]]:
        """(source, target in the build folder) of every asset file."""
        package = Path(self.build_lib) / "mpispeed"
        return [
            (path, package / f"_{folder}" / path.relative_to(folder))
            for folder, suffixes in ASSETS.items()
            for path in sorted(Path(folder).rglob("*"))
            if path.suffix in suffixes
        ]

    def run(self) -> None:
        """Build the package, then add the assets."""
        super().run()
        if self.editable_mode:
            return
        for source, target in self.asset_pairs():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """What a wheel has to contain."""
        assets = [] if self.editable_mode else [str(target) for _, target in self.asset_pairs()]
        return super().get_outputs(include_bytecode) + assets


class BuildExt(build_ext):
    """Builds with one thread for each loop where the compiler has no OpenMP, as Apple's clang."""

    def has_openmp(self) -> bool:
        """True if a program can be compiled and linked with -fopenmp."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "probe.c"
            source.write_text("#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n")
            try:
                made = self.compiler.compile([str(source)], output_dir="/", extra_postargs=LINK)
                self.compiler.link_executable(made, str(Path(folder) / "probe"), extra_postargs=LINK)
            except CCompilerError:
                return False
        return True

    def build_extensions(self) -> None:
        """Probe, then build."""
        if not self.has_openmp():
            sys.stderr.write("warning: the C compiler refuses -fopenmp; the compiled modules will use one thread\n")
            for module in self.extensions:
                module.extra_compile_args = [flag for flag in module.extra_compile_args if flag not in LINK]
                module.extra_link_args = [flag for flag in module.extra_link_args if flag not in LINK]
        if IS_REPRODUCIBLE:  # without the folder of this interpreter's library: modules need nothing of it
            self.compiler.linker_so = [x for x in self.compiler.linker_so if not x.startswith("-Wl,-rpath")]
        super().build_extensions()


class BdistWheel(bdist_wheel):
    """Gives all files of a reproducible wheel the same modes, whatever umask the checkout had."""

    def write_wheelfile(self, wheelfile_base: str, *words: str) -> None:
        """Write the last file that the archive takes in, then set the modes of all."""
        super().write_wheelfile(wheelfile_base, *words)
        if IS_REPRODUCIBLE:
            even_modes(Path(wheelfile_base).parent)


if IS_REPRODUCIBLE:
    os.umask(0o022)
setup(
    ext_modules=cythonize(
        [extension(name, source) for name, source in SOURCES.items()],
        build_dir="build/cython",
        include_path=["cython/include"],
        language_level=3,
    ),
    cmdclass={"bdist_wheel": BdistWheel, "build_ext": BuildExt, "build_py": BuildPy},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if IS_ABI3 else {},
)
