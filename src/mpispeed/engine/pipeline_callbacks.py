"""Callbacks of the pipeline executor into an engine: data, passes through the model, reductions, losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from mpispeed.base.device import HOST
from mpispeed.base.errors import AgreementError, DataEnded, PipelineError, UsageError
from mpispeed.base.events import Event
from mpispeed.base.tensor_tree import move
from mpispeed.engine.backward import backward_scaled, end_scale, require_scalar, scale_loss
from mpispeed.engine.slot_losses import slot_means
from mpispeed.engine.step import BatchFailed
from mpispeed.nn.sync_norm import SyncedNorm
from mpispeed.pipe import instructions as do
from mpispeed.pipe.exchange import MISSING
from mpispeed.pipe.module import PipelineModule

if TYPE_CHECKING:
    from mpispeed.base.split_grads import Backlog
    from mpispeed.engine.build.parts import Parts
    from mpispeed.mesh.comm import Comm
    from mpispeed.pipe.run import Executor
    from mpispeed.pipe.schedule import PipeSchedule

ALIKE_SECONDS = 5.0
"""How long a rank whose layers have failed waits for those that its layers communicate with, to hear the same."""

SHOWN_CHARACTERS = 2000


class FeedEnded(UsageError):
    """A stage has no batch to load. A StopIteration would not get through the generators between here and the user."""

    def __init__(self, text: str, taken: int) -> None:
        """Args: `taken` is the number of micro-batches that came before."""
        super().__init__(text)
        self.taken = taken


class StageDuties:
    """Callbacks of one stage in training and evaluation. See `pipe.run.Duties`.

    Attributes:
        data: iterator over batches, on first and last stages.
        batch_fn: applied to every batch.
        mean_loss: mean loss of the last training batch over micro-batches and data ranks; on every rank.
        extra_losses: means of the additional losses that the module reported; on every rank.
        last_outputs: outputs of the last micro-batch that was evaluated, on the last stage.
        is_at_boundary: gradients are being reduced, or the update runs.
    """

    def __init__(self, parts: Parts, model: PipelineModule, finish: Callable[[float], None]) -> None:
        """Args: `finish` runs the update; it gets the mean loss. Collective over: the pipe axis."""
        self._parts, self._model, self._finish = parts, model, finish
        self.data: Iterator[Any] | None = None
        self.batch_fn: Callable[[Any], Any] | None = None
        self.mean_loss, self.extra_losses, self.last_outputs = 0.0, dict[str, float](), None
        self.is_at_boundary = False
        self._feed: Iterator[Any] | None = None
        self._first: list[Any] = []  # a batch that was taken by `prepare`
        self._spare: tuple[Any, Any] | None = None  # the last pair that was loaded, where layers meet other ranks
        self._is_training = self._computes_loss = True
        self._micro_batches, self._taken = 1, 0
        self._losses: list[torch.Tensor] = []
        self._extras: dict[str, dict[int, float]] = {}  # name -> micro-batch -> value
        self._passes: Counter[int] = Counter()  # forward passes of this batch, by chunk
        self._held = ExitStack()
        self._met = _met(parts, model)

    # -- before and after a batch ------------------------------------------------------------------------------------

    def begin_training(self, feed: Iterator[Any] | None, micro_batches: int) -> None:
        """Prepare for one global batch."""
        self._begin(feed, is_training=True)
        self._micro_batches, self._losses, self._extras = micro_batches, [], {}

    def begin_evaluation(self, feed: Iterator[Any], *, computes_loss: bool) -> None:
        """Prepare for one global batch without gradients."""
        self._begin(feed, is_training=False, computes_loss=computes_loss)
        self.last_outputs = None

    def _begin(self, feed: Iterator[Any] | None, *, is_training: bool, computes_loss: bool = True) -> None:
        self._feed, self._taken, self._spare, self._first, self._passes = feed, 0, None, [], Counter()
        self._is_training, self._computes_loss = is_training, computes_loss

    @property
    def has_failed(self) -> bool:
        """This batch has failed on this rank, or on one that it depends on."""
        return self._parts.counters.has_failed

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context of a batch in which sharded parameters stay gathered, if the plan says so.

        Collective over: the axes over which parameters are sharded.
        """
        with ExitStack() as self._held:
            if self._parts.plan.gathers_once:
                self._held.enter_context(self._parts.params.whole(self._parts.table.all_units))
            yield

    # -- passes ------------------------------------------------------------------------------------------------------

    def load(self) -> tuple[Any, Any]:
        """The next pair of inputs and labels."""
        if self._feed is None:
            msg = "this stage loads micro-batches and got no data iterator; pass one on first and last stages"
            raise UsageError(msg)
        batch = self._next()
        self._taken += 1
        if self.batch_fn is not None:
            batch = self.batch_fn(batch)
        batch = self._parts.features.batch(batch, is_training=self._is_training)
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            found = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
            msg = f"a pipeline's batch is a pair (inputs, labels), each a tensor or a tuple of tensors; found {found}"
            raise UsageError(msg)
        inputs, labels = batch
        if self._parts.plan.device.type != "cpu":
            inputs, labels = move((inputs, labels), self._parts.plan.device)
        inputs = self._parts.casting.inputs((inputs,))[0]
        if self._met:
            self._spare = inputs, labels
        return inputs, labels

    def stand_in(self) -> tuple[Any, Any]:
        """The last pair again, if layers meet other ranks, which have pairs of their own and would wait."""
        return self._spare or (MISSING, MISSING)

    def prepare(self, *, loads: bool) -> Exception | None:
        """Tell features that a global batch begins, and take its first batch, for `load`; returns what failed."""
        try:
            for begin in self._parts.features.global_batches:
                begin()
            if loads and self._feed is not None:
                self._first.append(self._next())
        except Exception as failure:
            return failure
        return None

    def _next(self) -> Any:
        if self._first:
            return self._first.pop()
        try:
            return next(self._feed)  # type: ignore[arg-type]
        except StopIteration:
            msg = (
                f"the data iterator ended after {self._taken} micro-batches of a global batch; wrap the loader in "
                "mpispeed.data.RepeatingLoader, or give as many micro-batches as gradient_accumulation_steps"
            )
            raise FeedEnded(msg, self._taken) from None

    def forward(self, chunk: int, inputs: Any) -> Any:
        """Run the layers of a chunk."""
        parts = self._parts
        parts.begin_forward(self._passes[chunk], is_training=self._is_training, chunk=chunk)
        current, slots = parts.passes.current, parts.plan.slots
        if (
            slots is not None and current.slot is not None
        ):  # seeds of layers follow the slot, not the passes of this rank
            self._model.chunk(chunk).micro_offset = current.global_step * slots.count + current.slot
        self._passes[chunk] += 1
        start = parts.clock.now()
        ends = [begin(inputs) for begin in parts.features.chunks]
        with parts.sharding.running(self._model), parts.casting.forward(), parts.in_forward():
            outputs = self._model.chunk(chunk)(inputs)
        for end in ends:
            if end is not None:
                end(outputs)
        parts.passes.end(outputs)
        if parts.streams is not None and not (self._model.chunk(chunk).is_last and self._has_loss):
            parts.streams.leave()  # the loss goes on with the numbers of its slot
        parts.bus.announce(Event.FORWARD_END, seconds=parts.clock.now() - start)
        return outputs

    def leave_out(self, chunk: int, *, is_loss: bool = False) -> None:
        """Stand in for a forward pass, or a loss: where other ranks may gather parameters for theirs, take part."""
        self._passes[chunk] += not is_loss
        if not is_loss or self._has_loss:
            with self._parts.sharding.running(self._model):
                pass

    @property
    def _has_loss(self) -> bool:
        return self._computes_loss and self._model.loss_fn is not None

    def loss(self, outputs: Any, labels: Any) -> Any:
        """The loss of a micro-batch, or the last layer's output if there is no loss function or no loss is wanted."""
        outputs = self._parts.casting.result(outputs)
        if not self._is_training:
            self.last_outputs = outputs
        if self._has_loss:
            parts = self._parts
            with parts.sharding.running(self._model), parts.casting.autocasting(), parts.in_forward():
                outputs = self._model.loss_fn(outputs, labels)  # type: ignore[misc]
            if self._parts.streams is not None:
                self._parts.streams.leave()
        if self._is_training:
            require_scalar(outputs, "a pipeline", "give PipelineModule a loss_fn")
            self._losses.append(outputs.detach())
            for name, value in (self._model.get_additional_losses() or {}).items():
                self._extras.setdefault(name, {})[len(self._losses) - 1] = float(value)
        return outputs

    def backward(self, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor] | None, *, is_last: bool) -> None:
        """Run backward through a chunk."""
        parts, start = self._parts, self._begin_backward(reduces=is_last)
        with self._ending_alike(), parts.sharding.unwinding():
            if grads is not None:
                if tensors:
                    torch.autograd.backward(tensors, list(grads))
            else:
                steps = 1 if parts.accumulation.is_undivided else self._micro_batches
                backward_scaled(scale_loss(tensors[0], steps), parts.scaler.scale)
        parts.bus.announce(Event.BACKWARD_END, seconds=parts.clock.now() - start)

    def deliver(self, backlog: Backlog) -> None:
        """Compute the weight gradients that a backward pass deferred."""
        start = self._begin_backward("backward of weights", reduces=False)
        with self._ending_alike():
            if self._parts.optimization is not None:
                backlog.work_off(self._parts.optimization.hooks.deliver)
        self._parts.bus.announce(Event.BACKWARD_END, seconds=self._parts.clock.now() - start)

    def _begin_backward(self, name: str = "backward", *, reduces: bool) -> Any:
        parts, start = self._parts, self._parts.clock.now()
        if parts.clock.entering is not None:
            parts.clock.entering(name)
        if parts.optimization is not None:
            parts.optimization.grads.begin_backward(reduces=reduces)
        return start

    @contextmanager
    def _ending_alike(self) -> Iterator[None]:
        """Context of a backward pass: sums over ranks that are due in it are started even if it fails."""
        try:
            yield
        except Exception:
            end_scale()
            self._parts.end_backward()
            raise
        self._parts.end_backward()

    # -- failures ----------------------------------------------------------------------------------------------------

    def can_go_on(self) -> bool:
        """True if all ranks that meet in the layers of this stage have failed in the same pass."""
        works = [comm.start(lambda _: None, "call", label="a pass that failed") for comm in self._met]
        return all(work.settle(ALIKE_SECONDS) and work.error is None for work in works)

    def give_up(self) -> None:
        """Note that there must be no update; the ranks learn of it in the step."""
        self._parts.counters.has_failed = True
        if self._parts.optimization is not None:
            self._parts.optimization.grads.is_given_up = True

    def remember(self) -> Callable[[], None]:
        """A function that undoes a batch that failed before its update: its gradients and all that counted it."""
        counters, model = self._parts.counters, self._model
        counters.has_failed = False
        chunks = [model.chunk(index) for index in range(model.num_chunks)]
        counts, offsets = (counters.micro_steps, counters.pending_backwards), [each.micro_offset for each in chunks]
        results = self.mean_loss, self.extra_losses

        def undo() -> None:
            counters.micro_steps, counters.pending_backwards = counts
            counters.has_failed = False
            self.mean_loss, self.extra_losses = results
            for chunk, offset in zip(chunks, offsets, strict=True):
                chunk.micro_offset = offset
            if self._is_training and self._parts.optimization is not None:
                model.zero_grad()
                grads = self._parts.optimization.grads
                grads.rescale(1.0, is_overflow=True)  # errors of compression that belong to dropped values
                grads.clear()

        return undo

    # -- the end of a batch ------------------------------------------------------------------------------------------

    def reduce_tied(self) -> None:
        """No sums yet: `SumShared` sums tied weights after the reductions, when each rank has its shard of them."""
        self.is_at_boundary = True

    def reduce(self) -> None:
        """Complete the gradient reductions. Collective over: the data axis."""
        self.is_at_boundary = True
        if self._parts.optimization is not None:
            self._parts.optimization.grads.finish()

    def step(self) -> None:
        """Send losses to every rank, then run the update. Collective over: all ranks."""
        self.is_at_boundary = True
        self._held.close()
        try:
            means = _aggregate(self._parts, self._model, self._losses, self._extras, self._micro_batches)
            self.mean_loss, self.extra_losses = means
            self._finish(self.mean_loss)
        finally:
            self.is_at_boundary = False

    def evaluated(self, results: Sequence[Any], reduce_output: str | None, *, is_shared: bool) -> Any:
        """The result of `eval_batch`.

        Collective over: all ranks.

        Raises:
            UsageError: on all stages, if results of micro-batches cannot be averaged.
        """
        mesh = self._parts.mesh
        pipe, result, problem = mesh["pipe"], None, ""
        is_last = mesh.index("pipe") == pipe.size - 1
        if is_last:
            try:
                result = list(results) if reduce_output is None else self._mean(results)
            except (RuntimeError, TypeError) as error:
                problem = (
                    f"engine.eval_batch cannot take the mean of what {len(results)} micro-batches gave: {error}; give "
                    "tensors of one shape, or pass reduce_output=None"
                )
        told = move(result, HOST) if is_shared else None
        problem, shared = pipe.share((problem, told), pipe.size - 1)
        if problem:
            raise UsageError(problem)
        return result if is_last else shared

    def _mean(self, results: Sequence[Any]) -> Any:
        """Mean over micro-batches and data ranks, of tensors or of lists of them. Collective over: the data axis."""
        if isinstance(results[0], list | tuple):
            return type(results[0])(self._mean(column) for column in zip(*results, strict=True))
        values = [torch.as_tensor(value) for value in results]  # a loss may be a number here
        total = torch.stack([value.to(torch.promote_types(value.dtype, torch.float32)) for value in values]).mean(0)
        total = total.contiguous()
        self._parts.mesh["data"].all_reduce(total, "avg")
        return total


