"""The analyzer over files: DeepSpeed's bytes, threads and workers, what goes wrong."""

import json
import re
from pathlib import Path

import pytest
import torch

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.curriculum.analyzer import DataAnalyzer
from mpispeed.curriculum.difficulty_index import DifficultyIndex
from mpispeed.curriculum.distributed import DistributedDataAnalyzer
from mpispeed.curriculum.index_file import MMapIndexedDataset
from mpispeed.curriculum.index_layout import IndexFileError
from mpispeed.mesh.backends.solo import solo_comm
from tests.helpers import analyzer_cases as cases

MADE = json.loads(Path(__file__).with_name("deepspeed_analyzer.json").read_text())
"""SHA-256 sums of the files that DeepSpeed 0.19.6 made, by `tools/deepspeed_analyzer_sums.py`."""

LEFT_OUT = re.compile(r"_thread\d+\.(bin|idx)$")
"""Parts of results that DeepSpeed's reduce step leaves beside them and nobody reads."""


@pytest.mark.parametrize("name", cases.CASES)
def test_files_are_those_of_deepspeed(tmp_path, name):
    cases.run_serial(DataAnalyzer, name, tmp_path)
    assert cases.sums(tmp_path) == {
        file: sum_ for file, sum_ in MADE[name]["serial"].items() if not LEFT_OUT.search(file)
    }


def analyzer(folder, size, *functions, **settings):
    settings = {"batch_size": 8, "metric_types": [cases.SINGLE] * len(functions), **settings}
    settings.setdefault("metric_dtypes", [torch.int64] * len(functions))
    names = ["m", "n"][: len(functions)]
    return DataAnalyzer(
        cases.Numbers(size), metric_names=names, metric_functions=functions, save_path=folder, **settings
    )


def rows_of(folder, name, what):
    return [row.tolist() for row in MMapIndexedDataset(folder / name / f"{name}_{what}")]


def test_more_reduce_threads_than_values(tmp_path):
    """DeepSpeed's reduce step fails here: a part of its results is an empty file."""
    made = analyzer(tmp_path, 3, lambda batch: batch % 2, num_threads=4, num_threads_reduce=5, num_workers=2)
    for worker in range(2):
        made.worker_id = worker
        made.run_map()
    made.run_reduce()
    assert rows_of(tmp_path, "m", "sample_to_metric") == [[1], [0], [1]]
    assert rows_of(tmp_path, "m", "index_to_sample") == [[1], [0, 2]]
    assert MMapIndexedDataset(tmp_path / "m" / "m_index_to_sample").doc_idx.tolist() == [0, 0, 0, 1, 1, 2, 2]


def test_samples_of_batches_that_are_no_tensors(tmp_path):
    """DeepSpeed counts the keys of a batch: its numbers of samples would be 0 to 7, 1 to 8, ..."""
    made = analyzer(tmp_path, 40, lambda batch: batch["x"], collate_fn=lambda items: {"x": torch.tensor(items)})
    made.run_map_reduce()
    assert rows_of(tmp_path, "m", "index_to_sample") == [[i] for i in range(40)]


def test_numbers_of_samples_that_are_large(tmp_path):
    """DeepSpeed takes the type from the length of the data set, and wraps around."""
    ids = [70_000 * i for i in range(30)]
    made = analyzer(tmp_path, 30, lambda batch: batch - batch, sample_indices=ids)
    made.run_map_reduce()
    assert rows_of(tmp_path, "m", "index_to_sample") == rows_of(tmp_path, "m", "index_to_sample_percentile_merged")
    assert rows_of(tmp_path, "m", "index_to_sample") == [ids]


def test_only_some_threads(tmp_path):
    made = analyzer(tmp_path, 40, lambda batch: batch, num_threads=4)
    for thread in (3, 0, 2):
        made.specific_threads = [thread]
        made.run_map()
    with pytest.raises(UsageError, match=r"worker0_thread1/m_sample_to_metric\.bin and \.idx are missing; run the map"):
        made.run_reduce()
    made.specific_threads = [1]
    made.run_map()
    made.run_reduce()
    assert rows_of(tmp_path, "m", "sample_to_metric") == [[i + 7] for i in range(40)]


def test_map_files_of_another_data_set(tmp_path):
    analyzer(tmp_path, 40, lambda batch: batch).run_map()
    with pytest.raises(UsageError, match="left 40 values for 41 samples"):
        analyzer(tmp_path, 41, lambda batch: batch).run_reduce()
    csv = tmp_path / "m" / "worker0_thread0" / "m_metric_to_sample_9.csv"
    csv.write_bytes(b"2,3\r\n")
    with pytest.raises(UsageError, match="1 samples have the value 9, but 2 are listed"):
        analyzer(tmp_path, 40, lambda batch: batch).run_reduce()
    csv.write_bytes(b"2x\r\n")
    with pytest.raises(UsageError, match=r"sample_9\.csv does not hold numbers of samples only"):
        analyzer(tmp_path, 40, lambda batch: batch).run_reduce()


