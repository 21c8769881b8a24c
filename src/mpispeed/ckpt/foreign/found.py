"""Content of a foreign checkpoint, before it is written as one of ours."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.foreign.faults import ForeignMismatch
from mpispeed.ckpt.foreign.torch_tensors import NotDense
from mpispeed.ckpt.foreign.values import Plain, Values
from mpispeed.ckpt.format import schema

#: of HDF5
_MOST_DIMS = 32
MASTER, WEIGHT16 = "master", "weight16"
#: names of buffers in files that do not say which of their tensors are buffers
BUFFER_NAMES = r"(^|\.)(running_mean|running_var|num_batches_tracked)$"


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options for reading a foreign checkpoint.

    Attributes:
        form: "auto", "safetensors", "torch", "zero" or "universal".
        weights_only: leave out optimizer state.
        frozen: regular expression of parameters that are not trained, where the files do not say it.
        buffers: regular expression of buffers, where the files do not say it.
        tp_patterns: (kind, regular expression) for merging slices of tensor parallelism.
    """

    form: str = "auto"
    weights_only: bool = False
    frozen: str = ""
    buffers: str = BUFFER_NAMES
    tp_patterns: Sequence[tuple[str, str]] = ()

    def __post_init__(self) -> None:
        for text in (self.frozen, self.buffers, *(pattern for _, pattern in self.tp_patterns)):
            try:
                re.compile(text)
            except re.error as failure:
                msg = f"{text!r} is no regular expression: {failure}"
                raise CheckpointError(msg) from failure


WRAPPER = ".random_ltd_layer"


@dataclass(slots=True)
class FoundParam:
    """A parameter of a foreign checkpoint.

    Attributes:
        train_dtype: dtype in which the model uses it.
        slots: "master" or "weight16", and optimizer state.
        is_frozen: it is not trained.
        group: index of its parameter group, -1 for none.
        step: updates it has received.
        expert: (number, experts of the layer) of a parameter of one expert.
    """

    name: str
    shape: tuple[int, ...]
    train_dtype: torch.dtype
    slots: dict[str, Values]
    is_frozen: bool = False
    group: int = -1
    step: int = 0
    tp_kind: str = "none"
    tp_dim: int = -1
    expert: tuple[int, int] | None = None

    def check(self) -> None:
        """Check that the parameter is consistent and can be stored.

        Raises:
            CheckpointError: it does not or cannot.
        """
        _check_tensor(self.name, self.shape, *self.slots.values())
        for slot in self.slots:
            schema.escape(slot)
        schema.dtype_name(self.train_dtype)
        if not 0 <= self.step < 2**63:
            msg = f"{self.name!r} has received {self.step} updates"
            raise ForeignMismatch(msg)

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def weight(self) -> Values:
        """Its value, the master if there is one."""
        return self.slots[MASTER] if MASTER in self.slots else self.slots[WEIGHT16]


