"""The search of `mpispeed tune` beside an exhaustive one: 60 settings of the example's GPT of 7.3 million weights.

    python benchmarks/tuning/grid.py exhaustive --folder /local/scratch/grid
    python benchmarks/tuning/grid.py search --folder /local/scratch/grid
    python benchmarks/tuning/grid.py rounds --folder /local/scratch/grid
    python benchmarks/tuning/grid.py report --folder /local/scratch/grid --json benchmarks/results/tuning-grid.json

Each part goes on where it was ended: finished trials are in the folder. The choice of the search and the best of all 60
are measured again in turns, because one trial is too short to tell neighbours apart; their ratio is that of the medians
of samples per second. Predictions are those of the model after the search, for all 60, beside the exhaustive trials.
Wants an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "step"))

import peers  # noqa: E402

from mpispeed.launch.env import usable_cores  # noqa: E402
from mpispeed.tuning.api import read  # noqa: E402
from mpispeed.tuning.forecast import Survey  # noqa: E402
from mpispeed.tuning.job import WorkerJob  # noqa: E402
from mpispeed.tuning.protocol import Task  # noqa: E402
from mpispeed.tuning.results import Folders, Row  # noqa: E402
from mpispeed.tuning.search import Predicted, Trial  # noqa: E402
from mpispeed.tuning.space import Space  # noqa: E402
from mpispeed.tuning.time_model import terms_of  # noqa: E402
from mpispeed.tuning.tuner import Tuner  # noqa: E402

EXAMPLE = ROOT / "docs" / "examples" / "train_gpt.py"
MODEL = ("--layers", "4", "--width", "384", "--heads", "4", "--block", "32", "--cap_bytes", "500000", "--sample", "0")
GRID = {
    "train_micro_batch_size_per_gpu": [1, 2, 4, 8, 16],
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {
        "stage": [0, 1, 2, 3],
        # three ways: many small sums, few large ones, and large ones beside the backward pass
        "reduce_bucket_size": [200_000, 500_000_000],
        "overlap_comm": [False, True],
    },
}
LEFT_OUT = {"reduce_bucket_size": 200_000, "overlap_comm": True}
"""This way makes it 60 of 80."""

SETTINGS = 60
FIRST, LAST = 3, 5


class GridSpace(Space):
    """The 60 settings."""

    def first(self) -> list[Any]:
        """All but one of the four ways."""
        keys = {f"zero_optimization.{key}": value for key, value in LEFT_OUT.items()}
        return [one for one in super().first() if any(one.point[key] != value for key, value in keys.items())]


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("exhaustive", "search", "rounds", "report"))
    parser.add_argument("--folder", type=Path, required=True, help="takes all results")
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    {"exhaustive": tune, "search": tune, "rounds": compare, "report": report}[options.part](options)
    print(f"{options.part}: {time.monotonic() - began:.0f} s")


def words(options: argparse.Namespace) -> list[str]:
    """The words of the example."""
    return [*MODEL, "--steps", "1000", "--eval_every", "1000", "--out", str(options.folder / "out"),
            "--deepspeed_config", str(settings(options, "search"))]  # fmt: skip


def settings(options: argparse.Namespace, part: str) -> Path:
    """The file of one part."""
    path = options.folder / f"{part}.json"
    kind = {"tuner_type": "gridsearch", "tuner_early_stopping": 0} if part == "exhaustive" else {}
    section = {
        "enabled": True, "tuner_num_trials": SETTINGS, "start_profile_step": FIRST, "end_profile_step": LAST,
        "results_dir": str(options.folder / part), "exps_dir": str(options.folder / f"{part}-exps"), **kind,
    }  # fmt: skip
    path.write_text(json.dumps({**GRID, "autotuning": section}, indent=1))
    return path


def worker(options: argparse.Namespace, folder: Path) -> WorkerJob:
    """The job of all trials."""
    return WorkerJob([str(EXAMPLE), *words(options)], options.ranks, folder)


def tune(options: argparse.Namespace) -> None:
    """All 60, or the search."""
    raw, section = read(settings(options, options.part))
    space = GridSpace(raw, section, options.ranks)
    if len(space.first()) != SETTINGS:
        sys.exit(f"the grid has {len(space.first())} settings")
    folders = Folders(Path(section.results_dir), Path(section.exps_dir))
    with tempfile.TemporaryDirectory() as kept, worker(options, Path(kept)) as job:
        found = Tuner(
            space, section, job, folders, ranks=options.ranks, words=words(options),
            say=say,
        ).run()  # fmt: skip
    print((folders.results / "summary.txt").read_text(), *found.ended, sep="\n")
    if options.part == "search":
        survey(options, space)


def say(row: Row | str) -> None:
    """Print the end of a trial."""
    print(row if isinstance(row, str) else f"{row.name} {row.status} {row.seconds:.3f} s", flush=True)


def survey(options: argparse.Namespace, space: GridSpace) -> None:
    """Keep the forecasts of all 60."""
    configs = [one.config for one in space.first()]
    with tempfile.TemporaryDirectory() as kept, worker(options, Path(kept)) as job:
        task = Task(
            1, "survey", "survey", str(options.folder / "look"), configs[0], arguments=words(options), payload=configs
        )  # fmt: skip
        outcome = job.run(task)
    if outcome.status != "ok":
        sys.exit(outcome.reason)
    (options.folder / "survey.json").write_text(json.dumps(dict(outcome.survey)))


def rows(options: argparse.Namespace, part: str) -> dict[str, dict[str, Any]]:
    """Measured rows of one part, by name."""
    path = options.folder / part / "trials.json"
    if not path.is_file():
        sys.exit(f"{path} is not there: run the part {part} first")
    return {row["name"]: row for row in json.loads(path.read_text()) if row["metric"]}


def best(found: dict[str, dict[str, Any]]) -> str:
    """The name of the row with most samples per second."""
    return max(found, key=lambda name: found[name]["metric"])


def compare(options: argparse.Namespace) -> None:
    """Measure the two choices in turns."""
    raw, section = read(settings(options, "search"))
    configs = {one.name: one.config for one in GridSpace(raw, section, options.ranks).first()}
    names = [best(rows(options, part)) for part in ("search", "exhaustive")]
    path = options.folder / "rounds.json"
    kept = json.loads(path.read_text()) if path.is_file() else {}
    times = kept["seconds"] if kept.get("names") == names else {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder, worker(options, Path(folder)) as job:
        for number in range(min(map(len, times.values())), options.rounds):
            for name in list(times)[:: 1 if number % 2 else -1]:
                task = Task(
                    1, "trial", name, folder=str(options.folder / "rounds"), config=configs[name],
                    arguments=words(options), first_step=FIRST, last_step=LAST + 3,
                )  # fmt: skip
                outcome = job.run(task)
                if outcome.status != "ok":
                    sys.exit(f"{name}: {outcome.reason}")
                times[name].append(1 / outcome.metrics["throughput"])
            path.write_text(json.dumps({"names": names, "seconds": times}))
            print(number + 1, {name: f"{own[-1] * 1e3:.2f} ms a sample" for name, own in times.items()}, flush=True)


def report(options: argparse.Namespace) -> None:
    """Figures of all parts."""
    everything, searched = rows(options, "exhaustive"), rows(options, "search")
    rounds = json.loads((options.folder / "rounds.json").read_text())
    medians = {name: statistics.median(own) for name, own in rounds["seconds"].items()}
    chosen, least = rounds["names"]
    raw, section = read(settings(options, "search"))
    space = GridSpace(raw, section, options.ranks).first()
    names = [one.name for one in space]
    forecasts = Survey.of_values(json.loads((options.folder / "survey.json").read_text())).forecasts
    order = Predicted(forecasts, [one.point for one in space], per_sample=True)
    order.fit([Trial(names.index(name), row["seconds"] / row["train_batch"]) for name, row in searched.items()])
    known = [(n, everything[name]) for n, name in enumerate(names) if name in everything]
    wrong = [abs(order.model.predict(n).seconds / row["seconds"] - 1) for n, row in known]
    sent = [abs(row["sent_bytes"] / row["metrics"]["sent_bytes"] - 1) for _, row in known if row["sent_bytes"]]
    figures = {
        "settings": len(everything),
        "trials": len(searched),
        "chosen": chosen,
        "best_of_all": least,
        "seconds_per_sample": rounds["seconds"],
        "ratio_to_best": medians[chosen] / medians[least],
        "ratio_to_median": statistics.median(row["seconds"] / row["train_batch"] for row in everything.values())
        / (everything[chosen]["seconds"] / everything[chosen]["train_batch"]),
        "step_error_median": statistics.median(wrong),
        "step_error_p90": statistics.quantiles(wrong, n=10)[-1],
        "sent_error_max": max(sent, default=None),
        "rates": {name: rate for name, rate in order.model.rates.items() if rate},
        "terms_of_chosen": {name: size for name, size in terms_of(forecasts[names.index(chosen)]).items() if size},
    }
    print(json.dumps({key: value for key, value in figures.items() if key != "seconds_per_sample"}, indent=1))
    setup = {"ranks": options.ranks, "rounds": options.rounds, "cores": usable_cores()}
    peers.write_record(options.json, "tuning/grid", setup, figures)


if __name__ == "__main__":
    main()
