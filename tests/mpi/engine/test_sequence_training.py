"""Engines whose sequences are cut over ranks train as one process does: losses, all gradients, and weights."""

import pytest
import torch
from torch import nn

from mpispeed import sequence
from mpispeed.base.errors import UsageError
from mpispeed.nn.sequence.handed import hand
from mpispeed.nn.sequence.loss import vocab_sequence_parallel_cross_entropy
from mpispeed.pipe.module import PipelineModule
from mpispeed.zero import safe_get_full_grad
from tests.helpers.sequence_model import data, model
from tests.zoo.training import WARM, config, start

ROWS = 12
BOUND = 1e-5  # fp32 sums in another order, over 13 tokens and 12 rows; seen: 1e-6


def settings(stage, size, ring, accumulation, **more):
    section = {"sequence_parallel_size": size, "sequence_parallel": {"ring_size": ring}}
    return config(stage, ROWS, accumulation, **(WARM | {"scheduler": {}}), **section, **more)


def shares(batch, index, count):
    rows = ROWS // count
    return {name: tensor[index * rows : (index + 1) * rows] for name, tensor in batch.items()}


def trained(engine, batches):
    """Losses over all ranks, and gradients before the norm is clipped, of every step."""
    mesh, accumulation = engine.mpispeed.parts.mesh, engine.gradient_accumulation_steps()
    losses, grads = [], []
    for batch in batches:
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(accumulation):
            place = micro * mesh["batch"].size + mesh["batch"].rank
            loss = engine(**shares(batch, place, accumulation * mesh["batch"].size))
            told = mesh["sequence"].gather_objects(loss.item())
            assert told == [told[0]] * len(told)  # all ranks of a sequence know its loss
            total += engine.backward(loss).detach()
            if micro == accumulation - 1:
                grads.append({name: safe_get_full_grad(each) for name, each in engine.module.named_parameters()})
            engine.step()
        mesh["data"].all_reduce(total, "avg")
        losses.append(float(total))
    return losses, grads


def plain(batches, count, **options):
    """The same by one process with torch's attention; each of `count` parts of a batch has a mean of its own."""
    net = model(**options)
    net.is_reference = True
    optimizer = torch.optim.AdamW(net.parameters(), **WARM["optimizer"]["params"])
    losses, grads = [], []
    for batch in batches:
        optimizer.zero_grad()
        loss = torch.stack([net(**shares(batch, index, count)) for index in range(count)]).mean()
        loss.backward()
        losses.append(loss.item())
        grads.append({name: each.grad.clone() for name, each in net.named_parameters()})
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return losses, grads


def close(found, expected):
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= BOUND * max(1e-2, float(value.abs().max())), name


CASES = [
    (1, 1, 1, 2, 2, "padding"),
    (2, 2, 1, 0, 1, "packed"),
    (2, 2, 2, 3, 2, "plain"),
    (3, 3, 1, 1, 1, "padding"),
    (3, 3, 3, 3, 2, "packed"),
    (4, 4, 2, 3, 1, "packed"),
    (4, 4, 4, 2, 1, "padding"),
    (4, 2, 1, 3, 3, "padding"),
    (4, 2, 2, 1, 1, "packed"),
    (4, 4, 1, 0, 1, "plain"),
]


@pytest.mark.parametrize(
    ("size", "ring", "stage", "accumulation", "kind"),
    [pytest.param(*case, marks=pytest.mark.ranks(ranks)) for ranks, *case in CASES],
)
def test_a_cut_sequence_trains_as_a_whole_one(size, ring, stage, accumulation, kind):
    is_causal, batches = kind != "padding", data(kind, ROWS)
    engine = start(settings(stage, size, ring, accumulation), model(is_causal=is_causal))
    losses, grads = trained(engine, batches)
    count = accumulation * engine.mpispeed.parts.mesh["batch"].size
    engine.destroy()
    expected, own = plain(batches, count, is_causal=is_causal)
    for step, loss in enumerate(expected):
        assert abs(losses[step] - loss) <= BOUND * loss, step
        close(grads[step], own[step])


SLICES = {"q": "column", "k": "column", "v": "column", "up": "column", "attention.out": "row", "down": "row"}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("ring", "stage"), [(1, 3), (2, 1)])
def test_slices_of_cut_sequences(ring, stage):
    batches = data("packed", ROWS)
    more = {"tensor_parallel": {"autotp_size": 2, "injection_policy_tuple": SLICES}}
    engine = start(settings(stage, 2, ring, 1, **more), model())
    losses, grads = trained(engine, batches)
    engine.destroy()
    expected, own = plain(batches, 1)
    assert losses == pytest.approx(expected, rel=BOUND)
    close(grads[1], {name: value for name, value in own[1].items() if value.shape == grads[1][name].shape})
    assert any(value.shape != grads[1][name].shape for name, value in own[1].items())


