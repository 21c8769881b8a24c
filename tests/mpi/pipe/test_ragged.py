"""What may go from stage to stage: trees, masks, numbers, changing shapes; and stages with little in them."""

import pytest
import torch
from torch import nn

from mpispeed.base.errors import CommError
from mpispeed.pipe import LayerSpec, PipelineModule
from mpispeed.pipe.exchange import describe
from tests.helpers.covering import in_turn, on_ranks
from tests.zoo.training import SGD, config, start, weights

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 2, 3)]
WIDTH, MICRO_BATCHES, LR = 6, 3, 0.05


class Dense(nn.Module):
    """Linear and tanh over the last dim."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def mean_square(outputs, labels):
    return nn.functional.mse_loss(outputs.float(), labels)


def data(steps=3, *, lengths=(4,), rows=2):
    """Micro-batches of each step, lengths in turn."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for step in range(steps):
        found.append([])
        for micro in range(MICRO_BATCHES):
            shape = (rows, lengths[(step * MICRO_BATCHES + micro) % len(lengths)], WIDTH)
            pair = (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
            found[-1].append(pair)
    return found


def build(layers):
    with torch.random.fork_rng(devices=[]):
        for index, layer in enumerate(layers):
            torch.manual_seed(1234 + index)
            yield layer.build() if isinstance(layer, LayerSpec) else layer


def train_plain(layers, batches, loss_fn, frozen):
    """(losses, weights by name) of one process; layers that spread take a tuple as arguments."""
    built = list(build(layers))
    params = {}
    for index, (layer, module) in enumerate(zip(layers, built, strict=True)):
        if isinstance(module, nn.Module):
            params |= {
                f"{index}.{name}": param.requires_grad_(index not in frozen)
                for name, param in module.named_parameters()
            }
        assert not isinstance(layer, nn.Module)
    optimizer = torch.optim.SGD([param for param in params.values() if param.requires_grad], lr=LR)
    losses = []
    for pairs in batches:
        optimizer.zero_grad()
        total = 0.0
        for x, y in pairs:
            for layer, module in zip(layers, built, strict=True):
                spreads = isinstance(layer, LayerSpec) and layer.spreads_inputs
                x = module(*x) if spreads else module(x)
            loss = loss_fn(x, y) / len(pairs)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses, {name: param.detach() for name, param in params.items()}


def check(layers, batches, world, *, loss_fn=mean_square, schedule="1f1b", stage=0, frozen=(), **module):
    """Trained over as many stages as there are ranks the layers become what they become in one process."""
    losses, expected = train_plain(layers, batches, loss_fn, frozen)
    chunks = 2 if schedule == "interleaved" else 1
    module = {"num_chunks": chunks, "partition_method": "uniform"} | module
    model = PipelineModule(layers, num_stages=world.size, loss_fn=loss_fn, seed_layers=True, **module)
    for name, param in model.named_parameters():
        param.requires_grad_(model.layer_of(name) not in frozen)
    more = SGD | {"optimizer": {"type": "SGD", "params": {"lr": LR}}, "pipeline": {"schedule": schedule}}
    engine = start(config(stage, MICRO_BATCHES * 2, MICRO_BATCHES, **more), model)
    has_data = engine.is_first_stage() or engine.is_last_stage()
    found = [float(engine.train_batch(iter(pairs) if has_data else None)) for pairs in batches]
    assert found == pytest.approx(losses, rel=1e-5)
    for name, ours in weights(engine).items():
        torch.testing.assert_close(
            ours, expected[name], rtol=1e-5, atol=1e-6, msg=lambda text, at=name: f"{at}: {text}"
        )
    engine.destroy()
    return engine


# -- trees -----------------------------------------------------------------------------------------------------------


class Split(nn.Module):
    """From a tensor to a tree of all kinds of things."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Dense(), Dense()

    def forward(self, x):
        return {
            "pair": (self.one(x), [self.two(x)]),
            "mask": x[..., :1] > 0,
            "places": torch.arange(x.shape[1]),
            "scale": torch.tensor(2.0),  # takes no gradient
            "numbers": (3, 0.5, True, "text", None),
            "empty": x.new_zeros(0),
        }


class Through(nn.Module):
    """Changes what takes gradients and hands the rest on."""

    def __init__(self):
        super().__init__()
        self.dense = Dense()

    def forward(self, tree):
        first, (second,) = tree["pair"]
        assert (tree["mask"].dtype, tree["places"].dtype) == (torch.bool, torch.int64)
        assert not (tree["mask"].requires_grad or tree["scale"].requires_grad or tree["places"].requires_grad)
        assert tree["numbers"] == (3, 0.5, True, "text", None)
        assert tree["empty"].shape == (0,)
        return tree | {"pair": (self.dense(second), [first])}


class Join(nn.Module):
    """Back to a tensor."""

    def __init__(self):
        super().__init__()
        self.dense = Dense()

    def forward(self, tree):
        first, (second,) = tree["pair"]
        weights = tree["places"].to(first.dtype)[:, None] * 0.1 + tree["numbers"][1]
        return self.dense(first * tree["mask"] + second * tree["scale"] * weights)


TREE = [LayerSpec(kind) for kind in (Dense, Split, Through, Through, Through, Through, Join, Dense)]


@pytest.mark.parametrize(("schedule", "stage"), in_turn([("1f1b", 0), ("gpipe", 3), ("zb-h1", 2)], ranks=(2, 3, 4, 1)))
def test_trees_of_tensors_masks_and_numbers(schedule, stage, world):
    check(TREE, data(), world, schedule=schedule, stage=stage)


@pytest.mark.ranks(2, 3)
def test_trees_between_chunks(world):
    check(TREE, data(), world, schedule="interleaved")


class Masked(nn.Module):
    """Takes hidden states and a mask as two arguments and returns both."""

    def __init__(self):
        super().__init__()
        self.dense = Dense()

    def forward(self, x, mask):
        return x + self.dense(x).masked_fill(mask, 0.0), mask


def test_layers_with_several_arguments(world):
    layers = [
        lambda x: (x, x[..., :1] > 0.5),
        *(LayerSpec(Masked, spreads_inputs=True) for _ in range(4)),
        lambda x: x[0],
    ]
    check(layers, data(), world)


def test_inputs_and_labels_that_are_tuples(world):
    batches = [[((x, x > 0), (y, x.sum((1, 2)))) for x, y in pairs] for pairs in data()]
    layers = [LayerSpec(Masked, spreads_inputs=True) for _ in range(4)] + [lambda x: x[0]]

    def loss_fn(outputs, labels):
        return mean_square(outputs, labels[0]) + 0.1 * mean_square(outputs.sum((1, 2)), labels[1])

    check(layers, batches, world, loss_fn=loss_fn)


class Wasteful(nn.Module):
    """Returns, beside its result, floats that nobody will use."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = Dense(), Dense()

    def forward(self, x):
        x = x[0] if isinstance(x, tuple) else x
        return self.used(x), self.unused(x)


@pytest.mark.parametrize("schedule", in_turn(["1f1b", "zb-h1"]))
def test_what_is_not_used_gets_no_gradient(schedule, world):
    layers = [LayerSpec(Wasteful) for _ in range(4)] + [lambda x: x[0]]
    check(layers, data(), world, schedule=schedule)


def test_only_some_outputs_take_gradients(world):
    layers = [
        LayerSpec(Dense),
        lambda x: (x.detach(), x),
        lambda x: (x[0] * 2, x[1]),
        LayerSpec(Join2),
        LayerSpec(Dense),
    ]
    check(layers, data(), world)


class Join2(nn.Module):
    """Adds a tensor without gradients to one with them."""

    def __init__(self):
        super().__init__()
        self.dense = Dense()

    def forward(self, x):
        return self.dense(x[1]) + x[0]


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ((torch.zeros(1), {1}), "a set cannot be sent to the next stage; layers between stages pass tensors, numbers"),
        ([torch.eye(2).to_sparse()], "a torch.sparse_coo tensor of torch.float32 cannot be sent"),
    ],
)
def test_what_cannot_be_sent_is_named(tree, words):
    with pytest.raises(CommError, match=words):
        describe(tree, lambda _: False)


