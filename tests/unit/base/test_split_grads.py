"""Backward in two passes: the same bits as torch in one, and nothing but inputs in the first."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from mpispeed.base.split_grads import Backlog, Splits, put_off, split


class Own(Splits, nn.Module):
    """A layer with a forward of its own."""

    def __init__(self, is_transposed):
        super().__init__()
        self.weight, self.is_transposed = nn.Parameter(torch.randn(6, 6)), is_transposed

    def forward(self, x):
        return self.product(x, self.weight, None, self.is_transposed) + 1


MADE = {
    "linear": (lambda: nn.Linear(5, 7), (4, 3, 5)),
    "no bias": (lambda: nn.Linear(5, 7, bias=False), (4, 5)),
    "no rows": (lambda: nn.Linear(5, 0), (4, 5)),
    "no columns": (lambda: nn.Linear(0, 5), (4, 0)),
    "gpt2": (lambda: Conv1D(7, 5), (4, 3, 5)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, dilation=2), (2, 3, 9, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, bias=False), (2, 2, 4, 4, 4)),
    "own": (lambda: Own(False), (4, 6)),
    "own, transposed": (lambda: Own(True), (4, 3, 6)),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", MADE)
def test_two_passes_give_the_bits_of_one(name):
    torch.manual_seed(2)
    make, shape = MADE[name]
    layer, x = make(), torch.randn(shape, requires_grad=True)
    layer(x).square().sum().backward()
    expected = [x.grad, *(param.grad for param in layer.parameters())]
    x.grad = None
    layer.zero_grad()
    undo, backlog, found = split(layer), Backlog(), {}
    out = layer(x).square().sum()
    with put_off(backlog):
        out.backward()
    assert all(param.grad is None for param in layer.parameters())
    assert len(backlog) == 1
    backlog.work_off(lambda param, grad: found.update({id(param): grad}))
    assert len(backlog) == 0
    assert all(map(torch.equal, [x.grad, *(found[id(param)] for param in layer.parameters())], expected))
    undo()
    layer(x).square().sum().backward()
    assert all(map(torch.equal, (param.grad for param in layer.parameters()), expected[1:]))


def test_without_a_backlog_split_layers_do_both_passes_at_once():
    torch.manual_seed(2)
    layer, x = nn.Linear(5, 7), torch.randn(4, 5)
    layer(x).sum().backward()
    expected = [param.grad for param in layer.parameters()]
    layer.zero_grad()
    split(layer)
    layer(x).sum().backward()
    assert all(map(torch.equal, (param.grad for param in layer.parameters()), expected))


@pytest.mark.parametrize("trained", ["weight", "bias", None])
def test_frozen_parameters_get_no_gradient(trained):
    layer, x, found = nn.Linear(5, 7), torch.randn(4, 5, requires_grad=True), []
    for name, param in layer.named_parameters():
        param.requires_grad_(name == trained)
    split(layer)
    backlog = Backlog()
    with put_off(backlog):
        layer(x).sum().backward()
    backlog.work_off(lambda param, grad: found.append((param, grad.shape)))
    own = getattr(layer, trained) if trained else None
    assert [(param is own, shape) for param, shape in found] == ([(True, own.shape)] if trained else [])


def test_other_layers_and_subclasses_stay_in_the_first_pass():
    class Mine(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    layers = nn.Sequential(Mine(4, 4), nn.LayerNorm(4), nn.Conv1d(4, 4, 1, padding_mode="circular", padding=0))
    split(layers)
    backlog = Backlog()
    with put_off(backlog):
        layers(torch.randn(2, 4, 4)).sum().backward()
    assert len(backlog) == 0
    assert all(param.grad is not None for param in layers.parameters())
