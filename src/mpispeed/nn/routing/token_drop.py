"""Random layerwise token dropping (random-LTD): in training a layer sees a random part of the tokens of each sample.

Tokens that a layer does not see go past it unchanged, with their gradients. Which ones a layer sees is a function of a
seed, the step, the layer and the number of the sample in its global batch: so it is the same at any number of ranks, on
all ranks that share a sample, and when backward runs the layer again.

Source: Yao et al., "Random-LTD: Random and Layerwise Token Dropping Brings Efficient Training for Large-scale
Transformers", arXiv 2211.11586.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.native.token_choice import choose, key_of
from mpispeed.native.token_drop import put, take
from mpispeed.nn.routing.kept_inputs import KeptTokens
from mpispeed.nn.routing.schedule import RandomLTDScheduler

TOKEN_INPUTS = ("position_ids", "position_embeddings", "rotary_pos_emb")
"""Inputs of layers that run over tokens, as transformers and Megatron call them."""

ORDERS = ("batch_seq_dim", "seq_batch_dim")
MODELS = ("decoder", "encoder")

_ROUTE = "_random_ltd_route"


@dataclass(frozen=True, slots=True)
class DropSettings:
    """Settings that the layers of a model have in common.

    Attributes:
        scheduler: gives the reserved length: how many tokens of a sample a layer sees.
        batch_first: hidden states are [B, S, H], else [S, B, H].
        is_causal: of a decoder: the mask of kept tokens is the corner of a mask that is common to all samples.
        mask_name: the argument of layers that is the attention mask; None: there is none.
        token_inputs: further arguments that run over tokens; those that a layer does not get are ignored.
        seed: of all choices.
        place: returns the step and the number of the first sample of the batch that is running.
    """

    scheduler: RandomLTDScheduler
    batch_first: bool
    is_causal: bool
    mask_name: str | None
    token_inputs: tuple[str, ...]
    seed: int
    place: Callable[[], tuple[int, int]]

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        scheduler: RandomLTDScheduler,
        seed: int = 1234,
        place: Callable[[], tuple[int, int]] | None = None,
    ) -> DropSettings:
        """From the section `random_ltd`.

        Args:
            config: the section.
            scheduler: of the reserved length.
            seed: of all choices.
            place: as the attribute; None: the step of `scheduler`, and samples are numbered from 0.

        Raises:
            ConfigError: (a ValueError) a value is none of those that there are, or an encoder has no mask.
        """
        for key, allowed in (("hidden_state_order", ORDERS), ("model_type", MODELS)):
            if config.get(key) not in allowed:
                msg = f"random_ltd.{key} is {config.get(key)!r}; use {' or '.join(map(repr, allowed))}"
                raise ConfigError(msg)
        is_causal, mask_name = config["model_type"] == "decoder", config.get("model_mask_name")
        if not is_causal and not mask_name:
            msg = "random_ltd.model_mask_name is missing: in an encoder kept tokens have a mask of their own to be made"
            raise ConfigError(msg)
        return cls(
            scheduler=scheduler,
            batch_first=config["hidden_state_order"] == "batch_seq_dim",
            is_causal=is_causal,
            mask_name=mask_name or None,
            token_inputs=tuple(config.get("token_inputs", TOKEN_INPUTS)),
            seed=seed,
            place=place or (lambda: (scheduler.state["current_steps"], 0)),
        )

    def choose(self, layer: int, hidden: Tensor) -> KeptTokens | None:
        """The tokens that a layer sees; None: all."""
        batch, tokens = hidden.shape[:2] if self.batch_first else (hidden.shape[1], hidden.shape[0])
        reserved = self.scheduler.get_current_seq()
        if reserved >= tokens:
            return None
        step, first = self.place()
        index = choose(key_of(self.seed, step, layer), first, batch, tokens, reserved, hidden.device)
        return KeptTokens(index, tokens, self.batch_first, self.is_causal)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a layer that is running: its tokens, and the hidden states that the others keep."""

    kept: KeptTokens
    rest: Tensor


@dataclass(frozen=True, slots=True)
class _Arguments:
    """The arguments of a layer: names of those that may be given by place, of all, and whether there may be others."""

    by_place: tuple[str, ...]
    all: tuple[str, ...]
    is_open: bool

    @classmethod
    def of(cls, layer: nn.Module) -> _Arguments:
        """Those of its `forward`."""
        found = list(inspect.signature(layer.forward).parameters.values())
        by_place = tuple(one.name for one in found if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD))
        rest = tuple(one.name for one in found if one.kind is one.KEYWORD_ONLY)
        is_open = any(one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL) for one in found)
        return cls(by_place, by_place + rest, is_open)


