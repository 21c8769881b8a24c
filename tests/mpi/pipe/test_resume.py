"""What one layout of ranks saved, another goes on with; tests/jobs/test_parallel_matrix.py changes their number."""

from dataclasses import replace

import pytest

from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.exchange.quantized_sums import RANK_ERROR
from tests.helpers.covering import in_turn
from tests.helpers.pipes import Case, Layout, train
from tests.helpers.saved import difference
from tests.zoo import same_bits
from tests.zoo.training import weights

pytestmark = pytest.mark.mpi(min_size=1)
BEFORE, AFTER = 2, 3
# Each saves for the next, the last one for the first; all share one weight between the ends.
RINGS = {
    1: [((1, 1, 1), "1f1b", 0), ((1, 1, 1), "zb-h1", 3)],
    2: [((2, 1, 1), "interleaved", 1), ((1, 1, 2), "1f1b", 3), ((1, 2, 1), "gpipe", 2)],
    3: [((3, 1, 1), "1f1b", 3), ((3, 1, 1), "interleaved", 1)],
    4: [((2, 1, 2), "1f1b", 3), ((4, 1, 1), "interleaved", 0), ((2, 2, 1), "1f1b", 2), ((1, 2, 2), "gpipe", 1)],
}


@pytest.mark.parametrize("ranks", [pytest.param(ranks, marks=pytest.mark.ranks(ranks)) for ranks in RINGS])
def test_a_ring_of_layouts(ranks, mpi_tmp_path, comm):
    cases = [Case(Layout(*sizes), schedule, stage, is_tied=True) for sizes, schedule, stage in RINGS[ranks]]
    unbroken = []
    for number, case in enumerate(cases):
        engine = case.engine()
        train(engine, range(BEFORE))
        engine.save_checkpoint(str(mpi_tmp_path / f"{number}"), tag="t", client_state={"from": str(case)})
        unbroken.append(train(engine, range(BEFORE, BEFORE + AFTER)))
        engine.destroy()
    for number, case in enumerate(cases):
        source, again = (number - 1) % len(cases), mpi_tmp_path / f"again-{number}"
        engine = case.engine()
        path, client = engine.load_checkpoint(str(mpi_tmp_path / f"{source}"))
        assert path is not None
        assert client["from"] == str(cases[source])
        assert engine.global_steps == BEFORE
        engine.save_checkpoint(str(again), tag="t", client_state=client)
        found = comm.share(difference(mpi_tmp_path / f"{source}", again) if comm.rank == 0 else "")
        assert found == "", f"{cases[source]} -> {case}"
        losses = train(engine, range(BEFORE, BEFORE + AFTER))
        assert losses == pytest.approx(unbroken[source], rel=1e-5), f"{cases[source]} -> {case}"
        engine.destroy()


@pytest.mark.parametrize("stage", in_turn([3, 1], ranks=(2, 4, 3)))
def test_16_bit_weights_go_on_alike(stage, mpi_tmp_path, comm):
    case = Case(Layout(comm.size, 1, 1), "zb-h1", stage, "bf16", is_tied=True)
    first = case.engine()
    train(first, range(BEFORE))
    first.save_checkpoint(str(mpi_tmp_path / "a"), tag="t")
    expected = train(first, range(BEFORE, BEFORE + AFTER))
    first.destroy()
    second = replace(case, schedule="interleaved").engine()
    second.load_checkpoint(str(mpi_tmp_path / "a"))
    assert train(second, range(BEFORE, BEFORE + AFTER)) == pytest.approx(expected, rel=1e-3)
    second.destroy()
    same = case.engine()
    same.load_checkpoint(str(mpi_tmp_path / "a"))
    assert train(same, range(BEFORE, BEFORE + AFTER)) == expected  # to the bit
    same.destroy()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sizes", [(2, 1, 2), (1, 2, 2)])
def test_errors_of_quantized_gradients_go_on_bit_for_bit(sizes, mpi_tmp_path, monkeypatch):
    """Of a weight tied over two stages each has errors of its own: their gradients differ."""
    monkeypatch.setenv("MPISPEED_RANKS_PER_NODE", str(sizes[1]))
    case = Case(Layout(*sizes), stage=1, is_tied=True)
    zero = case.settings()["zero_optimization"] | {"zero_quantized_gradients": True, "zeropp_loco_param": {}}
    more = {"zero_optimization": zero, "reduction": "ordered"}
    first = case.engine(**more)
    train(first, range(BEFORE))
    first.save_checkpoint(str(mpi_tmp_path), tag="t")
    with open_checkpoint(mpi_tmp_path) as source:
        rows = {name: source.stored(name, RANK_ERROR).shape[0] for name in source.names()
                if RANK_ERROR in source.slots(name)}  # fmt: skip
    assert set(rows.values()) == ({2, 4} if sizes[0] == 2 else {2})
    expected = train(first, range(BEFORE, BEFORE + AFTER))
    second = case.engine(**more)
    second.load_checkpoint(str(mpi_tmp_path))
    assert train(second, range(BEFORE, BEFORE + AFTER)) == expected
    same_bits(weights(second), weights(first))
    for engine in (first, second):
        engine.destroy()
