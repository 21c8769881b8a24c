"""`mpispeed sbatch --stage-env`: the lines in a batch script."""

import subprocess
from pathlib import Path

import pytest

from mpispeed.base.errors import UsageError
from mpispeed.launch.sbatch import TEMPLATES, Request, fill, values_of
from mpispeed.launch.sites import Site
from mpispeed.launch.submit import Partition


def script(template="single", **more):
    words = [template if template in ("generate", "tune", "data") else "train.py"]
    request = Request(
        words, Path("/runs/x"), Path("/work"), template, time="10", cores_per_rank=1, python="/my env/python",
        array="0-1" * (template == "array"), **more,
    )  # fmt: skip
    return fill(template, values_of(request, Site(), Partition()))


@pytest.mark.parametrize("template", sorted({*TEMPLATES} - {"container"}))
def test_every_start_of_a_rank_is_from_the_copy(template, tmp_path):
    text = script(template, is_staged=True, staged_place="/local disk")
    (tmp_path / "job").write_text(text)
    done = subprocess.run(["bash", "-n", tmp_path / "job"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shared = [line for line in text.splitlines() if "'/my env/python'" in line]
    assert [line.split("=")[0].split()[0] for line in shared] == ["staged_lines", "end_staging()"]
    assert shared[0].endswith(" stage begin --stage-dir '/local disk')")
    assert '"$staged_python" -m' in text


def test_without_the_option_nothing_of_it_is_there():
    text = script()
    assert "stage" not in text.lower()
    assert "'/my env/python' -m mpi4py train.py" in text


@pytest.mark.parametrize("folder", ["plain", "with spaces and 'quotes'"])
def test_the_lines_are_run_before_the_ranks_and_undone_at_the_end(tmp_path, folder):
    """With a Python that only says how it is called."""
    python = tmp_path / folder / "python"
    python.parent.mkdir()
    python.write_text(
        '#!/bin/sh\necho "$@" >&2\ncase "$*" in *begin) echo "export MPISPEED_STAGED=/copy staged_python=echo";; esac\n'
    )
    python.chmod(0o755)
    request = Request(["train.py"], tmp_path, tmp_path, time="10", cores_per_rank=1, python=str(python), is_staged=True)
    lines = values_of(request, Site(), Partition())["environment"]
    done = subprocess.run(
        ["bash", "-euc", f'{lines}\n"$staged_python" the rank\nexit 3'], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (3, "the rank\n")
    first, last = done.stderr.splitlines()
    assert first.endswith("stage begin")
    assert last.endswith("stage end /copy")


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(UsageError, match="in one file already"):
        script("container", is_staged=True, image="x.sif")
    own = tmp_path / "own.sbatch"
    own.write_text("#!/bin/bash\n#SBATCH --time=$time_limit\nsrun $python $arguments\n")
    request = Request(["train.py"], tmp_path, tmp_path, str(own), time="10", cores_per_rank=1, is_staged=True)
    with pytest.raises(UsageError, match=r"neither \$prepare nor \$environment"):
        fill(str(own), values_of(request, Site(), Partition()))
