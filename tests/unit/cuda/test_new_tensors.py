"""Tensors that kernels write to: by torch's C interface, and by torch.empty where a part of it is missing."""

import sys

import pytest
import torch

from mpispeed._native import launch
from mpispeed.native import norm
from mpispeed.native.cuda import launcher
from tests.helpers.cuda_host import HostLauncher
from tests.zoo import same_bits

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.fixture(params=[True, False], ids=["interface", "empty"])
def is_found(request):
    """With the interface, and as on a torch that calls its functions otherwise."""
    found = launch.find_interface() if request.param else launch.find_interface(("no_such_function",))
    yield found
    assert launch.find_interface()


def test_the_interface_of_this_torch_is_found():
    assert launch.find_interface()
    assert not launch.find_interface(("no_such_function",))
    assert launch.find_interface(("no_such_function", "_Z16THPVariable_WrapRKN2at10TensorBaseE"))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (5,), (0, 3), (3, 1, 4), (2, 3, 4, 5), (1,) * 9])
def test_tensors_are_those_of_empty(shape, dtype, is_found):
    made, wanted = launch.new_tensor(shape, dtype, -1), torch.empty(shape, dtype=dtype)
    assert type(made) is torch.Tensor
    assert (made.shape, made.dtype, made.device) == (wanted.shape, dtype, wanted.device)
    assert made.stride() == wanted.stride()
    assert not made.requires_grad
    assert made.is_leaf
    assert torch.equal(made.fill_(1), torch.ones(shape, dtype=dtype))


def test_nothing_else_holds_them(is_found):
    def holders(x):
        return sys.getrefcount(x), x._use_count(), torch._C._storage_Use_Count(x.untyped_storage()._cdata)

    assert holders(launch.new_tensor((4,), torch.float32, -1)) == holders(torch.empty(4))
    kept = [launch.new_tensor((4,), torch.float32, -1).fill_(at) for at in range(100)]
    assert [x[0].item() for x in kept] == list(range(100))


def test_too_much_is_refused_as_by_torch(is_found):
    with pytest.raises(RuntimeError, match="allocate"):
        launch.new_tensor((1 << 60,), torch.float32, -1)


def test_bits_do_not_depend_on_it():
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((5, 24), (24,), (24,)))

    def outcome():
        y = norm.layer_norm(x, weight, bias)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, weight, bias])]

    with launcher.standing_in(HostLauncher()):
        assert launch.find_interface()
        wanted = outcome()
        assert not launch.find_interface(("no_such_function",))
        try:
            same_bits(wanted, outcome())
        finally:
            assert launch.find_interface()
