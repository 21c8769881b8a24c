"""Where activations rest: slices, slots, host memory. Ranks are simulated; every combination gives the same bits."""

import gc
import itertools
import json
import weakref

import pytest
import torch
from torch import nn

from mpispeed import checkpointing
from mpispeed.base.errors import AgreementError, ConfigError, UsageError
from mpispeed.checkpointing import Checkpointer
from mpispeed.mesh import Mesh, Topology, sim
from mpispeed.nn.checkpointing_options import Options
from tests.zoo import same_bits

LAYERS, BATCHES = 3, 2


def mesh_comm(world):
    return Mesh(Topology({"model": world.size}), world)["model"]


def layers(width=6):
    generator = torch.Generator().manual_seed(0)
    made = [nn.Sequential(nn.Linear(width, 10), nn.GELU(), nn.Linear(10, width)) for _ in range(LAYERS)]
    with torch.no_grad():
        for p in (p for layer in made for p in layer.parameters()):
            p.copy_(torch.randn(p.shape, generator=generator))
    return made


def tensor(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def train(call, rows=4, backward_order=(0, 1)):
    """Two micro-batches through three layers with a float mask, then both backward passes; gradients of everything."""
    model, mask = layers(), (tensor(rows, 6, seed=9) > 0).float()
    batches, losses = [tensor(rows, 6, seed=seed) for seed in range(BATCHES)], []
    for x in batches:
        for layer in model:
            x = call(lambda a, flag, m, layer=layer: layer(a * m) if flag else None, x, True, mask)
        losses.append(x.square().sum())
    for index in backward_order:
        losses[index].backward()
    return [x.grad for x in batches] + [p.grad for layer in model for p in layer.parameters()]


def plain(function, *args):
    return function(*args)


OPTIONS = [
    Options(
        partition_activations=True,
        cpu_checkpointing=on_host,
        contiguous_memory_optimization=in_slots,
        number_checkpoints=LAYERS * BATCHES if in_slots else None,
    )
    for on_host, in_slots in itertools.product([False, True], repeat=2)
] + [Options(cpu_checkpointing=on_host) for on_host in (False, True)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(n[:4] for n in o.__slots__ if getattr(o, n)))
def test_gradients_have_the_same_bits(options, size):
    expected = train(plain)

    def fn(world):
        checkpointer = Checkpointer(options, world.comm)
        for order in ((0, 1), (1, 0)):
            same_bits(train(checkpointer.checkpoint, backward_order=order), expected)
        assert checkpointer.account.total() == 0

    sim.run(size, fn)


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_sizes_that_do_not_divide_are_padded(rows):
    expected = train(plain, rows)

    def fn(world):
        checkpointer = Checkpointer(Options(partition_activations=True), mesh_comm(world))
        same_bits(train(checkpointer.checkpoint, rows), expected)

    sim.run(4, fn)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_slice_is_what_is_kept(size):
    def fn(world):
        checkpointer = Checkpointer(Options(partition_activations=True), mesh_comm(world))
        x, mask = tensor(16, 8), tensor(8, seed=2).detach()
        ids, few = torch.arange(16), torch.ones(size - 1)
        out = checkpointer.checkpoint(lambda a, m, i, f: torch.tanh(a * m)[i] + f.sum(), x, mask, ids, few)
        kept = (x.nbytes + mask.nbytes) // size
        # Integers are kept as they are, and activations with less than an element for each rank.
        assert checkpointer.account.total() == kept + few.nbytes
        out.sum().backward()
        return checkpointer.account.total()

    assert sim.run(size, fn) == [0] * size


@pytest.mark.parametrize("count", [1, 2])
def test_one_message_for_each_call(count):
    def fn(world):
        comm = mesh_comm(world)
        checkpointer = Checkpointer(Options(partition_activations=True), comm)
        args = [tensor(16, 8, seed=seed) for seed in range(count)]
        out = checkpointer.checkpoint(lambda *a: torch.tanh(sum(a)), *args)
        before = {verb: entry.count for (verb, _), entry in comm.comm_trace.entries().items()}
        out.sum().backward()
        after = {verb: entry.count for (verb, _), entry in comm.comm_trace.entries().items()}
        return {verb: after[verb] - before.get(verb, 0) for verb in after}

    assert sim.run(2, fn) == [{"all_gather": 1}] * 2


def test_the_producer_of_a_slice_is_not_held():
    def fn(world):
        checkpointer = Checkpointer(Options(partition_activations=True), world.comm)
        x = tensor(16, 8) * 1
        seen = weakref.ref(x.untyped_storage())
        out = checkpointer.checkpoint(torch.tanh, x)
        del x
        assert seen() is None
        out.sum().backward()

    sim.run(2, fn)


def test_nothing_inside_is_held():
    """Not after forward, and not after backward either, without help of the garbage collector."""
    seen = []

    def function(x):
        for _ in range(3):
            x = torch.tanh(x)
            seen.append(weakref.ref(x))
        return x + 1

    checkpointer = Checkpointer()
    gc.collect()
    gc.disable()
    try:
        out = checkpointer.checkpoint(function, tensor(4, 8))
        assert [ref() for ref in seen] == [None] * 3
        out.sum().backward()
        assert len(seen) > 3
        assert [ref() for ref in seen] == [None] * len(seen)
    finally:
        gc.enable()


def test_strict_partition_refuses_what_does_not_divide():
    def fn(world):
        checkpointer = Checkpointer(Options(partition_activations=True, strict_partition=True), world.comm)
        checkpointer.checkpoint(torch.tanh, tensor(4, 8))
        with pytest.raises(UsageError, match=r"shape \(5, 5\) has 25 elements, which 2 ranks do not divide"):
            checkpointer.checkpoint(torch.tanh, tensor(5, 5))

    sim.run(2, fn)


def test_nested_calls_are_not_cut_twice():
    model = layers()

    def fn(world):
        checkpointer = Checkpointer(Options(partition_activations=True), world.comm)

        def outer(x):
            return model[1](checkpointer.checkpoint(model[0], x))

        x = tensor(4, 6)
        out = checkpointer.checkpoint(outer, x)
        assert checkpointer.account.total() == x.nbytes // world.size
        (found,) = torch.autograd.grad(out.sum(), x)
        return found

    x = tensor(4, 6)
    (expected,) = torch.autograd.grad(model[1](model[0](x)).sum(), x)
    assert all(torch.equal(found, expected) for found in sim.run(2, fn))


# -- tensors that are cut already ------------------------------------------------------------------------------------


def test_marked_tensors_are_kept_as_they_are():
    def fn(world):
        checkpointer = Checkpointer(Options(partition_activations=True), world.comm)
        x = checkpointing.mark_cut(tensor(4, 8, seed=world.rank) * 1)
        seen = []

        def function(a):
            seen.append(checkpointing.is_cut(a))
            return torch.tanh(a)

        y = checkpointer.checkpoint(function, x)
        assert checkpointing.is_cut(y)  # so that a stack of calls needs one mark
        z = checkpointer.checkpoint(function, y)
        assert checkpointer.account.total() == x.nbytes + y.nbytes
        z.sum().backward()
        assert seen == [True] * 4
        assert not checkpointing.is_cut(checkpointer.checkpoint(lambda a: a.sum(), x))

    sim.run(2, fn)


@pytest.mark.parametrize("find", [lambda world: world.comm, mesh_comm])
def test_cut_tensors_without_a_mark_are_found(find):
    def fn(world):
        checkpointer = Checkpointer(Options(partition_activations=True), find(world))
        same, own = tensor(4, 8), tensor(4, 9, seed=world.rank)
        loss = checkpointer.checkpoint(lambda a, b: torch.tanh(a).sum() * torch.tanh(b).sum(), same, own)
        with pytest.raises(AgreementError, match=r"shape \(4, 9\) differs between ranks 0 and 1.*mark_cut") as caught:
            loss.backward()
        return caught.value.is_collective

    assert sim.run(3, fn) == [True] * 3


def test_rounding_between_ranks_is_no_cut():
    def fn(world):
        checkpointer = Checkpointer(Options(partition_activations=True), world.comm)
        x = (tensor(4, 8).detach() * (1 + 1e-3 * world.rank)).bfloat16().requires_grad_()
        checkpointer.checkpoint(torch.tanh, x).sum().backward()

    sim.run(2, fn)


# -- ranks that differ -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("find", [lambda world: world.comm, mesh_comm])
@pytest.mark.parametrize("shape", [(4, 8), (2, 8)])
def test_a_rank_that_checkpoints_one_call_more(find, shape):
    def fn(world):
        checkpointer = Checkpointer(Options(partition_activations=True), find(world))
        x = checkpointer.checkpoint(torch.tanh, tensor(4, 8))
        if world.rank == 1:
            x = checkpointer.checkpoint(torch.tanh, x[: shape[0]])
        with pytest.raises(AgreementError, match=r"call 1.*call 2.*same calls in the same order"):
            x.sum().backward()

    sim.run(2, fn)


# -- slots -----------------------------------------------------------------------------------------------------------


def contiguous(number, **more):
    return Checkpointer(
        Options(
            partition_activations=True, contiguous_memory_optimization=True, number_checkpoints=number, **more
        )
    )  # fmt: skip


def test_calls_in_slots_lie_in_one_buffer():
    checkpointer = contiguous(4)
    outs = [checkpointer.checkpoint(torch.tanh, tensor(4, 8, seed=seed)) for seed in range(4)]
    assert checkpointer.slots.used == 4
    assert checkpointer.account.total() == 4 * 4 * 8 * 4
    sum(out.sum() for out in outs).backward()
    assert checkpointer.slots.used == 0


def test_one_call_too_many():
    checkpointer = contiguous(2)
    kept = [checkpointer.checkpoint(torch.tanh, tensor(4, 8)) for _ in range(2)]
    with pytest.raises(UsageError, match=r"number_checkpoints is 2, and this is checkpointed call 3 .*reset\(\)"):
        checkpointer.checkpoint(torch.tanh, tensor(4, 8))
    # Slots come back with the graph.
    kept.pop()
    kept.append(checkpointer.checkpoint(torch.tanh, tensor(4, 8)))
    sum(out.sum() for out in kept).backward()


def test_forward_passes_without_backward():
    checkpointing.configure(None, None, True, True, 2)
    for _ in range(5):
        with torch.no_grad():
            checkpointing.checkpoint(torch.tanh, tensor(4, 8))
    x = tensor(4, 8)
    outs = [checkpointing.checkpoint(torch.tanh, x) for _ in range(2)]
    checkpointing.reset()
    outs += [checkpointing.checkpoint(torch.tanh, x) for _ in range(2)]
    sum(out.sum() for out in outs).backward()
    y = tensor(4, 8)
    (4 * torch.tanh(y)).sum().backward()
    assert torch.allclose(x.grad, y.grad)
    checkpointing.configure()


def test_shapes_that_grow_between_passes():
    checkpointer = contiguous(2)
    for rows in (2, 6, 4):
        x = tensor(rows, 8)
        checkpointer.checkpoint(torch.tanh, x).sum().backward()
        assert x.grad is not None


def test_shapes_that_grow_within_a_pass():
    checkpointer = contiguous(2)
    out = checkpointer.checkpoint(torch.tanh, tensor(2, 8))
    with pytest.raises(UsageError, match=r"slots of 64 bytes on cpu .* needs 192 on cpu"):
        checkpointer.checkpoint(torch.tanh, tensor(6, 8))
    del out


def test_calls_inside_of_calls_have_no_slots():
    checkpointer = contiguous(2)
    with pytest.raises(UsageError, match="calls inside of calls"):
        checkpointer.checkpoint(lambda x: checkpointer.checkpoint(torch.tanh, x), tensor(2, 8))


def test_tensors_that_opt_out():
    checkpointer = contiguous(2)
    x = tensor(2, 8)
    x.no_checkpointing = True
    checkpointer.checkpoint(torch.tanh, x).sum().backward()
    assert checkpointer.slots.used == 0
    assert checkpointer.slots._pool is None
    assert x.grad is not None


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def restored():
    yield
    checkpointing.configure()


@pytest.mark.usefixtures("restored")
def test_arguments_win_over_the_configuration(tmp_path):
    section = {"partition_activations": True, "cpu_checkpointing": True, "number_checkpoints": 3, "profile": True}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"activation_checkpointing": section}))
    for config in (path, str(path), {"activation_checkpointing": section}):
        checkpointing.configure(None, config, contiguous_checkpointing=True, checkpoint_in_cpu=False, num_checkpoints=5)
        assert current() == Options(True, True, 5, False, False, True, False)
        assert checkpointing.is_configured()
    checkpointing.configure(None)
    assert current() == Options()


