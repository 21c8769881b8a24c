"""A search for one file and one script, as `mpispeed tune` and DeepSpeed's `Autotuner` start it."""

from __future__ import annotations

import copy
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.plain import printable
from mpispeed.config.load import LoadedConfig, read_source, validate
from mpispeed.config.problems import refuse
from mpispeed.config.text import decode
from mpispeed.launch import srun
from mpispeed.launch.command import takes_srun
from mpispeed.launch.hosts import Host, count_ranks
from mpispeed.launch.options import Wishes
from mpispeed.tuning import steps
from mpispeed.tuning.job import WorkerJob
from mpispeed.tuning.results import OPTIMAL, PICTURE, SUMMARY, Folders, Row, draw
from mpispeed.tuning.space import MICRO_BATCH, SECTION, STAGE, Space, lists_of, put
from mpispeed.tuning.tuner import Found, Tuner, mapped_value, mappings_of
from mpispeed.tuning.words import config_of, with_config

if TYPE_CHECKING:
    import argparse

    from mpispeed.config.autotuning import Autotuning


@dataclass(frozen=True)
class Request:
    """Settings and script to be tuned, and the job that tries them.

    Attributes:
        file: of settings.
        script: the words of the script: its path, or -m and a module.
        arguments: its own words.
        ranks: of the job; None: all slots of the hosts, the tasks of the SLURM job, else 1.
        mpi: as for `launch.plan_launch`.
        wishes: hosts, launcher and variables.
        is_debug: errors come with a traceback.
        memory_bytes: of a node, in place of what its machine has left.
    """

    file: Path
    script: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    ranks: int | None = None
    mpi: str = "auto"
    wishes: Wishes = field(default_factory=Wishes)
    is_debug: bool = False
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Answer:
    """The end of a search.

    Attributes:
        found: rows, and the best candidate.
        folders: where all files are.
        arguments: the script's words for the best settings; empty without any.
        notes: sentences about what could not be written.
    """

    found: Found
    folders: Folders
    arguments: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def summary(self) -> str:
        """The table of DeepSpeed."""
        return (self.folders.results / SUMMARY).read_text()

    @property
    def optimal(self) -> Path:
        """The file of the best settings."""
        return self.folders.results / OPTIMAL


def search(request: Request, say: Callable[[Row | str], None] = lambda _: None) -> Answer:
    """Search for the best settings of a script, and write all files.

    Args:
        request: what is to be tuned.
        say: called with each row as soon as it is known.

    Raises:
        ConfigError: the file is wrong, or has no candidates.
        UsageError: there is no launcher, a folder cannot be used or has another search, or the script does not come to
            `initialize`.
    """
    raw, tuning = read(request.file)
    check_files(tuning)
    ranks = count(request)
    least = mapped_value(request.arguments, mappings_of(tuning), MICRO_BATCH)
    space, folders = Space(raw, tuning, ranks, least), Folders(Path(tuning.results_dir), Path(tuning.exps_dir))
    space.first()  # before anything is started
    words = [*request.script, *request.arguments]
    with (
        folders.claimed(),
        WorkerJob(
            words, ranks, folders.of_jobs(), mpi=request.mpi, wishes=request.wishes, is_debug=request.is_debug
        ) as job,
    ):
        tuner = Tuner(
            space, tuning, job, folders, ranks=ranks, words=request.arguments, memory_bytes=request.memory_bytes,
            say=say,
        )  # fmt: skip
        found = tuner.run()
    return _conclude(request, raw, tuning, ranks, tuner, found, folders)


def _conclude(
    request: Request, raw: Mapping[str, Any], tuning: Autotuning, ranks: int, tuner: Tuner, found: Found,
    folders: Folders,
) -> Answer:  # fmt: skip
    """Write the best settings, the command that trains with them, and the picture."""
    notes, words = [], list[str]()
    if found.best is not None:
        best = optimal_of(raw, found.best.point)
        words = with_config(tuner.arguments(best), folders.results / OPTIMAL)
        folders.write_optimal(best, shlex.join(["mpispeed", "run", "-n", str(ranks), *request.script, *words]))
        try:
            draw(folders.results / PICTURE, found.rows, tuning.metric)
        except UsageError as error:
            notes.append(f"no picture: {error}")
    return Answer(found, folders, words, notes)