def _aggregate(
    parts: Parts,
    model: PipelineModule,
    losses: Sequence[torch.Tensor],
    extras: Mapping[str, Mapping[int, float]],
    micro_batches: int,
) -> tuple[float, dict[str, float]]:
    """Mean losses over micro-batches and data ranks, from the last stage. Collective over: all ranks."""
    mesh, slots = parts.mesh, parts.plan.slots
    pipe, data = mesh["pipe"], mesh["data"]
    found: tuple[float, dict[str, float]] = 0.0, {}
    if mesh.index("pipe") == pipe.size - 1:
        names = _extra_names(model, data, extras)
        rows = [[float(loss) for loss in losses]]
        rows += [[extras.get(name, {}).get(k, 0.0) for k in range(micro_batches)] for name in names]
        if slots is not None:
            means = slot_means(slots, data, rows)
        else:
            sums = torch.tensor([sum(row) for row in rows], dtype=torch.float64) / micro_batches
            data.all_reduce(sums, "avg")
            means = sums.tolist()
        found = means[0], dict(zip(names, means[1:], strict=True))
    shared: list[tuple[float, dict[str, float]]] = []
    # Started, not blocking: the last stage arrives a backward pass early, and would wait in a spinning loop.
    pipe.start(lambda comm: shared.append(comm.share(found, pipe.size - 1)), "share", label="losses").wait()
    return shared[0]


