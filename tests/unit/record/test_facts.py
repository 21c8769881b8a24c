"""Facts of a run: what is allowed is there, and keys never are."""

import string
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.base.version import VERSION
from mpispeed.record import facts

KEY = "kY7-distinctive-9Qz-secret"
NAMES = st.text(string.ascii_uppercase + "_", min_size=1, max_size=12)


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "OMP_TOKEN", "MPISPEED_API_KEY",
        "NCCL_SECRET", "UCX_PASSWORD", "I_MPI_HYDRA_PASSWD", "OMPI_MCA_orte_hnp_uri", "PMIX_SERVER_URI", "MY_VARIABLE",
        "SSH_AUTH_SOCK", "PYTORCH_Credential",
    ],
)  # fmt: skip
def test_a_variable_that_may_be_secret_is_not_recorded(name):
    assert facts.environment({name: KEY, "OMP_NUM_THREADS": "4"}) == {"OMP_NUM_THREADS": "4"}
    assert facts.slurm({name: KEY}) == {}


@given(NAMES, st.sampled_from(["KEY", "TOKEN", "SECRET", "PASSWORD", "key", "Token"]), NAMES)
def test_no_prefix_lets_a_secret_through(before, word, after):
    for prefix in facts.ALLOWED_PREFIXES:
        assert facts.environment({f"{prefix}{before}{word}{after}": KEY}) == {}


def test_variables_that_matter_are_recorded():
    kept = {
        "CUDA_VISIBLE_DEVICES": "0", "MPISPEED_RUN_DIR": "/runs/1", "NCCL_DEBUG": "INFO", "PATH": "x" * 5000,
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    assert facts.environment(kept) == {**kept, "PATH": "x" * 4096}
    assert facts.slurm({"SLURM_JOB_ID": "7", "SLURM_JWT": KEY}) == {"SLURM_JOB_ID": "7"}
    assert not any(facts.FORBIDDEN.search(name) for name in facts.ALLOWED if name != facts.EXCEPTION)


def test_the_command_has_no_keys():
    words = ["python", "train.py", "--api_key", KEY, f"--hf-token={KEY}", "--steps", "10"]
    found = facts.command(words)
    assert found["words"] == ["python", "train.py", "--api_key", "(set)", "--hf-token=(set)", "--steps", "10"]
    assert facts.command()["words"] == [word[:4096] for word in sys.orig_argv]


def test_versions_are_those_of_what_is_installed():
    import torch

    found = facts.versions("MPI 1")
    assert found["mpispeed"] == VERSION and found["torch"] == torch.__version__ and found["mpi"] == "MPI 1"
