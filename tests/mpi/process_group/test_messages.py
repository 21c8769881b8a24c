"""Messages between two ranks, from any rank, in batches; and verbs on Python objects."""

import pytest
import torch
import torch.distributed as dist

import mpispeed.comm
from mpispeed.base.errors import CommError

pytestmark = pytest.mark.mpi(min_size=1)
several = pytest.mark.ranks(2, 3, 4)


def ring(size, me):
    return (me + 1) % size, (me - 1) % size


@several
@pytest.mark.parametrize("shape", ((4,), (0,), (3, 4)))
@pytest.mark.parametrize("is_strided", (False, True))
def test_send_and_recv(both, shape, is_strided):
    groups = both["sub-group"]
    if groups.me < 0:
        return
    size, me = len(groups.ranks), groups.me
    x, out = (torch.full(shape, float(value), dtype=torch.float64) for value in (me, -1))
    if is_strided:
        x, out = x.t(), out.t()
    after, before = ring(size, me)
    if me == 0:
        dist.send(x, group=groups.ours, group_dst=after, tag=3)
        assert dist.recv(out, group=groups.ours, group_src=before, tag=3) == groups.ranks[before]
    else:
        dist.recv(out, group=groups.ours, group_src=before, tag=3)
        dist.send(x, group=groups.ours, group_dst=after, tag=3)
    assert out.eq(before).all()


@several
def test_tags_tell_messages_apart(both):
    size, me = len(both["world"].ranks), both["world"].me
    after, before = ring(size, me)
    sent = [dist.isend(torch.tensor([me, tag]), after, tag=tag) for tag in range(20)]
    found = [torch.zeros(2, dtype=torch.int64) for _ in range(20)]
    got = [dist.irecv(found[tag], before, tag=tag) for tag in reversed(range(20))]
    for work in (*sent, *got):
        work.wait()
    assert [x.tolist() for x in found] == [[before, tag] for tag in range(20)]


@several
@pytest.mark.parametrize("tag", (32000, 32767))
def test_tags_of_verbs_themselves_are_refused(both, tag):
    after, before = ring(len(both["world"].ranks), both["world"].me)
    x = torch.ones(1)
    for call in (
        lambda: dist.isend(x, after, tag=tag),
        lambda: dist.irecv(x, before, tag=tag),
        lambda: dist.irecv(x, tag=tag),
        lambda: mpispeed.comm.send(x, after, tag=tag),
        lambda: mpispeed.comm.recv(x, tag=tag),
    ):
        with pytest.raises(CommError, match=f"with tag {tag}, which other verbs use"):
            call()


@several
def test_receiving_from_any_rank(both):
    groups = both["world"]
    size, me = len(groups.ranks), groups.me
    if me > 0:
        dist.send(torch.full((3,), float(me)), 0, tag=9)
        dist.send(torch.full((3, 2), float(me)), 0, tag=10)
    else:
        found = set()
        for _ in range(size - 1):
            x = torch.zeros(3)
            source = dist.recv(x, tag=9)
            assert x.eq(source).all()
            found.add(source)
        assert found == set(range(1, size))
        x = torch.zeros(2, 3).t()
        works = [dist.irecv(x, tag=10) for _ in range(1)]
        assert works[0].get_future().wait()[0] is x
        assert x.eq(works[0]._source_rank()).all()
        for _ in range(size - 2):
            dist.recv(torch.zeros(3, 2), tag=10)
    dist.barrier()


@several
def test_receiving_from_any_rank_of_a_sub_group_names_it_in_the_world(both):
    groups = both["sub-group"]
    if groups.me == 1:
        dist.send(torch.ones(1), groups.ranks[0], group=groups.ours)
    if groups.me == 0:
        assert dist.recv(torch.zeros(1), group=groups.ours) == groups.ranks[1]


@several
def test_batches(both):
    groups = both["world"]
    size, me = len(groups.ranks), groups.me
    outs = {other: torch.zeros(5) for other in range(size) if other != me}
    batch = [dist.P2POp(dist.isend, torch.full((5,), 10.0 * me + other), other) for other in outs]
    batch += [dist.P2POp(dist.irecv, out, other) for other, out in outs.items()]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert all(out.eq(10.0 * other + me).all() for other, out in outs.items())


@several
def test_messages_do_not_wait_for_collectives_started_before(both):
    groups = both["world"]
    x, y = torch.ones(1), torch.zeros(1)
    if groups.me == 0:
        work = dist.all_reduce(x, async_op=True)
        dist.send(torch.ones(1), 1)
    else:
        if groups.me == 1:
            dist.recv(y, 0)
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert x.item() == len(groups.ranks)


# -- objects ---------------------------------------------------------------------------------------------------------


def thing(rank):
    return {"rank": rank, "text": "x" * (100 * rank), "tensor": torch.full((rank,), rank)}


def same_thing(found, rank):
    wanted = thing(rank)
    return found["text"] == wanted["text"] and torch.equal(found["tensor"], wanted["tensor"]) and found["rank"] == rank


@pytest.mark.parametrize("name", ("world", "sub-group"))
def test_objects(both, name):
    groups = both[name]
    if groups.me < 0:
        return
    size, me, group = len(groups.ranks), groups.me, groups.ours
    root = groups.ranks[-1]
    found = [None] * size
    dist.all_gather_object(found, thing(me), group=group)
    assert all(same_thing(each, rank) for rank, each in enumerate(found))
    told = [thing(me), me] if me == size - 1 else [None, None]
    dist.broadcast_object_list(told, src=root, group=group)
    assert same_thing(told[0], size - 1)
    assert told[1] == size - 1
    gathered = [None] * size if me == size - 1 else None
    dist.gather_object(thing(me), gathered, dst=root, group=group)
    assert gathered is None or all(same_thing(each, rank) for rank, each in enumerate(gathered))
    given = [None]
    dist.scatter_object_list(given, [thing(rank) for rank in range(size)] if me == size - 1 else None, root, group)
    assert same_thing(given[0], me)


@several
def test_lists_of_objects_as_messages(both):
    me = both["world"].me
    if me == 0:
        dist.send_object_list([thing(3), "end"], 1)
    if me == 1:
        found = [None, None]
        dist.recv_object_list(found, 0)
        assert same_thing(found[0], 3)
        assert found[1] == "end"
