"""Stage 3 trains models of every shape as stage 0 does, bit for bit: where parameters are used, what modules return."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.cut import WIDTH, check_like_whole, difference
from tests.zoo.models import Residual, Stack

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(2)]

HIDDEN = 10


def test_blocks():
    check_like_whole(Stack)


def test_one_linear_layer_is_the_model():
    check_like_whole(lambda: nn.Linear(WIDTH, WIDTH))


def test_sequential_of_sequentials():
    check_like_whole(
        lambda: nn.Sequential(nn.Sequential(Residual(), Residual()), nn.Sequential(Residual(), nn.Identity()))
    )


# -- used in more than one place -------------------------------------------------------------------------------------


class Tied(Stack):
    def __init__(self):
        super().__init__()
        self.last.weight = self.first.weight
        self.blocks[2].up.weight = self.blocks[0].up.weight


def test_tied_weights():
    check_like_whole(Tied)


class SharedModules(nn.Module):
    """One block used three times, one layer used inside of several blocks."""

    def __init__(self):
        super().__init__()
        block = Residual()
        self.blocks = nn.ModuleList([block, Residual(), block, block])
        self.blocks[1].down = block.down

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_modules_shared_several_times():
    check_like_whole(SharedModules)


class ByRoot(Stack):
    """The root reads weights of its children; it has a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        x = F.linear(x, self.first.weight, self.first.bias) * self.gain + self.shift
        for block in self.blocks:
            x = F.linear(torch.tanh(F.linear(x, block.up.weight)), block.down.weight) + x
        return x @ self.last.weight.t() + super().forward(x)


def test_parameters_used_outside_of_their_modules():
    check_like_whole(ByRoot)


class ByOtherBlock(nn.Module):
    class Reader(nn.Module):
        def __init__(self, other):
            super().__init__()
            self.own = nn.Linear(WIDTH, WIDTH)
            self.others = [other]  # in a list: not registered

        def forward(self, x):
            return F.linear(self.own(x), self.others[0].down.weight.t()[:WIDTH, :WIDTH]) + self.others[0].norm.bias

    def __init__(self):
        super().__init__()
        first = Residual()
        self.blocks = nn.ModuleList([first, self.Reader(first), self.Reader(first)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_that_use_parameters_of_another():
    check_like_whole(ByOtherBlock)


class Lists(nn.Module):
    """Parameters in lists and dicts, of the root and of blocks."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.ParameterList(nn.Parameter(torch.randn(WIDTH) * 0.3) for _ in range(3))
            self.named = nn.ParameterDict({"a": torch.randn(WIDTH, WIDTH) * 0.3, "b": torch.zeros(WIDTH)})

        def forward(self, x):
            for row in self.rows:
                x = x + torch.tanh(x) * row
            return x @ self.named["a"] + self.named["b"]

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Mixed(), self.Mixed()])
        self.own = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.eye(WIDTH))])
        self.nested = nn.ParameterDict({"deep": nn.Parameter(torch.ones(1))})

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return (x * self.own[0]) @ self.own[1] * self.nested["deep"]


def test_parameter_lists_and_dicts():
    check_like_whole(Lists)


# -- what modules return ---------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["weight", "value"])


@dataclass
class Record:
    weight: torch.Tensor
    value: torch.Tensor


FORMS = {
    "tuple": lambda w, x: (w, x),
    "list": lambda w, x: [w, x],
    "dict": lambda w, x: {"weight": w, "value": x},
    "ordered dict": lambda w, x: OrderedDict(weight=w, value=x),
    "namedtuple": Pair,
    "dataclass": Record,
    "nested": lambda w, x: {"inner": [(w, None), {"value": x, "name": "text"}]},
}


def unpacked(form, out):
    if form == "nested":
        return out["inner"][0][0], out["inner"][1]["value"]
    if form in ("namedtuple", "dataclass"):
        return out.weight, out.value
    return (out["weight"], out["value"]) if "dict" in form else tuple(out)


class Returning(nn.Module):
    """Blocks return a parameter, or a view of one, which the root uses."""

    class Giver(nn.Module):
        def __init__(self, form, view):
            super().__init__()
            self.form, self.view = form, view
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            weight = self.layer.weight
            return FORMS[self.form](weight.t()[:, 1:] if self.view else weight, self.layer(x))

    def __init__(self, form, view):
        super().__init__()
        self.form = form
        self.blocks = nn.ModuleList(self.Giver(form, view) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            weight, value = unpacked(self.form, block(x))
            x = torch.tanh(value) + (weight * weight).sum() / WIDTH + (x[:, : weight.shape[0]] @ weight)[:, :1]
        return x


@pytest.mark.parametrize("form", FORMS)
def test_returned_parameters(form):
    check_like_whole(lambda: Returning(form, view=False))


@pytest.mark.parametrize("form", ["tuple", "dict", "dataclass"])
def test_returned_views_of_parameters(form):
    check_like_whole(lambda: Returning(form, view=True), kept=True)


class ReturnsNothing(nn.Module):
    """Blocks write into a dict and return None; the root returns what is no tensor."""

    class Writer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, *, table, key):
            table[key] = torch.tanh(self.layer(table[key]))

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Writer() for _ in range(3))

    def forward(self, x):
        table = {"x": x}
        for block in self.blocks:
            assert block(table=table, key="x") is None
        return {"out": table["x"], "steps": 3, "name": "text", "nothing": None}


def test_kwargs_only_inputs_and_outputs_that_are_no_tensors():
    def drive(engine, batch, step):
        out = engine(x=batch[0])
        assert (out["steps"], out["name"], out["nothing"]) == (3, "text", None)
        loss = difference(out["out"], batch[1])
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    check_like_whole(ReturnsNothing, drive)


# -- called in other ways --------------------------------------------------------------------------------------------


class OtherMethods(nn.Module):
    """Methods other than forward, forward called directly, and a child of another module called directly."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def project(self, x):
            return F.linear(x, self.layer.weight, self.layer.bias) * self.scale

        def forward(self, x):
            return x

    class Holder(nn.Module):
        def __init__(self, attention):
            super().__init__()
            self.attn = attention
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.inner(x) + self.attn.project(x)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Holder(self.Attention()) for _ in range(3))

    def forward(self, x):
        x = torch.tanh(self.blocks[0].attn.project(x))
        x = torch.tanh(self.blocks[1].forward(x))
        return self.blocks[2].inner.forward(x) + nn.Module.__call__(self.blocks[2], x)


def test_methods_called_instead_of_forward():
    check_like_whole(OtherMethods)


class Changing(Stack):
    """Takes another way in each step, the same on all ranks, and never the last block."""

    def __init__(self):
        super().__init__(5)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        order = {0: (0, 1, 2, 3), 1: (3, 1), 2: (2, 2, 0), 3: (1, 0, 3, 1)}[self.calls % 4]
        x = self.first(x)
        for index in order:
            x = self.blocks[index](x)
        return self.last(x) if self.calls % 3 else F.linear(x, self.last.weight)


def test_branches_that_change_between_steps():
    check_like_whole(Changing, steps=9)


def test_gradients_of_a_fetched_module_that_one_rank_does_not_use():
    def drive(engine, batch, step):
        out = engine(batch[0])
        last = engine.module.last(out)  # fetched by all
        loss = difference(last if engine.global_rank else out + 0.0 * last.detach(), batch[1])
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    check_like_whole(Stack, drive)