class Step(nn.Module):
    """A layer of a pipeline."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, sequence.positions(x)[None])


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_pipeline_of_cut_sequences(comm, stage):
    batches, stages = data("plain", ROWS), 2 if comm.size == 4 else 1
    size = comm.size // stages
    net = model()
    layers = [net.embed, *(Step(layer) for layer in net.layers), net.head]
    pipeline = PipelineModule(layers, num_stages=stages, loss_fn=sequence.cross_entropy)
    engine = start(settings(stage, size, size, 3), pipeline)
    found = []
    for batch in batches:
        own = [shares(batch, index, 3) for index in range(3)]
        found.append(engine.train_batch(iter([(each["input_ids"], each["labels"]) for each in own])).item())
    evaluated = engine.eval_batch(iter([(batch["input_ids"], batch["labels"])]), num_micro_batches=1).item()
    engine.destroy()
    expected, _ = plain([*batches, batches[-1]], 3)
    assert [*found, evaluated] == pytest.approx(expected, rel=BOUND)


@pytest.mark.ranks(4)
def test_stages_recompute_each_micro_batch_with_its_own_length():
    found = []
    for interval in (0, 1):
        torch.manual_seed(3)
        net = model()
        layers = [net.embed, *(Step(layer) for layer in net.layers), net.head]
        pipeline = PipelineModule(layers, num_stages=2, loss_fn=sequence.cross_entropy, dynamic_shape=True,
                                  activation_checkpoint_interval=interval)  # fmt: skip
        engine = start(settings(0, 2, 2, 3), pipeline)
        losses = []
        for batch in data("plain", ROWS):
            own = [shares(batch, index, 3) for index in range(3)]
            cut = [
                {name: x[:, :length] for name, x in each.items()} for each, length in zip(own, (13, 9, 11), strict=True)
            ]
            losses.append(engine.train_batch(iter([(each["input_ids"], each["labels"]) for each in cut])).item())
        engine.destroy()
        found.append(losses)
    assert found[0] == found[1]


@pytest.mark.ranks(2, 3)
def test_ranks_of_a_sequence_have_to_have_the_same_batch(comm):
    engine = start(settings(0, comm.size, 1, 1), model())
    (batch,) = data("plain", ROWS, steps=1)
    if comm.rank == 1:
        batch["input_ids"] = batch["input_ids"].flip(0)
    with pytest.raises(UsageError, match=f"ranks 0 and 1 of the {comm.size} that share a sequence have different"):
        engine(**batch)
    hole = torch.ones(ROWS, 13)
    hole[3, 5] = 0
    if comm.rank == 1:
        batch["attention_mask"] = hole
    with pytest.raises(UsageError, match=r"rank 1 of the . of a sequence: attention_mask of row 3 is zero inside"):
        engine(**batch)
    engine.destroy()


@pytest.mark.ranks(2, 4)
def test_losses_of_all_tokens_are_joined_and_their_gradients_come_back(comm):
    logits = torch.randn(3 * comm.size - 1, 2, 5, generator=torch.Generator().manual_seed(2), requires_grad=True)
    target = torch.arange(logits.shape[0] * 2).view(-1, 2) % 5
    own = logits.detach().tensor_split(comm.size)[comm.rank].requires_grad_()
    losses = vocab_sequence_parallel_cross_entropy(own, target.tensor_split(comm.size)[comm.rank], comm)
    whole = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
    torch.testing.assert_close(losses, whole)
    losses.mean().backward()
    whole.mean().backward()
    torch.testing.assert_close(own.grad, comm.size * logits.grad.tensor_split(comm.size)[comm.rank])


@pytest.mark.mpi(min_size=1)
def test_a_whole_tensor_is_cut_and_joined_again(comm):
    group = sequence.SequenceGroup.split(comm, comm.size if comm.size < 4 else 2)
    layout = sequence.Layout(11, group.ulysses.size, group.ring.size)
    whole = torch.arange(22.0).reshape(2, 11)
    with sequence.use(sequence.Running(group, layout)):
        part = sequence.cut(whole).requires_grad_()
        assert torch.equal(part[0].detach().long(), sequence.positions(part))
        joined = sequence.join(part)
        assert torch.equal(joined, whole)
        (joined * whole).sum().backward()
        assert torch.equal(part.grad, comm.size * part.detach())
        with pytest.raises(UsageError, match="of 11 tokens; pass what is cut"):
            sequence.positions(torch.zeros(1, 12))


@pytest.mark.mpi(min_size=1)
def test_the_loss_of_a_batch_that_its_loader_has_cut_is_that_of_the_sequence(comm):
    group = sequence.SequenceGroup.split(comm)
    cut = sequence.Running(group, sequence.Layout(9, comm.size))
    logits, labels = torch.randn(2, 9, 5, generator=torch.Generator().manual_seed(4)), torch.arange(18).view(2, 9) % 5
    labels[:, 5:] = -100
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    own, of_own = (cut.layout.cut(x, comm.rank) for x in (logits, labels))
    hand([of_own], cut)
    assert sequence.cross_entropy(own, of_own).item() == pytest.approx(expected, rel=1e-6)  # fp32 in another order
    assert sequence.tiled_loss(nn.Identity(), own, of_own, 2).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo looks
@pytest.mark.filterwarnings("ignore:Dynamo:UserWarning")  # it tells once what it leaves out, locks of threads
@pytest.mark.ranks(2)
def test_compiled_models_share_sequences():
    engine = start(settings(1, 2, 1, 1), model())
    engine.compile(backend="eager")  # what is traced is the same with others
    batches = data("packed", ROWS)
    losses, grads = trained(engine, batches)
    engine.destroy()
    expected, own = plain(batches, 1)
    assert losses == pytest.approx(expected, rel=BOUND)
    close(grads[1], own[1])
