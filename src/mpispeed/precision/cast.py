"""Casts batches and modules to the compute dtype; integers, booleans and complex numbers stay as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mpispeed.base.tensor_tree import map_tensors

_MIXED = re.compile(
    r"same dtype|type.* should be the same|dtypes? must be the same|scalar type (of )?(Float|Half|BFloat16)"
    r"|not match weight dtype|type promoting not supported|Found dtype \w+ but expected"
    r"|must have the type torch\.",  # of recurrent layers, up to torch 2.8
    re.IGNORECASE,
)
"""What torch's layers and products say about operands of several floating dtypes."""


@contextmanager
def naming_dtype(dtype: torch.dtype, setting: str) -> Iterator[None]:
    """Add advice to torch's errors about operands of several dtypes, where the model was cast by `setting`.

    The error stays the same object, so its type and its traceback are those of the failing line.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        text = str(error)
        if setting and _MIXED.search(text):
            name = str(dtype).removeprefix("torch.")
            error.args = (
                f"{text}\n{setting}.enabled makes the model compute in {name}: give it floating inputs in that dtype, "
                f"x.to(torch.{name}), also those that it makes itself, x.to(self.weight.dtype), and a loss outputs and "
                "targets of one dtype, outputs.float()"
                + (', or set "fp16": {"auto_cast": true} for inputs' if dtype == torch.float16 else ""),
                *error.args[1:],
            )
        raise


@dataclass(frozen=True, slots=True)
class Casting:
    """Casts and advice for the inputs of a model that computes in `dtype`.

    Attributes:
        dtype: of the model.
        setting: the section of the config by which it was cast, or "".
        casts_inputs: floating inputs are cast too.
        casts_keywords: also those that are given by keyword.
        outputs: dtype of floating outputs; None: as the model gives them.
        autocast: dtype of torch's autocast around forward passes; None: none.
        device_type: where autocast is on.
    """

    dtype: torch.dtype
    setting: str
    casts_inputs: bool
    casts_keywords: bool = False
    outputs: torch.dtype | None = None
    autocast: torch.dtype | None = None
    device_type: str = "cpu"

    def inputs(self, tree: Any) -> Any:
        """The model's inputs, cast if that is set."""
        return cast_inputs(tree, self.dtype) if self.casts_inputs else tree

    def keywords(self, given: dict[str, Any]) -> dict[str, Any]:
        """The model's inputs that are given by keyword, cast if that is set."""
        cast: dict[str, Any] = cast_inputs(given, self.dtype) if self.casts_keywords else given
        return cast

    def result(self, tree: Any) -> Any:
        """The model's outputs, cast if that is set."""
        return tree if self.outputs is None else cast_inputs(tree, self.outputs)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context of a forward pass: autocast if that is set, and `naming_dtype`."""
        with self.named(), self.autocasting():
            yield

    def autocasting(self) -> AbstractContextManager[Any]:
        """Context of torch's autocast if that is set; backward passes run outside of it, as torch advises."""
        return nullcontext() if self.autocast is None else torch.autocast(self.device_type, self.autocast)

    def named(self) -> AbstractContextManager[None]:
        """Context of a pass through the model; see `naming_dtype`."""
        return naming_dtype(self.dtype, self.setting)


def cast_inputs(tree: Any, dtype: torch.dtype) -> Any:
    """`tree` with its floating tensors in `dtype`, looked for in lists, tuples, named tuples and dicts.

    Containers are copied, leaves that need no cast are the same objects; other types are returned as they are.
    """
    return map_tensors(tree, lambda x: x.to(dtype) if x.is_floating_point() else x)


def cast_module(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast floating parameters, their gradients and buffers of `module` in place, and return it.

    The tensor objects stay the same, so tied parameters stay tied and optimizers keep their references.
    """
    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            grad, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.to(dtype)
            parameter.grad = None if grad is None else grad.to(dtype)
    for buffer in module.buffers():
        if buffer.is_floating_point() and buffer.dtype != dtype:
            buffer.data = buffer.data.to(dtype)
    return module
