"""Operations that are started and waited for later: handles, futures, time-outs, functional collectives."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from mpispeed.base.errors import CommError
from mpispeed.process_group.options import Options
from tests.helpers.torch_verbs import single

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")]


@pytest.mark.ranks(1, 2, 4)
def test_a_thousand_operations_in_flight(both):
    world, some = both["world"], both["sub-group"]
    started = []
    for number in range(1000):
        groups = some if number % 3 == 0 and some.me >= 0 else world if number % 3 else None
        if groups is not None:
            x = torch.tensor([number, groups.me])
            started.append((groups, number, x, dist.all_reduce(x, group=groups.ours, async_op=True)))
    for groups, number, x, work in reversed(started):
        work.wait()
        size = len(groups.ranks)
        assert x.tolist() == [number * size, size * (size - 1) // 2]


def test_handles_say_when_they_are_done(both):
    gate = both["world"]
    x = torch.ones(3)
    if gate.me > 0:
        gate.gloo.barrier().wait()  # rank 0 has looked
    work = dist.all_reduce(x, async_op=True)
    if gate.me == 0:
        assert len(gate.ranks) == 1 or not work.is_completed()
        gate.gloo.barrier().wait()
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert x.tolist() == [len(gate.ranks)] * 3
    assert work.result()[0] is x


def test_futures(both):
    size, seen = len(both["world"].ranks), []
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    chained = work.get_future().then(lambda future: seen.append(threading.get_ident()) or future.value()[0] * 2)
    assert chained.wait().tolist() == [2.0 * size] * 4
    assert len(seen) == 1
    # A future that is asked for after the end, and one of a verb that was carried out at once.
    assert work.get_future().wait()[0].tolist() == [float(size)] * 4
    options = dist.AllreduceOptions()
    options.asyncOp = False
    done = dist.group.WORLD.allreduce([torch.ones(2)], options)
    assert done.get_future().wait()[0].tolist() == [float(size)] * 2


def test_a_callback_may_ask_its_operation(both):
    x, seen = torch.zeros(1), []
    work = dist.all_reduce(x, async_op=True)
    work.get_future().then(lambda _: seen.append((work.is_completed(), work.wait(), work.is_success()))).wait()
    assert seen == [(True, True, True)]


@pytest.mark.ranks(2, 3)
def test_a_future_of_a_message_has_its_values(both):
    size, me = len(both["world"].ranks), both["world"].me
    for number in range(50):
        x = torch.zeros(2, 300).t()
        got = dist.irecv(x, (me - 1) % size, tag=number).get_future().then(lambda future: future.value()[0].clone())
        dist.send(torch.full((300, 2), number + 1.0), (me + 1) % size, tag=number)
        assert got.wait().eq(number + 1).all()


def test_results_are_no_part_of_a_graph(both):
    x = torch.ones(2, requires_grad=True)
    y = torch.ones(2, requires_grad=True)
    dist.all_reduce(x)
    dist.all_reduce(y, async_op=True).wait()
    assert x.tolist() == y.tolist() == [float(len(both["world"].ranks))] * 2
    assert x.requires_grad
    assert x.grad_fn is None


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("is_large", (False, True))  # from some size on memory is shared
def test_inference_mode(both, is_large):
    """Tensors that were made there are written to there, also by calls that are carried out on another thread."""
    size, me = len(both["world"].ranks), both["world"].me
    count, ordered = (1 << 19 if is_large else 5), dist.new_group(pg_options=Options(reduction="ordered"))
    with torch.inference_mode():
        x, out = torch.full((count,), float(me)), [torch.zeros(count) for _ in range(size)]
        works = [dist.all_gather(out, x, async_op=True), dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True)]
        works.append(dist.all_reduce(y := torch.ones(count), group=ordered, async_op=True))
        z = torch.zeros(2, 300).t()
        works.append(dist.irecv(z, (me - 1) % size))
        dist.send(torch.ones(300, 2), (me + 1) % size)
        dist.all_reduce(out[0], dist.ReduceOp.AVG)
    for work in works:
        work.wait()
    assert x.is_inference()
    assert x.eq((size - 1) / 2).all()
    assert y.eq(size).all()
    assert z.eq(1).all()
    assert all(found.eq(rank).all() for rank, found in enumerate(out))
    plain = torch.ones(count)  # scratch that was made in that mode serves outside of it
    for group in (None, ordered):
        dist.all_reduce(plain, dist.ReduceOp.AVG, group=group)
        dist.all_reduce(plain, dist.ReduceOp.AVG, group=group, async_op=True).wait()
    assert plain.eq(1).all()
    dist.destroy_process_group(ordered)


@pytest.mark.ranks(2, 3)
def test_a_wait_has_a_time_out(both):
    groups = both["world"]
    if groups.me == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(CommError, match=r"all_reduce was not done after 0\.2 s"):
            work.wait(timedelta(seconds=0.2))
    groups.gloo.barrier().wait()
    if groups.me > 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work.wait(timedelta(seconds=20))


def test_a_barrier_comes_after_what_was_started(both):
    x = torch.ones(100_000)
    work = dist.all_reduce(x, async_op=True)
    dist.barrier()
    assert work.is_completed()
    assert dist.barrier(async_op=True).wait()


# -- functional collectives ------------------------------------------------------------------------------------------


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", ("world", "sub-group"))
def test_functional_collectives(both, name):
    groups = both[name]
    if groups.me < 0:
        return
    size, me = len(groups.ranks), groups.me
    group, x = groups.ours, torch.arange(2.0 * size) + me
    total = torch.arange(2.0 * size) * size + size * (size - 1) / 2
    assert torch.equal(functional.wait_tensor(functional.all_reduce(x, "sum", group)), total)
    assert torch.equal(functional.all_reduce(x, "avg", group) + 0, total / size)
    gathered = functional.all_gather_tensor(x[:1] * 0 + me, 0, group)
    assert gathered.tolist() == list(range(size))
    assert torch.equal(functional.reduce_scatter_tensor(x, "sum", 0, group) + 0, total.chunk(size)[me])
    swapped = functional.all_to_all_single(x, [2] * size, [2] * size, group)
    assert (swapped + 0).tolist() == [float(2 * me + i + r) for r in range(size) for i in range(2)]
    assert (functional.broadcast(x, 0, group) + 0)[0].item() == 0.0
    for found in functional.all_reduce_coalesced([x, x * 2], "sum", group):
        assert found[0].item() in (total[0].item(), 2 * total[0].item())
    first, second = functional.all_gather_into_tensor_coalesced([x[:1] * 0 + me, x[:2]], group)
    assert (first + 0).tolist() == list(range(size))
    assert second.shape == (2 * size,)
    (part,) = functional.reduce_scatter_tensor_coalesced([x], "sum", [0], group)
    assert torch.equal(part + 0, total.chunk(size)[me])


@pytest.mark.ranks(3)
def test_functional_collectives_have_gradients(both):
    size = len(both["world"].ranks)
    x = torch.ones(2 * size, requires_grad=True)
    functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD).sum().backward()
    assert x.grad.tolist() == [float(size)] * (2 * size)


# -- both spellings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_new", (False, True))
def test_methods_of_a_group_have_both_names(both, is_new):
    groups = both["world"]
    size, me, group = len(groups.ranks), groups.me, groups.ours
    names = {
        "gather": ("_allgather_base", "all_gather_single"),
        "gathers": ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
        "scatter": ("_reduce_scatter_base", "reduce_scatter_single"),
        "scatters": ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
        "swap": ("alltoall_base", "all_to_all_single"),
    }
    verb = {key: getattr(group, found[is_new]) for key, found in names.items()}
    own, everyone = torch.full((2,), float(me)), torch.arange(float(size)).repeat_interleave(2)
    total = torch.full((2,), size * (size - 1) / 2)
    out = torch.zeros(2 * size)
    verb["gather"](out, own).wait()
    assert torch.equal(out, everyone)
    outs = [torch.zeros(2 * size), torch.zeros(2 * size)]
    verb["gathers"](outs, [own, own * 2]).wait()
    assert torch.equal(outs[1], everyone * 2)
    part = torch.zeros(2)
    verb["scatter"](part, own.repeat(size)).wait()
    assert torch.equal(part, total)
    parts = [torch.zeros(2), torch.zeros(2)]
    verb["scatters"](parts, [own.repeat(size), own.repeat(size) * 2]).wait()
    assert torch.equal(parts[1], total * 2)
    swapped = torch.zeros(2 * size)
    verb["swap"](swapped, own.repeat(size), [], []).wait()
    assert torch.equal(swapped, everyone)


@pytest.mark.parametrize("async_ops", (False, True))
def test_coalescing(both, async_ops):
    size = len(both["world"].ranks)
    found = [torch.ones(3), torch.ones(5), torch.ones(1 << 19)]
    with dist._coalescing_manager(async_ops=async_ops) as manager:
        for x in found:
            dist.all_reduce(x)
    if async_ops:
        manager.wait()
    assert all(x.eq(size).all() for x in found)
    outs = [torch.zeros(size), torch.zeros(2 * size)]
    with dist._coalescing_manager(async_ops=async_ops) as manager:
        single["all_gather"](outs[0], torch.ones(1))
        single["all_gather"](outs[1], torch.ones(2))
    if async_ops:
        manager.wait()
    assert all(x.eq(1).all() for x in outs)
