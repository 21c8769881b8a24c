"""Training with a whole checkpoint on every node; every rank, or every two, is a node with a folder of its own."""

import shutil

import pytest

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import manifest as manifests
from mpispeed.ckpt.format import tags
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, start, train_averaged

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(2, 3)]
BATCH = 36


def settings(stage=1, **checkpoint):
    return config(stage, BATCH, 1, **WARM, checkpoint={"use_node_local_storage": True, **checkpoint})


def digests(comm, path):
    """What every rank has in its copy, by file."""
    found = {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
    return comm.gather_objects(found)


@pytest.mark.parametrize(
    ("stage", "is_async", "ranks_per_node"), [(0, False, 1), (3, True, 1), (3, False, 2), (0, True, 2)]
)
def test_every_node_has_all_and_training_goes_on(stage, is_async, ranks_per_node, mpi_tmp_path, comm):
    own = mpi_tmp_path / f"node{comm.rank // ranks_per_node}"
    data = batches(6, BATCH)
    engine = start(settings(stage, async_save=is_async, keep_last=2, window_bytes="4MiB"), TinyLM())
    train_averaged(engine, data[:3])
    for tag in ("a", "b", "c"):
        engine.save_checkpoint(str(own), tag=tag, client_state={"note": tag})
    engine.wait_checkpoint()
    assert sorted(path.name for path in own.iterdir()) == ["b", "c", "latest", "zero_to_fp32.py"]
    copies = digests(comm, own / "c")
    assert len(copies[0]) == 3
    assert all(copy == copies[0] for copy in copies)
    losses = train_averaged(engine, data[3:])
    engine.destroy()
    # the last node is a new one, and so are all that look at its folder
    comm.barrier()
    last = comm.size - 1
    if comm.rank == last and comm.size > ranks_per_node:
        shutil.rmtree(own)
    comm.barrier()
    again = start(settings(stage), TinyLM(seed=9))
    path, state = again.load_checkpoint(str(own))
    assert path == str(own / "c")
    assert state == {"note": "c"}
    assert train_averaged(again, data[3:]) == losses
    again.destroy()
    assert digests(comm, own / "c")[last] == copies[0]


def test_a_save_that_fails_on_one_node(mpi_tmp_path, comm, monkeypatch):
    own = mpi_tmp_path / f"node{comm.rank}"
    engine = start(settings(2), TinyLM())
    data = batches(4, BATCH)
    train_averaged(engine, data[:2])
    engine.save_checkpoint(str(own))
    losses = train_averaged(engine, data[2:])
    if comm.rank == comm.size - 1:
        own.rename(mpi_tmp_path / "away")
        own.write_text("no folder")
    comm.barrier()
    with pytest.raises(CheckpointError, match=f"rank {comm.size - 1} of {comm.size}"):
        engine.save_checkpoint(str(own))
    if comm.rank == comm.size - 1:
        own.unlink()
        (mpi_tmp_path / "away").rename(own)
    comm.barrier()
    assert not list(own.glob(".*"))
    real = tags.publish

    def publish(work, final, uuid, **more):
        if comm.rank:
            msg = "cut off"
            raise OSError(msg)
        real(work, final, uuid, **more)

    monkeypatch.setattr(tags, "publish", publish)
    with pytest.raises(CheckpointError, match="cut off"):
        engine.save_checkpoint(str(own), tag="cut")
    monkeypatch.undo()
    # one node has it: all get it
    assert engine.load_checkpoint(str(own), tag="cut")[0] == str(own / "cut")
    uuids = comm.gather_objects(manifests.read(own / "cut").uuid)
    assert len(set(uuids)) == 1
    assert engine.load_checkpoint(str(own))[0] == str(own / "global_step2")
    assert train_averaged(engine, data[2:]) == losses
    assert engine.load_checkpoint(str(own / "nothing")) == (None, None)
    engine.destroy()


def test_a_folder_that_all_nodes_share_is_fine_too(mpi_tmp_path, comm):
    engine = start(config(1, BATCH, 1, **WARM), TinyLM())
    engine.save_checkpoint(str(mpi_tmp_path / "shared"), tag="t")
    engine.destroy()
    local = start(settings(1), TinyLM())
    # all nodes see one folder: nothing is copied
    assert local.load_checkpoint(str(mpi_tmp_path / "shared"))[0] == str(mpi_tmp_path / "shared" / "t")
    local.destroy()