# -- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", in_turn(["1f1b", "gpipe", "zb-h1"], ranks=(2, 4, 3, 1)))
def test_shapes_that_change_inside_a_batch_and_from_batch_to_batch(schedule, world):
    check([LayerSpec(Dense) for _ in range(5)], data(4, lengths=(4, 1, 7, 7, 2)), world, schedule=schedule)


@pytest.mark.ranks(2, 3, 4)
def test_shapes_that_change_between_chunks(world):
    check([LayerSpec(Dense) for _ in range(9)], data(4, lengths=(4, 1, 7, 7, 2)), world, schedule="interleaved")


def test_trees_that_change_their_form(world):
    layers = [
        LayerSpec(Dense),
        lambda x: (x,) * (1 + x.shape[1] % 3),
        lambda x: (x[0] * 2, *x[1:]),
        lambda x: sum(x),
        LayerSpec(Dense),
    ]
    check(layers, data(4, lengths=(4, 1, 6, 5)), world)


# -- stages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", in_turn([0, 1, 2, 3], ranks=(2, 3, 4, 3)))
def test_more_stages_than_layers(stage, world):
    check([LayerSpec(Dense)], data(), world, stage=stage)


@pytest.mark.parametrize("stage", in_turn([0, 1, 2, 3], ranks=(3, 2, 1, 4)))
def test_a_stage_of_functions(stage, world):
    layers = [*(lambda x: x * 1.1 for _ in range(3)), LayerSpec(Dense), lambda x: x + 1.0, lambda x: x * 0.5]
    check(layers, data(), world, stage=stage)


@pytest.mark.parametrize(("stage", "frozen"), on_ranks([0, 3], [(0,), (3,), (1, 2), (0, 1), (0, 1, 2)]))
def test_frozen_layers(stage, frozen, world):
    check([LayerSpec(Dense) for _ in range(4)], data(), world, stage=stage, frozen=frozen)


def test_frozen_layers_with_split_backward_passes(world):
    check([LayerSpec(Dense) for _ in range(4)], data(), world, schedule="zb-h1", frozen=(0, 2))


@pytest.mark.parametrize("interval", in_turn([1, 2], ranks=(1, 3, 4, 2)))
def test_recomputed_layers(interval, world):
    check(TREE, data(lengths=(4, 2)), world, activation_checkpoint_interval=interval)
