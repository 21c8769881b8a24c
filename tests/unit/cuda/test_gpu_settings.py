"""What tests on a GPU are run with, as far as it can be tried without one."""

import warnings

import pytest

from tests.gpu import conftest, test_sanitizer

OF_TORCH = {
    DeprecationWarning: "`torch.jit.script_method` is deprecated. Please switch to `torch.compile` or `torch.export`.",
    UserWarning: "Attempting to run cuBLAS, but there was no current CUDA context! Attempting to set the primary "
    "context... (Triggered internally at CublasHandlePool.cpp:135.)",
}


class Item:
    """Has what the hook asks of a test."""

    def __init__(self, path):
        self.path, self.markers = path, []

    def add_marker(self, marker):
        self.markers.append(marker)


@pytest.mark.filterwarnings(*conftest.IGNORED)
def test_torch_may_warn_of_itself_and_nobody_else():
    for kind, text in OF_TORCH.items():
        warnings.warn(text, kind, stacklevel=1)
        with pytest.raises(kind, match="of mpispeed"):
            warnings.warn(f"{text[:10]} of mpispeed", kind, stacklevel=1)
    with pytest.raises(FutureWarning):
        warnings.warn(OF_TORCH[UserWarning], FutureWarning, stacklevel=1)


def test_every_test_on_a_gpu_has_these_filters(request):
    here, there = Item(request.path), Item(request.config.rootpath / "tests" / "gpu" / "test_norm.py")
    conftest.pytest_collection_modifyitems([here, there])
    assert here.markers == []
    found = [marker.args for marker in there.markers if getattr(marker, "name", "") == "filterwarnings"]
    assert found == [(line,) for line in conftest.IGNORED]


def test_initcheck_sees_what_torch_writes():
    assert test_sanitizer.left_out("initcheck") == []
    assert "--kernel-name-exclude" in test_sanitizer.left_out("memcheck")
