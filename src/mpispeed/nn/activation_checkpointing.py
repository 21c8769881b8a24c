"""Activation checkpointing: `checkpoint(function, *args)` keeps the arguments and recomputes the rest in backward.

The names and the rules are those of `deepspeed.checkpointing`. Reentrant and non-reentrant calls are the same here: a
call works where no input needs a gradient, nested, for parts of a graph, and with several calls under way in any order.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174; Rajbhandari et al., "ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models", SC20.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from mpispeed.base import rng
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.mesh.comm import Comm
from mpispeed.nn import checkpointing_options, recompute
from mpispeed.nn.boundary_timers import BackwardPass, Boundaries, Timer
from mpispeed.nn.checkpointing_options import Options
from mpispeed.nn.contiguous_buffer import Slots
from mpispeed.nn.cut_marks import is_cut, mark_cut
from mpispeed.nn.policy import Account, Policy
from mpispeed.nn.saved_inputs import SavedInputs, map_tensors


class Checkpointer:
    """Checkpointed calls with one set of options, over one slicing group."""

    def __init__(
        self, options: Options | None = None, comm: Comm | None = None, account: Account | None = None
    ) -> None:
        self.options = (options or Options()).checked()
        self.comm = comm
        self.account = account or Account()
        self.boundaries = Boundaries(
            synchronizes=self.options.synchronize_checkpoint_boundary, profiles=self.options.profile
        )
        self.slots = None
        if self.options.contiguous_memory_optimization and self.options.number_checkpoints is not None:
            self.slots = Slots(self.options.number_checkpoints)
        self._calls = 0

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """See `checkpoint` below."""
        if not torch.is_grad_enabled():
            return function(*args)
        outer = recompute.innermost()
        if outer is not None:
            return self._run(function, args, outer, self._calls)
        self._calls += 1
        with self.boundaries.forward(self._calls):
            return self._run(function, args, None, self._calls)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], outer: Any, number: int) -> Any:
        if outer is not None and self.slots is not None:
            msg = (
                "a checkpointed function calls checkpoint again, and contiguous_memory_optimization has no slots for "
                "calls inside of calls; switch it off, or checkpoint only one level"
            )
            raise UsageError(msg)
        views: list[torch.Tensor] = []
        is_watched = outer is None and self.boundaries.is_on
        if is_watched:
            args, views = self.boundaries.watched(args)
        inputs = SavedInputs(args, self._policy(), outer, number)
        region = recompute.Region(function, inputs)
        if is_watched:
            region.on_backward = BackwardPass(self.boundaries, number, views).begin
        outputs = region.run(args)
        inputs.check_unchanged()
        _pass_marks_on(args, outputs)
        return outputs

    def _policy(self) -> Policy:
        shares = self.options.partition_activations and self.comm is not None and self.comm.size > 1
        return Policy(
            comm=self.comm if shares else None,
            is_strict=self.options.strict_partition,
            on_host=self.options.cpu_checkpointing,
            slots=self.slots,
            account=self.account,
        )


def _pass_marks_on(args: tuple[Any, ...], outputs: Any) -> None:
    """Mark outputs of the shape of a marked input.

    A superfluous mark costs memory; a missing one would gather parts that do not belong together.
    """
    shapes = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if is_cut(tensor):
            shapes.add(tensor.shape)
        return tensor

    map_tensors(args, note)
    if shapes:
        map_tensors(outputs, lambda tensor: mark_cut(tensor) if tensor.shape in shapes else tensor)


class _Process:
    """Options set by `configure` for this process."""

    def __init__(self) -> None:
        self.is_configured = False
        self.slice_rank = 0
        self.current = Checkpointer()

    def change(self, options: Options, comm: Comm | None) -> None:
        self.current = Checkpointer(options, comm, self.current.account)


_process = _Process()


def configure(mpu_: Any = None, config: Any = None, **options: Any) -> None:
    """Set all options: to their defaults, then to those of the configuration, then to `options` that are not None.

    Args:
        mpu_: the slicing group, or an object that gives it, or None: activations are not sliced.
        config: a mapping, a path of a JSON file, or an object with the section `activation_checkpointing`.
        options: by the keys of the section.

    Raises:
        ConfigError: options do not fit together, or `mpu_` gives no slicing group. Nothing is changed then.
    """
    chosen = checkpointing_options.override(checkpointing_options.read(config), **options)
    comm = slicing_group(mpu_)
    _process.change(chosen, comm)
    _process.slice_rank = 0 if comm is None else comm.rank
    _process.is_configured = True


def unconfigure() -> None:
    """Go back to the state before the first `configure`."""
    global _process
    _process = _Process()


def current() -> Checkpointer:
    """The checkpointer that `checkpoint` uses now."""
    return _process.current


def is_configured() -> bool:
    """True if `configure` was called."""
    return _process.is_configured


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)`, keep only the arguments, and call it again when backward needs intermediate results.

    Returns what the function returns. Arguments may be anything; tensors are also found in tuples, lists and dicts.
    Where gradients are switched off the function is called and nothing is kept.

    Collective over: the slicing group, in backward, if activations are partitioned: its ranks have to checkpoint the
        same calls in the same order.

    Raises:
        UsageError: the function changes an argument in place, or slots or sizes do not fit; in backward, if an argument
            was changed in place after the call, or the function did something else when it was recomputed.
        AgreementError: in backward, if ranks are at different calls or activations are not equal on them.
    """
    return _process.current.checkpoint(function, *args)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Alias of `checkpoint`, which has no other form here."""
    return _process.current.checkpoint(function, *args)


class CheckpointFunction:
    """`checkpoint` with the calling convention of DeepSpeed's autograd function; no such function itself."""

    @staticmethod
    def apply(function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """Call `checkpoint(function, *args)`; outputs are also appended to `all_outputs`."""
        outputs = checkpoint(function, *args)
        all_outputs.extend(outputs if isinstance(outputs, tuple) else (outputs,))
        return outputs


def reset() -> None:
    """Drop the contiguous buffer, after forward passes with gradients that no backward followed."""
    if _process.current.slots is not None:
        _process.current.slots.clear()


def set_num_layers(nlayers: int) -> None:
    """Set `num_checkpoints`.

    Raises:
        ConfigError: it is no number from 1.
    """
    current = _process.current
    _process.change(replace(current.options, number_checkpoints=nlayers), current.comm)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Set `partition_activations`.

    Raises:
        ConfigError: contiguous checkpointing needs it.
    """
    current = _process.current
    _process.change(replace(current.options, partition_activations=partition_activation), current.comm)


def kept_bytes(device_type: str | None = None) -> int:
    """Bytes of activations that checkpointed calls keep on this rank until their backward; "cpu", "cuda" or all.

    Memory used anyway is counted too: an activation that is kept as it is often shares the memory of its producer.
    """
    return _process.current.account.total(device_type)


def timers() -> dict[str, Timer]:
    """Seconds and counts of "forward" and "backward" passes since `configure(profile=True)`."""
    return _process.current.boundaries.timers


def slicing_group(mpu_: Any) -> Comm | None:
    """The slicing group of a user's `mpu` object; None if there is none.

    Raises:
        ConfigError: the object does not give a group, or one of another size than it says.
    """
    if mpu_ is None or isinstance(mpu_, Comm):
        return mpu_
    for prefix in ("get_tensor_model_parallel", "get_model_parallel"):
        getter = getattr(mpu_, f"{prefix}_group", None)
        if getter is None:
            continue
        group, ask_size = getter(), getattr(mpu_, f"{prefix}_world_size", None)
        size = ask_size() if ask_size is not None else None
        if isinstance(group, Comm):
            if size not in (None, group.size):
                msg = (
                    f"mpu: {prefix}_world_size() gives {size}, but the group of {prefix}_group() has {group.size} ranks"
                )
                raise ConfigError(msg)
            return group
        if size == 1:
            return None
        msg = (
            f"mpu: {prefix}_group() gives a {type(group).__name__}; a group of ranks of this library is needed, such "
            'as grid.get_tensor_model_parallel_group(), mesh["model"] or mpispeed.comm.new_group(ranks)'
        )
        raise ConfigError(msg)
    msg = (
        f"mpu: {type(mpu_).__name__} has neither get_tensor_model_parallel_group nor get_model_parallel_group; pass "
        "the slicing group itself, an object with one of these methods, or None"
    )
    raise ConfigError(msg)


# -- random numbers ----------------------------------------------------------------------------------------------------

RNGStatesTracker = CudaRNGStatesTracker = rng.RNGStatesTracker
get_rng_tracker = get_cuda_rng_tracker = rng.get_rng_tracker


def model_parallel_manual_seed(seed: int) -> None:
    """Start the random streams: the default at `seed`, the one of slices at `seed` + 2718 + rank in the slicing group.

    Replaces other seeding of torch, and all streams that were in the tracker.

    Raises:
        UsageError: `configure` was not called, so the slicing group is unknown.
    """
    rng.seed_streams(seed, _slice_rank("model_parallel_manual_seed"))


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Start the stream of slices again at `seed` + 2718 + rank in the slicing group; nothing else changes.

    Raises:
        UsageError: the stream was never started, or `configure` was not called.
    """
    rng.reseed_slices(seed, _slice_rank("model_parallel_reconfigure_tp_seed"))


model_parallel_cuda_manual_seed = model_parallel_manual_seed


def _slice_rank(caller: str) -> int:
    if not _process.is_configured:
        msg = f"{caller} needs the rank in the slicing group; call checkpointing.configure(mpu) first"
        raise UsageError(msg)
    return _process.slice_rank
