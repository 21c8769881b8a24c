"""tools/walk.py: the files that an operation enters."""

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[3] / "tools/walk.py"


def test_an_update_enters_the_engine_its_optimizer_and_the_loops_under_it(tmp_path):
    told = tmp_path / "files.json"
    command = [sys.executable, str(TOOL), "--rank", "update2", str(told)]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300)
    files = set(json.loads(told.read_text()))
    assert {"engine/engine.py", "optim/adam.py", "native/multi_tensor_host.py"} <= files
    assert not [name for name in files if name.startswith("ckpt/")]
