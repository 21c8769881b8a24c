"""The analyzer in memory: DeepSpeed's bytes on any number of ranks, even parts, failures that all ranks share."""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.curriculum.distributed import DistributedDataAnalyzer
from mpispeed.curriculum.index_file import MMapIndexedDataset
from mpispeed.curriculum.sample_sort import Pairs, sorted_pairs
from tests.helpers import analyzer_cases as cases

pytestmark = pytest.mark.mpi(min_size=1)

MADE = json.loads((Path(__file__).parents[2] / "unit/curriculum/deepspeed_analyzer.json").read_text())
"""SHA-256 sums of the files that DeepSpeed 0.19.6 made on one rank, by `tools/deepspeed_analyzer_sums.py`."""


@pytest.fixture
def folder(comm):
    path = Path(comm.share(tempfile.mkdtemp() if comm.rank == 0 else None))
    yield path
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(path)


def analyse(comm, folder, size, function, **settings):
    settings = {"batch_size": 7, "metric_types": [cases.SINGLE], "metric_functions": [function], **settings}
    analyzer = DistributedDataAnalyzer(cases.Numbers(size), comm=comm, metric_names=["m"], save_path=folder, **settings)
    analyzer.run_map_reduce()
    comm.barrier()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", cases.CASES)
def test_files_are_those_of_deepspeed(comm, folder, name, threads):
    arguments, _, _ = cases.common(name, folder)
    DistributedDataAnalyzer(comm=comm, num_threads=threads, **arguments).run_map_reduce()
    comm.barrier()
    assert cases.sums(folder) == MADE[name]["distributed"]


@pytest.mark.parametrize("kind", ["one value", "few values", "all different", "on one rank only", "none on the first"])
def test_pairs_are_sorted_in_even_parts(comm, kind):
    random = np.random.default_rng(comm.rank)
    count = {"on one rank only": 900 * (comm.rank == 0), "none on the first": 900 * (comm.rank > 0)}.get(kind, 900)
    values = {"one value": np.full(count, -5), "few values": random.integers(-2, 2, count)}.get(
        kind, random.integers(-(2**62), 2**62, count)
    )
    ids = random.permutation(count) + 1000 * comm.rank
    mine = sorted_pairs(comm, Pairs(values.astype(np.int64), ids.astype(np.int64)))
    given = [pair for part in comm.gather_objects(list(zip(values, ids, strict=True))) for pair in part]
    parts = comm.gather_objects(list(zip(mine.values, mine.ids, strict=True)))
    assert [pair for part in parts for pair in part] == sorted(given)
    assert len(mine.ids) <= 2 * -(-len(given) // comm.size) + comm.size


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_fewer_samples_than_ranks(comm, folder, size):
    analyse(comm, folder, size, lambda batch: -batch, num_threads=3, batch_size=4)
    values, samples = (MMapIndexedDataset(folder / "m" / f"m_index_to_{what}") for what in ("metric", "sample"))
    assert [int(row[0]) for row in values] == [-7 - i for i in reversed(range(size))]
    assert [list(row) for row in samples] == [[i] for i in reversed(range(size))]


def test_a_metric_that_fails_on_one_rank(comm, folder):
    bad = comm.size - 1

    def fails(batch):
        if comm.rank == bad:
            msg = "no such sample"
            raise KeyError(msg)
        return batch

    with pytest.raises(UsageError, match="analysing data: KeyError: 'no such sample'"):
        analyse(comm, folder, 50, fails, num_threads=2)


def test_a_disk_that_is_full(comm, folder):
    for name in ("sample_to_metric", "index_to_sample"):
        if comm.rank == 0:
            (folder / "m").mkdir(exist_ok=True)
            (folder / "m" / f"m_{name}.bin").symlink_to("/dev/full")
        with pytest.raises(UsageError, match=r"metric 'm': OSError: .*No space left"):
            analyse(comm, folder, 40_000, lambda batch: batch)
        comm.barrier()
        if comm.rank == 0:
            (folder / "m" / f"m_{name}.bin").unlink()
    analyse(comm, folder, 40, lambda batch: batch)
    MMapIndexedDataset(folder / "m" / "m_index_to_sample").check()


def test_what_does_not_fit(comm, folder):
    with pytest.raises(UsageError, match=r"shape \[7, 2\] for 7 samples"):
        analyse(comm, folder, 50, lambda batch: torch.stack((batch, batch), 1))
    with pytest.raises(UsageError, match="returned float32"):
        analyse(comm, folder, 50, lambda batch: batch.float())
    with pytest.raises(UsageError, match="above 2\\^63 - 1"):
        analyse(comm, folder, 50, lambda batch: np.full(len(batch), 2**63, np.uint64))
    with pytest.raises(ConfigError, match="without samples"):
        analyse(comm, folder, 0, lambda batch: batch)
    if comm.size > 1:
        with pytest.raises(ConfigError, match=r"rank 1 analyses .*51.*all need the same"):
            analyse(comm, folder, 50 + comm.rank, lambda batch: batch)
        with pytest.raises(UsageError, match=r"shapes \[\[2\], \[3\]\]"):
            analyse(
                comm, folder, 50, lambda batch: batch[: 2 + (comm.rank == 1)], metric_types=[cases.SUM], batch_size=9
            )


def test_by_deepspeeds_names(comm, folder):
    from mpispeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer, DistributedDataAnalyzer

    arguments, _, serial = cases.common("example", folder)
    ranks = {"num_workers": comm.size, "worker_id": comm.rank}
    DistributedDataAnalyzer(device="cpu", num_threads=None, **ranks, **arguments).run_map_reduce()
    comm.barrier()
    made = cases.sums(folder)
    comm.barrier()  # before the files are written anew
    assert made == MADE["example"]["distributed"]
    DataAnalyzer(**ranks, **serial, **arguments).run_map_reduce()
    made = cases.sums(folder)
    wanted = {name: sum_ for name, sum_ in MADE["example"]["serial"].items() if "thread" not in name}
    assert {name: made[name] for name in wanted} == wanted
    with pytest.raises(ConfigError, match=f"num_workers=7 and worker_id=None were given on rank {comm.rank}"):
        DistributedDataAnalyzer(num_workers=7, **arguments)
