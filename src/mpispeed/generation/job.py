"""A job of batch generation from its first line to its last: every prompt of a file answered once, over many starts.

    settings -> prompts, batches, identity -> what earlier starts have finished -> model -> batches by the shared
    counter -> results, or the hand-off to the job that goes on

What is finished is read from files alone; the counter only shares out what is left.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpispeed import watchdog
from mpispeed.base.errors import MpispeedError, UsageError
from mpispeed.base.version import VERSION
from mpispeed.engine.distributed import join_world
from mpispeed.generation import results
from mpispeed.generation.batches import Batches, cut
from mpispeed.generation.counter import GOES_ON, NONE, Counter, Report, Stop
from mpispeed.generation.decoding import Answerer, Dropped, Job
from mpispeed.generation.finished import Finished, Writer, scan
from mpispeed.generation.identity import ANSWERED_FILE, Identity, OtherJob, claim, lock, put_text
from mpispeed.generation.model import Described, Opened, describe_model, open_model
from mpispeed.generation.prompt_index import Index
from mpispeed.generation.prompts import Prompts, open_prompts
from mpispeed.generation.report import Tally
from mpispeed.generation.requests import Options
from mpispeed.generation.stopping import SIGNALS, Heed, Plan, Shift, Steward
from mpispeed.generation.texts import Encoder
from mpispeed.walltime.requests import SignalWatch

if TYPE_CHECKING:
    from mpispeed.mesh import World
    from mpispeed.store.owner import OwnerLock

log = logging.getLogger(__name__)

HDF5_SUFFIXES, JSON_SUFFIXES = (".h5", ".hdf5"), (".jsonl", ".json")

WAIT_SECONDS = 3600.0
"""Longest wait in a collective: ranks wait for the first one to look at all prompts, and for weights."""

Open = Callable[[Described, "Settings"], Opened]


@dataclass(frozen=True)
class Settings:
    """Everything that a job is asked for.

    Attributes:
        model: folder of the model.
        prompts: file of prompts.
        outputs: files of results: HDF5, lines of JSON, or one of each.
        work: folder for what is finished; beside the first file of results by default.
        model_config: folder with config and tokenizer, of a model that is a checkpoint.
        tensor: ranks that share each layer.
        dtype: of the weights; None: as the config of the model says.
        inference: settings of `mpispeed.init_inference`.
        options: of generation, for prompts that have none of their own.
        batch_size: most prompts of a batch.
        max_batch_tokens: most tokens of a batch.
        too_long: what becomes of prompts that are too long: "skip", "error" or "truncate".
        prompt_field: the entry of prompts in their file.
        id_field: that of ids.
        adds_special_tokens: whether the tokenizer adds its own.
        chat_template: a template in place of the tokenizer's.
        with_token_ids: lines of JSON have token ids.
        plan: how the job ends.
    """

    model: Path
    prompts: Path
    outputs: tuple[Path, ...]
    work: Path | None = None
    model_config: Path | None = None
    tensor: int = 1
    dtype: str | None = None
    inference: Mapping[str, Any] = field(default_factory=dict)
    options: Options = field(default_factory=lambda: Options(max_new_tokens=64, n=1))
    batch_size: int = 32
    max_batch_tokens: int | None = None
    too_long: str = "skip"
    prompt_field: str = "prompt"
    id_field: str | None = "id"
    adds_special_tokens: bool = True
    chat_template: str | None = None
    with_token_ids: bool = False
    plan: Plan = field(default_factory=Plan)

    @property
    def work_folder(self) -> Path:
        """Where finished batches are kept."""
        first = self.outputs[0]
        return self.work or first.with_name(f"{first.name}.work")

    def of_identity(self) -> dict[str, Any]:
        """What has an influence on results, beside the files."""
        own = {name: value for name, value in asdict(self.options).items() if value is not None}
        return {
            **own, "tensor": self.tensor, "dtype": self.dtype or "as saved", "batch_size": self.batch_size,
            "max_batch_tokens": self.max_batch_tokens, "too_long": self.too_long, "field": self.prompt_field,
            "id_field": self.id_field, "adds_special_tokens": self.adds_special_tokens,
            "chat_template": self.chat_template, "inference": json.loads(json.dumps(dict(self.inference), default=str)),
        }  # fmt: skip

    @property
    def hdf5_path(self) -> Path | None:
        """The file of results in HDF5."""
        return next((path for path in self.outputs if path.suffix in HDF5_SUFFIXES), None)

    @property
    def json_path(self) -> Path | None:
        """The file of results as lines of JSON."""
        return next((path for path in self.outputs if path.suffix in JSON_SUFFIXES), None)


@dataclass(frozen=True)
class Outcome:
    """The end of a start.

    Attributes:
        is_finished: all prompts are answered and the results are written.
        stop: why it ended before; `stop.asked` is 0 if it did not.
        longest_wait_seconds: that a group waited for its next batch, on rank 0.
    """

    is_finished: bool
    stop: Stop = GOES_ON
    longest_wait_seconds: float = 0.0


def _open(described: Described, settings: Settings) -> Opened:
    return open_model(described, dtype=settings.dtype, tensor=settings.tensor, settings=settings.inference)


def run(settings: Settings, *, open_with: Open = _open) -> Outcome:
    """Answer what is left of the prompts, and write the results if that was all.

    `open_with` makes the model ready.

    Collective over: all ranks of the job, which it starts.

    Raises:
        MpispeedError: on every rank, if something does not fit or cannot be read or written.
    """
    world = join_world()
    watchdog.start.allow(hang_seconds=WAIT_SECONDS)
    with world.comm.together(UsageError):
        if world.rank == 0:
            _check(settings, world)
    with world.comm.together(UsageError):
        described = describe_model(settings.model, settings.model_config)
    with _prompts(world, settings) as prompts:
        encoder = Encoder(
            described.tokenizer, vocabulary=described.vocabulary, adds_special_tokens=settings.adds_special_tokens,
            chat_template=settings.chat_template,
        )  # fmt: skip
        batches = _batches(world, settings, described, prompts, encoder)
        identity = Identity(
            prompts.digest, batches.digest, described.digest, settings.of_identity(), len(prompts), len(batches),
            len(batches.left_out), {"mpispeed": VERSION},
        )  # fmt: skip
        job = Job(described, prompts, batches, encoder, settings.options)
        return Start(world, settings, job, identity).run(open_with)


class Start:
    """One start of a job whose prompts and batches are known."""

    def __init__(self, world: World, settings: Settings, job: Job, identity: Identity) -> None:
        self._world, self._settings, self._job, self._identity = world, settings, job, identity
        self._work = settings.work_folder
        self._shift: Shift | None = None
        self._lock: OwnerLock | None = None

    def run(self, open_with: Open) -> Outcome:
        """Collective over: all ranks."""
        try:
            return self._run(open_with)
        finally:
            if self._lock is not None:
                self._lock.close()

    def _run(self, open_with: Open) -> Outcome:
        comm = self._world.comm
        found, state = None, ""
        with comm.together(UsageError, doing=""):
            if self._world.rank == 0:
                found, state = self._look()
        state = comm.share(state)
        if state:
            log.info("generate   %s", state)
            return Outcome(is_finished=True)
        todo = comm.share(found.left() if found is not None else None)
        try:
            if self._is_stopped():
                return Outcome(is_finished=False)
            stop, waited = GOES_ON, 0.0
            if len(todo):
                stop, waited = self._answer(todo, found, open_with)
            elif self._shift is not None and found is not None:
                self._shift.begin(int(found.done.sum()))
                self._write()
                self._shift.end(self._identity.count, GOES_ON)
        except BaseException as error:
            if self._shift is not None:
                self._shift.fail(error)
            raise
        comm.barrier()
        return Outcome(not stop.asked, stop, waited)

    # -- before --------------------------------------------------------------------------------------------------

    def _look(self) -> tuple[Finished | None, str]:
        """What earlier starts have finished; a text if there is nothing to do. On rank 0."""
        self._lock = lock(self._work)
        is_resumed = claim(self._work, self._identity)
        if is_resumed and (self._work / ANSWERED_FILE).is_file():
            lacking = [path for path in self._settings.outputs if not path.exists()]
            if not lacking:
                names = " and ".join(map(str, self._settings.outputs))
                return None, f"all {self._identity.requests} prompts were answered before, in {names}: nothing is done"
            msg = (
                f"all prompts were answered before, but {lacking[0]} is not there any more; if they are to be answered "
                f"again, remove {self._work}"
            )
            raise UsageError(msg)
        for path in self._settings.outputs:
            results.refuse_taken(path, self._identity, is_resumed=is_resumed)
        found = scan(self._work, self._identity, self._job.batches, sets_aside=True)
        for note in found.notes:
            log.warning("generate   %s", note)
        self._shift = Shift(self._settings.plan, self._work)
        rival = self._shift.find_rival()
        if rival:
            raise UsageError(rival)
        self._tell(found, is_resumed=is_resumed)
        return found, ""

    def _tell(self, found: Finished, *, is_resumed: bool) -> None:
        if self._job.prompts.index.ignored:
            # a misspelt option would be among them
            log.info("prompts    entries that are not used: %s", ", ".join(self._job.prompts.index.ignored))
        done, identity = int(found.done.sum()), self._identity
        what = f"{identity.requests} prompts in {identity.count} batches"
        if identity.left_out:
            what += f"; {identity.left_out} more are too long for the model and are not answered"
        if is_resumed:
            log.info("generate   %s; %d batches are finished, found in %s", what, done, self._work)
        else:
            log.info("generate   %s; finished ones go to %s", what, self._work)

    def _is_stopped(self) -> bool:
        """True if a file STOP is left from before. Collective over: all ranks."""
        is_stopped = self._shift is not None and self._shift.is_stopped()
        if is_stopped and self._shift is not None:
            log.info("walltime   %s is there: nothing is started; remove it to go on", self._shift.folder / "STOP")
        return bool(self._world.comm.share(is_stopped))

    # -- answers -------------------------------------------------------------------------------------------------

    def _answer(self, todo: np.ndarray, found: Finished | None, open_with: Open) -> tuple[Stop, float]:
        """Answer batches until none is left or the ranks are to stop. Collective over: all ranks."""
        world, signals = self._world, SignalWatch(SIGNALS)
        signals.install()
        try:
            opened = open_with(self._job.described, self._settings)
            tally = self._tally(found)
            counter = Counter(world, len(todo), tally.note)
            heed = Heed(counter, world.rank, signals)
            with self._stewarding(counter, tally):
                answerer = Answerer(self._job, opened, heed.must_drop)
                last = self._loop(todo, counter, heed, answerer)
                counter.leave(last)
            stop = counter.heed()
            if self._shift is not None:
                log.info("generate   %s", tally.summary())
                if tally.finished == self._identity.count:
                    stop = GOES_ON  # it came when all was done
                    self._write()
                self._shift.end(tally.finished, stop)
            counter.close()
            return world.comm.share((stop, tally.longest_wait_seconds))
        finally:
            signals.restore()

    def _tally(self, found: Finished | None) -> Tally:
        batches = self._job.batches
        if found is None:
            return Tally(0, 0, 0, 0)
        sizes = np.diff(batches.starts)
        return Tally(len(batches), int(sizes.sum()), int(found.done.sum()), int(sizes[found.done].sum()))

    @contextmanager
    def _stewarding(self, counter: Counter, tally: Tally) -> Iterator[None]:
        """Context in which rank 0 watches time and files."""
        if self._shift is None:
            yield
            return
        self._shift.begin(tally.found_batches)
        steward = Steward(counter, tally, self._settings.plan, self._shift.job_end, self._shift.folder)
        steward.start()
        try:
            yield
        finally:
            steward.close()

    def _loop(self, todo: np.ndarray, counter: Counter, heed: Heed, answerer: Answerer) -> Report:
        """Answer batches; the report of the last one. Collective over: the ranks that share layers."""
        tensor, report = answerer.opened.tensor, Report()
        is_first = tensor.rank == 0
        with Writer(
            self._work, self._identity, start=self._start_name(), group=self._world.rank // tensor.size
        ) as writer:
            if is_first:
                counter.ask(report)
            while True:
                heed.must_drop()
                place = tensor.share(counter.take() if is_first else NONE)
                if place == NONE:
                    return report
                waited = counter.waited_seconds
                if is_first:
                    counter.ask(report)
                report = Report()
                try:
                    answers = answerer.answer(int(todo[place]))
                except Dropped:
                    continue
                if is_first:
                    writer.add(answers)
                    tokens = sum(len(answer.tokens) for answer in answers.answers)
                    report = Report(
                        answers.batch, len(answers.answers), tokens, int(answers.seconds * 1e6), int(waited * 1e6)
                    )

    def _start_name(self) -> str:
        """A name that no other start has; equal on all ranks is not needed."""
        return f"{os.environ.get('SLURM_JOB_ID', 'start')}-{secrets.token_hex(6)}"

    # -- results -------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        """Write the results, then forget the finished batches. On rank 0."""
        if self._world.rank:
            return
        found = scan(self._work, self._identity, self._job.batches)
        if not found.done.all():
            msg = f"{int((~found.done).sum())} batches that were finished cannot be read any more; start the job again"
            raise OtherJob(msg)
        settings = self._settings
        results.write(
            self._job.prompts, self._job.batches, found, self._identity, hdf5_path=settings.hdf5_path,
            json_path=settings.json_path, with_token_ids=settings.with_token_ids,
        )  # fmt: skip
        put_text(
            self._work / ANSWERED_FILE, json.dumps({"results": [str(path.resolve()) for path in settings.outputs]})
        )
        for path in self._work.glob("*.finished*"):
            path.unlink(missing_ok=True)
        log.info("generate   %s: all prompts are answered", " and ".join(map(str, settings.outputs)))


# -- what is asked for -----------------------------------------------------------------------------------------------


def _check(settings: Settings, world: World) -> None:
    """Refuse settings that cannot hold, on rank 0, before anything is read."""
    for path in settings.outputs:
        if path.suffix not in (*HDF5_SUFFIXES, *JSON_SUFFIXES):
            msg = f"--out {path}: results are HDF5 (.h5) or lines of JSON (.jsonl), by the end of the name"
            raise UsageError(msg)
        if not path.parent.is_dir():
            msg = f"--out {path}: there is no folder {path.parent}; make it, on a file system that all nodes see"
            raise UsageError(msg)
    if len(settings.outputs) > 1 and (settings.hdf5_path is None or settings.json_path is None):
        msg = f"--out is given {len(settings.outputs)} times; one file of HDF5 and one of lines of JSON can be written"
        raise UsageError(msg)
    if settings.tensor < 1 or world.size % settings.tensor:
        whole = ", ".join(str(count) for count in range(1, world.size + 1) if world.size % count == 0)
        msg = f"--tensor {settings.tensor} does not divide the {world.size} ranks; use one of {whole}"
        raise UsageError(msg)
    if settings.options.max_new_tokens is None:
        msg = "--max-new-tokens is not given"
        raise UsageError(msg)


@contextmanager
def _prompts(world: World, settings: Settings) -> Iterator[Prompts]:
    """Context with the prompts; rank 0 scans the file. Collective over: all ranks."""
    own: Prompts | None = None

    def opened(index: Index | None = None) -> Prompts:
        samples = settings.options.n or 1
        return open_prompts(
            settings.prompts, field=settings.prompt_field, id_field=settings.id_field, samples=samples, index=index
        )

    with world.comm.together(UsageError, plain=MpispeedError):
        if world.rank == 0:
            own = opened()
    index = world.comm.share(own.index if own is not None else None)
    with world.comm.together(UsageError, plain=MpispeedError):
        found = own or opened(index)
    with found:
        yield found


def _batches(world: World, settings: Settings, described: Described, prompts: Prompts, encoder: Encoder) -> Batches:
    """Cut the prompts; each rank counts the tokens of its share. Collective over: all ranks."""
    first, last = (len(prompts) * (world.rank + more) // world.size for more in (0, 1))
    lengths, limits = np.zeros(0, np.int32), np.zeros(0, np.int32)
    most = settings.options.max_new_tokens or 0
    with world.comm.together(UsageError, plain=MpispeedError):
        lengths = encoder.lengths(prompts, first, last)
        own = (prompts[number].options.max_new_tokens for number in range(first, last))
        limits = np.array([limit or most for limit in own], np.int32)
    told = world.comm.gather_objects((lengths, limits))
    with world.comm.together(UsageError, plain=MpispeedError):
        return cut(
            np.concatenate([each for each, _ in told]), np.concatenate([each for _, each in told]),
            batch_size=settings.batch_size, max_batch_tokens=settings.max_batch_tokens,
            max_positions=described.most_positions, too_long=settings.too_long,
        )  # fmt: skip
