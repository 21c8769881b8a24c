"""The engine that `init_inference` returns: it stands in for its model, also inside of a pipeline of transformers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from mpispeed.base import device as devices
from mpispeed.base.errors import UnimplementedUse, UsageError
from mpispeed.inference.fused import wants_growing_cache

if TYPE_CHECKING:
    from mpispeed.inference.in_step import InStep
    from mpispeed.mesh.mesh import Mesh


_TABLES = ("wpe", "embed_positions", "position_embeddings")
"""Names of learned tables of positions in transformers' models; the config has their length."""

MakeCache = Callable[[nn.Module, int], Any]
"""Makes a cache for a model and a number of sequences."""


class Limits(NamedTuple):
    """Most tokens of a sequence, and new tokens that there has to be room for."""

    most_tokens: int
    least_new: int


class InferenceEngine(nn.Module):
    """A model that answers. What it does not have itself, as `config` or `device`, is the model's.

    Ranks that share layers call `forward` and `generate` alike, with equal inputs.

    Attributes:
        module: the model, with this rank's slices.
        mesh: groups of ranks: `mesh["model"]` shares each layer, `mesh["data"]` has the same slices.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        *,
        limits: Limits,
        config: Any = None,
        in_step: InStep | None = None,
        make_cache: MakeCache | None = None,
        close: Callable[[], None],
    ) -> None:
        """Made by `init_inference`.

        Args:
            module: the model, ready to answer.
            mesh: with the axes "data" and "model".
            limits: of sequences.
            config: what `config` returns instead of the model's.
            in_step: keeps ranks in step that run the model together, each with inputs of its own.
            make_cache: makes a cache for the model, if it is to have another one than its own `generate` would make.
            close: gives groups of ranks back; called once, on all ranks.
        """
        super().__init__()
        self.module = module
        self.mesh = mesh
        self.is_compiled = False
        self._limits, self._config, self._is_open = limits, config, True
        self._in_step, self._make_cache, self._close = in_step, make_cache, close
        self._times: Times | None = None
        self.training = module.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or name == "module":
                raise
            return getattr(super().__getattr__("module"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__.get("_modules", {}).get("module")
        if own is None or name in self.__dict__ or hasattr(type(self), name) or not hasattr(own, name):
            super().__setattr__(name, value)
        else:
            setattr(own, name, value)

    @property
    def runs_in_step(self) -> bool:
        """True if ranks with prompts of their own have to run the model together."""
        return self._in_step is not None

    @property
    def config(self) -> Any:
        """The setting `config` if it was given, else the model's own config; None for a model without one."""
        return getattr(self.module, "config", None) if self._config is None else self._config

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the model returns for these inputs. Collective over: the ranks that share layers."""
        self._require_open("forward")
        return self.module(*inputs, **kwargs)

    @property
    def generate(self) -> Callable[..., Any]:
        """`generate(*inputs, **kwargs)` of a model that has it: tokens, as the model's own `generate` returns them.

        Collective over: the ranks that share layers; where parameters or experts are spread, all ranks that have them.

        Raises:
            NotImplementedError: several beams are asked for.
            UsageError: a prompt leaves no room for new tokens, or `max_time` is set where ranks share layers.
        """
        if not hasattr(self.module, "generate"):
            msg = f"{type(self.module).__name__} has no generate"
            raise AttributeError(msg)
        return self._generate

    def _generate(self, *inputs: Any, **kwargs: Any) -> Any:
        self._require_open("generate")
        generate: Callable[..., Any] = getattr(self.module, "generate")  # noqa: B009
        with nullcontext() if self._in_step is None else self._in_step.entered():
            self._check_search(kwargs)
            self._check_length(inputs, kwargs)
            if self._make_cache is not None and wants_growing_cache(self.module, kwargs):
                tokens = _tokens_of(inputs, kwargs)
                kwargs["past_key_values"] = self._make_cache(self.module, 1 if tokens is None else tokens.shape[0])
            return generate(*inputs, **kwargs)

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Take the time of every forward pass of the model from now on, for `model_times`.

        Args:
            use_cuda_events: on a GPU, take its own times; else those of the host once the GPU has finished.
        """
        if self._times is None:
            self._times = Times(self.module, uses_events=use_cuda_events)

    def model_times(self) -> list[float]:
        """Milliseconds of each forward pass since the last call, or since `profile_model_time`.

        Raises:
            UsageError: `profile_model_time` was not called.
        """
        if self._times is None:
            msg = "engine.model_times(): no times are taken; call engine.profile_model_time() first"
            raise UsageError(msg)
        return self._times.take()

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Let torch compile the model: `engine.module.compile(backend=backend, **compile_kwargs)`.

        Args:
            backend: of `torch.compile`.
            compile_kwargs: other arguments of `torch.compile`.
        """
        self.module.compile(backend=backend, **(compile_kwargs or {}))
        self.is_compiled = True

    def destroy(self) -> None:
        """Give the groups of ranks back; the engine answers no more. Streamed parameters become whole on every rank.

        Collective over: all ranks.
        """
        if self._is_open:
            self._is_open = False
            if self._times is not None:
                self._times.remove()
            self._close()

    def _require_open(self, verb: str) -> None:
        if not self._is_open:
            msg = f"engine.{verb}() after engine.destroy(): its groups of ranks are gone; make a new engine"
            raise UsageError(msg)

    def _check_search(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse what ranks that share layers could not do in step, and what DeepSpeed refuses."""
        beams = self._setting("num_beams", kwargs) or 1
        if beams > 1:
            msg = f"engine.generate(num_beams={beams}): searches with several beams are not offered; use num_beams=1"
            raise UnimplementedUse(msg)
        seconds = self._setting("max_time", kwargs)
        if seconds is not None and self.mesh["model"].size > 1:
            msg = (
                f"engine.generate(max_time={seconds}): {self.mesh['model'].size} ranks share each layer, and their "
                "clocks would stop them at different tokens; limit max_new_tokens instead"
            )
            raise UsageError(msg)

    def _setting(self, name: str, kwargs: Mapping[str, Any]) -> Any:
        """A setting of generation, by keyword, in a given config of generation, or in the model's."""
        if kwargs.get(name) is not None:
            return kwargs[name]
        given = kwargs.get("generation_config") or getattr(self.module, "generation_config", None)
        return getattr(given, name, None)

    def _check_length(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tokens = _tokens_of(inputs, kwargs)
        if tokens is None:
            return
        length, limits, rows = tokens.shape[1], self._limits, _table_rows(self.module)
        if length > rows:
            msg = f"engine.generate(): prompts of {length} tokens, but the model has a table of {rows} positions; give "
            msg += "shorter prompts, or split them"
            raise UsageError(msg)
        has_encoder = bool(getattr(getattr(self.module, "config", None), "is_encoder_decoder", False))
        new = 0 if has_encoder else limits.least_new
        if length + new > limits.most_tokens:
            more = f" and at least {new} new ones (min_out_tokens) make {length + new}" if new else ""
            msg = (
                f"engine.generate(): prompts of {length} tokens{more}, but max_out_tokens is {limits.most_tokens}, "
                "those of the prompt included; give init_inference a larger max_out_tokens (max_tokens)"
            )
            raise UsageError(msg)


def _table_rows(module: nn.Module) -> int:
    """Tokens for which a model with a table of positions has a row; `sys.maxsize` for others."""
    has_table = any(path.rpartition(".")[2] in _TABLES for path, _ in module.named_modules())
    found = getattr(getattr(module, "config", None), "max_position_embeddings", None) if has_table else None
    return found if isinstance(found, int) else sys.maxsize


def _tokens_of(inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The tokens that `generate` is given, [batch, length]; None: something else."""
    tokens = next((kwargs[name] for name in ("input_ids", "inputs") if kwargs.get(name) is not None), None)
    tokens = tokens if tokens is not None else next(iter(inputs), None)
    is_ids = isinstance(tokens, torch.Tensor) and tokens.dim() == 2 and not tokens.is_floating_point()
    return tokens if is_ids else None


class Times:
    """Times of a module's forward passes, by hooks."""

    def __init__(self, module: nn.Module, *, uses_events: bool) -> None:
        self._uses_events = uses_events
        self._begun: Any = None
        self._spans: list[tuple[Any, Any]] = []
        before = module.register_forward_pre_hook(lambda *_: self._begin())
        self._hooks = (before, module.register_forward_hook(lambda *_: self._end()))

    def take(self) -> list[float]:
        """Milliseconds of each pass since the last call."""
        spans, self._spans = self._spans, []
        device = devices.used()
        if device is not None and self._uses_events:
            devices.module_of(device).synchronize()
            return [begin.elapsed_time(end) for begin, end in spans]
        return [(end - begin) * 1e3 for begin, end in spans]

    def remove(self) -> None:
        """Take no more times."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self) -> None:
        self._begun = self._now()

    def _end(self) -> None:
        self._spans.append((self._begun, self._now()))

    def _now(self) -> Any:
        """The host's clock once the device has finished, or an event of the device."""
        device = devices.used()
        if device is None:
            return time.perf_counter()
        module = devices.module_of(device)
        if not self._uses_events:
            module.synchronize()
            return time.perf_counter()
        event = module.Event(enable_timing=True)
        event.record()
        return event
