"""Cut layers against the layers of torch: the same at the start to the bit, the same outputs and gradients after."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from mpispeed.base.errors import UsageError
from mpispeed.nn.tensor import ColumnLinear, RowLinear, VocabEmbedding, VocabLinear, cross_entropy, cuts
from mpispeed.nn.tensor.entry import Entry
from tests.helpers.tensor import assert_near, joined, whole_gradients, whole_parameters

pytestmark = pytest.mark.mpi(min_size=1)

WIDTHS = [(8, 12), (7, 5), (5, 2), (3, 1)]


def made(comm, build):
    """What `build` makes with equal generators on all ranks."""
    torch.manual_seed(11)
    return build()


def data(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), requires_grad=True)


def same_start(comm, cut, whole):
    parts = whole_parameters(comm, cut)
    for name, param in whole.named_parameters():
        assert torch.equal(parts[name], param), name


def compare(comm, cut, whole, x, loss_of):
    """Outputs of both (already whole), then gradients of input and weights."""
    again = x.detach().clone().requires_grad_()
    found, expected = loss_of(cut, x), loss_of(whole, again)
    assert_near(found.detach(), expected.detach(), what="output")
    slope = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4))
    found.backward(slope)
    expected.backward(slope)
    assert_near(x.grad, again.grad, what="input")
    grads = whole_gradients(comm, cut)
    for name, param in whole.named_parameters():
        assert_near(grads[name], param.grad, what=name)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("width", "height"), WIDTHS)
def test_column_with_gathered_output(comm, width, height, bias, transposed):
    cut = made(comm, lambda: ColumnLinear(width, height, comm, bias=bias, transposed=transposed, gather_output=True))
    whole = made(comm, lambda: nn.Linear(width, height, bias=bias))
    if transposed:
        whole.weight = nn.Parameter(whole.weight.detach().t().contiguous())
        whole.forward = lambda x: functional.linear(x, whole.weight.t(), whole.bias)
    same_start(comm, cut, whole)
    compare(comm, cut, whole, data(2, 3, width), lambda layer, x: layer(x))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("height", "width"), WIDTHS)
def test_row_with_whole_input(comm, width, height, bias, transposed):
    cut = made(comm, lambda: RowLinear(width, height, comm, bias=bias, transposed=transposed, input_is_whole=True))
    whole = made(comm, lambda: nn.Linear(width, height, bias=bias))
    if transposed:
        whole.weight = nn.Parameter(whole.weight.detach().t().contiguous())
        whole.forward = lambda x: functional.linear(x, whole.weight.t(), whole.bias)
    same_start(comm, cut, whole)
    compare(comm, cut, whole, data(4, width), lambda layer, x: layer(x))


class Pair(nn.Module):
    """Two gates and a way down, as a gated MLP."""

    def __init__(self, up, gate, down):
        super().__init__()
        self.up, self.gate, self.down = up, gate, down

    def forward(self, x):
        return self.down(self.up(x).tanh() * self.gate(x))


def cut_pair(comm, inner, grain=1, **options):
    entry = Entry(comm, users=2) if not options else None
    columns = [ColumnLinear(6, inner, comm, grains=(grain,), entry=entry, **options) for _ in range(2)]
    return Pair(*columns, RowLinear(inner, 6, comm, grain=grain, **options))


def whole_pair(inner):
    return Pair(nn.Linear(6, inner), nn.Linear(6, inner), nn.Linear(inner, 6))


@pytest.mark.parametrize(("inner", "grain"), [(12, 1), (7, 1), (2, 1), (12, 4), (10, 4), (6, 6)])
def test_columns_then_row(comm, inner, grain):
    cut = made(comm, lambda: cut_pair(comm, inner, grain))
    same_start(comm, cut, whole := made(comm, lambda: whole_pair(inner)))
    assert cut.up.weight.shape[0] % grain == 0 or inner % grain
    before = comm.comm_trace.entries()
    count = {key: entry.count for key, entry in before.items()}
    compare(comm, cut, whole, data(2, 4, 6), lambda layer, x: layer(x))
    sums = sum(e.count - count.get(key, 0) for key, e in comm.comm_trace.entries().items() if key[0] == "all_reduce")
    assert sums == (2 if comm.size > 1 else 0)  # one in forward, one in backward though two layers take the input


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_sequence_parallel_pair(comm, is_checkpointed):
    """The sequence is cut outside of the pair; the bias after the sum has partial gradients."""
    from torch.utils.checkpoint import checkpoint

    cut = made(comm, lambda: cut_pair(comm, 9, sequence_parallel=True))
    whole = made(comm, lambda: whole_pair(9))
    length = 3 * comm.size
    x = data(2, length, 6)
    again = x.detach().clone().requires_grad_()
    own = x.narrow(1, 3 * comm.rank, 3)
    found = checkpoint(cut, own, use_reentrant=False) if is_checkpointed else cut(own)
    expected = whole(again)
    slope = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4))
    assert_near(found.detach(), expected.detach().narrow(1, 3 * comm.rank, 3))
    found.backward(slope.narrow(1, 3 * comm.rank, 3))
    expected.backward(slope)
    assert_near(x.grad.narrow(1, 3 * comm.rank, 3), again.grad.narrow(1, 3 * comm.rank, 3))
    grads = whole_gradients(comm, cut)
    for name, param in whole.named_parameters():
        assert_near(grads[name], param.grad, what=name)


def test_a_sequence_that_does_not_divide(comm):
    row = RowLinear(4, 4, comm, sequence_parallel=True)
    if comm.size > 1:
        with pytest.raises(UsageError, match=rf"length {comm.size + 1} cannot be cut into {comm.size} equal parts"):
            row(torch.zeros(1, comm.size + 1, row.weight.shape[1]))


def test_fused_parts_are_cut_each_by_itself(comm):
    sizes, grains = (12, 6, 6), (4, 2, 2)
    cut = made(comm, lambda: ColumnLinear(5, 24, comm, sub_sizes=sizes, grains=grains))
    whole = made(comm, lambda: nn.Linear(5, 24))
    same_start(comm, cut, whole)
    x = data(3, 5)
    parts = comm.gather_objects(cut(x).detach())
    assert_near(_joined(cut, parts), whole(x).detach())


def _joined(cut, parts):
    plan = cuts(cut)["bias"]
    return torch.stack([plan.join([part[i] for part in parts]) for i in range(len(parts[0]))])


@pytest.mark.parametrize(("vocab", "padding"), [(16, None), (13, 4), (5, 0), (1, None)])
def test_embedding(comm, vocab, padding):
    cut = made(comm, lambda: VocabEmbedding(vocab, 6, comm, padding_idx=padding))
    whole = made(comm, lambda: nn.Embedding(vocab, 6, padding))
    same_start(comm, cut, whole)
    index = torch.randint(vocab, (3, 7), generator=torch.Generator().manual_seed(1))
    found, expected = cut(index), whole(index)
    assert torch.equal(found, expected)
    slope = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4))
    found.backward(slope)
    expected.backward(slope)
    assert_near(whole_gradients(comm, cut)["weight"], whole.weight.grad)
    assert cut.weight.shape[0] == -(-vocab // comm.size)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("vocab", [16, 13, 3])
def test_logits_and_loss(comm, vocab, is_tied):
    """Gathered logits are those of the whole layer; the loss of cut ones is that of torch."""

    def build(is_cut, gather):
        embed = VocabEmbedding(vocab, 6, comm) if is_cut else nn.Embedding(vocab, 6)
        if is_cut:
            head = VocabLinear(6, vocab, comm, gather_output=gather, tied=embed if is_tied else None)
        else:
            head = nn.Linear(6, vocab, bias=False)
            head.weight = embed.weight if is_tied else head.weight
        return nn.Sequential(embed, head)

    index = torch.randint(vocab, (2, 5), generator=torch.Generator().manual_seed(1))
    target = torch.randint(vocab, (2, 5), generator=torch.Generator().manual_seed(2))
    whole = made(comm, lambda: build(False, False))
    expected = functional.cross_entropy(whole(index).flatten(0, 1), target.flatten())
    expected.backward()
    for gather in (True, False):
        cut = made(comm, lambda gather=gather: build(True, gather))
        logits = cut(index)
        if gather:
            assert_near(logits.detach(), whole(index).detach())
            loss = functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        else:
            loss = cross_entropy(logits, target, comm, vocab)
        assert_near(loss.detach(), expected.detach())
        loss.backward()
        grads = whole_gradients(comm, cut)
        for name, param in whole.named_parameters():
            assert_near(grads[name], param.grad, what=name)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("classes", [12, 11, 2])
def test_cross_entropy(comm, classes, smoothing, reduction):
    logits = 30 * torch.randn(4, 3, classes, generator=torch.Generator().manual_seed(5))
    target = torch.randint(classes, (4, 3), generator=torch.Generator().manual_seed(6))
    target[1, 2] = target[0, 0] = -100
    rows = -(-classes // comm.size)
    padded = functional.pad(logits, (0, rows * comm.size - classes), value=7.0)
    own = padded[..., comm.rank * rows :][..., :rows].clone().requires_grad_()
    whole = logits.clone().requires_grad_()
    options = {"label_smoothing": smoothing, "reduction": reduction}
    found = cross_entropy(own, target, comm, classes, **options)
    expected = functional.cross_entropy(whole.flatten(0, 1), target.flatten(), **options)
    assert_near(found.detach().flatten(), expected.detach().flatten())
    slope = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4))
    found.backward(slope.view(found.shape))
    expected.backward(slope)
    grad = torch.cat(comm.gather_objects(own.grad), -1)
    assert_near(grad[..., :classes], whole.grad)
    assert not grad[..., classes:].any()


def test_cross_entropy_in_16_bits(comm):
    logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(5)).bfloat16()
    target = torch.arange(6)
    rows = -(-8 // comm.size)
    padded = functional.pad(logits, (0, rows * comm.size - 8))
    found = cross_entropy(padded[:, comm.rank * rows :][:, :rows], target, comm, 8)
    assert found.dtype == torch.bfloat16
    assert_near(found.float(), functional.cross_entropy(logits.float(), target), 2**-8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "median"}, "reduction='median'"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5"),
        ({"target": torch.tensor([1, 6])}, "target 6 is none of 6 classes"),
        ({"target": torch.tensor([1, -1])}, "target -1 is none"),
        ({"target": torch.tensor([1])}, "no cut of 6 classes"),
    ],
)
def test_wrong_arguments_of_the_loss(comm, change, message):
    arguments = {"logits": torch.zeros(2, -(-6 // comm.size)), "target": torch.tensor([1, 2]), **change}
    with pytest.raises(UsageError, match=message):
        cross_entropy(comm=comm, vocab_size=6, **arguments)


def test_copies_use_the_same_group_and_are_their_own(comm):
    pair = made(comm, lambda: cut_pair(comm, 8))
    reference = copy.deepcopy(pair)
    assert reference.up.comm is comm
    assert reference.up.entry is reference.gate.entry
    assert reference.up.entry is not pair.up.entry
    assert cuts(reference) == cuts(pair)
    x = data(2, 3, 6)
    assert torch.equal(reference(x), pair(x))


def test_second_derivatives(comm):
    cut, whole = made(comm, lambda: cut_pair(comm, 5)), made(comm, lambda: whole_pair(5))
    slopes = []
    for layer in (cut, whole):
        x = data(2, 3, 6)
        (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        slopes.append(torch.autograd.grad(first.square().sum(), x)[0])
    assert_near(*slopes, 1e-5)


def test_autocast_keeps_the_dtype_of_the_unsplit_layer(comm):
    cut = made(comm, lambda: cut_pair(comm, 8))
    with torch.autocast("cpu", torch.bfloat16):
        assert cut(data(2, 3, 6)).dtype == torch.bfloat16


def test_frozen_parts_stay_frozen(comm):
    whole = nn.Linear(4, 6)
    whole.weight.requires_grad_(False)
    cut = ColumnLinear(4, 6, comm, whole=whole)
    assert not cut.weight.requires_grad
    assert cut.bias.requires_grad
    assert torch.equal(joined(comm, cuts(cut)["weight"], cut.weight), comm.share(whole.weight.detach()))
