"""The package root: its names are found when they are used, and importing it costs next to nothing."""

import subprocess
import sys

import pytest

import mpispeed


@pytest.mark.parametrize("name", mpispeed.__all__)
def test_every_public_name_is_there(name):
    assert getattr(mpispeed, name)
    assert name in dir(mpispeed)


def test_import_is_light():
    code = "import sys, mpispeed; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "pydantic", "mpispeed.engine"} & set(done.stdout.split())


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"no attribute 'initialise'; its public names are .*initialize"):
        _ = mpispeed.initialise
