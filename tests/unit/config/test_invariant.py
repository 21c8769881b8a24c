"""Settings that `reduction` "invariant" rules out are refused, each with its reason."""

import pytest

from mpispeed.base.errors import MpispeedError
from mpispeed.config.load import validate

BASE = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "reduction": "invariant"}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"prescale_gradients": True}, "nothing is divided before"),
        ({"gradient_predivide_factor": 2.0}, "nothing is divided before"),
        ({"sparse_gradients": True}, "rows are added in the order of ranks"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "inside groups of ranks"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "blocks of codes"),
        ({"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}}, "blocks of codes"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}, "each rank compresses"),
        (
            {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 1}},
            "norms of parameters",
        ),
        ({"pipeline": {"schedule": "zb-h1"}}, "several micro-batches"),
        ({"pipeline": {"schedule": "interleaved"}}, "several micro-batches"),
    ],
)
def test_conflicts_are_refused_with_a_reason(more, words):
    with pytest.raises(MpispeedError, match=words):
        validate(BASE | more)
    validate(BASE | more | {"reduction": "ordered"})


def test_lamb_with_whole_states_is_allowed():
    validate(BASE | {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}})


@pytest.mark.parametrize("value", [0, -1, 1.5, 1025, 2**40, True, "many", None, [1]])
def test_threads_that_no_node_has_are_refused(value):
    with pytest.raises(MpispeedError, match=r"reproducibility\.threads"):
        validate({"reproducibility": {"threads": value}}, "test")