@dataclass(slots=True)
class Found:
    """A foreign checkpoint.

    Attributes:
        path: where it is.
        form: format, as in `ReadOptions`.
        params: by name.
        buffers: by name; shape and elements.
        aliases: other name -> name of tied parameters.
        groups: hyper-parameters of the parameter groups, without "params".
        rule: name of the optimizer, "" for none.
        counters: global_steps, global_samples, skipped_steps and loss_scaler.
        lr_scheduler: state of the schedule.
        client: the user's own entries.
        config_json: configuration of the run that saved.
        layout: numbers about the ranks that saved.
        left_out: descriptions of content that an import does not take.
    """

    path: Path
    form: str
    params: dict[str, FoundParam] = field(default_factory=dict)
    buffers: dict[str, tuple[tuple[int, ...], Values]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    rule: str = ""
    counters: dict[str, Any] = field(default_factory=dict)
    lr_scheduler: dict[str, Any] | None = None
    client: dict[str, Any] = field(default_factory=dict)
    config_json: str = "{}"
    layout: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, param: FoundParam) -> None:
        """Add a parameter.

        Raises:
            ForeignMismatch: one of that name is there.
        """
        if param.name in self.params or param.name in self.buffers:
            msg = f"{self.path} has {param.name!r} twice"
            raise ForeignMismatch(msg)
        self.params[param.name] = param

    def add_weight(self, name: str, tensor: torch.Tensor, *, is_frozen: bool) -> None:
        """Add a parameter of which only the weight is known."""
        is_wide = tensor.dtype in (torch.float32, torch.float64) and not is_frozen
        slots: dict[str, Values] = {MASTER if is_wide else WEIGHT16: Plain(tensor)}
        self.add(FoundParam(name, tuple(tensor.shape), tensor.dtype, slots, is_frozen))

    def unwrap(self) -> None:
        """Take DeepSpeed's wrapper of layers that drop tokens (random-LTD) out of all names.

        Raises:
            ForeignMismatch: two names would be one.
        """
        if not any(WRAPPER in name for name in (*self.params, *self.buffers, *self.aliases)):
            return
        params, buffers = list(self.params.values()), self.buffers
        self.params, self.buffers = {}, {}
        for param in params:
            param.name = param.name.replace(WRAPPER, "")
            self.add(param)
        self.buffers = {name.replace(WRAPPER, ""): found for name, found in buffers.items()}
        self.aliases = {one.replace(WRAPPER, ""): other.replace(WRAPPER, "") for one, other in self.aliases.items()}

    def check(self) -> None:
        """Check that the checkpoint is consistent and can be stored.

        Raises:
            CheckpointError: it does not or cannot.
        """
        for param in self.params.values():
            param.check()
        for name, (shape, values) in self.buffers.items():
            _check_tensor(name, shape, values)
        for alias, name in self.aliases.items():
            _check_tensor(alias, ())
            _check_tensor(name, ())
        for key in ("global_steps", "global_samples", "skipped_steps"):
            if not 0 <= self.counters.get(key, 0) < 2**63:
                msg = f"{self.path} counts {self.counters[key]} {key}"
                raise ForeignMismatch(msg)

    def add_buffer(self, name: str, tensor: torch.Tensor) -> None:
        """Add a buffer."""
        self.buffers[name] = (tuple(tensor.shape), Plain(tensor))


def _check_tensor(name: str, shape: tuple[int, ...], *parts: Values) -> None:
    if not isinstance(name, str):
        msg = f"a {type(name).__name__} is the name of a tensor"
        raise ForeignMismatch(msg)
    schema.escape(name)
    if len(shape) > _MOST_DIMS or any(type(size) is not int or size < 0 for size in shape):
        msg = f"{name!r} has the shape {shape!r:.80}; up to {_MOST_DIMS} dimensions can be stored"
        raise ForeignMismatch(msg)
    for values in parts:
        schema.dtype_name(values.dtype)
        if values.numel != math.prod(shape):
            msg = f"{name!r} has {values.numel} elements and the shape {shape!r:.80}"
            raise ForeignMismatch(msg)


def same_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key that is equal for tensors of the same memory and shape."""
    if tensor.is_meta:  # stands for bytes of a file that no other tensor has
        return (id(tensor),)
    place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*place, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def take_state_dict(found: Found, state: Mapping[str, Any], options: ReadOptions, skip: frozenset[str]) -> None:
    """Add the tensors of an ordinary state dict; further names of a tensor become aliases."""
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        if name in skip:
            continue
        if isinstance(tensor, NotDense):
            msg = f"{name!r} of {found.path} is sparse, quantized or nested; only dense tensors can be imported"
            raise ForeignMismatch(msg)
        if not isinstance(tensor, torch.Tensor):
            found.left_out.append(f"{name} is no tensor")
            continue
        key = same_tensor(tensor)
        if tensor.numel() and key in seen:
            found.aliases[name] = seen[key]
        elif re.search(options.buffers, name) or not (tensor.is_floating_point() or tensor.is_complex()):
            found.add_buffer(name, tensor)
        else:
            seen[key] = name
            found.add_weight(name, tensor, is_frozen=bool(options.frozen and re.search(options.frozen, name)))
