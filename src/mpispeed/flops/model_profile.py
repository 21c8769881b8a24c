"""The profile of a model alone: one call that runs it, and returns and prints what it computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mpispeed.base.errors import UsageError
from mpispeed.flops.profiler import FlopsProfiler, prepare_file

MODES = ("forward", "generate")


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[int | str, int | str, int | str]:
    """Operations, MACs and parameters of a model, which runs once in evaluation mode; its own mode comes back.

    Args:
        model: the model.
        input_shape: shape of ones, in the dtype and on the device of the first parameter, that are the only input.
        args: positional inputs, without `input_shape`.
        kwargs: inputs by name, without `input_shape`.
        print_profile: print the report.
        detailed: with the tree of modules.
        module_depth: of the deepest modules among the top ones; -1 for all.
        top_modules: modules that are shown at each depth.
        warm_up: passes before the one that is counted.
        as_string: return texts such as "866.08 M".
        output_file: for the report, instead of the screen.
        ignore_modules: classes of modules that are not counted.
        mode: "forward" calls the model, "generate" its method `generate`.

    Returns (flops, MACs, params) of the pass.

    Source: DeepSpeed's documentation, "Flops Profiler".

    Raises:
        UsageError: (an AssertionError) `input_shape` is no tuple of numbers, there are no inputs, inputs are given
            twice, `mode` is another one, or the file cannot be written.
    """
    inputs, named = _inputs(model, input_shape, args, kwargs)
    run = _runner(model, mode)
    if print_profile and output_file:
        prepare_file(output_file)
    profiler = FlopsProfiler(model)
    with _evaluating(model):
        for _ in range(warm_up):
            run(*inputs, **named)
        profiler.start_profile(ignore_list=ignore_modules)
        try:
            run(*inputs, **named)
        finally:
            profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    found = (
        profiler.get_total_flops(as_string), profiler.get_total_macs(as_string), profiler.get_total_params(as_string)
    )  # fmt: skip
    profiler.end_profile()
    return found


def _inputs(
    model: nn.Module, shape: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The inputs of a pass."""
    args, kwargs, call = args or (), kwargs or {}, "get_model_profile"
    if shape is None:
        if not args and not kwargs:
            msg = f"{call}() has no inputs; give input_shape, args or kwargs"
            raise UsageError(msg)
        return args, kwargs
    if not isinstance(shape, tuple) or not shape or not all(isinstance(size, int) and size >= 0 for size in shape):
        msg = f"{call}(input_shape={shape!r}): a tuple of at least one length is needed, such as (batch, 3, 224, 224)"
        raise UsageError(msg)
    if args or kwargs:
        msg = f"{call}(): input_shape makes the only input, and args or kwargs are given too; leave one out"
        raise UsageError(msg)
    like = next(model.parameters(), torch.empty(0))
    return (torch.ones(shape, dtype=like.dtype, device=like.device),), {}


def _runner(model: nn.Module, mode: str) -> Any:
    """What one pass calls."""
    if mode not in MODES:
        msg = f"get_model_profile(mode={mode!r}): {' and '.join(map(repr, MODES))} are known"
        raise UsageError(msg)
    if mode == "forward":
        return model
    if not callable(getattr(model, "generate", None)):
        msg = f"get_model_profile(mode='generate'): {type(model).__name__} has no method generate; use mode='forward'"
        raise UsageError(msg)
    return model.generate


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which the model is in evaluation mode."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode
