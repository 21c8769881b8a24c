"""Work of all ranks together: that on slices of layers adds up, that which all slices repeat counts once.

Layers that are sliced are known by their marks. What runs between a layer whose output is sliced and one that sums
over slices (attention on this rank's heads, activations) is on slices too; so the order in which modules run says what
to add. Between the ends of a sliced sequence everything is on slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from mpispeed.flops.by_module import ModuleCounter
from mpispeed.flops.tables import Totals
from mpispeed.nn.tensor.embedding import VocabLinear
from mpispeed.nn.tensor.linear import ColumnLinear, CutLayer, RowLinear
from mpispeed.nn.tensor.sequence import Cut, Join
from mpispeed.nn.tensor.tensor_cut import OWN, WHOLE_KINDS, TensorCut, cuts, marks_of

_Amounts = tuple[int, int, int]
"""Of one module's own work in forward: flops of operators, DeepSpeed's flops and MACs."""


def is_opening(module: nn.Module) -> bool:
    """True for a layer whose output is sliced."""
    if isinstance(module, ColumnLinear | VocabLinear):
        return not module.gather_output
    return 0 in _own_dims(module)


def is_closing(module: nn.Module) -> bool:
    """True for a layer whose input is sliced, and its output not."""
    if isinstance(module, RowLinear):
        return not module.input_is_whole
    return 1 in _own_dims(module)


def _own_dims(module: nn.Module) -> set[int]:
    """Dims of matrices that the model's own code has sliced; tables of embeddings are left out."""
    if "embedding" in type(module).__name__.lower():
        return set()
    return {cut.dim for cut in _cuts_of(module) if cut.kind == OWN and len(cut.shape) == 2}


def _cuts_of(module: nn.Module) -> list[TensorCut]:
    """Slicing of a module's own parameters."""
    return [cut for name, cut in marks_of(module).cuts.items() if module._parameters.get(name) is not None]


class SlicedWork:
    """Splits the work of a counter into work on slices and work that every slice repeats, while the model runs.

    Args:
        model: sliced.
        counter: of the model, which runs.
    """

    def __init__(self, model: nn.Module, counter: ModuleCounter) -> None:
        self._model, self._counter = model, counter
        self._handles: list[Any] = []
        self._before: dict[str, _Amounts] | None = None  # at the begin of what is on slices
        self._found: dict[str, _Amounts] = {}
        self._around = 0  # calls under way that are on slices from begin to end
        self._whole = {path for path, module in model.named_modules() if _is_on_slices(module)}

    def start(self) -> None:
        """Watch modules from now on."""
        for module in self._model.modules():
            if is_opening(module):
                self._handles.append(module.register_forward_hook(lambda *_: self._open()))
            elif is_closing(module):
                self._handles.append(module.register_forward_pre_hook(lambda *_: self._close()))
            elif _is_on_slices(module) and not isinstance(module, CutLayer):
                self._handles.append(module.register_forward_pre_hook(lambda *_: self._enter()))
                self._handles.append(module.register_forward_hook(lambda *_: self._leave()))
            if any(isinstance(hook, Cut) for hook in module._forward_pre_hooks.values()):
                self._handles.append(module.register_forward_pre_hook(self._enter_sequence))
            if any(isinstance(hook, Join) for hook in module._forward_hooks.values()):
                self._handles.append(module.register_forward_hook(lambda *_: self._leave()))

    def stop(self) -> None:
        """Watch no more."""
        self.end_pass()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def end_pass(self) -> None:
        """End what is on slices, at the end of a forward pass."""
        self._around = 0
        self._close()

    def _enter_sequence(self, module: nn.Module, _: Any) -> None:
        hooks = module._forward_pre_hooks.values()
        if any(isinstance(hook, Cut) and hook.sequence.is_on for hook in hooks):
            self._enter()

    def _enter(self) -> None:
        self._open()
        self._around += 1

    def _leave(self) -> None:
        if self._around:
            self._around -= 1
            self._close()

    def _open(self) -> None:
        if self._before is None:
            self._before = self._amounts()

    def _close(self) -> None:
        if self._before is None or self._around:
            return
        before, self._before = self._before, None
        for path, now in self._amounts().items():
            past, known = before.get(path, (0, 0, 0)), self._found.get(path, (0, 0, 0))
            self._found[path] = (
                known[0] + now[0] - past[0], known[1] + now[1] - past[1], known[2] + now[2] - past[2]
            )  # fmt: skip

    def _amounts(self) -> dict[str, _Amounts]:
        own = self._counter.own
        return {path: (each.forward, each.deepspeed_flops, each.deepspeed_macs) for path, each in own.items()}

    def share(self) -> Totals:
        """The part of the counted work that is on slices."""
        found = [0] * 5
        for path, own in self._counter.own.items():
            whole = (own.forward, own.deepspeed_flops, own.deepspeed_macs)
            forward, flops, macs = whole if path in self._whole else self._found.get(path, (0, 0, 0))
            backward, recompute = (_part(each, forward, own.forward) for each in (own.backward, own.recompute))
            if path in self._whole:
                backward, recompute = own.backward, own.recompute
            for place, value in enumerate((flops, macs, forward, backward, recompute)):
                found[place] += value
        return Totals(*found)


def _part(amount: int, part: int, whole: int) -> int:
    """The part of the work in backward of a module whose work in forward is `whole`, `part` of it on slices."""
    return amount * part // whole if whole else 0


def _is_on_slices(module: nn.Module) -> bool:
    """True for a layer that has sliced parameters, or its part of an input."""
    if isinstance(module, CutLayer):
        return True
    return any(cut.kind not in WHOLE_KINDS for cut in _cuts_of(module))


def counted_work(counter: ModuleCounter, sliced: SlicedWork | None, *, is_first: bool) -> Totals:
    """The work of this rank in sums over all ranks.

    Args:
        counter: of the model.
        sliced: None where layers are not sliced.
        is_first: of the ranks that have slices of the same layers, the one that counts what they repeat.
    """
    if sliced is not None and not is_first:
        return sliced.share()
    total = counter.total()
    return Totals(
        total.deepspeed_flops, total.deepspeed_macs, total.forward, total.backward, total.recompute
    )  # fmt: skip


def own_elements(
    model: nn.Module,
    slice_rank: int,
    slices: int,
    counts: Callable[[nn.Parameter], bool],
    expert: Callable[[Any], bool],
) -> tuple[int, int]:
    """Elements of parameters that this rank counts in sums over all ranks, and those of experts among them.

    Args:
        model: on this rank.
        slice_rank: place of this rank among those that have slices of the same layers.
        slices: number of these ranks.
        counts: True for a parameter that this rank counts, one of those that have it.
        expert: True for a parameter of an expert.
    """
    known, total, of_experts = cuts(model) if slices > 1 else {}, 0, 0
    for name, param in model.named_parameters():
        if not counts(param):
            continue
        cut, elements = known.get(name), param.numel()
        if cut is not None and cut.kind not in WHOLE_KINDS:  # without the padding of a vocabulary
            held = sum(stop - start for start, stop in cut.ranges(slice_rank, slices))
            elements = math.prod(size for dim, size in enumerate(cut.shape) if dim != cut.dim) * held
        total += elements
        of_experts += elements if expert(param) else 0
    return total, of_experts


def summed(parts: list[Totals]) -> Totals:
    """The sum over ranks."""
    return Totals(*(sum(getattr(part, name) for part in parts) for name in Totals.__dataclass_fields__))
