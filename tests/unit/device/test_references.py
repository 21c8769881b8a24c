"""The torch references on a device: what runs where kernels cannot, giving the bytes of the host."""

import pytest
import torch

from mpispeed.native.flat import divisor
from mpispeed.native.onebit_lamb import FrozenLamb, update_frozen_lamb
from tests.helpers.device import stand_in
from tests.helpers.divisors import DivisionByNumber, TensorDivisors
from tests.helpers.every_face import KINDS, Faces


@pytest.mark.parametrize("dtype", KINDS)
def test_twins_divide_by_tensors(dtype):
    faces = Faces(str(stand_in()))
    low = None if dtype == torch.float32 else dtype
    with TensorDivisors() as divisions:
        faces.optimizers(torch.float32, dtype, torch.float32, low)
        faces.onebit(low)
        faces.codes(dtype)
        optimizers_and_codes = divisions.seen
        faces.layers(dtype)
        faces.attention(dtype, (7, 400))
    assert optimizers_and_codes > 50


def test_the_frozen_lamb_divides_by_tensors():
    param, *others = (Faces(str(stand_in())).odd(300).detach().abs() for _ in range(5))
    with TensorDivisors() as divisions:
        update_frozen_lamb(
            param, tuple(others[:3]), others[3], None, FrozenLamb(1e-3, (0.9, 0.99), 1e-8, 0.1, 1.0, 1.0, 0.5, 4.0, 0.1)
        )
    assert divisions.seen >= 3


@pytest.mark.parametrize("by", [3.0, 7, torch.tensor(3.0)], ids=["float", "int", "tensor of the host"])
def test_a_division_by_a_number_is_found(by):
    x = torch.ones(5).to(stand_in())
    with TensorDivisors():
        torch.testing.assert_close((x / divisor(3.0, x)).cpu(), torch.full((5,), 1 / 3), rtol=0, atol=0)
        for divide in (lambda: x / by, lambda: x.div_(by), lambda: torch._foreach_div([x], by)):
            with pytest.raises(DivisionByNumber, match=r"of \(5,\) on standin:0 by"):
                divide()
