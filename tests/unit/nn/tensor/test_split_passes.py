"""Cut layers put off their weight gradients, as whole ones do."""

import pytest
import torch

from mpispeed.base.split_grads import Backlog, put_off, split
from mpispeed.mesh.backends.solo import solo_comm
from mpispeed.nn.tensor import ColumnLinear, RowLinear, VocabLinear

MADE = {
    "column": lambda comm: ColumnLinear(6, 8, comm),
    "column of gpt2": lambda comm: ColumnLinear(6, 8, comm, transposed=True),
    "row": lambda comm: RowLinear(6, 8, comm),
    "row of gpt2": lambda comm: RowLinear(6, 8, comm, transposed=True),
    "vocabulary": lambda comm: VocabLinear(6, 8, comm),
}


@pytest.mark.parametrize("name", MADE)
def test_weight_gradients_are_put_off_and_have_the_same_bits(name):
    torch.manual_seed(1)
    layer, x = MADE[name](solo_comm()), torch.randn(3, 5, 6, requires_grad=True)
    layer(x).square().sum().backward()
    expected = {id(param): param.grad for param in layer.parameters()}
    layer.zero_grad()
    split(layer)
    backlog, found = Backlog(), {}
    with put_off(backlog):
        layer(x).square().sum().backward()
    assert layer.weight.grad is None
    backlog.work_off(lambda param, grad: found.update({id(param): grad}))
    assert torch.equal(found[id(layer.weight)], expected[id(layer.weight)])
