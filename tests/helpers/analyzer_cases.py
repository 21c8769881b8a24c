"""Small data sets with metrics, given to DeepSpeed's analyzers (by `tools/deepspeed_analyzer_sums.py`) and to ours."""

import hashlib

import numpy as np
import torch

SINGLE, SUM = "single_value_per_sample", "accumulate_value_over_samples"


class Numbers(torch.utils.data.Dataset):
    """The data set of DeepSpeed's own example, of another size."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return (i + 7) % 10_000


class Indexed(Numbers):
    """The same, with numbers of samples of its own, as Megatron's data sets have."""

    def __getitem__(self, i):
        return {"value": super().__getitem__(i), "index": torch.tensor([self.size - 1 - i])}


def identity(batch):
    return batch.to(torch.int64)


def batch_sum(batch):
    return batch.to(torch.int64).sum()


def few(batch):
    """Some values that many samples have, negative ones too."""
    return (batch % 7 - 3).to(torch.int16)


def small(batch):
    return (batch % 256).numpy().astype(np.uint8)


def histogram(batch):
    return torch.bincount(batch % 9, minlength=9) - torch.bincount(batch % 4, minlength=9)


def few_of_dict(batch):
    return (batch["value"] % 5).to(torch.int32)


def join(items):
    """What torch's own function does; DeepSpeed takes the number of keys of a batch for the number of its samples."""
    return torch.utils.data.default_collate(items)


#: DeepSpeed's own example
EXAMPLE = {"mod": (identity, SINGLE, torch.int64), "batch_sum": (batch_sum, SUM, torch.int64)}
METRICS = {
    "few": (few, SINGLE, torch.int16),
    "small": (small, SINGLE, np.uint8),
    "histogram": (histogram, SUM, torch.int64),
}
ORDER = [int(i) for i in np.random.default_rng(3).permutation(700)]

#: name -> (data set, metrics, settings of both analyzers, workers, settings of the serial one)
CASES = {
    "example": (Numbers(2500), EXAMPLE, {"batch_size": 1024}, 1, {"num_threads": 1}),
    "threads": (Numbers(2500), EXAMPLE, {"batch_size": 1024}, 1, {"num_threads": 4, "num_threads_reduce": 4}),
    "metrics": (Numbers(1200), METRICS, {"batch_size": 32}, 3, {"num_threads": 2, "num_threads_reduce": 2}),
    "single samples": (Numbers(300), METRICS, {"batch_size": 1}, 2, {"num_threads": 1, "num_threads_reduce": 2}),
    "sample_indices": (Numbers(700), METRICS, {"batch_size": 50, "sample_indices": ORDER}, 2, {"num_threads": 2}),
    "index": (Indexed(900), {"few": (few_of_dict, SINGLE, torch.int32)}, {"batch_size": 64, "collate_fn": join}, 2, {}),
}  # fmt: skip


def common(name, folder):
    """Arguments of both analyzers but for workers and threads, the number of workers, those of the serial one."""
    dataset, metrics, settings, workers, serial = CASES[name]
    functions, types, dtypes = zip(*metrics.values(), strict=True)
    arguments = {
        "dataset": dataset,
        "metric_names": list(metrics),
        "metric_functions": list(functions),
        "metric_types": list(types),
        "save_path": str(folder),
        **settings,
    }
    return arguments, workers, {"metric_dtypes": list(dtypes), **serial}


def run_serial(analyzer, name, folder):
    """All workers of a case one after another, then the reduce step."""
    arguments, workers, serial = common(name, folder)
    made = [analyzer(worker_id=i, num_workers=workers, **arguments, **serial) for i in range(workers)]
    for each in made:
        each.run_map()
    made[0].run_reduce()


def sums(folder):
    """SHA-256 of the files below a folder by their paths; `NAME_*.csv` are one entry: names and contents."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if path.suffix == ".csv":
            name, _, value = name.rpartition("_")
            name += "_*.csv"
            found.setdefault(name, hashlib.sha256()).update(value.encode())
        found.setdefault(name, hashlib.sha256()).update(path.read_bytes())
    return {name: made.hexdigest() for name, made in found.items()}
