"""Compressed layers that are sliced compute what the full ones do, whether they were compressed before or after."""

import pytest
import torch

from mpispeed.nn.compression import (
    ActivationQuantization,
    Group,
    Pruning,
    Quantizer,
    WeightQuantization,
    compress,
    compression_of,
)
from mpispeed.nn.tensor import cuts, inject
from tests.helpers import home_made as made
from tests.helpers.covering import IS_FULL
from tests.helpers.tensor import assert_near, whole_gradients, whole_parameters

pytestmark = pytest.mark.mpi(min_size=1)

POLICY = {
    "wq": "column", "wk": "column", "wv": "column", "qkv": "qkv", "wo": "row", "proj": "row", "mlp.0": "column",
    "mlp.2": "row", "embed": "vocab", "head": "vocab",
}  # fmt: skip


def build(attention=made.Separate):
    """In doubles, so that another order of sums moves nothing across a border of rounding."""
    return made.build(lambda: attention(12, 4)).double()


def policy(model):
    names = [name for name, _ in model.named_modules()]
    return {key: kind for key, kind in POLICY.items() if any(name.endswith(key) for name in names)}


def weights(bits, *modules, groups=1, kind="symmetric", rounding="nearest"):
    return Group("w", WeightQuantization(bits, bits, quantizer=Quantizer(kind, rounding, groups)), modules)


def inputs(*modules, kind="symmetric", is_static=False):
    return Group("a", ActivationQuantization(8, Quantizer(kind), is_static), modules)


def pruned(kind, scores, *modules, ratio=0.5, heads=0, related=()):
    return Group("p", Pruning(kind, ratio, scores, num_heads=heads), modules, related)


CASES = {
    "weights": [
        weights(8, "attention", groups=12),
        weights(4, "mlp", groups=5, kind="asymmetric", rounding="stochastic"),
        weights(8, "embed", "head", groups=19, kind="asymmetric"),
    ],
    "few bits": [weights(2, "attention", groups=4), weights(1, "mlp")],
    "inputs": [inputs("blocks.0", kind="asymmetric"), inputs("blocks.1", "head", is_static=True)],
    "sparse": [pruned("sparse", "l1", "blocks.0", "head", ratio=0.3), pruned("sparse", "topk", "blocks.1", ratio=0.3)],
    "rows": [pruned("row", "l1", "0.*(wo|mlp)"), pruned("row", "topk", "1.attention.wo", "1.mlp")],
    "rows and followers": [
        inputs("mlp.2"),
        pruned("row", "l1", "0.mlp.0", related=(("0.mlp.2",),)),
        pruned("row", "topk", "1.mlp.0", related=(("1.mlp.2",),)),
    ],
    "heads": [
        pruned("head", "topk", "0.*wo", heads=4, related=(("0.*wq", "0.*wk", "0.*wv"),)),
        pruned("head", "l1", "1.*wo", heads=4),
    ],
    "sequence": [inputs("blocks", is_static=True), pruned("row", "topk", "mlp.2")],
    "all": [
        weights(8, "blocks", groups=4),
        inputs("blocks"),
        pruned("sparse", "topk", "wq", "mlp.0"),
        pruned("row", "topk", "mlp"),
        pruned("head", "topk", "wo", heads=4),
    ],
}


def sliced(comm, groups, *, is_first, cuts_sequence=False):
    model = build()
    if is_first:
        compress(model, groups, seed=5)
    inject(model, comm, policy(model), sequence_parallel=cuts_sequence)
    compress(model, groups, seed=5)
    return model


SIZES = ((1, 2, 3, 4),) if IS_FULL else ((2, 3), (3, 4), (1, 4))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.ranks(*SIZES[at % len(SIZES)])) for at, case in enumerate(CASES)]
)
def test_slices_compute_what_full_layers_do(comm, case):
    whole = build()
    compress(whole, CASES[case], seed=5)
    is_sequence = case == "sequence"
    before, after = (sliced(comm, CASES[case], is_first=each, cuts_sequence=is_sequence) for each in (True, False))
    for cut in (before, after):
        assert set(compression_of(cut).layers) == set(compression_of(whole).layers)
        for name, values in whole_parameters(comm, cut).items():
            assert torch.equal(values, whole.get_parameter(name)), name
    for _ in range(2):  # running ranges move
        expected = whole(made.tokens())
        losses = [cut(made.tokens()) for cut in (before, after)]
    expected.backward()
    for cut, found in zip((before, after), losses, strict=True):
        assert_near(found.detach(), expected.detach(), what="loss")
        found.backward()
        grads = whole_gradients(comm, cut)
        for name, param in whole.named_parameters():
            assert_near(grads[name], param.grad, 1e-5, name)
        known, buffers = cuts(cut), dict(cut.named_buffers())
        for name, buffer in whole.named_buffers():
            parts = comm.gather_objects(buffers[name])
            own = known[name].join(parts) if name in known else parts[0]
            assert torch.equal(own, buffer) if own.dtype == torch.bool else torch.allclose(own, buffer, rtol=1e-6), name
