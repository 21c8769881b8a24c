"""A scaling study: one run for each number of ranks and repetition, each with a config of its own size."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.plain import hide_secrets
from mpispeed.launch import srun
from mpispeed.launch.command import plan_launch
from mpispeed.launch.efficiency import Run, read_run
from mpispeed.launch.env import usable_cores

MODES = ("strong", "weak")
CONFIG_FLAGS = ("--deepspeed_config", "--deepspeed-config")
"""Flags that take the config in scripts; a --config may be anything."""

RESULT_FILE = "MPISPEED_SCALE_FILE"
NAME = "study.json"
_TRIANGLE = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_SHOWN_LINES = 15
_END_SECONDS = 10
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 10.0, 60.0


@dataclass(frozen=True, slots=True)
class Study:
    """Settings of a study, as stored in `study.json`.

    Attributes:
        words: the script and its arguments.
        ranks: the numbers of ranks.
        mode: strong (the batch of all ranks stays) or weak (that of each rank stays).
        repeat: runs of each size.
        skip: first steps of a run, which do not count.
    """

    words: tuple[str, ...]
    ranks: tuple[int, ...]
    mode: str
    repeat: int = 1
    skip: int = 3

    def cases(self) -> Iterator[tuple[int, int]]:
        """(ranks, repetition): all sizes in turn, so that changes over time affect them alike."""
        return ((ranks, number) for number in range(self.repeat) for ranks in self.ranks)


@dataclass(frozen=True, slots=True)
class Case:
    """One run of a study, and its folder."""

    ranks: int
    folder: Path
    words: tuple[str, ...]

    @property
    def result(self) -> Path:
        """File of the run's results."""
        return self.folder / "steps.json"

    @property
    def variables(self) -> dict[str, str]:
        """Variables for the run."""
        return {RESULT_FILE: str(self.result)}


