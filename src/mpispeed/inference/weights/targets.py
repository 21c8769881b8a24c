"""Parameters and buffers of a model that files have values for, tied ones as one, and their storage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from mpispeed.base.errors import CheckpointError
from mpispeed.nn.tensor import TensorCut, cuts


@dataclass(slots=True)
class Target:
    """A tensor of the model.

    Attributes:
        names: all of its full names; the first one stands for it.
        owners: the modules that have it, and its name there.
        cut: its slicing; None where every rank has all of it.
        shape: of the whole.
        local_shape: of what this rank has.
        dtype: that it shall have.
        is_param: it is a parameter, not a buffer.
    """

    names: list[str]
    owners: list[tuple[nn.Module, str]]
    cut: TensorCut | None
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: torch.dtype
    is_param: bool
    values: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """The name that stands for it."""
        return self.names[0]

    @property
    def held(self) -> torch.Tensor:
        """The tensor in the model."""
        module, name = self.owners[0]
        found: torch.Tensor = (module._parameters if self.is_param else module._buffers)[name]  # type: ignore[assignment]
        return found

    @property
    def new_bytes(self) -> int:
        """Memory that has to be made for it. Units: bytes."""
        held = self.held
        is_kept = not held.is_meta and held.dtype == self.dtype and held.is_contiguous()
        return 0 if is_kept else math.prod(self.local_shape) * self.dtype.itemsize

    def storage(self, rank: int) -> torch.Tensor:
        """The memory that gets the values, made at the first call; padding of a vocabulary is zero."""
        if self.values is None:
            held = self.held.detach()
            if self.new_bytes or held.is_meta:
                device = "cpu" if held.is_meta else held.device
                self.values = torch.empty(self.local_shape, dtype=self.dtype, device=device)
                self._put(self.values)
            else:
                self.values = held
            if self.cut is not None and self.cut.kind == "vocab":
                rows, full = self.local_shape[0], self.shape[0]
                self.values[min(max(full - rank * rows, 0), rows) :].zero_()
        return self.values

    def map(self, values: torch.Tensor) -> None:
        """Use memory that a file is mapped to."""
        self.values = values.view(self.local_shape)
        self._put(self.values)

    def _put(self, values: torch.Tensor) -> None:
        """Make the model use this memory."""
        old = self.held
        new = values
        if self.is_param:
            new = nn.Parameter(values, requires_grad=old.requires_grad and values.is_floating_point())
            new.__dict__.update(old.__dict__)
        for module, name in self.owners:
            (module._parameters if self.is_param else module._buffers)[name] = new  # type: ignore[assignment]


@dataclass(slots=True)
class Targets:
    """All tensors of a model that files have values for.

    Attributes:
        rows: in the order of the model.
        by_name: every name -> its tensor.
        leaves: path of a module -> positions of its own tensors in `rows`.
    """

    rows: list[Target] = field(default_factory=list)
    by_name: dict[str, Target] = field(default_factory=dict)
    leaves: dict[str, list[int]] = field(default_factory=dict)


def find_targets(model: nn.Module, rank: int, size: int, dtype: torch.dtype | None) -> Targets:
    """The parameters and persistent buffers of a model.

    Args:
        model: sliced or not; may be without memory.
        rank: in the slicing group.
        size: of the slicing group.
        dtype: of numbers with a fraction; None for those that the model has.

    Raises:
        CheckpointError: a tensor is not as its slicing says.
    """
    made, seen, sliced = Targets(), dict[int, int](), cuts(model)
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor, is_param in _own(module):
            full = f"{path}.{name}" if path else name
            at = seen.setdefault(id(tensor), len(made.rows))
            if at == len(made.rows):
                made.rows.append(_target(full, tensor, sliced, (rank, size), dtype, is_param))
            else:
                made.rows[at].names.append(full)
            target = made.rows[at]
            if not any(owner is module and known == name for owner, known in target.owners):
                target.owners.append((module, name))
            made.by_name[full] = target
            made.leaves.setdefault(path, []).append(at)
    return made


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for name, param in module._parameters.items():
        if param is not None:
            yield name, param, True
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer, False


def _target(
    name: str,
    tensor: torch.Tensor,
    sliced: Mapping[str, TensorCut],
    place: tuple[int, int],
    dtype: torch.dtype | None,
    is_param: bool,
) -> Target:
    cut = sliced.get(name)
    if cut is not None and cut.dim < 0:
        cut = None
    local = tuple(tensor.shape)
    if cut is not None and cut.local_shape(*place) != local:
        msg = f"{name} has the shape {local} on rank {place[0]} of {place[1]}, and its slicing of {cut.shape} says "
        msg += f"{cut.local_shape(*place)}"
        raise CheckpointError(msg)
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return Target([name], [], cut, local if cut is None else cut.shape, local, wanted, is_param)
