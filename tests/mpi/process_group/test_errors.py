"""Wrong calls: refused before anything is sent, on all ranks alike, and named where ranks differ."""

import pytest
import torch
import torch.distributed as dist

from mpispeed.base.errors import AgreementError, CommError, ConfigError

pytestmark = pytest.mark.mpi(min_size=1)


def ones(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype)


WRONG = {
    "gather": (lambda g, n: g.all_gather_single(ones(n + 1), ones(1)), "out needs"),
    "gather of two dtypes": (
        lambda g, n: g.all_gather_single(ones(n), ones(1, dtype=torch.int32)),
        "out is torch.float32 and shard is torch.int32",
    ),
    "list": (lambda g, n: g.allgather([[ones(1)] * (n + 1)], [ones(1)]), r"the list has \d tensors for \d rank"),
    "place": (lambda g, n: g.allgather([[ones(2)] * n], [ones(3)]), "this rank's tensor has 3 elements"),
    "scatter": (lambda g, n: g.reduce_scatter_single(ones(2), ones(2 * n + 1)), "full needs"),
    "scatter list": (lambda g, n: g.reduce_scatter([ones(2)], [[ones(2)] * (n + 1)]), "the list has"),
    "exchange": (lambda g, n: g.all_to_all_single(ones(n), ones(n), [2] * n, [1] * n), "add up to"),
    "exchange list": (lambda g, n: g.alltoall([ones(1)] * (n + 1), [ones(1)] * n), "the list has"),
    "reduction": (lambda g, n: g.allreduce([ones(2)], dist.ReduceOp.BAND), "combines the bits"),
    "average": (lambda g, n: g.allreduce([ones(2, dtype=torch.int32)], dist.ReduceOp.AVG), "an average of torch.int32"),
    "root": (lambda g, n: g.broadcast([ones(2)], 7), "names rank 7"),
    "two tensors": (lambda g, n: g.allreduce([ones(2), ones(2)]), "2 tensors in one call"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(both, name):
    """Whether a call is waited for or not; the group works on."""
    run, text = WRONG[name]
    group, size = both["world"].ours, len(both["world"].ranks)
    with pytest.raises(CommError, match=text):
        run(group, size).wait()
    x = ones(1)
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()
    assert x.item() == size**2


def test_a_failure_reaches_the_future(both):
    size = len(both["world"].ranks)
    work = both["world"].ours.all_gather_single(ones(size + 1), ones(1))
    with pytest.raises(RuntimeError, match="out needs"):
        work.get_future().wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), CommError)


def test_options_of_another_backend(torch_world):
    with pytest.raises(ConfigError, match=r"mpispeed\.torch_backend\.Options, not str"):
        dist.new_group(pg_options="fast")
    dist.barrier()


# -- ranks that call different verbs ---------------------------------------------------------------------------------


@pytest.fixture
def checked(torch_world):
    """A group of the test's own: the first difference breaks it."""
    group = dist.new_group()
    yield group
    dist.destroy_process_group(group)


def test_ranks_that_agree(checked, torch_world):
    x = ones(2)
    dist.all_reduce(x, group=checked)
    dist.broadcast(x, 0, group=checked)
    dist.barrier(group=checked)
    found = [None] * torch_world.size
    dist.all_gather_object(found, torch_world.rank, group=checked)
    assert found == list(range(torch_world.size))


DIFFERENT = {
    "verbs": (
        lambda g: dist.all_reduce(ones(4), group=g),
        lambda g: dist.broadcast(ones(4), 0, group=g),
        ("all_reduce sum of 4 torch.float32", "broadcast of 16 bytes from rank 0"),
    ),
    "sizes": (
        lambda g: dist.all_reduce(ones(4), group=g),
        lambda g: dist.all_reduce(ones(5), group=g),
        ("all_reduce sum of 4 torch.float32", "all_reduce sum of 5 torch.float32"),
    ),
    "reductions": (
        lambda g: dist.all_reduce(ones(4), group=g),
        lambda g: dist.all_reduce(ones(4), dist.ReduceOp.MAX, g),
        ("all_reduce sum of 4 torch.float32", "all_reduce max of 4 torch.float32"),
    ),
    "roots": (
        lambda g: dist.broadcast(ones(4), 0, group=g),
        lambda g: dist.broadcast(ones(4), 1, group=g),
        ("broadcast of 16 bytes from rank 0", "broadcast of 16 bytes from rank 1"),
    ),
    "roots of sums": (
        lambda g: dist.reduce(ones(4), 0, group=g),
        lambda g: dist.reduce(ones(4), 1, group=g),
        ("reduce sum of 4 torch.float32 to rank 0", "reduce sum of 4 torch.float32 to rank 1"),
    ),
    "barriers": (
        lambda g: dist.barrier(g),
        lambda g: dist.all_reduce(ones(4), group=g),
        ("barrier", "all_reduce sum of 4 torch.float32"),
    ),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_differ_are_named(checked, torch_world, name):
    first, second, (wish, other) = DIFFERENT[name]
    with pytest.raises(AgreementError) as caught:
        (first if torch_world.rank == 0 else second)(checked)
    text = str(caught.value)
    assert f"rank 0 wants {wish}" in text
    assert other in text
    assert "rank 1 wants" in text or "ranks 1, 2 want" in text
    # Nothing later on this group runs, on any rank.
    with pytest.raises(AgreementError, match="diverged"):
        dist.barrier(checked)
