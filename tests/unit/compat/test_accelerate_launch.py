"""Options of torch's launcher, as `accelerate launch` fills them in, in words of `mpispeed run`."""

import pytest
from torch.distributed.run import get_args_parser

from mpispeed.compat.accelerate_launch import start, words_of


def options(*words):
    return get_args_parser().parse_args([*words, "train.py", "--lr", "1"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--nproc_per_node", "4"], ["-n", "4", "--as-deepspeed"]),
        (["--nproc_per_node", "2", "--master_port", "29500", "--module"], ["-n", "2", "--as-deepspeed", "--module"]),
        (["--nproc_per_node", "2", "--no_python"], ["-n", "2", "--as-deepspeed", "--no-python"]),
        (["--nproc_per_node", "0"], ["--as-deepspeed"]),  # on a machine without GPUs, where no number was given
    ],
)
def test_its_words_become_ours(given, expected):
    assert words_of(options(*given)) == ["run", *expected, "train.py", "--lr", "1"]


def test_machines_that_start_their_own_processes_are_refused(capsys):
    with pytest.raises(SystemExit) as leaving:
        start(options("--nnodes", "2", "--nproc_per_node", "1"))
    assert leaving.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("mpispeed: --num_machines 2 with the launcher standard starts processes on each machine")
