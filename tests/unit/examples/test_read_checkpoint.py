"""The C reader of checkpoints, compiled with the library of HDF5 and nothing of ours."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from mpispeed.ckpt.write.save import SaveOptions
from tests.unit.ckpt.sample import saved, tensors_of

SOURCE = Path(__file__).parents[3] / "docs/examples/read_checkpoint.c"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("c") / "read_checkpoint"
    subprocess.run(["h5cc", "-shlib", "-Wall", "-Wextra", "-Werror", "-o", path, SOURCE], check=True)
    return path


def test_sums_are_those_of_the_tensors(program, tmp_path):
    """Equal to the bit: both add doubles in the order of the elements. With one file, and over links to several."""
    kinds = {torch.bfloat16: "bfloat16"}
    for files in (1, 3):
        where = tmp_path / str(files)
        path = saved(where, options=SaveOptions(files=files)) / "model.h5"
        for slot in ("master", "momentum16"):
            value = tensors_of()["embed.weight", slot]
            done = subprocess.run(
                [program, path, f"params/embed.weight/{slot}"], capture_output=True, text=True, check=True
            )
            said, number = done.stdout.rsplit(" ", 1)
            shape = " ".join(map(str, value.shape))
            kind = kinds.get(value.dtype, "numbers")
            assert said == f"params/embed.weight/{slot}: {kind}, shape {shape}, sum"
            assert float(number) == np.add.accumulate(value.double().reshape(-1).numpy())[-1]


def test_what_it_cannot_read(program, tmp_path):
    path = saved(tmp_path, tensors={("w", "master"): torch.ones(3), ("w", "odd"): torch.ones(3).to(torch.float8_e5m2)})
    done = subprocess.run([program, path / "model.h5", "params/w/odd"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and re.search("float8_e5m2, which this program does not know", done.stderr)
    for words in ([path / "model.h5", "params/gone"], [path / "gone.h5", "x"]):
        assert subprocess.run([program, *words], capture_output=True, check=False).returncode == 1
    assert subprocess.run([program], capture_output=True, check=False).returncode == 2