class LayerRoute:
    """The hooks of one layer; without `configure` they do nothing.

    Hooks, because a layer keeps its place and its names so: whatever else has hooks on it, or names of its parameters,
    need not know. One layer has one route, found by `route_of`.
    """

    def __init__(self, layer: nn.Module) -> None:
        """Put hooks on `layer`."""
        self._settings: DropSettings | None = None
        self._number = 0
        self._arguments = _Arguments.of(layer)
        self._call: _Call | None = None
        layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        layer.register_forward_hook(self._leave, always_call=True)
        layer.__dict__[_ROUTE] = self

    def configure(self, name: str, number: int, settings: DropSettings) -> None:
        """Drop tokens from now on.

        Args:
            name: of the layer, for messages.
            number: of the layer among those that drop tokens, part of the key of its choices.
            settings: of the model.

        Raises:
            ConfigError: (a ValueError) the layer has no argument with the name of the mask.
        """
        names = self._arguments.all
        if settings.mask_name and settings.mask_name not in names and not self._arguments.is_open and len(names) > 1:
            msg = (
                f"random_ltd.model_mask_name is {settings.mask_name!r}, and layer {name!r} takes {', '.join(names)}; "
                "name the attention mask among them, or null if there is none"
            )
            raise ConfigError(msg)
        self._settings, self._number = settings, number

    def clear(self) -> None:
        """Drop no tokens from now on."""
        self._settings = self._call = None

    @property
    def is_on(self) -> bool:
        """True between `configure` and `clear`."""
        return self._settings is not None

    # -- hooks ------------------------------------------------------------------------------------------------------

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._call = None
        if self._settings is None or not layer.training:
            return None
        names = self._arguments.by_place
        first = names[0] if names else ""
        whole = args[0] if args else kwargs.get(first)
        hidden = whole[0] if isinstance(whole, tuple | list) and whole else whole
        if not isinstance(hidden, Tensor) or hidden.dim() < 2:
            msg = f"{type(layer).__name__}: random-LTD needs hidden states as first input, found {_described(hidden)}"
            raise UsageError(msg)
        kept = self._settings.choose(self._number, hidden)
        if kept is None:
            return None
        taken, rest = take(hidden, kept.index, batch_first=kept.batch_first)
        self._call = _Call(kept, rest)
        inputs = taken if whole is hidden else _with_first(whole, taken, kept.by_shape)
        others = zip_longest(names[1 : len(args)], args[1:], fillvalue="")
        new_args = (inputs, *(self._kept(kept, name, value) for name, value in others)) if args else ()
        new_kwargs = {name: self._kept(kept, name, value) for name, value in kwargs.items()}
        if not args:
            new_kwargs[first] = inputs
        return new_args, new_kwargs

    def _kept(self, kept: KeptTokens, name: str, value: Any) -> Any:
        settings = self._settings
        if settings is not None and name == settings.mask_name:
            return kept.mask(name, value)
        return kept.along_tokens(name, value) if settings is not None and name in settings.token_inputs else value

    def _leave(self, layer: nn.Module, _: tuple[Any, ...], output: Any) -> Any:
        call, self._call = self._call, None
        if call is None or output is None:  # all tokens, or an exception is on its way up
            return None
        y = output[0] if isinstance(output, tuple | list) and output else output
        if not isinstance(y, Tensor):
            msg = f"{type(layer).__name__}: random-LTD needs hidden states as first output, found {_described(y)}"
            raise UsageError(msg)
        merged = put(y, call.kept.index, call.rest, batch_first=call.kept.batch_first)
        return merged if y is output else _with_first(output, merged, call.kept.restored)


class RandomLayerTokenDrop(nn.Module):
    """A layer whose tokens are dropped, as a module around it; its names begin with "random_ltd_layer".

    `convert_to_random_ltd` needs no such module.
    """

    def __init__(self, layer: nn.Module) -> None:
        """All tokens pass until `init_config`."""
        super().__init__()
        self.random_ltd_layer = layer
        self._route = route_of(layer) or LayerRoute(layer)

    def init_config(self, config: Mapping[str, Any], scheduler: RandomLTDScheduler, random_ltd_layer_id: int) -> None:
        """Drop tokens in training from now on.

        Args:
            config: the section `random_ltd`.
            scheduler: gives the reserved length.
            random_ltd_layer_id: number of the layer among those that drop tokens.

        Raises:
            ConfigError: as `DropSettings.of` and `LayerRoute.configure`.
        """
        self._route.configure("random_ltd_layer", random_ltd_layer_id, DropSettings.of(config, scheduler))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The layer's output."""
        return self.random_ltd_layer(*inputs, **kwargs)


def route_of(layer: nn.Module) -> LayerRoute | None:
    """The route of a layer that was converted."""
    found: LayerRoute | None = layer.__dict__.get(_ROUTE)
    return found


def _with_first(whole: Any, first: Any, change: Callable[[Any], Any]) -> Any:
    """A tuple or list with another first member, and the others changed."""
    parts = [first, *map(change, whole[1:])]
    return type(whole)(*parts) if hasattr(whole, "_fields") else type(whole)(parts)


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
