"""Simulated ranks that start different things are told so; nothing hangs."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.base.errors import AgreementError
from mpispeed.mesh import Mesh, Topology, World, sim
from mpispeed.mesh.collectives.work import Key, by_text, code_of
from mpispeed.mesh.deadlock import Report, Watch, deadlock
from tests.helpers import diverge

SIZES = (2, 5)  # real ranks are 2, 3 and 4
SCENARIOS = (
    diverge.different_labels,
    diverge.extra_operation,
    diverge.different_sizes,
    diverge.equal_texts,
    diverge.cross_lane,
    diverge.stale_round,
    diverge.left_behind,
)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda fn: fn.__name__)
def test_divergence(scenario, size):
    sim.run(size, scenario, timeout_seconds=60)


def test_slow_rank(caplog, monkeypatch):
    assert len(sim.run(3, lambda world: diverge.slow_rank(world, caplog, monkeypatch), timeout_seconds=60)) == 3
    assert sum("has been waiting" in record.getMessage() for record in caplog.records) == 1


def test_groups_of_one_lane_in_another_order():
    """Two groups, one queue: rank 0 starts them the other way round than rank 1; nobody can go on."""

    def fn(world):
        mesh = Mesh(Topology({"pipe": 2, "data": 2}), world)
        watch = Watch(mesh, first_look_seconds=0.5)
        channel = mesh.channel("params")
        order = ("data", "pipe") if world.rank in (0, 3) else ("pipe", "data")
        works = [channel[axis].start(lambda _: None, "fetch", label=axis) for axis in order]
        with pytest.raises(AgreementError) as caught:
            watch.wait(works[1], lambda: f"the {order[1]} part")
        mesh.close()
        return str(caught.value)

    texts = set(sim.run(4, fn))
    assert len(texts) == 1
    assert "ranks 0, 3 wait for" not in texts.pop()  # each of them misses another rank, which is named


def test_watch_of_some_ranks_convicts_without_the_others():
    """One data group is stuck while the other one never waits."""

    def fn(world):
        mesh = Mesh(Topology({"pipe": 2, "data": 2}), world)
        watch = Watch(mesh, "data", first_look_seconds=0.5)
        name = "params" if world.rank == 0 else "grads"
        channels = {channel: mesh.channel(channel) for channel in ("params", "grads")}
        text = ""
        if world.rank < 2:
            work = channels[name]["data"].start(lambda _: None, "fetch")
            with pytest.raises(AgreementError) as caught:
                watch.wait(work, lambda: name)
            text = str(caught.value)
        world.comm.barrier()
        return text

    texts = sim.run(4, fn)
    assert texts[0] == texts[1] != ""
    assert texts[2:] == ["", ""]


def test_without_threads_labels_are_compared_at_once():
    def fn(world):
        plain = World(world.comm.duplicate(), world.node.duplicate(), node_count=1, has_threads=False)
        mesh = Mesh(Topology({"data": world.size}), plain)
        watch = Watch(mesh)
        channel, done = mesh.channel("params"), []
        watch.wait(diverge.fetch(channel, "embed", done, rank=world.rank), lambda: "the embedding")
        texts = [
            diverge.error_of(lambda: diverge.fetch(channel, f"{world.rank}", done, rank=world.rank)) for _ in range(2)
        ]
        watch.close()
        mesh.close()
        assert len(done) == 1
        return texts

    texts = sim.run(3, fn)
    assert len({text for pair in texts for text in pair}) == 1
    assert "rank 0 wants fetch of unit '0'; rank 1 wants fetch of unit '1'; rank 2" in texts[0][0]


def test_codes_are_equal_in_every_process():
    place = "mpispeed.mesh.collectives.work"
    program = f"from {place} import code_of; import sys; sys.stdout.write(str(code_of('fetch', 'head')))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert found == str(code_of("fetch", "head"))
    assert len({code_of("a", 1), code_of("a", "1"), code_of("a1", ""), code_of("b", 1)}) == 4
    assert 0 < code_of("a", 1) < 2**63


def test_many_ranks_are_named_in_short():
    assert by_text([(rank, "x") for rank in range(20)]) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more want x"
    assert by_text([(rank, f"x{rank}") for rank in range(20)]).endswith("; and 12 more groups of ranks")


@given(st.data())
def test_verdicts_against_a_search(data):
    """A verdict is right exactly if no channel can ever move, found by moving channels until none moves."""
    size, channels = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3))
    keys = [Key(channel, ("data",), 0, size, 0, 0) for channel in range(channels)]
    queues = [data.draw(st.lists(st.sampled_from(keys), max_size=4)) for _ in range(size)]
    lane_queues = [[[key for key in queue if key is k] for k in keys] for queue in queues]
    posted = [[min(len(q), data.draw(st.integers(0, 1))) for q in rank_queues] for rank_queues in lane_queues]
    heads = [[(k, posted[r][i]) for i, k in enumerate(keys) if posted[r][i]] for r in range(size)]
    reports = [
        Report(r, "x", bool(heads[r]), "lane", heads[r][0] if heads[r] else None, heads[r],
               {k: posted[r][i] for i, k in enumerate(keys)})
        for r in range(size)
    ]  # fmt: skip
    can_move = any(
        all(posted[other][keys.index(k)] >= n for other in range(size)) for r in range(size) for k, n in heads[r]
    )
    is_stuck = all(heads[r] for r in range(size)) and not can_move
    assert bool(deadlock(reports)) == is_stuck


def test_a_moving_rank_prevents_a_verdict():
    key = Key(0, ("data",), 0, 2, 0, 0)
    stuck = Report(0, "x", True, "a", (key, 1), [(key, 1)], {key: 1})
    assert deadlock([stuck, Report(1, "y", False, posted={key: 0})]) == ""
    other = Key(1, ("data",), 0, 2, 0, 0)
    assert "rank 1 waits for y" in deadlock(
        [Report(0, "x", True, "a", (key, 1), [(key, 1)], {key: 1, other: 0}),
         Report(1, "y", True, "b", (other, 1), [(other, 1)], {key: 0, other: 1})]
    )  # fmt: skip