def current():
    from mpispeed.nn.activation_checkpointing import _process

    return _process.current.options


@pytest.mark.usefixtures("restored")
def test_a_loaded_configuration():
    from mpispeed.config.load import load

    loaded = load({"train_batch_size": 1, "activation_checkpointing": {"partition_activations": True, "profile": True}})
    checkpointing.configure(None, loaded.config)
    assert current() == Options(partition_activations=True, profile=True)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"contiguous_checkpointing": True, "num_checkpoints": 2}, "only available with partitioned activations"),
        ({"contiguous_checkpointing": True, "partition_activations": True}, "needs number_checkpoints"),
        ({"num_checkpoints": 0}, "expected a whole number from 1, found 0"),
        ({"num_checkpoints": True}, "found True"),
        ({"profile": 3}, "expected true or false, found 3"),
        ({"deepspeed_config": {"activation_checkpointing": {"profil": True}}}, "profil: unknown key"),
        ({"deepspeed_config": "/nowhere.json"}, "cannot be read"),
        ({"mpu_": object()}, "neither get_tensor_model_parallel_group nor get_model_parallel_group"),
    ],
)
def test_options_that_cannot_be(settings, told):
    checkpointing.configure(None, partition_activations=True)
    with pytest.raises(ConfigError, match=told) as caught:
        checkpointing.configure(**settings)
    assert isinstance(caught.value, AssertionError)  # what scripts for DeepSpeed catch
    assert current() == Options(partition_activations=True)


