"""Experts of one layer: modules of any kind, or MLPs whose weights are in three-dimensional tensors.

Both are called with rows sorted by expert and the number of rows of each. An expert without rows is called too, so that
all ranks with copies of it gather its parameters and have gradients for them.

Weights of the fused kinds are [experts, out, in], those that transformers has for its fused experts.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mpispeed.base import init_scope
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.even_split import share
from mpispeed.base.param_marks import part_of
from mpispeed.mesh.comm import Comm
from mpispeed.nn.expert import host_products
from mpispeed.nn.tensor import regions
from mpispeed.nn.tensor.tensor_cut import WHOLE_KINDS, TensorCut, marks_of

ALIGNMENT_BYTES = 16
"""What strides of `grouped_mm` are multiples of."""

COMPUTE = ("auto", "grouped", "loop")
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}


Part = Callable[[torch.Tensor], torch.Tensor]


class Hands(Protocol):
    """Changes parameters of experts, wherever their values are."""

    def keep(self, param: nn.Parameter, part: Part | None) -> None:
        """Give `param` a part of its values; None: all of them."""

    def drop(self, param: nn.Parameter) -> None:
        """Leave `param` to other ranks."""


class _AtHand:
    """Parameters whose values are on this rank."""

    def keep(self, param: nn.Parameter, part: Part | None) -> None:
        if part is not None:
            param.grad, param.data = None, part(param.detach()).clone()

    def drop(self, param: nn.Parameter) -> None:
        param.requires_grad_(False)  # groups of an optimizer may have it: nobody trains it here


AT_HAND = _AtHand()


class Experts(nn.Module, abc.ABC):
    """Base of both kinds.

    Attributes:
        num_experts: experts of the layer, on all ranks.
        held: numbers of those of this rank.
    """

    def __init__(self, num_experts: int, held: range) -> None:
        """Hold these experts."""
        super().__init__()
        self.num_experts, self.held = num_experts, held
        self._has_spare = len(held) < num_experts  # made for the rank with most experts; others drop the last one

    def keep(self, held: range, hands: Hands = AT_HAND) -> None:
        """Drop all experts of this rank but these, or give the held ones these numbers if they are as many.

        Local, unless parameters are elsewhere.

        Args:
            held: numbers of the experts.
            hands: changes the parameters.

        Raises:
            ConfigError: neither fits.
        """
        is_spare, self._has_spare = self._has_spare, False
        if len(held) == len(self.held) or (is_spare and len(held) == len(self.held) - 1):
            places = range(len(held))
        elif len(self.held) == self.num_experts:
            places = held
        else:
            msg = f"experts {held.start} to {held.stop - 1} belong on this rank, which holds {len(self.held)} of "
            msg += (
                f"{self.num_experts} experts; make the layer with all experts, or with ep_size = the ranks of the group"
            )
            raise ConfigError(msg)
        self._narrow(places, hands)
        self.held = held

    @abc.abstractmethod
    def _narrow(self, places: range, hands: Hands) -> None:
        """Drop the parameters of all experts of this rank but those at these places."""

    @abc.abstractmethod
    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Outputs of the experts. Shapes: rows [sum of counts, hidden], result the same."""


def ranged(num_experts: int, comm: Comm | None) -> range:
    """The experts that belong on this rank of a group."""
    return range(num_experts) if comm is None else range(*share(num_experts, comm.rank, comm.size))


class NumberedModules(nn.ModuleList):
    """Some modules of a longer list: indices count from 0, names from the number of the first."""

    def __init__(self, modules: Iterable[nn.Module], first: int = 0) -> None:
        super().__init__()
        for number, module in enumerate(modules, first):
            self.add_module(str(number), module)

    def __getitem__(self, index: Any) -> Any:
        """One module by its place here, or a list of several."""
        found = list(self._modules.values())[index]
        return NumberedModules(found) if isinstance(index, slice) else found


def share_hands(modules: Iterable[nn.Module], places: range, hands: Hands) -> None:
    """Keep the parameters of the modules at these places, and drop those of the others."""
    for place, module in enumerate(modules):
        for param in module.parameters():
            if place in places:
                hands.keep(param, None)
            else:
                hands.drop(param)


