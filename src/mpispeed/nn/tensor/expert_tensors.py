"""Experts of `transformers`, which keep the weights of all experts in three-dimensional tensors, sliced by inner width.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3, for each expert: one sum of outputs, and one of gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mpispeed.base.param_marks import part_of
from mpispeed.mesh.comm import Comm
from mpispeed.nn.tensor import regions
from mpispeed.nn.tensor.apply import Layers
from mpispeed.nn.tensor.shard_plan import Division
from mpispeed.nn.tensor.tensor_cut import TensorCut, marks_of

_ALIGNED = (8, 4)  # elements of 16-bit floats, and of fp32
_LAST = "down_proj"
_PLAIN = ("has_bias", "has_post_expert_norm", "_is_expert_parallel", "is_transposed")


@dataclass(frozen=True, slots=True)
class ExpertSite:
    """A module with experts' weights.

    Attributes:
        path: of the module.
        parts: name of each parameter [experts, ..., ...] -> (dim that is sliced, parts along it).
        grain: shares of the inner width are multiples of it.
        source: how it was found.
    """

    path: str
    parts: tuple[tuple[str, int, int], ...]
    grain: int
    source: str


def expert_sites(model: nn.Module, division: Division) -> Iterator[ExpertSite]:
    """Modules that carry the marks of `use_experts_implementation` of transformers."""
    for path, module in model.named_modules():
        marks = vars(module)
        up = "gate_up_proj" if marks.get("has_gate") else "up_proj"
        if "is_concatenated" not in marks or any(marks.get(name) for name in _PLAIN):
            continue
        parts = {up: (1, 2 if up == "gate_up_proj" else 1), _LAST: (2, 1)}
        if marks["is_concatenated"] or up == "up_proj":
            site = expert_site(module, path, parts, division, "experts")
            if site is not None:
                yield site


def expert_site(
    module: nn.Module, path: str, parts: Mapping[str, tuple[int, int]], division: Division, source: str
) -> ExpertSite | None:
    """The site of a module whose parameters are to be sliced, or None if these do not fit together.

    Args:
        module: has the parameters.
        path: of it.
        parts: name of each parameter -> (dim that is sliced, parts along it).
        division: how to slice.
        source: for the report.
    """
    widths = set()
    for name, (dim, count) in parts.items():
        param = module._parameters.get(name)
        if param is None or param.dim() != 3 or param.shape[dim] % count:
            return None
        widths.add(param.shape[dim] // count)
    if len(widths) != 1 or set(parts) != {name for name, p in module._parameters.items() if p is not None}:
        return None
    found = tuple((name, dim, count) for name, (dim, count) in parts.items())
    return ExpertSite(path, found, _grain(widths.pop(), division), source)


def _grain(width: int, division: Division) -> int:
    """The wanted grain, or the largest that gives each rank one: `grouped_mm` wants rows in multiples of 16 bytes."""
    grains = (max(division.grain, _ALIGNED[0]), *_ALIGNED)
    return next((grain for grain in grains if width >= grain * division.size), 1)


def slice_experts(model: nn.Module, site: ExpertSite, comm: Comm, layers: Layers) -> None:
    """Keep this rank's slice of each expert, and sum the outputs. Local, unless full parameters are elsewhere."""
    module = model.get_submodule(site.path)

    def made() -> nn.Module:
        for name, dim, count in site.parts:
            param: Any = getattr(module, name)
            sizes = (param.shape[dim] // count,) * count if count > 1 else ()
            cut = TensorCut(
                "sub" if sizes else "column" if name != _LAST else "row",
                dim,
                tuple(param.shape),
                sizes,
                (site.grain,) * count,
            )
            own = cut.take(param, comm.rank, comm.size)
            module.register_parameter(name, part_of(param, own))
            marks_of(module).cuts[name] = cut
        return module

    layers.replaced(module, made)
    module.register_forward_pre_hook(BeforeExperts(comm))
    module.register_forward_hook(BehindExperts(comm))


class BeforeExperts:
    """A hook before experts: gradients of what reaches their slices are summed."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def __deepcopy__(self, memo: dict[int, Any]) -> BeforeExperts:
        return type(self)(self.comm)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same arguments. Collective over: the slices, in backward."""
        return tuple(
            regions.copy_to(x, self.comm) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args
        )


class BehindExperts:
    """A hook behind experts that sums the outputs of their slices."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def __deepcopy__(self, memo: dict[int, Any]) -> BehindExperts:
        return type(self)(self.comm)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """The sum. Collective over: the slices."""
        return regions.reduce_from(output, self.comm)