def _extra_names(model: PipelineModule, data: Comm, extras: Mapping[str, Mapping[int, float]]) -> list[str]:
    """Names of additional losses reported by any data rank. Collective over: the data axis."""
    if type(model).get_additional_losses is PipelineModule.get_additional_losses:
        return []
    return sorted(set().union(*data.gather_objects(set(extras))))


def _met(parts: Parts, model: PipelineModule) -> list[Comm]:
    """The groups over which layers of any stage communicate in their passes. Collective over: the pipe axis."""
    mesh, plan = parts.mesh, parts.plan
    is_joined = plan.config.zero_optimization.divergent_modules == "union"  # passes of ranks may differ then
    is_gathering = parts.params.rests_cut and not plan.gathers_once and not is_joined
    is_synced = any(isinstance(module, SyncedNorm) for module in model.modules())
    axes = ["model", "sequence"] + ["data"] * (is_gathering or any(mesh["pipe"].gather_objects(is_synced)))
    return [mesh[axis] for axis in axes if mesh[axis].size > 1]


def run_batch(
    executor: Executor, duties: StageDuties, schedule: PipeSchedule, comm: Comm, *, is_training: bool
) -> None:
    """Run one global batch; if it fails on any rank, it ends on all of them as if it had never begun.

    Collective over: all ranks; `comm` is their group.

    Raises:
        DataEnded: on all ranks, if there was not one micro-batch for one; on that rank only, if its data end later.
        PipelineError: on ranks without a failure of their own, if another one failed; the others raise their own.
    """
    failure = None
    try:
        if is_training:  # an evaluation agrees at its end instead
            loads = any(isinstance(one, do.LoadMicroBatch) for step in schedule.steps() for one in step)
            failure = duties.prepare(loads=loads)
            if not _agrees(comm, failure is None):
                _tell(comm, executor.place.stage, failure)
        undo = duties.remember()
        if not _completes(executor, duties, schedule, comm, is_training=is_training):
            failure, executor.failure = executor.failure, None
            undo()
            _tell(comm, executor.place.stage, failure)
    finally:
        failure = None  # its traceback holds this frame