@pytest.mark.usefixtures("restored")
def test_setters():
    checkpointing.partition_activations_in_checkpoint(True)
    checkpointing.set_num_layers(7)
    assert current() == Options(partition_activations=True, number_checkpoints=7)
    with pytest.raises(ConfigError, match="found 0"):
        checkpointing.set_num_layers(0)


class Mpu:
    """Only what is asked for; `group` stands for all model-parallel ranks, `slices` for the slicing group."""

    def __init__(self, group, slices=None, size=None):
        self.get_model_parallel_group = lambda: group
        if size is not None:
            self.get_model_parallel_world_size = lambda: size
        if slices is not None:
            self.get_tensor_model_parallel_group = lambda: slices


def test_the_slicing_group_of_an_mpu():
    def fn(world):
        mesh = Mesh(Topology({"pipe": 2, "model": 2}), world)
        slices, model = mesh["model"], mesh["pipe", "model"]
        find = checkpointing_module().slicing_group
        assert find(slices) is slices
        assert find(Mpu(model, slices)) is slices
        assert find(Mpu(slices, size=2)) is slices
        assert find(Mpu("group of a library", size=1)) is None
        assert find(None) is None
        with pytest.raises(ConfigError, match=r"gives 4, but the group .* has 2 ranks"):
            find(Mpu(slices, size=4))
        with pytest.raises(ConfigError, match=r"gives a str; a group of ranks of this library is needed"):
            find(Mpu("group of a library", size=2))

    sim.run(4, fn)


def checkpointing_module():
    from mpispeed.nn import activation_checkpointing as module

    return module


# -- times -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("grad", [True, False])
def test_passes_are_timed_and_logged(grad, caplog):
    model = layers()
    checkpointing.configure(None, profile=True, synchronize=True)
    caplog.set_level("INFO", logger="mpispeed")
    for _ in range(2):
        first = x = tensor(4, 6).detach().requires_grad_(grad)
        for layer in model:
            x = checkpointing.checkpoint(layer, x)
        (x.sum() + first.sum()).backward()
    times = checkpointing.timers()
    assert {name: timer.count for name, timer in times.items()} == {"forward": 6, "backward": 6}
    assert all(timer.seconds > 0 for timer in times.values())
    told = [record.getMessage().rpartition(" ")[0].rpartition(" ")[0] for record in caplog.records]
    assert told.count("checkpointed call 2: forward") == told.count("checkpointed call 2: backward") == 1


@pytest.mark.usefixtures("restored")
def test_synchronizing_alone_times_nothing():
    checkpointing.configure(None, synchronize=True)
    checkpointing.checkpoint(torch.tanh, tensor(4, 8)).sum().backward()
    assert all(timer.count == 0 for timer in checkpointing.timers().values())