def test_a_map_step_that_is_run_again(tmp_path):
    for factor in (3, 2):
        analyzer(tmp_path, 20, lambda batch, factor=factor: batch * factor).run_map_reduce()
    assert rows_of(tmp_path, "m", "index_to_metric") == [[2 * (i + 7)] for i in range(20)]
    assert len(list((tmp_path / "m" / "worker0_thread0").glob("*.csv"))) == 20


def test_a_function_that_fails_stops_all_threads(tmp_path):
    seen = []

    def fails(batch):
        seen.append(len(batch))
        msg = f"bad sample {batch[0]}"
        raise ValueError(msg)

    with pytest.raises(ValueError, match="bad sample"):
        analyzer(tmp_path, 10_000, fails, num_threads=2).run_map()
    assert len(seen) <= 4


@pytest.mark.parametrize(
    ("function", "dtype", "text"),
    [
        (lambda batch: batch.tolist(), torch.int64, "returned a list; it must return a tensor or an array"),
        (lambda batch: batch, torch.int32, "returned int64, but metric_dtypes says torch.int32"),
        (lambda batch: batch[:, None].expand(-1, 2), torch.int64, r"shape \[8, 2\]"),
        (lambda batch: batch.sum(), torch.int64, r"shape \[\]"),
    ],
)
def test_what_functions_return(tmp_path, function, dtype, text):
    with pytest.raises(UsageError, match=text):
        analyzer(tmp_path, 40, function, metric_dtypes=[dtype]).run_map()


def test_a_sum_that_its_type_does_not_hold(tmp_path):
    made = analyzer(
        tmp_path, 80, lambda batch: batch.max().byte(), metric_types=[cases.SUM], metric_dtypes=[torch.uint8]
    )
    with pytest.raises(IndexFileError, match="values from 500 to 500 do not fit the type uint8"):
        made.run_map()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"metric_types": ["mean"]}, "'mean' of 'm' is neither"),
        ({"metric_dtypes": []}, "1 metric_names and 0 metric_dtypes"),
        ({"metric_types": []}, "0 metric_types do not fit"),
        ({"num_threads": 0}, "num_threads=0 is no positive"),
        ({"worker_id": 1}, "worker_id=1"),
        ({"num_threads": 2, "specific_threads": [2]}, r"specific_threads=\[2\]"),
    ],
)
def test_arguments_that_do_not_fit(tmp_path, settings, text):
    with pytest.raises(ConfigError, match=text):
        analyzer(tmp_path, 40, lambda batch: batch, **settings)


@pytest.mark.parametrize("name", ["../m", "", ".m", "a\0b"])
def test_names_that_are_no_folders(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot be the name of a folder"):
        DataAnalyzer(cases.Numbers(3), metric_names=[name], metric_functions=[len], metric_types=[cases.SINGLE])


def test_own_functions_in_the_place_of_steps(tmp_path):
    calls = []
    made = analyzer(
        tmp_path, 20, lambda batch: batch,
        custom_map_init=lambda thread, names, types, dtypes, path, worker: calls.append((thread, names, worker)) or [0],
        custom_map_update=lambda data, types, dtypes, functions, results, first: results.append(first),
        custom_map_finalize=lambda types, dtypes, results: calls.append(results),
        custom_reduce=lambda *args: calls.append(args[1:]),
    )  # fmt: skip
    made.run_map_reduce()
    assert calls == [(0, ["m"], 0), [0, 0, 8, 16], (["m"], [cases.SINGLE], tmp_path, 1, 1, 1)]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["files", "memory"])
def test_the_sampler_reads_what_was_written(tmp_path, kind):
    if kind == "files":
        analyzer(tmp_path, 300, lambda batch: batch % 50, num_threads=2).run_map_reduce()
    else:
        DistributedDataAnalyzer(
            cases.Numbers(300), comm=solo_comm(), batch_size=8, metric_names=["m"], metric_functions=[lambda b: b % 50],
            metric_types=[cases.SINGLE], save_path=tmp_path,
        ).run_map_reduce()  # fmt: skip
    samples, values = (MMapIndexedDataset(tmp_path / "m" / f"m_index_to_{what}") for what in ("sample", "metric"))
    index = DifficultyIndex(samples, values, 300)
    count = index.admitted_by_value(9)
    found = [int(number) for piece in index.read(0, count) for number in piece]
    assert sorted(found) == [i for i in range(300) if (i + 7) % 50 <= 9]