def _completes(
    executor: Executor, duties: StageDuties, schedule: PipeSchedule, comm: Comm, *, is_training: bool
) -> bool:
    """Run the schedule; False on all ranks if it failed on one. Collective over: all ranks."""
    try:
        with duties.gathered():
            executor.run(schedule, is_training=is_training)
    except BatchFailed:
        executor.exchange.settle()
        return False
    except Exception as error:
        first, executor.failure = executor.failure, None
        if first is None or first is error:
            raise
    else:
        return is_training or _agrees(comm, not duties.has_failed)
    # What was kept explains what came of it. Other ranks may be stuck: nothing that communicates is undone.
    raise _as_shown(first)


def _agrees(comm: Comm, is_good: bool) -> bool:
    """True if all ranks are well. Collective over: the group."""
    try:
        comm.agree(is_good)
    except AgreementError:
        return False
    return True


def _as_shown(failure: Exception) -> Exception:
    return DataEnded(str(failure)) if isinstance(failure, FeedEnded) else failure


def _tell(comm: Comm, stage: int, failure: Exception | None) -> NoReturn:
    """Raise what has ended a batch. Collective over: the group of all ranks."""
    own = None
    if failure is not None:
        text = str(failure) if isinstance(failure, FeedEnded) else f"{type(failure).__name__}: {failure}"
        own = stage, text[:SHOWN_CHARACTERS], isinstance(failure, FeedEnded) and failure.taken == 0
    failed = [(rank, *report) for rank, report in enumerate(comm.gather_objects(own)) if report is not None]
    rank, stage, text, _ = failed[0]
    if all(is_empty for _, _, _, is_empty in failed):
        ended = DataEnded(text if comm.size == 1 else f"rank {rank} of {comm.size}: {text}")
        ended.is_collective = True
        raise ended
    try:
        if failure is not None:
            raise _as_shown(failure)
    finally:
        failure = None  # its traceback holds this frame
    more = f" ({len(failed) - 1} more ranks failed)" if len(failed) > 1 else ""
    echo = PipelineError(
        f"this batch failed on stage {stage}, rank {rank}: {text}{more}; its gradients are dropped and nothing was "
        f"updated: the next batch can follow, if rank {rank} catches its error too"
    )
    echo.is_echo = True
    raise echo