def parse_ranks(text: str) -> tuple[int, ...]:
    """The numbers in "1,2,4", ascending.

    Raises:
        ConfigError: they are none, or fewer than two.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) for word in words) or len(set(words)) < 2:
        msg = f"--ranks is {text!r}; expected at least two numbers of ranks, such as 1,2,4"
        raise ConfigError(msg)
    return tuple(sorted(set(map(int, words))))


# -- batches ---------------------------------------------------------------------------------------------------------


def batch_keys(config: Mapping[str, Any], mode: str, ranks: int, first: int) -> dict[str, int]:
    """Batch settings of a config for a number of ranks; `first` is the smallest one of the study.

    Raises:
        ConfigError: the config does not tell its batch, or it cannot be cut so.
    """
    total, micro, steps = (_positive(config, key) for key in _TRIANGLE)
    if _section(config, "elasticity").get("enabled"):
        msg = "elasticity chooses the batch by itself; disable it in the config for a scaling study"
        raise ConfigError(msg)
    others = _others(config)
    if ranks % others or first % others:
        msg = f"{first} and {ranks} ranks: the config has {others} ranks for each sample, and needs multiples"
        raise ConfigError(msg)
    here, at_first = ranks // others, first // others
    if mode == "weak":
        if micro is None and total is not None:
            micro = _quotient(total, (steps or 1) * at_first, first)
        if micro is None:
            raise ConfigError(_NO_BATCH)
        return {_TRIANGLE[1]: micro, _TRIANGLE[2]: steps or (_quotient(total, micro * at_first, first) if total else 1)}
    if total is None:
        if micro is None:
            raise ConfigError(_NO_BATCH)
        total = micro * (steps or 1) * at_first
    share = _quotient(total, here, ranks)
    if micro is None:
        return {_TRIANGLE[0]: total, _TRIANGLE[2]: steps if steps and share % steps == 0 else 1}
    # As large as possible without exceeding the config's, so that a rank needs no more memory.
    fitting = max(size for size in range(1, min(micro, share) + 1) if share % size == 0)
    return {_TRIANGLE[0]: total, _TRIANGLE[1]: fitting}


_NO_BATCH = f"the config has neither {_TRIANGLE[0]} nor {_TRIANGLE[1]}; a scaling study has to know the batch"


def _positive(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value in (None, "auto"):
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        msg = f"{key} is {value!r} in the config; expected a positive whole number"
        raise ConfigError(msg)
    return value


def _quotient(total: int, parts: int, ranks: int) -> int:
    if total % parts:
        msg = f"{_TRIANGLE[0]} {total} cannot be cut for {ranks} ranks; choose a multiple of {parts}, or other --ranks"
        raise ConfigError(msg)
    return total // parts


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _others(config: Mapping[str, Any]) -> int:
    """Ranks that share one part of the batch: stages of a pipeline, ranks of a sequence and tensor slices."""
    tensor = _section(config, "tensor_parallel")
    slices = [tensor.get("autotp_size"), _section(tensor, "tensor_parallel").get("tp_size")]
    found = [number for number in slices if isinstance(number, int)]
    more = _section(config, "pipeline").get("stages"), config.get("sequence_parallel_size")
    return math.prod([max([1, *found]), *(number for number in more if isinstance(number, int))])


# -- runs ------------------------------------------------------------------------------------------------------------


def find_config(words: Sequence[str]) -> tuple[int, str, Path] | None:
    """Find (position, text before the path in that word, path) of the config among the words; None without one."""
    for number, word in enumerate(words[1:], 1):
        flag, equals, value = word.partition("=")
        if flag in CONFIG_FLAGS and equals:
            return number, f"{flag}=", Path(value)
        if words[number - 1] in CONFIG_FLAGS:
            return number, "", Path(word)
    return None


def prepare(study: Study, folder: Path) -> list[Case]:
    """Make the folder of a study, and for each run one with a config of its size; returns the runs in turn.

    Raises:
        ConfigError: the config cannot be used at one of the sizes.
        UsageError: the config cannot be read, or the folder has a study already.
    """
    place = find_config(study.words)
    config = _read_config(place[2]) if place else None
    sized = {} if config is None else {n: batch_keys(config, study.mode, n, study.ranks[0]) for n in study.ranks}
    if (folder / NAME).exists():
        msg = f"{folder} has a study already; read it with --collect {folder}, or choose another --folder"
        raise UsageError(msg)
    cases = []
    for ranks, number in study.cases():
        case = _case(study, folder, ranks, number)
        case.folder.mkdir(parents=True, exist_ok=True)
        if config is not None:
            kept = {key: value for key, value in hide_secrets(config).items() if key not in _TRIANGLE}
            (case.folder / "config.json").write_text(json.dumps({**kept, **sized[ranks]}, indent=2) + "\n")
        cases.append(case)
    (folder / NAME).write_text(json.dumps(asdict(study), indent=1) + "\n")
    return cases


def _case(study: Study, folder: Path, ranks: int, number: int) -> Case:
    own, words, place = folder / f"ranks-{ranks}-run-{number}", list(study.words), find_config(study.words)
    if place:
        words[place[0]] = f"{place[1]}{own / 'config.json'}"
    return Case(ranks, own, tuple(words))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        msg = f"the config {path} cannot be read: {error}"
        raise UsageError(msg) from error
    if not isinstance(found, dict):
        msg = f"the config {path} is a {type(found).__name__}; expected an object"
        raise UsageError(msg)
    return found


def threads_of(most: int, environ: Mapping[str, str] | None = None) -> int:
    """Threads of a rank, equal at all sizes, or they could not be compared: its share of the cores at the largest one.

    Raises:
        UsageError: a variable of SLURM is not a number.
    """
    environ = os.environ if environ is None else environ
    if srun.is_inside_allocation(environ):
        nodes = srun.allocation_size(environ)[1]
        share = srun.cores_per_rank(-(-most // nodes), environ)
        if share is not None:
            return share
    return max(1, usable_cores() // most)


def run_case(case: Case, runner: Sequence[str], threads: int, mpi: str = "auto") -> None:
    """Run one case with mpirun or srun, and wait; its output goes to a file.

    Args:
        case: the run.
        runner: the command of a rank, before the script.
        threads: of each rank if the user does not say; equal for all sizes, which could not be compared otherwise.
        mpi: as in `plan_launch`.

    Raises:
        UsageError: it fails, or ends without having written its times.
    """
    environ = {"OMP_NUM_THREADS": str(threads), **os.environ, **case.variables, "MPISPEED_RUN_DIR": str(case.folder)}
    launch = plan_launch([*runner, *case.words], case.ranks, mpi=mpi, environ=environ)
    log = case.folder / "output.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            launch.argv, env={**environ, **launch.added}, stdout=file, stderr=file, stdin=subprocess.DEVNULL
        )
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    if code or not case.result.exists():
        last = "\n".join(log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])
        none = (
            "took 0 steps of an engine: a run that goes on from a finished one has none left; else, does it train with "
            "mpispeed.initialize?"
        )
        what = f"ended with {code}" if code else none
        msg = f"the run on {case.ranks} ranks {what}\n{last}\n(all of it: {log}; again: {shlex.join(launch.argv)})"
        raise UsageError(msg)


def collect(folder: Path) -> tuple[Study, list[Run], list[Path]]:
    """Return the study prepared in this folder, its runs that have ended, and the missing results.

    Raises:
        UsageError: there is no study.
    """
    try:
        found = json.loads((folder / NAME).read_text())
        study = Study(**{**found, "words": tuple(found["words"]), "ranks": tuple(found["ranks"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        msg = f"{folder} has no study of mpispeed scale: {error}"
        raise UsageError(msg) from error
    results = [_case(study, folder, *case).result for case in study.cases()]
    there = [path for path in results if path.exists()]
    return study, [read_run(path) for path in there], [path for path in results if path not in there]


def wait_for(
    jobs: Sequence[str],
    ended_of: Callable[[Sequence[str]], set[str] | None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until all jobs are over; a question without an answer is asked again."""
    left, pause = list(jobs), _FIRST_PAUSE_SECONDS
    while True:
        ended = ended_of(left) or set()
        left = [job for job in left if job not in ended]
        if not left:
            return
        sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)
