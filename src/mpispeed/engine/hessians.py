"""Products with the Hessians of blocks under an engine: of a whole model, and of a pipeline's stages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpispeed.base.errors import MpispeedError, UsageError
from mpispeed.base.tensor_tree import map_tensors, move
from mpispeed.engine.curvature import find_blocks, joined, product_with, second_order, split_like, start_vector, trained
from mpispeed.nn.recompute import Surroundings, repeating
from mpispeed.pipe.exchange import Exchange, tensors_with_grad

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.config.data import Eigenvalue as Section
    from mpispeed.engine.build.parts import Parts
    from mpispeed.engine.curvature import Product
    from mpispeed.engine.hooks import Context
    from mpispeed.pipe.module import PipelineModule


class Hessians(Protocol):
    """The Hessians of the blocks of a model, of the mean loss of a micro-batch over data ranks.

    Attributes:
        names: of the blocks.
        blocks: those that this rank has.
    """

    names: list[str]
    blocks: list[nn.Module]

    def begin(self, given: Any, scale: float) -> None:
        """Make the graph of the gradients of a loss that is multiplied by `scale`."""

    def start(self, number: int) -> torch.Tensor:
        """A vector for block `number`."""

    def product(self, number: int) -> Product:
        """The product for block `number`."""

    def agreed(self, number: int, value: float) -> float:
        """A value for block `number`, the same on all ranks."""

    def end(self) -> None:
        """Let the graph go."""


def backward_pass(parts: Parts, run: Callable[[], Any]) -> Any:
    """Run a backward pass that may leave a graph. Collective over: the data axis, where parameters are sharded."""
    hooks = parts.sharding.module_hooks
    with nullcontext() if hooks is None else hooks.saving():
        found = run()
    parts.sharding.end_backward()
    return found


class WholeHessians:
    """Those of a model that each rank runs as a whole. `begin` takes the loss."""

    def __init__(self, context: Context, section: Section) -> None:
        """Raises: UsageError: the blocks are not there."""
        self.blocks = find_blocks(context.module, section.layer_name, section.layer_num)
        self.names = [f"{section.layer_name}.{number}" for number in range(len(self.blocks))]
        self._params = [trained(block) for block in self.blocks]
        self._parts, self._data = context.parts, context.mesh["data"]
        self._grads: list[torch.Tensor | None] = []
        self._scale = 1.0

    def begin(self, given: Any, scale: float) -> None:
        """Collective over: the data axis, where parameters are sharded."""
        everything = [param for params in self._params for param in params]
        loss = given if scale == 1.0 else given.float() * scale
        found = backward_pass(self._parts, lambda: second_order([loss], everything, keeps_graph=True))
        self._grads, self._scale = list(found), scale

    def start(self, number: int) -> torch.Tensor:
        """Local."""
        return start_vector(self._params[number], number)

    def product(self, number: int) -> Product:
        """Calls are collective over: the data axis."""
        first = sum(map(len, self._params[:number]))
        params = self._params[number]
        own = product_with(self._grads[first : first + len(params)], params)

        def mean(vector: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = backward_pass(self._parts, lambda: own(vector))
            self._data.all_reduce(found, "avg")
            return found / self._scale

        return mean

    def agreed(self, number: int, value: float) -> float:
        """Collective over: the data axis."""
        told = torch.tensor([value], dtype=torch.float64)
        self._data.broadcast(told)
        return float(told)

    def end(self) -> None:
        """Local."""
        self._grads = []


# -- pipelines ---------------------------------------------------------------------------------------------------------

_ACTIVATIONS, _GRADS, _DOWN, _UP = range(4)  # kinds of messages over a border of two virtual stages


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        msg = f"eigenvalue.layer_name: {text!r} is no pattern of class names: {error}"
        raise UsageError(msg) from error


@dataclass(slots=True)
class _Pass:
    """The graph of one virtual stage.

    Attributes:
        inputs: what it received, as far as it takes gradients.
        outputs: what it sent, as far as it takes gradients; at the end the loss.
        above: gradients of the outputs, themselves differentiable; none at the end.
        of_inputs: gradients of the inputs, with a graph.
        of_params: gradients of the parameters of its blocks, by block, with a graph.
        halved: outputs and weights of the product on its way down, which the way up needs again.
    """

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    above: list[torch.Tensor] = field(default_factory=list)
    of_inputs: list[torch.Tensor] = field(default_factory=list)
    of_params: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    halved: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])


class StagedHessians:
    """Those of a pipeline: one micro-batch runs through the stages once more. `begin` takes a pair (inputs, labels).

    A gradient of a stage depends on its parameters, its inputs, and the gradients of its outputs. So a second backward
    pass leaves the stage of the block by the latter and goes down through the gradients of the stages below, and from
    the loss up again through their outputs.
    """

    def __init__(self, context: Context, section: Section, model: PipelineModule) -> None:
        """Collective over: all ranks.

        Raises:
            UsageError: the blocks are not there, or one is tied or has nothing to train.
        """
        self._parts, self._model, mesh = context.parts, model, context.mesh
        self._data, self._pipe, self._world = mesh["data"], mesh["pipe"], mesh.world.comm
        self._stages, self._me, pattern = model.num_stages, model.stage_id, _pattern(section.layer_name)
        self._count = model.num_stages * model.num_chunks
        self._exchange = Exchange(mesh.channel("curvature")["pipe"], device=context.plan.device)
        steps = [(k, step) for k in range(self._count) if self._is_own(k) for step in self._chunk(k).steps if step.path]
        own = [
            (step.index, k, step.path, bool(trained(model.get_submodule(step.path))))
            for k, step in steps if pattern.search(step.name)
        ]  # fmt: skip
        found = sorted(row for part in self._pipe.gather_objects(own) for row in part)
        if len(found) < max(1, section.layer_num):
            known = sorted(
                {name for part in self._pipe.gather_objects([step.name for _, step in steps]) for name in part}
            )
            msg = (
                f"eigenvalue: {len(found)} layers of the pipeline are of a class {section.layer_name!r}, and layer_num "
                f"is {section.layer_num}; layer_name is a pattern of their names here; classes: {', '.join(known)}"
            )
            raise UsageError(msg)
        uses = Counter(path for _, _, path, _ in found)
        found = found[: section.layer_num or None]
        for index, _, path, is_trained in found:
            if not is_trained or uses[path] > 1:
                why = "is tied to another one" if is_trained else "has no parameter that is trained"
                msg = (
                    f"eigenvalue: layer {index} of the pipeline, of a class {section.layer_name!r}, {why}; choose a "
                    "layer_name and a layer_num that leave it out"
                )
                raise UsageError(msg)
        self.names = [path for _, _, path, _ in found]
        self._owners = [k for _, k, _, _ in found]
        mine = {number: model.get_submodule(path) for number, (_, k, path, _) in enumerate(found) if self._is_own(k)}
        self._params = {number: trained(block) for number, block in mine.items()}
        self.blocks = list(mine.values())
        self._passes: dict[int, _Pass] = {}
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._own_mail: dict[tuple[int, int], Any] = {}
        self._scale = 1.0

    def _is_own(self, k: int) -> bool:
        return k % self._stages == self._me

    def _chunk(self, k: int) -> Any:
        return self._model.chunk(k // self._stages)

    # -- the graph ---------------------------------------------------------------------------------------------------

    def begin(self, given: Any, scale: float) -> None:
        """Collective over: all ranks.

        Raises:
            UsageError: on every rank, if an operator of one has no second derivative.
        """
        self._scale = scale
        with torch.enable_grad():
            self._forward(given)
            problem = self._backward()
        self._world.agree(not problem, problem, UsageError)

    def _forward(self, given: Any) -> None:
        self._buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        with Surroundings().restored(), repeating():
            for k in filter(self._is_own, range(self._count)):
                x = self._loaded(given[0]) if k == 0 else self._receive(k, k - 1, _ACTIVATIONS)
                with self._parts.sharding.running(self._model), self._parts.casting.forward():
                    chunk = self._chunk(k)
                    chunk.micro_offset -= 1  # the seeds of the last micro-batch, and none that training will use
                    y = chunk(x)
                    if k == self._count - 1:
                        y = self._loss(y, given[1])
                self._passes[k] = _Pass(tensors_with_grad(x), tensors_with_grad(y))
                if k < self._count - 1:
                    self._send(y, k, k + 1, _ACTIVATIONS)

    def _loaded(self, inputs: Any) -> Any:
        device = self._parts.plan.device
        return self._parts.casting.inputs((inputs if device.type == "cpu" else move(inputs, device),))[0]

    def _loss(self, outputs: Any, labels: Any) -> torch.Tensor:
        device, compute = self._parts.plan.device, self._model.loss_fn
        labels = labels if device.type == "cpu" else move(labels, device)
        loss = outputs if compute is None else compute(outputs, labels)
        found: torch.Tensor = loss if self._scale == 1.0 else loss.float() * self._scale
        return found

    def _backward(self) -> str:
        """The gradients, with a graph; what is wrong on this rank."""
        problem = ""
        for k in filter(self._is_own, reversed(range(self._count))):
            one = self._passes[k]
            is_end = k == self._count - 1
            one.above = [] if is_end else self._receive(k, k + 1, _GRADS)
            numbers = [number for number in self._params if self._owners[number] == k]
            wanted = one.inputs + [param for number in numbers for param in self._params[number]]
            weights = [torch.ones_like(loss) for loss in one.outputs] if is_end else one.above
            try:
                found = self._vjp(one.outputs, wanted, weights, keeps_graph=True)
                if found:  # a trial: whoever fails later lets other stages wait
                    self._vjp(found, wanted + one.above, [torch.zeros_like(grad) for grad in found])
            except Exception as error:  # other stages are on their way to the next message
                problem = f"eigenvalue: {error}" if isinstance(error, MpispeedError) else f"eigenvalue: {error!r}"
                found = [torch.zeros_like(each) for each in wanted]
            one.of_inputs, rest = found[: len(one.inputs)], found[len(one.inputs) :]
            for number in numbers:
                count = len(self._params[number])
                one.of_params[number], rest = rest[:count], rest[count:]
            if k > 0:
                self._send([grad.detach().requires_grad_() for grad in one.of_inputs], k, k - 1, _GRADS)
        return problem

    def end(self) -> None:
        """Leave buffers as they were. Local."""
        self._exchange.settle()
        self._passes.clear()
        self._own_mail.clear()
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        self._buffers = []

    # -- products --------------------------------------------------------------------------------------------------

    def start(self, number: int) -> torch.Tensor:
        """A vector on the stage of the block, one zero elsewhere."""
        return start_vector(self._params[number], number) if number in self._params else torch.zeros(1)

    def product(self, number: int) -> Product:
        """Calls are collective over: all ranks; the result is on the stage of the block, and a zero elsewhere."""
        first, last = self._owners[number], self._count - 1

        def product(vector: torch.Tensor) -> torch.Tensor:
            for k in filter(self._is_own, range(first, self._count)):
                one = self._passes[k]
                if k == first:
                    one.halved = list(one.of_params[number]), split_like(vector, self._params[number])
                else:
                    one.halved = list(one.of_inputs), self._receive(k, k - 1, _DOWN)
                if k < last:
                    self._send(self._vjp(one.halved[0], one.above, one.halved[1]), k, k + 1, _DOWN)
            found = torch.zeros_like(vector)
            for k in filter(self._is_own, reversed(range(first, self._count))):
                one = self._passes[k]
                outputs, weights = one.halved
                if k < last:
                    outputs, weights = outputs + one.outputs, weights + self._receive(k, k + 1, _UP)
                wanted = self._params[number] if k == first else one.inputs
                grads = self._vjp(outputs, wanted, weights)
                if k == first:
                    found = joined(grads, wanted, vector.dtype)
                    self._data.all_reduce(found, "avg")
                    found /= self._scale
                else:
                    self._send(grads, k, k - 1, _UP)
            self._exchange.settle()
            return found

        return product

    def _vjp(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor],
        *, keeps_graph: bool = False,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Gradients of the weighted outputs; zeros where there are none."""
        live = [(output, weight) for output, weight in zip(outputs, weights, strict=True) if output.requires_grad]
        if not live or not inputs:
            return [torch.zeros_like(each) for each in inputs]
        chosen, factors = [output for output, _ in live], [weight.to(output.dtype) for output, weight in live]
        found = backward_pass(self._parts, lambda: second_order(chosen, inputs, factors, keeps_graph=keeps_graph))
        return [torch.zeros_like(each) if grad is None else grad for each, grad in zip(inputs, found, strict=True)]

    def agreed(self, number: int, value: float) -> float:
        """Collective over: all ranks."""
        told, root = torch.tensor([value], dtype=torch.float64), self._owners[number] % self._stages
        if root == self._me:
            self._data.broadcast(told)
        self._pipe.broadcast(told, root)
        return float(told)

    # -- messages --------------------------------------------------------------------------------------------------

    def _send(self, tree: Any, k: int, to: int, kind: int) -> None:
        if self._is_own(to):
            self._own_mail[to, kind] = map_tensors(tree, lambda x: x.detach().requires_grad_(x.requires_grad))
        else:
            self._exchange.send_tree(tree, to % self._stages, 4 * min(k, to) + kind)

    def _receive(self, k: int, source: int, kind: int) -> Any:
        if self._is_own(source):
            return self._own_mail.pop((k, kind))
        return self._exchange.recv_tree(source % self._stages, 4 * min(k, source) + kind)
