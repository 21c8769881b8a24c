"""Keys that say how updated parameters are collected, and how much is updated at once: same bits, other messages."""

import logging
from collections import Counter

import pytest

from mpispeed.base import log
from tests.helpers.covering import in_turn
from tests.zoo import same_bits
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, start, train_averaged, weights

BATCH = 12
MOST = 1000
KEPT = {"stage3_param_persistence_threshold": 5000}  # some units stay whole at stage 3, others are cut
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}, "zero_allow_untested_optimizer": True}
LAMB = {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}, "zero_allow_untested_optimizer": True}


class Seen:
    """Messages of the last of two steps by verb, and this rank's parts of the units that are collected."""

    def __init__(self, engine):
        params = engine.parts.params
        self.counts, self.sent = Counter(), Counter()
        for (verb, _), entry in engine.mesh.comm_trace.entries().items():
            self.counts[verb] += entry.count
            self.sent[verb] += entry.bytes
        self.parts = [params.shards.span(unit).numel for unit in params.table.units if unit.states.param.is_replicated]
        self.itemsize = params.table.units[0].states.compute.itemsize


def run(stage, dtype="bf16", more=WARM, **zero):
    engine = start(config(stage, BATCH, 1, dtype=dtype, zero={**KEPT, **zero}, reduction="ordered", **more), TinyLM())
    rule, lengths = engine.parts.optimization.rule, []
    update = rule.update

    def noting(windows, **arguments):
        def noted():
            for window in windows:
                lengths.append(window.master.numel())
                yield window

        return update(noted(), **arguments)

    rule.update = noting
    losses = train_averaged(engine, batches(1, BATCH))
    engine.mesh.comm_trace.reset()
    lengths.clear()
    losses += train_averaged(engine, batches(2, BATCH)[1:])
    seen, found = Seen(engine), (losses, weights(engine))
    engine.destroy()
    return found, seen, lengths


def pieces(part, piece):
    return -(-part // piece)


CASES = [(1, "bf16"), (2, "fp32"), (3, "bf16"), (1, "fp32")]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("stage", "dtype"), in_turn(CASES, ranks=(2, 3)))
def test_updated_parameters_are_collected_as_the_keys_say(comm, stage, dtype):
    expected, plain, _ = run(stage, dtype)
    ranks = comm.size
    own_bytes = sum(plain.parts) * plain.itemsize
    assert plain.parts
    assert max(plain.parts) * ranks > 2 * MOST
    assert "broadcast" not in plain.counts

    found, bounded, _ = run(stage, dtype, allgather_bucket_size=MOST)
    same_bits(found, expected)
    more = sum(pieces(part, MOST // ranks) - 1 for part in plain.parts)
    assert bounded.counts["all_gather"] == plain.counts["all_gather"] + more
    assert bounded.sent == plain.sent

    found, turns, _ = run(stage, dtype, allgather_partitions=False)
    same_bits(found, expected)
    assert turns.counts["broadcast"] == ranks * len(plain.parts)
    assert turns.sent["broadcast"] == own_bytes
    assert turns.counts["all_gather"] == plain.counts["all_gather"] - len(plain.parts)
    assert turns.sent["all_gather"] == plain.sent["all_gather"] - (ranks - 1) * own_bytes

    found, both, _ = run(stage, dtype, allgather_partitions=False, allgather_bucket_size=MOST)
    same_bits(found, expected)
    assert both.counts["broadcast"] == ranks * sum(pieces(part, MOST) for part in plain.parts)
    assert both.sent == turns.sent


@pytest.mark.mpi(min_size=2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("more", [WARM, SGD], ids=["AdamW", "SGD"])
def test_an_update_is_cut_into_sub_groups(more):
    expected, _, whole = run(3, more=more)
    found, _, cut = run(3, more=more, sub_group_size=333)
    same_bits(found, expected)
    assert max(whole) > 3 * 333
    assert max(cut) == 333
    assert sum(cut) == sum(whole)
    assert len(cut) == sum(pieces(length, 333) for length in whole)


@pytest.mark.mpi(min_size=2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("most", [333, 10**6])
def test_an_optimizer_of_whole_parameters_is_not_cut_and_says_so(caplog, monkeypatch, most):
    monkeypatch.setattr(log, "_seen", set())
    with caplog.at_level(logging.WARNING, logger="mpispeed"):
        engine = start(config(3, BATCH, 1, zero={"sub_group_size": most}, **LAMB), TinyLM())
    engine.destroy()
    told = [record.message for record in caplog.records if "sub_group_size" in record.message]
    assert bool(told) == (most == 333)
    assert all("Lamb" in text and "333 has no effect" in text for text in told)