def optimal_of(raw: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    """The file's settings with those of the best candidate, without the section of the search."""
    sizes = ("train_batch_size", MICRO_BATCH, "gradient_accumulation_steps")
    found = {key: copy.deepcopy(value) for key, value in raw.items() if key not in (SECTION, *sizes)}
    for key, value in point.items():
        put(found, key, value)
    return found


# -- the file and the ranks --------------------------------------------------------------------------------------------


def read(file: Path) -> tuple[dict[str, Any], Autotuning]:
    """The content of a file with lists, and its section `autotuning`.

    Raises:
        ConfigError: it cannot be read, or something in it is wrong, whatever value of a list is taken first.
    """
    content, where = read_source(file)
    raw, problems = decode(content, where) if isinstance(content, str) else (dict(content), [])
    if problems:
        raise refuse(where, problems)
    return raw, _checked(raw, where).config.autotuning


def _checked(raw: Mapping[str, Any], where: str) -> LoadedConfig:
    plain = copy.deepcopy(dict(raw))
    for key, values in lists_of(raw).items():
        put(plain, key, values[0])
    if plain.get("zero_optimization", {}).get("stage") == "all":
        put(plain, STAGE, 0)
    return validate(plain, where)


def check_files(tuning: Autotuning) -> None:
    """Refuse names of files that could not be written after a long search.

    Raises:
        UsageError: naming the key.
    """
    for key in ("metric_path", "model_info_path"):
        name = getattr(tuning, key)
        if name is None:
            continue
        path = Path(name)
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            msg = f"autotuning.{key} {printable(name)} cannot be written; name a file in a folder that is there"
            raise UsageError(msg)


def count(request: Request, environ: Mapping[str, str] | None = None) -> int:
    """Ranks of the job, as `plan_launch` counts them; in a step of the tuner's own, those of the whole allocation.

    Raises:
        ConfigError: the launcher is none of those there are.
        UsageError: a variable of SLURM is no number, or the step has several tasks.
    """
    environ = steps.outside(os.environ if environ is None else environ)
    if request.wishes.hosts:
        return count_ranks(request.wishes.hosts)
    if request.ranks is not None:
        return request.ranks
    return srun.allocation_size(environ)[0] if takes_srun(request.wishes.launcher, environ) else 1


# -- DeepSpeed's class -------------------------------------------------------------------------------------------------


class Autotuner:
    """A search, as DeepSpeed's launcher makes it.

    Args:
        args: words of the launcher: `user_script`, `user_args`; and, where there are any, `num_nodes`, `num_gpus`.
        active_resources: name of each host -> its slots.

    Raises:
        ConfigError: the script's words name no file of settings, or more hosts or slots are asked for than there are.
    """

    def __init__(self, args: argparse.Namespace, active_resources: Mapping[str, Sequence[int]]) -> None:
        self.args = args
        slots = {name: tuple(found) for name, found in active_resources.items()}
        nodes, gpus = (int(getattr(args, name, -1) or -1) for name in ("num_nodes", "num_gpus"))
        least = min((len(found) for found in slots.values()), default=0)
        if nodes > len(slots) or gpus > least:
            msg = (
                f"--num_nodes {nodes}, --num_gpus {gpus}: there are {len(slots)} hosts with at least {least} slots "
                "each; ask for fewer"
            )
            raise ConfigError(msg)
        self.exp_num_nodes, self.exp_num_gpus = nodes if nodes > 0 else len(slots), gpus if gpus > 0 else least
        words = tuple(getattr(args, "user_args", ()))
        file = config_of(words)
        if file is None:
            msg = "the script's words name no file of settings: give --deepspeed_config FILE.json"
            raise ConfigError(msg)
        chosen = [Host(name, found[: self.exp_num_gpus]) for name, found in list(slots.items())[: self.exp_num_nodes]]
        self._request = Request(file, (str(args.user_script),), words, wishes=Wishes(hosts=tuple(chosen)))
        self._request = replace(self._request, ranks=self.exp_num_nodes * self.exp_num_gpus)
        self._answer: Answer | None = None

    def tune(self) -> None:
        """Search, and write all files. Raises as `search`."""
        self._answer = search(self._request)

    @property
    def answer(self) -> Answer:
        """The end of the search.

        Raises:
            UsageError: `tune` was not called.
        """
        if self._answer is None:
            msg = "there are no results yet; call tune() first"
            raise UsageError(msg)
        return self._answer

    def print_tuning_results(self) -> str:
        """The table of the search, which is also in summary.txt."""
        return self.answer.summary

    def write_optimal_config(self) -> Path:
        """The file of the best settings; `tune` has written it."""
        return self.answer.optimal
