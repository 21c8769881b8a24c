"""Files of a search, with the names and places of DeepSpeed's: experiments, results, the best settings, tables."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpispeed.base.errors import UsageError
from mpispeed.base.plain import hide_in_words, hide_secrets
from mpispeed.base.plotting import picture
from mpispeed.base.units import format_bytes, format_duration
from mpispeed.tuning.protocol import TASKS, write_private

SUMMARY, OPTIMAL, COMMAND, TRIALS, PICTURE = (
    "summary.txt", "ds_config_optimal.json", "cmd_optimal.txt", "trials.json", "search.png",
)  # fmt: skip
MODEL_INFO, JOBS, LOCK = "profile_model_info", "jobs", ".mpispeed.lock"
_NAMES = {"latency": "latency", "throughput": "throughput", "flops": "FLOPS_per_gpu"}


@dataclass(frozen=True)
class Row:
    """A candidate of the search that was tried, or discarded.

    Attributes:
        name: of the candidate.
        stage: of ZeRO.
        micro_batch: samples of a forward pass.
        micro_steps: forward passes of a step.
        train_batch: samples of a step over all ranks.
        status: of the outcome; "skipped" for one that was discarded, "reused" for one of an earlier search.
        reason: a sentence for all but "ok" and "reused".
        seconds: measured, of a step; 0 for none.
        predicted_seconds: of a step, before it was tried; 0 for none.
        need_bytes: predicted of one rank's device.
        sent_bytes: predicted, of one rank in a step.
        metric: what was measured of the wanted metric; None for none.
        metrics: all that was measured.
    """

    name: str
    stage: int
    micro_batch: int
    micro_steps: int
    train_batch: int
    status: str
    reason: str = ""
    seconds: float = 0.0
    predicted_seconds: float = 0.0
    need_bytes: int = 0
    sent_bytes: int = 0
    metric: float | None = None
    metrics: Mapping[str, float] | None = None

    @property
    def is_good(self) -> bool:
        """It was measured."""
        return self.metric is not None


def metric_of(metrics: Mapping[str, float], metric: str) -> float | None:
    """The wanted figure of a trial; None if it was not measured."""
    value = metrics.get(_NAMES[metric])
    return None if value is None else float(value)


def best_of(rows: Sequence[Row], metric: str) -> Row | None:
    """The row with the least latency, or with most of another metric; the first of equals."""
    good = [row for row in rows if row.metric is not None]
    sign = 1.0 if metric == "latency" else -1.0
    return min(good, key=lambda row: sign * (row.metric or 0.0), default=None)


class Folders:
    """The folders of a search.

    Args:
        results: `results_dir`.
        experiments: `exps_dir`.
    """

    def __init__(self, results: Path, experiments: Path) -> None:
        self.results, self.experiments = results, experiments

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Context in which no other search may use the results, as far as the file system knows locks.

        Raises:
            UsageError: another one does, or the folder cannot be made or written to.
        """
        with contextlib.ExitStack() as stack:
            try:
                self.results.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context((self.results / LOCK).open("w"))
            except OSError as error:
                raise _unusable("results_dir", self.results, error) from error
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                msg = (
                    f"another search uses autotuning.results_dir {self.results}; wait for its end, or name another "
                    "folder"
                )
                raise UsageError(msg) from error
            except OSError:  # a file system without locks, such as Lustre on many sites
                pass
            yield

    def prepare(self, *, overwrite: bool) -> None:
        """Make the folders; with `overwrite`, first remove what earlier searches left in them, and nothing else.

        Raises:
            UsageError: one of them is a file, or cannot be made or written to.
        """
        for key, folder in (("results_dir", self.results), ("exps_dir", self.experiments)):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if overwrite:
                    self._remove(folder)
                probe = folder / ".mpispeed"
                probe.touch()
                probe.unlink()
            except OSError as error:
                raise _unusable(key, folder, error) from error

    def _remove(self, folder: Path) -> None:
        for path in folder.iterdir():
            is_ours = path.name == MODEL_INFO or _is_experiment(path / "exp.json")
            if path.is_dir() and not path.is_symlink() and is_ours:
                shutil.rmtree(path)
            elif path.is_file() and (path.name in (SUMMARY, OPTIMAL, COMMAND, TRIALS, PICTURE) or _is_experiment(path)):
                path.unlink()

    def of_trial(self, name: str) -> Path:
        """The folder of a trial."""
        return self.results / name

    def describe(self, experiment: Mapping[str, Any]) -> None:
        """Write what is to be tried, as `experiment_of` gives it, before it is."""
        folder = self.of_trial(experiment["name"])
        folder.mkdir(parents=True, exist_ok=True)
        _write(self.experiments / f"{experiment['name']}.json", experiment)
        _write(folder / "exp.json", experiment)
        _write(folder / "ds_config.json", experiment["ds_config"])
        (folder / "cmd.txt").write_text(shlex.join(experiment["arguments"]) + "\n")
        for stale in ("metrics.json", "stdout.log", "stderr.log"):
            (folder / stale).unlink(missing_ok=True)

    def finished(self, experiment: Mapping[str, Any]) -> Mapping[str, float]:
        """Figures of an earlier trial of the same experiment; empty if there is none."""
        folder = self.of_trial(experiment["name"])
        try:
            earlier, metrics = (json.loads((folder / file).read_text()) for file in ("exp.json", "metrics.json"))
        except (OSError, ValueError):
            return {}
        plain = json.loads(json.dumps(experiment))
        is_same = isinstance(earlier, dict) and all(earlier.get(key) == value for key, value in plain.items())
        return metrics if is_same and isinstance(metrics, dict) else {}

    def note(self, row: Row) -> None:
        """Write the end of a trial."""
        folder = self.of_trial(row.name)
        if row.is_good and row.metrics is not None:
            _write(folder / "metrics.json", dict(row.metrics))
        path = folder / "exp.json"
        experiment = json.loads(path.read_text())
        _write(path, {**experiment, "status": row.status, "reason": row.reason})

    def conclude(self, rows: Sequence[Row], metric: str, seconds: float) -> None:
        """Write the tables of a whole search."""
        _write(self.results / TRIALS, [asdict(row) for row in rows])
        (self.results / SUMMARY).write_text(summary(rows, metric, seconds))

    def write_optimal(self, config: Mapping[str, Any], command: str) -> None:
        """Write the best settings and the command that trains with them, for their owner only: they may hold keys."""
        for name, text in ((OPTIMAL, json.dumps(dict(config), indent=2)), (COMMAND, command)):
            write_private(self.results / name, text + "\n")

    def write_model(self, facts: Mapping[str, Any]) -> None:
        """Write the facts about the model."""
        _write(self.of_model() / "model_info.json", dict(facts))

    def of_jobs(self) -> Path:
        """The folder for worker jobs, without those of earlier searches; what else is in it stays.

        All nodes have to see it, so it is no temporary one.
        """
        folder = self.results / JOBS
        for path in folder.glob("job-*"):
            if not path.is_symlink() and (path / TASKS).is_file():
                shutil.rmtree(path)
        return folder

    def of_model(self) -> Path:
        """The folder of the look at the model."""
        folder = self.results / MODEL_INFO
        folder.mkdir(exist_ok=True)
        return folder


