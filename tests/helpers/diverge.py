"""Ranks that start different things: scenarios for simulated ranks and for MPI. Each ends within LIMIT_SECONDS."""

import logging
import re
import time

import pytest
import torch

from mpispeed.base.errors import AgreementError
from mpispeed.mesh import Mesh, Topology, deadlock
from mpispeed.mesh.deadlock import Watch

LIMIT_SECONDS = 30.0
GATE_SECONDS = 25.0
"""After this a gate fails with another error than the one expected: a broken feature fails, and does not hang."""


def new_mesh(world):
    mesh = Mesh(Topology({"data": world.size}), world)
    mesh["data"].group.limits.timeout_seconds = GATE_SECONDS  # channels inherit it
    return mesh


def fetch(channel, unit, done, *, rank):
    """Start a gather of everyone's rank, named like a fetch of a unit; its text also names the rank."""
    comm = channel["data"]
    return comm.start(
        lambda inner: done.append((unit, inner.gather_objects(rank))),
        "fetch",
        label=unit,
        describe=lambda: f"fetch of unit {unit!r}",
    )


def error_of(wait):
    with pytest.raises(AgreementError) as caught:
        wait()
    assert caught.value.is_collective
    return str(caught.value)


def others(world):
    ranks = ", ".join(str(rank) for rank in range(1, world.size))
    return f"rank {ranks} wants" if world.size == 2 else f"ranks {ranks} want"


def different_labels(world):
    """The n-th operation differs: nobody does it, all raise the same, later ones fail at once, close returns."""
    begin, mesh, done = time.monotonic(), new_mesh(world), []
    channel = mesh.channel("params")
    fetch(channel, "embed", done, rank=world.rank).wait()
    bad = fetch(channel, "blocks.3" if world.rank == 0 else "head", done, rank=world.rank)
    queued = fetch(channel, "tail", done, rank=world.rank)
    text = error_of(bad.wait)
    assert "operation 2 of channel 'params' over data" in text
    assert f"rank 0 wants fetch of unit 'blocks.3'; {others(world)} fetch of unit 'head'" in text
    assert error_of(queued.wait) == text
    assert error_of(fetch(channel, "tail", done, rank=world.rank).wait) == text
    assert error_of(lambda: channel["data"].barrier()) == text
    assert world.comm.gather_objects(text) == [text] * world.size
    assert done == [("embed", list(range(world.size)))]
    # Another channel of the same mesh still works.
    fetch(mesh.channel("grads"), "embed", done, rank=world.rank).wait()
    mesh.close()
    assert len(done) == 2
    assert time.monotonic() - begin < LIMIT_SECONDS


def extra_operation(world):
    """One rank starts one more, then all go on alike: the extra one meets the next one of the others."""
    begin, mesh, done = time.monotonic(), new_mesh(world), []
    channel = mesh.channel("params")
    works = [fetch(channel, "a", done, rank=world.rank)]
    if world.rank == world.size - 1:
        works.append(fetch(channel, "extra", done, rank=world.rank))
    works += [fetch(channel, unit, done, rank=world.rank) for unit in ("b", "c", "d")]
    works[0].wait()
    texts = {error_of(work.wait) for work in works[1:]}
    assert len(texts) == 1
    text = texts.pop()
    assert "operation 2 of channel 'params'" in text
    assert f"rank {world.size - 1} wants fetch of unit 'extra'" in text
    assert "fetch of unit 'b'" in text
    assert world.comm.gather_objects(text) == [text] * world.size
    mesh.close()
    assert [unit for unit, _ in done] == ["a"]
    assert time.monotonic() - begin < LIMIT_SECONDS


def different_sizes(world):
    """Verbs compare what has to be equal in their arguments."""
    mesh = new_mesh(world)
    x = torch.ones(4 if world.rank == 0 else 8)
    text = error_of(mesh["data"].start_all_reduce(x).wait)
    assert "rank 0 wants all_reduce sum of 4 torch.float32" in text
    assert "all_reduce sum of 8 torch.float32" in text
    assert x.eq(1).all()
    mesh.close()


def equal_texts(world):
    """Labels that differ behind equal or failing descriptions are shown themselves."""
    mesh = new_mesh(world)
    work = mesh["data"].start(lambda _: None, "step", label=world.rank, describe=lambda: "a step")
    assert "rank 0 wants a step [step 0]" in error_of(work.wait)
    mesh.close()
    mesh = new_mesh(world)

    def fail():
        msg = "no such module"
        raise KeyError(msg)

    work = mesh["data"].start(lambda _: None, "step", label=world.rank, describe=fail)
    assert "cannot be described (KeyError: 'no such module') [step 1]" in error_of(work.wait)
    mesh.close()


