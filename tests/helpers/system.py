"""What tests need of the system they run on; with CI=true its lack is a failure, so that no test is left out unseen."""

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
"""PYTHONPATH of processes that tests start: they run this checkout, whatever is installed."""


def cannot(reason):
    """Skip the test; with CI=true fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI has to run this test: {reason}")
    pytest.skip(reason)


def with_own_mounts():
    """Words before a command that let it mount what nobody else sees: as a user of a new namespace, or as root."""
    words, refusals = _with_own_mounts()
    if not words:
        cannot(f"this system lets a user mount nothing in a namespace of its own: {refusals}")
    return list(words)


@functools.cache
def _with_own_mounts():
    if not shutil.which("unshare"):
        return (), "unshare is not installed"
    refusals = []
    with tempfile.TemporaryDirectory(prefix="mpispeed-mount-") as folder:
        for words in (("unshare", "-rm"), ("unshare", "-m")):
            done = subprocess.run(
                [*words, "mount", "-t", "tmpfs", "none", folder], capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                return words, ""
            refusals.append(f"{' '.join(words)}: {done.stderr.strip()}")
    return (), "; ".join(refusals)
