"""Training with states on other tiers: the losses of no offload, bit for bit."""

import functools
import shutil
import tempfile
from pathlib import Path

import pytest

from mpispeed.base.errors import StoreError
from tests.helpers.covering import in_turn
from tests.zoo import same_bits
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, start, train_averaged, weights

STEPS = 5


@pytest.fixture
def disk():
    """A folder that all ranks name alike."""
    from mpi4py import MPI

    made = tempfile.mkdtemp(prefix="mpispeed-test-", dir="/var/tmp") if MPI.COMM_WORLD.rank == 0 else None
    folder = Path(MPI.COMM_WORLD.bcast(made))
    yield folder
    MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.rank == 0:
        shutil.rmtree(folder)


def optimizer_on(folder, device="nvme", **more):
    """The section of `offload_optimizer`."""
    return {"offload_optimizer": {"device": device, "nvme_path": str(folder), **more}}


def params_on(folder, device="nvme", **more):
    """The section of `offload_param`; nothing of it stays in memory unless asked for."""
    return {"offload_param": {"device": device, "nvme_path": str(folder), "max_in_cpu": 0, **more}}


def run(stage, accumulation, sections, **more):
    """Losses and weights of a few steps."""
    settings = config(stage, 12 * accumulation, accumulation, reduction="ordered", **(WARM | more), zero=sections)
    engine = start(settings, TinyLM())
    swapped = engine.parts.params.tiers.file_bytes
    losses = train_averaged(engine, batches(STEPS, 12 * accumulation))
    found = weights(engine)
    engine.destroy()
    return losses, found, swapped


@functools.cache
def plain(stage, accumulation, dtype="fp32"):
    """What `run` gives with everything in memory; the same for all cases."""
    return run(stage, accumulation, {}, dtype=dtype)[:2]


CASES = {
    "optimizer": (lambda d: optimizer_on(d), (1, 2, 3)),
    "optimizer, pipelined, short windows": (
        lambda d: {**optimizer_on(d, pipeline_read=True, pipeline_write=True, buffer_count=1), "sub_group_size": 30000},
        (1, 2, 3),
    ),
    "optimizer, half of it": (lambda d: optimizer_on(d, ratio=0.5), (3,)),
    "optimizer, fast_init": (lambda d: optimizer_on(d, fast_init=True), (2,)),
    "params": (lambda d: params_on(d), (3,)),
    "params, one buffer": (lambda d: params_on(d, buffer_count=1), (3,)),
    "params, some in memory": (lambda d: params_on(d, max_in_cpu=2000), (3,)),
    "all": (
        lambda d: {**params_on(d), **optimizer_on(d, pipeline_read=True, pipeline_write=True)},
        (3,),
    ),
    "all on the host": (lambda d: {**params_on(d, "cpu"), **optimizer_on(d, "cpu")}, (3,)),
    "params on the host, optimizer swapped": (lambda d: {**params_on(d, "cpu"), **optimizer_on(d)}, (3,)),
}


WAYS = [(name, stage, count) for name, (_, stages) in CASES.items() for stage in stages for count in (1, 3)]


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(("name", "stage", "accumulation"), in_turn(WAYS, ranks=(1, 3, 2, 4, 3)))
def test_losses_and_weights_are_those_of_no_offload(name, stage, accumulation, disk):
    section = CASES[name][0](disk)
    expected, reference = plain(stage, accumulation)
    losses, found, swapped = run(stage, accumulation, section)
    assert losses == expected
    same_bits(found, reference)
    assert (swapped > 0) == ("'device': 'nvme'" in str(section))
    assert not list(disk.rglob("*.swap"))


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(
    ("stage", "dtype"),
    in_turn([(stage, dtype) for stage in (1, 2, 3) for dtype in ("bf16", "fp16")], ranks=(3, 1, 2, 4)),
)
def test_sixteen_bit_training_has_the_same_bits_too(stage, dtype, disk):
    section = {**optimizer_on(disk, pipeline_read=True), **(params_on(disk) if stage == 3 else {})}
    expected, reference = plain(stage, 2, dtype)
    losses, found, _ = run(stage, 2, section, dtype=dtype)
    assert losses == expected
    same_bits(found, reference)


@pytest.mark.mpi(min_size=1)
def test_swap_files_are_private_and_of_one_rank(disk):
    settings = config(3, 12, 1, **WARM, zero=optimizer_on(disk) | params_on(disk))
    engine = start(settings, TinyLM())
    engine.mesh.world.comm.barrier()
    files = sorted(disk.rglob("*.swap"))
    folders = {file.parent for file in files}
    assert len(folders) == engine.mesh.size
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
    engine.mesh.world.comm.barrier()
    engine.destroy()
    engine.mesh.world.comm.barrier()
    assert not list(disk.rglob("*.swap"))


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("buffers", in_turn([1, 5], ranks=(3, 2, 1, 4)))
def test_padding_of_swapped_parameters_is_zero_and_spoils_no_codes(buffers, disk):
    section = {**params_on(disk, buffer_count=buffers), **optimizer_on(disk)}
    more = {"bf16": {"enabled": True}}
    coded = {"zero_quantized_weights": True, "zero_quantized_in_node": True}
    expected, reference, _ = run(3, 1, coded, **more)
    losses, found, _ = run(3, 1, coded | section, **more)
    assert losses == expected
    same_bits(found, reference)


@pytest.mark.mpi(min_size=1)
def test_an_error_in_the_update_of_one_rank_ends_the_step_of_all_and_leaves_no_window_borrowed(disk):
    settings = config(3, 12, 1, **WARM, zero=params_on(disk) | optimizer_on(disk, pipeline_read=True))
    engine = start(settings, TinyLM())
    rule = engine.parts.optimization.rule
    update, data = rule.update, batches(3, 12)
    train_averaged(engine, data[:1])

    def broken(windows, **options):
        next(iter(windows))
        msg = "the rule is broken"
        raise RuntimeError(msg)

    rule.update = broken if engine.mesh.rank == 0 else update
    with pytest.raises(StoreError, match="the rule is broken") as kept:
        train_averaged(engine, data[1:2])
    rule.update = update
    assert engine.save_checkpoint(str(disk / "after"))  # reads through the buffers; `kept` still holds the traceback
    assert kept.value is not None
    engine.destroy()