def _unusable(key: str, folder: Path, error: OSError) -> UsageError:
    return UsageError(f"autotuning.{key} {folder} cannot be used: {error.strerror or error}; name another folder")


def experiment_of(
    name: str, config: Mapping[str, Any], words: Sequence[str], ranks: int, steps: tuple[int, int]
) -> dict[str, Any]:
    """All that decides what a trial measures, without secrets; `steps` are the first and the last measured one."""
    return {
        "name": name, "ds_config": hide_secrets(config), "num_ranks": ranks, "arguments": hide_in_words(words),
        "measured_steps": list(steps),
    }  # fmt: skip


def _is_experiment(path: Path) -> bool:
    if path.suffix != ".json":
        return False
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"name", "ds_config", "num_ranks"} <= set(found)


def _write(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


# -- tables ----------------------------------------------------------------------------------------------------------


def summary(rows: Sequence[Row], metric: str, seconds: float) -> str:
    """One line for each stage and a last one for all, between pipes, as DeepSpeed's."""
    head = ("tuning_space", "num_experiments", "best_metric_val", "best_exp_name")
    tried = [row for row in rows if row.status != "skipped"]
    lines = [head]
    for stage in sorted({row.stage for row in tried}):
        lines.append(_summed(f"z{stage}", [row for row in tried if row.stage == stage], metric))
    lines.append(_summed("global", tried, metric))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    text.insert(1, "|-" + "-|-".join("-" * width for width in widths) + "-|")
    left_out = len(rows) - len(tried)
    text.append(f"tuning duration: {format_duration(seconds)}")
    text.append(f"total number of experiments: {len(tried)}; discarded without a trial: {left_out}")
    return "\n".join(text) + "\n"


def _summed(name: str, rows: Sequence[Row], metric: str) -> tuple[str, str, str, str]:
    best = best_of(rows, metric)
    return name, str(len(rows)), "" if best is None else f"{best.metric:.4g}", "" if best is None else best.name


HEAD = ("candidate", "stage", "micro-batch", "steps", "batch", "seconds", "predicted", "samples/s", "memory", "")


def cells(row: Row) -> tuple[str, ...]:
    """The cells of one row, as `HEAD` names them."""
    rate = row.train_batch / row.seconds if row.seconds else 0.0
    said = "" if row.status == "ok" else row.status if not row.reason else f"{row.status}: {row.reason}"
    return (
        row.name, str(row.stage), str(row.micro_batch), str(row.micro_steps), str(row.train_batch),
        f"{row.seconds:.4g}" if row.seconds else "", f"{row.predicted_seconds:.4g}" if row.predicted_seconds else "",
        f"{rate:.4g}" if rate else "", format_bytes(row.need_bytes) if row.need_bytes else "", said,
    )  # fmt: skip


def draw(path: Path, rows: Sequence[Row], metric: str) -> None:
    """The figures of all trials in their order, the best so far, and what was predicted.

    Raises:
        UsageError: matplotlib is not installed.
    """
    good = [row for row in rows if row.metric is not None]
    names = {"latency": "seconds of a step", "throughput": "samples per second", "flops": "FLOPS of a rank"}
    with picture(path, 8, 4.5, layout="constrained") as figure:
        axes = figure.add_subplot()
        numbers = range(1, len(good) + 1)
        figures = [row.metric or 0.0 for row in good]
        choose = min if metric == "latency" else max
        for stage in sorted({row.stage for row in good}):
            own = [(n, row.metric) for n, row in zip(numbers, good, strict=True) if row.stage == stage]
            axes.plot(*zip(*own, strict=True), "o", label=f"stage {stage}")
        axes.step(list(numbers), [choose(figures[:n]) for n in numbers], where="post", color="0.5", label="best so far")
        told = [(n, _predicted(row, metric)) for n, row in zip(numbers, good, strict=True) if row.predicted_seconds]
        if told:
            axes.plot(*zip(*told, strict=True), "x", color="0.3", label="predicted")
        axes.set_xlabel("trial")
        axes.set_ylabel(names[metric])
        axes.set_xticks(list(numbers), [row.name for row in good], rotation=60, ha="right", fontsize=7)
        axes.legend(fontsize=8)


def _predicted(row: Row, metric: str) -> float:
    """The predicted figure: latency, and what is proportional to its inverse."""
    if metric == "latency":
        return row.predicted_seconds
    return (row.metric or 0.0) * row.seconds / row.predicted_seconds