class ExpertModules(Experts):
    """Experts that are copies of a module; of outputs that are tuples the first element counts.

    Attributes:
        deepspeed_experts: the modules of this rank; in names of parameters they have the numbers of `held`.
        prefix: what comes before these numbers.
    """

    prefix = "deepspeed_experts."

    def __init__(self, expert: nn.Module, num_experts: int, num_local_experts: int | None = None) -> None:
        """Copy the module.

        Args:
            expert: made into copies with equal parameters.
            num_experts: experts of the layer, on all ranks.
            num_local_experts: those of this rank; by default all.
        """
        count = num_experts if num_local_experts is None else num_local_experts
        super().__init__(num_experts, range(count))
        self.deepspeed_experts = NumberedModules(init_scope.copied(expert) for _ in range(count))

    def keep(self, held: range, hands: Hands = AT_HAND) -> None:
        """As `Experts`."""
        super().keep(held, hands)
        if [int(name) for name in self.deepspeed_experts._modules] != list(held):
            self.deepspeed_experts = NumberedModules(self.deepspeed_experts, held.start)

    def _narrow(self, places: range, hands: Hands) -> None:
        share_hands(self.deepspeed_experts, places, hands)
        if len(places) < len(self.deepspeed_experts):
            self.deepspeed_experts = self.deepspeed_experts[places.start : places.stop]

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """As `Experts`."""
        if not len(self.deepspeed_experts):
            return rows
        outputs = []
        for expert, part in zip(self.deepspeed_experts, rows.split(list(counts)), strict=True):
            output = expert(part)
            output = output[0] if isinstance(output, tuple) else output
            if output.shape != part.shape:
                msg = f"an expert ({type(expert).__name__}) made {tuple(output.shape)} of rows {tuple(part.shape)}; "
                msg += "experts of a layer keep the width of its tokens"
                raise UsageError(msg)
            outputs.append(output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


@dataclass(frozen=True, slots=True)
class Slicing:
    """The slicing of one parameter, as of `TensorCut`; `parts` lie one behind the other along `dim`.

    One of kind "replicated" is used by the first slice alone.
    """

    kind: str
    dim: int = -1
    parts: int = 1


class FusedExperts(Experts):
    """Experts whose parameters are slices of common tensors, along the first dim of each.

    Attributes:
        comm: ranks over which each expert is sliced; None: it is whole.
    """

    slicing: Mapping[str, Slicing] = MappingProxyType({})
    """By name of the parameter: columns of first products, rows of the last one."""

    comm: Comm | None = None

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int, comm: Comm | None = None) -> None:
        """`comm`: the expert-parallel group, where only this rank's experts are to be made."""
        super().__init__(num_experts, ranged(num_experts, comm))
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.compute = "auto"

    def slice_over(self, comm: Comm, grain: int = 1) -> FusedExperts:
        """Keep this rank's slice of each expert, in grains of the inner width. Local.

        Source: Shoeybi et al., "Megatron-LM", 2019, section 3: one sum of outputs, and one of gradients.

        Raises:
            ConfigError: the class does not say how, or experts are sliced already.
        """
        if self.comm is not None or not self.slicing:
            what = f"are sliced over {self.comm.size} ranks already" if self.comm else "have no `slicing` of parameters"
            msg = f"experts of {type(self).__name__} {what}; give their layer slices_experts=False, or whole experts"
            raise ConfigError(msg)
        for name, how in self.slicing.items():
            param = getattr(self, name)
            if param is None:
                continue
            parts = (self.intermediate_size,) * how.parts if how.parts > 1 else ()
            grains = () if how.kind in WHOLE_KINDS else (grain,) * how.parts
            cut = TensorCut(how.kind, how.dim, tuple(param.shape), parts, grains)
            own = cut.take(param, comm.rank, comm.size)
            self.register_parameter(name, part_of(param, own))
            marks_of(self).cuts[name] = cut
            if how.kind in WHOLE_KINDS:
                marks_of(self).partial.add(name)
        self.comm = comm
        return self

    def _entered(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows on their way to slices: gradients are summed. Collective over: the slices, in backward."""
        return rows if self.comm is None else regions.copy_to(rows, self.comm)

    def _left(self, rows: torch.Tensor) -> torch.Tensor:
        """Outputs of slices, summed. Collective over: the slices."""
        return rows if self.comm is None else regions.reduce_from(rows, self.comm)

    def _draw(self, *shapes: tuple[int, ...]) -> Iterator[nn.Parameter]:
        """Parameters of these shapes per expert, as those of `torch.nn.Linear`.

        Each expert's are drawn in turn, those of other ranks too, so that values do not depend on the ranks.
        """
        made = [torch.empty((len(self.held), *shape)) for shape in shapes]
        for number in range(self.num_experts):
            bound = 1.0
            for whole, shape in zip(made, shapes, strict=True):
                bound = shape[-1] ** -0.5 if len(shape) == 2 else bound  # a bias has that of its weight, before it
                drawn = torch.empty(shape, device="cpu").uniform_(-bound, bound)
                if number in self.held and not whole.is_meta:
                    whole[number - self.held.start].copy_(drawn)
        return map(nn.Parameter, made)

    def _narrow(self, places: range, hands: Hands) -> None:
        part = None if len(places) == len(self.held) else lambda values: values[places.start : places.stop]
        for param in self.parameters(recurse=False):  # the same objects: groups of an optimizer may have them
            hands.keep(param, part)
        marks = marks_of(self).cuts
        marks.update({name: replace(cut, shape=(len(places), *cut.shape[1:])) for name, cut in marks.items()})

    def _products(
        self, rows: torch.Tensor, weights: torch.Tensor, counts: Sequence[int], bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Each expert's rows times its weights. Shapes: weights [experts, out, in], bias [experts, out]."""
        if serves_grouped(rows, weights) if self.compute == "auto" else self.compute == "grouped":
            there = brought(counts, rows.device)
            ends = there.cumsum(0).to(torch.int32)
            out = F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
            return out if bias is None else _Biased.apply(out, bias, there, ends)
        if self.compute == "auto" and host_products.serves(rows, weights):
            return host_products.host_products(rows, weights, counts, bias)
        biases = [None] * len(counts) if bias is None else bias.unbind(0)
        # `unbind`, because each index of its own would have a gradient of all experts.
        parts = zip(rows.split(list(counts)), weights.unbind(0), biases, strict=True)
        return torch.cat([F.linear(*part) for part in parts])


class _Biased(torch.autograd.Function):
    """Rows plus the bias of their expert.

    Its gradient is a grouped product with ones: repeatable sums in fp32, which adding rows by index has not on a GPU.

    Shapes: rows [n, out], bias [experts, out], counts and ends [experts].
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, bias: torch.Tensor, counts: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(ends)
        return rows + bias.repeat_interleave(counts, 0, output_size=len(rows))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        (ends,) = ctx.saved_tensors
        ones = grad.new_ones((len(grad), ALIGNMENT_BYTES // grad.element_size()))
        return grad, F.grouped_mm(ones.t(), grad.contiguous(), offs=ends)[:, 0], None, None


def brought(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Numbers as a tensor of the device; a GPU is not waited for. Shapes: [counts], int64."""
    return torch.tensor(counts, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def serves_grouped(rows: torch.Tensor, weights: torch.Tensor) -> bool:
    """True where one grouped product is better than a loop over experts: on devices that have a kernel for it.

    On the CPU it is a loop itself, and not in older versions of torch at all.
    """
    if rows.device.type != "cuda" or not len(rows) or not hasattr(F, "grouped_mm") or rows.dtype != weights.dtype:
        return False
    is_aligned = all(size and size * rows.element_size() % ALIGNMENT_BYTES == 0 for size in weights.shape[1:])
    is_plain = rows.dtype == torch.bfloat16 and not torch.is_autocast_enabled(rows.device.type)
    return is_aligned and is_plain and torch.cuda.get_device_capability(rows.device) >= (8, 0)


class SwiGLUExperts(FusedExperts):
    """MLPs with a gate: down(silu(gate x) * up x), without biases.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.

    Attributes:
        gate_up_proj: [experts, 2 * intermediate, hidden], gates first.
        down_proj: [experts, hidden, intermediate].
    """

    slicing = MappingProxyType({"gate_up_proj": Slicing("sub", 1, 2), "down_proj": Slicing("row", 2)})

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int, comm: Comm | None = None) -> None:
        """As `FusedExperts`."""
        super().__init__(hidden_size, intermediate_size, num_experts, comm)
        shapes = (2 * intermediate_size, hidden_size), (hidden_size, intermediate_size)
        self.gate_up_proj, self.down_proj = self._draw(*shapes)

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """As `Experts`."""
        if not counts:
            return rows
        gate, up = self._products(self._entered(rows), self.gate_up_proj, counts).chunk(2, -1)
        return self._left(self._products(F.silu(gate) * up, self.down_proj, counts))


class MLPExperts(FusedExperts):
    """MLPs: down(activation(up x)), with biases if wanted.

    Attributes:
        up_proj: [experts, intermediate, hidden]; `up_bias` [experts, intermediate].
        down_proj: [experts, hidden, intermediate]; `down_bias` [experts, hidden].
    """

    slicing = MappingProxyType(
        {
            "up_proj": Slicing("column", 1),
            "up_bias": Slicing("column", 1),
            "down_proj": Slicing("row", 2),
            "down_bias": Slicing("replicated"),
        }
    )
    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        comm: Comm | None = None,
        *,
        activation: str = "gelu",
        bias: bool = True,
    ) -> None:
        """As `FusedExperts`.

        Raises:
            ConfigError: the activation is unknown.
        """
        super().__init__(hidden_size, intermediate_size, num_experts, comm)
        if activation not in ACTIVATIONS:
            msg = f"activation = {activation!r} of experts is unknown; known are {', '.join(ACTIVATIONS)}"
            raise ConfigError(msg)
        self.activation = activation
        up, down = (intermediate_size, hidden_size), (hidden_size, intermediate_size)
        if bias:
            self.up_proj, self.up_bias, self.down_proj, self.down_bias = self._draw(up, up[:1], down, down[:1])
        else:
            self.up_proj, self.down_proj = self._draw(up, down)
            self.up_bias = self.down_bias = None

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """As `Experts`."""
        if not counts:
            return rows
        up = self._products(self._entered(rows), self.up_proj, counts, self.up_bias)
        inner = ACTIVATIONS[self.activation](up)
        bias: torch.Tensor | None = self.down_bias
        if self.comm is not None and self.comm.rank and bias is not None:
            bias = bias * 0.0  # the first slice adds it; gradients are parts of a sum
        return self._left(self._products(inner, self.down_proj, counts, bias))
