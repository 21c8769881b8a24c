"""Pieces of a sequence one after the other: values and gradients of the whole, and never all intermediates."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mpispeed.base.errors import UsageError
from mpispeed.nn.sequence.loss import cross_entropy, vocab_sequence_parallel_cross_entropy
from mpispeed.nn.sequence.tiled import tiled_loss, tiled_mlp

BOUND = 1e-6  # of the largest value: sums over tokens are in another order
WIDTH, INNER, CLASSES = 8, 48, 97


class Largest(TorchDispatchMode):
    """Remembers the most elements of a tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.most = max(self.most, tensor.numel())
        return out


def made(seed=3):
    torch.manual_seed(seed)
    mlp = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))
    return mlp, nn.Linear(WIDTH, CLASSES)


def run(function, module, x):
    """Value, gradients of the input and of parameters, and the largest tensor."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    with Largest() as seen:
        out = function(x)
        (out * torch.arange(out.numel()).reshape(out.shape).cos()).sum().backward()
    return [out.detach(), x.grad, *(each.grad.clone() for each in module.parameters())], seen.most


def close(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= BOUND * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize(("tiles", "dim", "shape"), [(1, -2, (2, 11)), (4, -2, (2, 11)), (3, 0, (7,)), (5, -2, (2, 3))])
def test_a_tiled_mlp_is_the_mlp(tiles, dim, shape):
    mlp, _ = made()
    x = torch.randn(*shape, WIDTH)
    found, most = run(lambda x: tiled_mlp(mlp, x, tiles, dim=dim), mlp, x)
    expected, whole = run(mlp, mlp, x)
    close(found, expected)
    tokens = -(-shape[dim if len(shape) == 1 else 1] // tiles) * (shape[0] if len(shape) == 2 else 1)
    assert most <= max(tokens * INNER, WIDTH * INNER, x.numel()) <= whole


@pytest.mark.parametrize(
    ("tiles", "smoothing", "dtype"), [(1, 0.0, torch.float32), (5, 0.2, torch.float32), (4, 0.0, torch.bfloat16)]
)
def test_a_tiled_loss_never_has_all_logits(tiles, smoothing, dtype):
    _, head = made()
    head = head.to(dtype)
    hidden = torch.randn(2, 60, WIDTH).to(dtype)
    labels = torch.randint(CLASSES, (2, 60))
    labels[0, 3:30] = -100
    options = {"label_smoothing": smoothing}
    found, most = run(lambda x: tiled_loss(head, x, labels, tiles, **options), head, hidden)
    expected, whole = run(lambda x: cross_entropy(head(x), labels, **options), head, hidden)
    assert found[0].dtype == torch.float32
    if dtype == torch.float32:
        close(found, expected)
    else:
        close(found[:2], expected[:2])
        for one, other in zip(found[2:], expected[2:], strict=True):
            # sums of tiles are rounded to 8 bits, 4 times
            assert (one - other).abs().max() <= 2**-6 * other.abs().max()
    assert whole >= 120 * CLASSES
    assert most <= max(-(-120 // tiles), WIDTH + 1) * CLASSES


def test_the_loss_is_that_of_torch():
    _, head = made()
    hidden, labels = torch.randn(3, 7, WIDTH), torch.randint(CLASSES, (3, 7))
    labels[1] = -100
    expected = nn.functional.cross_entropy(head(hidden).flatten(0, 1), labels.flatten())
    assert torch.allclose(cross_entropy(head(hidden), labels), expected, atol=0, rtol=1e-6)
    each = vocab_sequence_parallel_cross_entropy(head(hidden), labels.clamp(0), None)
    whole = nn.functional.cross_entropy(head(hidden).flatten(0, 1), labels.clamp(0).flatten(), reduction="none")
    assert torch.equal(each.flatten(), whole)


def test_without_gradients_nothing_is_recomputed():
    mlp, _ = made()
    runs = []
    mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    with torch.no_grad():
        tiled_mlp(mlp, torch.randn(1, 6, WIDTH), 3)
    assert len(runs) == 3
    tiled_mlp(mlp, torch.randn(1, 2, WIDTH), 3).sum().backward()
    assert len(runs) == 3 + 3 + 3  # pieces without a token run too: other ranks may have one there


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda mlp, head: tiled_mlp(mlp, torch.zeros(1, 4, WIDTH), 0), "tiles=0"),
        (lambda mlp, head: tiled_loss(head, torch.zeros(1, 4, WIDTH), torch.zeros(4), 2), "do not fit labels"),
        (lambda mlp, head: cross_entropy(torch.zeros(1, 4, 9), torch.zeros(4)), "do not fit labels"),
        (
            lambda mlp, head: vocab_sequence_parallel_cross_entropy(torch.zeros(1, 4, 9), torch.zeros(4), None),
            "targets",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(UsageError, match=words):
        call(*made())
