"""An operation that one rank cannot take part in runs nowhere, and every rank hears why."""

import time

import pytest

from mpispeed.base.errors import StoreError
from mpispeed.mesh import Mesh, Topology, sim


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("delay_seconds", [0.0, 0.2])
def test_a_problem_of_one_rank_is_raised_on_all_at_once(size, delay_seconds):
    def fn(world):
        mesh = Mesh(Topology({"data": world.size}), world)
        channel, ran = mesh.channel("params")["data"], []
        end = time.monotonic() + delay_seconds

        def ready():
            if time.monotonic() < end:
                return None
            return "the disk is gone" if world.rank == world.size - 1 else ""

        start = time.monotonic()
        ended = []
        first = channel.start(lambda _: ran.append(0), "fetch", label="x", describe=lambda: "unit x", ready=ready)
        first.after(lambda: ended.append(True))
        texts = []
        later = [first]
        if world.size > 1:
            later.append(channel.start(lambda _: ran.append(1), "fetch", label="y"))
        for work in later:
            with pytest.raises(StoreError) as caught:
                work.wait()
            texts.append(str(caught.value))
        assert time.monotonic() - start < 20
        assert (ran, ended) == ([], [True])
        mesh.close()
        return texts

    told = sim.run(size, fn, timeout_seconds=60)
    assert all(texts == told[0] for texts in told)
    assert "unit x" in told[0][0]
    assert "the disk is gone" in told[0][0]
    assert size == 1 or f"rank {size - 1} says: the disk is gone" in told[0][0]


@pytest.mark.parametrize("size", [1, 3])
def test_what_is_ready_runs(size):
    def fn(world):
        mesh = Mesh(Topology({"data": world.size}), world)
        channel, ran, asked = mesh.channel("params")["data"], [], []

        def ready():
            asked.append(True)
            return "" if len(asked) > 3 else None

        for number in range(3):
            asked.clear()
            channel.start(lambda _, n=number: ran.append(n), "fetch", label=number, ready=ready).wait()
        mesh.close()
        return ran

    assert sim.run(size, fn, timeout_seconds=60) == [[0, 1, 2]] * size
