"""Stage 3 trains parameters of every kind as stage 0 does, bit for bit: frozen, unused, tiny, of several dtypes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mpispeed.sharding.sharded_param import is_sharded
from tests.zoo import same_bits
from tests.zoo.cut import WIDTH, check_all_cut, check_like_whole, difference, one_step, own_batches, run
from tests.zoo.models import Stack, built
from tests.zoo.training import ORDERED, config, start

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(3)]


# -- frozen ----------------------------------------------------------------------------------------------------------


def frozen(choose):
    def make():
        model = Stack(4)
        for name, param in model.named_parameters():
            param.requires_grad_(not choose(name))
        return model

    return make


FROZEN = {
    "some of each block": lambda name: "up.weight" in name or "norm.bias" in name,
    "whole blocks": lambda name: name.startswith(("blocks.1", "blocks.2")),
    "all but the last": lambda name: not name.startswith("last"),
    "all but the first": lambda name: not name.startswith("first"),
    "embedding and one bias": lambda name: name in ("first.weight", "blocks.3.up.bias"),
}


@pytest.mark.parametrize("which", FROZEN)
def test_frozen_parameters(which):
    check_like_whole(frozen(FROZEN[which]))


def test_trained_and_frozen_units_of_a_block_are_fetched_once_for_its_backward_pass():
    make = frozen(FROZEN["some of each block"])
    outcome = run(make, config(3, **ORDERED, reuse=0), steps=3)
    # Four blocks with two units each, in forward and in backward; the two layers around them have one.
    assert outcome.tally.fetches <= 3 * 2 * (4 * 2 + 2)


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) * 0.3)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class Adapters(Stack):
    """A frozen base with low-rank adapters that are trained."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.up, block.down = Adapted(block.up), Adapted(block.down)


@pytest.mark.parametrize("recomputes", [False, True])
def test_adapters_on_a_frozen_base(recomputes):
    class Model(Adapters):
        def forward(self, x):
            if not recomputes:
                return super().forward(x)
            x = self.first(x).requires_grad_()
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
            return self.last(x)

    check_like_whole(Model)


def test_gradients_switched_off_and_on_between_steps():
    def drive(engine, batch, step):
        for index, block in enumerate(engine.module.blocks):
            block.requires_grad_(index != step % 4)
        return one_step(engine, batch, step)

    check_like_whole(Stack, drive, steps=6)


def test_gradients_switched_off_between_micro_steps():
    def drive(engine, batch, step):
        total = 0.0
        for micro in range(2):
            engine.module.blocks[1].requires_grad_(micro == 0)
            engine.module.last.bias.requires_grad_(micro == 1)
            total += one_step(engine, (batch[0][micro::2], batch[1][micro::2]), step)
        return total

    check_like_whole(Stack, drive, like=2, gradient_accumulation_steps=2, train_batch_size=24)


def test_frozen_integers_and_buffers():
    class Mapped(Stack):
        def __init__(self):
            super().__init__()
            self.order = nn.Parameter(torch.randperm(WIDTH), requires_grad=False)
            self.mask = nn.Parameter(torch.rand(WIDTH) > 0.3, requires_grad=False)
            self.small = nn.Parameter(torch.arange(5, dtype=torch.uint8), requires_grad=False)
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

        def forward(self, x):
            self.count += 1
            self.mean.lerp_(self.order.float(), 0.1)
            return super().forward(x[:, self.order] * self.mask) + self.mean * self.small[1]

    check_like_whole(Mapped)


# -- unused ----------------------------------------------------------------------------------------------------------


def test_parameters_that_nobody_uses():
    class Unused(Stack):
        def __init__(self):
            super().__init__()
            self.never = nn.Linear(WIDTH, WIDTH)
            self.alone = nn.Parameter(torch.ones(3, 5))

        def forward(self, x):
            for block in self.blocks[:2]:
                x = block(x)
            return self.last(self.first(x))

    check_like_whole(Unused)


def test_parameters_that_only_one_rank_trains_where_ranks_may_differ():
    def drive(engine, batch, step):
        out = engine(batch[0])
        aside = engine.module.blocks[0](out)
        loss = difference(out + aside if engine.global_rank else out, batch[1])
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    check_like_whole(Stack, drive, zero={"divergent_modules": "union"})