def cross_lane(world):
    """Rank 0 waits in one channel, the others in another."""
    begin, mesh, done = time.monotonic(), new_mesh(world), []
    watch = Watch(mesh, first_look_seconds=1.0)
    channels = mesh.channel("params"), mesh.channel("grads")
    name = "params" if world.rank == 0 else "grads"
    work = fetch(mesh.channel(name), name, done, rank=world.rank)
    text = error_of(lambda: watch.wait(work, lambda: f"the {name} of rank {min(world.rank, 1)}"))
    taken = time.monotonic() - begin
    assert taken < 15.0
    assert "rank 0 waits for the params of rank 0 in channel 'params', which is at operation 1, where rank" in text
    assert "the grads of rank 1 in channel 'grads', which is at operation 1, where rank 0 has not come" in text
    assert world.comm.gather_objects(text) == [text] * world.size
    for channel in channels:
        assert error_of(fetch(channel, "more", done, rank=world.rank).wait) == text
    assert not done
    # What was left at the gates is gone: a fresh channel and the groups' end are not disturbed.
    fetch(mesh.channel("other"), "fresh", done, rank=world.rank).wait()
    assert done == [("fresh", list(range(world.size)))]
    mesh.close()
    assert time.monotonic() - begin < LIMIT_SECONDS


def slow_rank(world, caplog, monkeypatch):
    """A rank that sleeps is waited for, with correct data and one warning for the node, of its lowest rank."""
    monkeypatch.setattr(deadlock, "RANK_SECONDS", 1.0)  # ranks of a busy machine do not begin to wait at one time
    begin, mesh, done = time.monotonic(), new_mesh(world), []
    watch = Watch(mesh, first_look_seconds=0.5, warning_seconds=2.0)
    channel = mesh.channel("params")
    world.comm.barrier()
    with caplog.at_level(logging.WARNING, logger="mpispeed.mesh.deadlock"):
        if world.rank == world.size - 1:
            time.sleep(5)
        work = fetch(channel, "embed", done, rank=world.rank)
        watch.wait(work, lambda: "the embedding")
    assert done == [("embed", list(range(world.size)))]
    assert 4.5 < time.monotonic() - begin < LIMIT_SECONDS
    seen = [r.getMessage() for r in caplog.records if "has been waiting" in r.getMessage()]
    text = r"rank 0 has been waiting [2-5] s for the embedding in channel 'params', which is at operation 1"
    if world.rank == 0:
        assert len(seen) == 1
        assert re.match(text, seen[0]), seen
    fetch(channel, "head", done, rank=world.rank).wait()
    watch.close()
    mesh.close()
    return seen


def stale_round(world):
    """A round that one rank joined long ago completes later; it convicts nobody, and the next one is right."""
    begin, mesh, done = time.monotonic(), new_mesh(world), []
    watch = Watch(mesh, first_look_seconds=0.5)
    channels = mesh.channel("params"), mesh.channel("grads")
    if world.rank > 0:
        time.sleep(2)  # rank 0 joins a round meanwhile
    watch.wait(fetch(channels[0], "embed", done, rank=world.rank), lambda: "the embedding")
    # All ranks wait at last, all for the same: the round of rank 0 completes, and no error may come of it.
    slow = channels[1]["data"].start(lambda _: time.sleep(2), "slow")
    watch.wait(slow, lambda: "a slow operation")
    channel = channels[0] if world.rank == 0 else channels[1]
    work = fetch(channel, "head", done, rank=world.rank)
    text = error_of(lambda: watch.wait(work, lambda: f"head {min(world.rank, 1)}"))
    assert "rank 0 waits for head 0 in channel 'params', which is at operation 2" in text
    assert "head 1 in channel 'grads', which is at operation 2, where rank 0 has not come" in text
    assert "embedding" not in text
    assert "slow" not in text
    assert done == [("embed", list(range(world.size)))]
    mesh.close()
    assert time.monotonic() - begin < LIMIT_SECONDS


def left_behind(world):
    """A round that only rank 0 has joined when the mesh is closed keeps nobody."""
    begin, mesh, done = time.monotonic(), new_mesh(world), []
    watch = Watch(mesh, first_look_seconds=0.2)
    if world.rank > 0:
        time.sleep(1.5)
    watch.wait(fetch(mesh.channel("params"), "embed", done, rank=world.rank), lambda: "the embedding")
    if world.size > 2:
        watch.close()
    mesh.close()
    assert time.monotonic() - begin < 10.0
    assert len(done) == 1
