"""Callbacks of the pipeline executor into an engine: data, passes through the model, reductions, losses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.device import HOST
from mpispeed.base.errors import UsageError
from mpispeed.base.events import Event
from mpispeed.base.tensor_tree import move
from mpispeed.engine.backward import backward_scaled, require_scalar, scale_loss
from mpispeed.pipe.module import PipelineModule

if TYPE_CHECKING:
    from mpispeed.base.split_grads import Backlog
    from mpispeed.engine.build.parts import Parts


class FeedEnded(UsageError):
    """A stage has no batch to load. A StopIteration would not get through the generators between here and the user."""


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
        """Args: `finish` runs the update; it gets the mean loss."""
        self._parts, self._model, self._finish = parts, model, finish
        self.data: Iterator[Any] | None = None
        self.batch_fn: Callable[[Any], Any] | None = None
        self.mean_loss, self.extra_losses, self.last_outputs = 0.0, dict[str, float](), None
        self.is_at_boundary = False
        self._feed: Iterator[Any] | None = None
        self._first: list[Any] = []  # a batch that was taken by `look_ahead`
        self._is_training = self._computes_loss = True
        self._micro_batches, self._taken = 1, 0
        self._losses: list[torch.Tensor] = []
        self._extras: dict[str, float] = {}
        self._held = ExitStack()

    # -- before and after a batch ------------------------------------------------------------------------------------

    def begin_training(self, feed: Iterator[Any] | None, micro_batches: int) -> None:
        """Prepare for one global batch."""
        self._feed, self._micro_batches, self._taken = feed, micro_batches, 0
        self._first.clear()
        self._is_training = self._computes_loss = True
        self._losses, self._extras = [], {}

    def begin_evaluation(self, feed: Iterator[Any], *, computes_loss: bool) -> None:
        """Prepare for one global batch without gradients."""
        self._feed, self._taken = feed, 0
        self._first.clear()
        self._is_training, self._computes_loss = False, computes_loss
        self.last_outputs = None

    @contextmanager
    def gathered(self, *, is_held: bool) -> Iterator[None]:
        """Context of a batch in which sharded parameters stay gathered, if `is_held`.

        Collective over: the axes over which parameters are sharded.
        """
        with ExitStack() as self._held:
            if is_held:
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
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            found = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
            msg = f"a pipeline's batch is a pair (inputs, labels), each a tensor or a tuple of tensors; found {found}"
            raise UsageError(msg)
        inputs, labels = batch
        if self._parts.plan.device.type != "cpu":
            inputs, labels = move((inputs, labels), self._parts.plan.device)
        return self._parts.casting.inputs((inputs,))[0], labels

    def look_ahead(self) -> str:
        """Take the first batch of a global batch, for `load`; "" or, where there is none, what to tell the user."""
        if self._feed is None:
            return ""
        try:
            self._first.append(self._next())
        except FeedEnded as failure:
            return str(failure)
        return ""

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
            raise FeedEnded(msg) from None

    def forward(self, chunk: int, inputs: Any) -> Any:
        """Run the layers of a chunk."""
        counters, bus = self._parts.counters, self._parts.bus
        bus.announce(
            Event.BATCH_START,
            micro_step=counters.micro_steps,
            global_step=counters.global_steps,
            is_training=self._is_training,
        )
        start = time.perf_counter()
        with self._parts.sharding.running(self._model), self._parts.casting.named():
            outputs = self._model.chunk(chunk)(inputs)
        bus.announce(Event.FORWARD_END, seconds=time.perf_counter() - start)
        return outputs

    def loss(self, outputs: Any, labels: Any) -> Any:
        """The loss of a micro-batch, or the last layer's output if there is no loss function or no loss is wanted."""
        if not self._is_training:
            self.last_outputs = outputs
        if self._computes_loss and self._model.loss_fn is not None:
            with self._parts.sharding.running(self._model):
                outputs = self._model.loss_fn(outputs, labels)
        if self._is_training:
            require_scalar(outputs, "a pipeline", "give PipelineModule a loss_fn")
            self._losses.append(outputs.detach())
            for name, value in (self._model.get_additional_losses() or {}).items():
                self._extras[name] = self._extras.get(name, 0.0) + float(value)
        return outputs

    def backward(self, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor] | None, *, is_last: bool) -> None:
        """Run backward through a chunk."""
        parts, start = self._parts, time.perf_counter()
        self._begin_backward(reduces=is_last)
        with parts.sharding.unwinding():
            if grads is not None:
                if tensors:
                    torch.autograd.backward(tensors, list(grads))
            else:
                backward_scaled(scale_loss(tensors[0], self._micro_batches), parts.scaler.scale)
        parts.end_backward()
        parts.bus.announce(Event.BACKWARD_END, seconds=time.perf_counter() - start)

    def deliver(self, backlog: Backlog) -> None:
        """Compute the weight gradients that a backward pass deferred."""
        start = time.perf_counter()
        self._begin_backward(reduces=False)
        if self._parts.optimization is not None:
            backlog.work_off(self._parts.optimization.hooks.deliver)
        self._parts.end_backward()
        self._parts.bus.announce(Event.BACKWARD_END, seconds=time.perf_counter() - start)

    def _begin_backward(self, *, reduces: bool) -> None:
        if self._parts.optimization is not None:
            self._parts.optimization.grads.begin_backward(reduces=reduces)

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
            self.mean_loss, self.extra_losses = self._aggregate()
            self._finish(self.mean_loss)
        finally:
            self.is_at_boundary = False

    def _aggregate(self) -> tuple[float, dict[str, float]]:
        """Mean losses over micro-batches and data ranks, from the last stage. Collective over: all ranks."""
        mesh = self._parts.mesh
        pipe = mesh["pipe"]
        found: tuple[float, dict[str, float]] = 0.0, {}
        if mesh.index("pipe") == pipe.size - 1:
            names = self._extra_names()
            sums = [sum(float(loss) for loss in self._losses), *(self._extras.get(name, 0.0) for name in names)]
            means = torch.tensor(sums, dtype=torch.float64) / self._micro_batches
            mesh["data"].all_reduce(means, "avg")
            found = float(means[0]), dict(zip(names, means[1:].tolist(), strict=True))
        shared: list[tuple[float, dict[str, float]]] = []
        # Started, not blocking: the last stage arrives a backward pass early, and would wait in a spinning loop.
        pipe.start(lambda comm: shared.append(comm.share(found, pipe.size - 1)), "share", label="losses").wait()
        return shared[0]

    def _extra_names(self) -> list[str]:
        """Names of additional losses reported by any data rank. Collective over: the data axis."""
        if type(self._model).get_additional_losses is PipelineModule.get_additional_losses:
            return []
        return sorted(set().union(*self._parts.mesh["data"].gather_objects(set(self._extras))))

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