# -- shapes and dtypes -----------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Scalars, empty ones, a single element, and sizes that no rank count divides."""

    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0))
        self.hollow = nn.Parameter(torch.zeros(3, 0))
        self.one = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList()
        for _ in range(2):
            block = nn.Linear(WIDTH, WIDTH)
            block.extra = nn.Parameter(torch.zeros(0, WIDTH))
            self.blocks.append(block)
        self.deep = nn.Parameter(torch.randn(1, 2, 1, 3, 1))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x)) + block.extra.sum()
        x = x * self.scalar + self.empty.sum() + (self.hollow @ self.hollow.t()).sum()
        return x * self.one + self.deep.reshape(-1)


def test_scalars_empty_parameters_and_odd_sizes():
    check_like_whole(Odd)


def test_only_tiny_parameters():
    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            return x * self.scale

    check_like_whole(Tiny)


def test_a_unit_of_nothing_but_empty_parameters():
    class Hollow(Stack):
        def __init__(self):
            super().__init__()
            self.blocks[1] = nn.Linear(0, 0)
            self.side = nn.Linear(WIDTH, 0)

        def forward(self, x):
            x = self.blocks[0](self.first(x))
            x = x + self.blocks[1](self.side(x)).sum()
            return self.last(x)

    with_warning = pytest.warns(UserWarning, match="zero-element")

    def make():
        with with_warning:
            return Hollow()

    check_like_whole(make)


def test_double_precision_beside_single():
    class Mixed(Stack):
        def __init__(self):
            super().__init__()
            self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
            self.blocks[1].norm.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
            self.blocks[1].norm.bias = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
            self.blocks[1].norm.register_forward_pre_hook(lambda m, a: a[0].double())
            self.blocks[1].norm.register_forward_hook(lambda m, a, out: out.float())

        def forward(self, x):
            return self.wide(super().forward(x).double()).float()

    check_like_whole(Mixed)


def test_parameters_that_are_not_contiguous():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, 4).t())
            self.last = nn.Linear(4, WIDTH)

        def forward(self, x):
            return self.last(torch.tanh(F.linear(x, self.weight)))

    check_like_whole(Turned)


def test_subclasses_of_parameter():
    class Named(nn.Parameter):
        pass

    class Model(Stack):
        def __init__(self):
            super().__init__()
            for layer in [self.first, *(block.up for block in self.blocks)]:
                layer.weight = Named(layer.weight.detach())
                layer.weight.tag = "kept"

        def forward(self, x):
            assert self.first.weight.tag == "kept"
            return super().forward(x)

    check_like_whole(Model)
    engine = start(config(3, **ORDERED), built(Model))
    engine.destroy()
    assert type(engine.module.first.weight) is Named


# -- groups ----------------------------------------------------------------------------------------------------------


def groups_of(model):
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if "bias" in n], "lr": 3e-2},
        {"params": [], "lr": 1.0},
        {"params": [p for n, p in named if "bias" not in n and "blocks.1" not in n], "weight_decay": 0.1},
    ]  # the weights of one block are in no group


def test_several_groups_an_empty_one_and_parameters_in_none():
    outcomes = []
    for stage, reuse in ((0, None), (3, None), (3, 0)):
        model = built(Stack)
        before = model.blocks[1].up.weight.detach().clone()
        engine = start(config(stage, **ORDERED, reuse=reuse), model, model_parameters=groups_of(model))
        losses = [one_step(engine, batch, step) for step, batch in enumerate(own_batches(engine, 4))]
        engine.destroy()
        assert torch.equal(model.blocks[1].up.weight, before)
        outcomes.append((losses, [p.detach().clone() for p in model.parameters()]))
    for losses, params in outcomes[1:]:
        assert losses == outcomes[0][0]
        same_bits(params, outcomes[0][1])


# -- nothing to train ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_frozen", [False, True])
def test_inference_without_an_optimizer(is_frozen):
    settings = config(3, **ORDERED)
    del settings["optimizer"]
    reference = built(Stack)
    engine = start(settings, built(lambda: Stack().requires_grad_(not is_frozen)))
    for mode in (torch.no_grad, torch.inference_mode):
        engine.eval()
        with mode():
            for batch in own_batches(engine, 3):
                torch.testing.assert_close(engine(batch[0]), reference(batch[0]), rtol=0, atol=0)
    engine.parts.params.prefetcher.reshard_all()
    check_all_cut(engine)
    engine.destroy()
    for ours, theirs in zip(engine.module.parameters(), reference.parameters(), strict=True):
        assert not is_sharded(ours)
        assert torch.equal(ours, theirs)
