"""The calls that are tried on other processors (`tools/check_aarch64.py`) hold on this one, at every vector width."""

import pytest

from mpispeed.native import status
from tests.helpers import native_calls

FOLDER = native_calls.Path(status.__file__).parents[1] / "_native"


@pytest.mark.parametrize("name", [*native_calls.BITWISE, *native_calls.CLOSE])
def test_calls_by_numpy_alone(name):
    arrays = list({**native_calls.BITWISE, **native_calls.CLOSE}[name](FOLDER))
    assert sum(array.size for array in arrays) > 0


def test_every_compiled_module_is_called_but_the_one_that_needs_torch():
    text = native_calls.Path(native_calls.__file__).read_text()
    called = {name for name in status.MODULES if f'load(folder, "{name}")' in text}
    assert called == status.MODULES.keys() - {"launch"}


def test_one_openmp_runtime_in_a_process():
    """torch's and that of the loops: two would start threads beside each other's."""
    for name in status.MODULES:
        status.require(name)
    words = [line.split()[-1] for line in native_calls.Path("/proc/self/maps").read_text().splitlines()]
    found = {word for word in words if any(part in word for part in ("libgomp", "libomp", "libiomp"))}
    assert len(found) == 1, found
