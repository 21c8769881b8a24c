"""Products of experts on the host have the bits of a loop."""

import pytest
import torch
from torch.testing import assert_close

from mpispeed.nn.expert import MLPExperts, SwiGLUExperts
from mpispeed.nn.expert.host_products import host_products, serves

COUNTS = [5, 0, 130, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [None, False, True])
def test_bits_of_the_loop(dtype, bias):
    torch.manual_seed(0)
    experts = SwiGLUExperts(48, 40, 4) if bias is None else MLPExperts(48, 40, 4, bias=bias)
    experts.to(dtype)
    rows = torch.randn(sum(COUNTS), 48, dtype=dtype, requires_grad=True)
    found = {}
    for compute in ("auto", "loop"):
        experts.compute, rows.grad = compute, None
        experts.zero_grad()
        y = experts(rows, COUNTS)
        y.sin().sum().backward()
        found[compute] = [y, rows.grad, *(param.grad for param in experts.parameters())]
    assert_close(found["auto"], found["loop"], rtol=0, atol=0)
    assert serves(rows, next(experts.parameters()))


def test_gradients_of_gradients():
    torch.manual_seed(0)
    shapes = (4, 3), (2, 5, 3), (2, 5)
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradgradcheck(lambda x, w, b: host_products(x, w, [3, 1], b), given)


def test_autocast_keeps_the_loop():
    experts = SwiGLUExperts(8, 8, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert not serves(torch.ones(2, 8), experts.down_proj)
        assert experts(torch.ones(2, 8), [1, 1]).dtype == torch.bfloat16
