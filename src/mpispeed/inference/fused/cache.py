"""A cache of keys and values that grows by doubling, for `past_key_values` of transformers' models.

transformers' DynamicCache concatenates: every token copies all keys and values of every layer. Here a token is written
behind the last one, and memory doubles when it is full, so that a token costs a constant number of copies. Sliding
layers keep what their window sees, in memory of at most about twice the window.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mpispeed.base.cgroups import machine_limits
from mpispeed.base.errors import UsageError
from mpispeed.base.units import format_bytes

_FIRST = 64
"""Tokens that a layer has room for at least."""

_CHOOSING = ("use_cache", "cache_implementation", "prompt_lookup_num_tokens", "assistant_early_exit")
"""Settings of generation by which transformers chooses another cache."""


class GrowingLayer:
    """Keys and values of one layer. It has the methods and attributes of transformers' cache layers.

    Args:
        most: tokens beyond which memory does not double but grows by what is asked; 0: there is no such number.
        window: tokens that a query sees, itself included; 0: all.

    Shapes: states are [batch, key heads, tokens, size].
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, most: int = 0, window: int = 0) -> None:
        self.most, self.window = most, window
        self.is_sliding = window > 0
        self.record_past = False
        self.cumulative_length = 0
        self._begin = self._end = 0
        self._memory: tuple[Tensor, Tensor] | None = None

    def __repr__(self) -> str:
        return f"GrowingLayer({self.cumulative_length} tokens{f', window {self.window}' if self.window else ''})"

    # -- states ------------------------------------------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:
        """True once there are states."""
        return self._memory is not None

    @property
    def keys(self) -> Tensor | None:
        """The keys that are kept, a view."""
        return None if self._memory is None else self._memory[0][:, :, self._begin : self._end]

    @property
    def values(self) -> Tensor | None:
        """The values that are kept, a view."""
        return None if self._memory is None else self._memory[1][:, :, self._begin : self._end]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append states; gives all that the new queries may see, as views."""
        new = key_states.shape[2]
        kept = self._end - self._begin
        seen = kept if self.record_past or not self.window else min(kept, self.window - 1)
        if self._memory is None or self._end + new > self._memory[0].shape[2]:
            self._make_room(key_states, value_states, seen, new)
        if self._memory is None:  # for type checkers: there is room now
            raise UsageError("a growing cache has no memory")  # noqa: TRY003
        keys, values = self._memory
        keys[:, :, self._end : self._end + new] = key_states
        values[:, :, self._end : self._end + new] = value_states
        self._end += new
        self.cumulative_length += new
        first = self._end - new - (min(kept, self.window - 1) if self.window else kept)
        if self.window and not self.record_past:
            self._begin = max(self._begin, self._end - (self.window - 1))
        return keys[:, :, first : self._end], values[:, :, first : self._end]

    def _make_room(self, key_states: Tensor, value_states: Tensor, seen: int, new: int) -> None:
        """Move the last `seen` states to the front of memory that has room for `new` more."""
        need = seen + new
        if self._memory is not None and self.window and need + self.window <= self._memory[0].shape[2]:
            room = self._memory
            states = [m[:, :, self._end - seen : self._end].clone() for m in room]  # old and new place may overlap
        else:
            count = self._capacity(need)
            pair = (key_states, value_states)
            room = tuple(x.new_empty((*x.shape[:2], count, x.shape[3])) for x in pair)  # type: ignore[assignment]
            states = [] if self._memory is None else [m[:, :, self._end - seen : self._end] for m in self._memory]
        for memory, state in zip(room, states, strict=False):
            memory[:, :, :seen] = state
        self._memory, self._begin, self._end = room, 0, seen

    def _capacity(self, need: int) -> int:
        if self.window:
            return max(need + self.window, min(2 * self.window, 2 * need), _FIRST)
        count = max(_FIRST, 1 << (need - 1).bit_length() if need & (need - 1) else 2 * need)
        return max(need, min(count, self.most)) if self.most else count

    # -- what transformers asks --------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: memory comes with the first states."""

    def get_seq_length(self) -> int:
        """Tokens that were appended, less those that were cropped."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        """The window, or -1: there is no limit."""
        return self.window or -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that the next `query_length` queries get, and the place of the first."""
        seen = min(self.cumulative_length, self.window - 1) if self.window else self.cumulative_length
        return seen + query_length, self.cumulative_length - seen

    def activate_past_recording(self) -> None:
        """Keep states beyond the window, so that `crop` can go back."""
        self.record_past = True

    def reset(self) -> None:
        """Forget all states, and keep the memory."""
        self.cumulative_length = self._begin = self._end = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; their number is given as a negative one, as transformers has it.

        Raises:
            UsageError: a positive number, or a sliding layer that has dropped what would be needed.
        """
        if tokens_to_remove > 0:
            msg = f"crop({tokens_to_remove}) of a growing cache; give the number of tokens to forget as a negative one"
            raise UsageError(msg)
        count = min(-tokens_to_remove, self.cumulative_length)
        if self.window and count and self.cumulative_length >= self.window and not self.record_past:
            msg = f"crop of {count} tokens, but the window of {self.window} has dropped what came before; call "
            msg += "activate_past_recording before the forward passes"
            raise UsageError(msg)
        self._end -= count
        self.cumulative_length -= count
        if self.window:
            self._begin = max(self._begin, self._end - (self.window - 1))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Choose entries of the batch, for beams."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these entries of the batch, in this order."""
        if self._memory is not None:
            self._replace([x.index_select(0, indices.to(x.device)) for x in self._states()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every entry of the batch."""
        if self._memory is not None:
            self._replace([x.repeat_interleave(repeats, dim=0) for x in self._states()])

    def offload(self) -> None:
        """Move the states to the host."""
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Nothing: states stay where they are."""

    def _states(self) -> list[Tensor]:
        return [] if self._memory is None else [m[:, :, self._begin : self._end] for m in self._memory]

    def _replace(self, states: list[Tensor]) -> None:
        """Other states in memory of the same room."""
        if self._memory is None:
            return
        room = self._memory[0].shape[2]
        made = [x.new_empty((*x.shape[:2], room, x.shape[3])) for x in states]
        for memory, state in zip(made, states, strict=True):
            memory[:, :, self._begin : self._end] = state
        self._memory = (made[0], made[1])

    def _move(self, device: torch.device) -> None:
        if self._memory is not None:
            self._memory = (self._memory[0].to(device), self._memory[1].to(device))


def growing_cache(config: Any, most: int = 0) -> Any:
    """A cache for a model with this config of transformers: its DynamicCache, with layers that grow.

    Layers that keep no keys and values of single tokens, such as those of linear attention, stay transformers'.

    Args:
        config: of the model.
        most: tokens of prompt and answer together, if known; see `GrowingLayer`.
    """
    utils = importlib.import_module("transformers.cache_utils")
    utils.CacheLayerMixin.register(GrowingLayer)  # an ABC, by which transformers tells layers that count tokens
    cache = utils.DynamicCache(config=config)
    for place, layer in enumerate(cache.layers):
        if type(layer) is utils.DynamicLayer:
            cache.layers[place] = GrowingLayer(most)
        elif type(layer) is utils.DynamicSlidingWindowLayer:
            cache.layers[place] = GrowingLayer(most, layer.sliding_window)
    if cache.layer_class_to_replicate is utils.DynamicLayer:
        cache.layer_class_to_replicate = functools.partial(GrowingLayer, most)
    return cache


def wants_growing_cache(module: Any, kwargs: Mapping[str, Any]) -> bool:
    """True if `module.generate(**kwargs)` would make a DynamicCache: nothing says otherwise."""
    given = kwargs.get("generation_config") or getattr(module, "generation_config", None)
    settings = {name: getattr(given, name, None) for name in _CHOOSING}
    settings.update({name: value for name, value in kwargs.items() if name in _CHOOSING})
    is_plain = settings.pop("use_cache") is not False and not any(value is not None for value in settings.values())
    has_decoder_only = not getattr(module.config, "is_encoder_decoder", False)
    return is_plain and has_decoder_only and "past_key_values" not in kwargs and "assistant_model" not in kwargs


def check_room(bytes_per_token: int, tokens: int, batch: int, device: torch.device) -> None:
    """Check that keys and values of so many tokens fit into the memory that is free now.

    Args:
        bytes_per_token: of all layers of this rank, for one sequence.
        tokens: of each sequence.
        batch: sequences.
        device: where they are kept.

    Raises:
        UsageError: they do not fit; the message has the figures.
    """
    need = bytes_per_token * tokens * batch
    if device.type == "cuda":
        free, source = torch.cuda.mem_get_info(device)[0], f"free memory of {device}"
    else:
        limits = machine_limits() if device.type == "cpu" else []
        free, source = min(((limit.bytes, limit.source) for limit in limits), default=(need, ""))
    if need > free:
        msg = f"keys and values of {batch} x {tokens} tokens need {format_bytes(need)}, "
        msg += f"{format_bytes(bytes_per_token)} a token, and {format_bytes(free)} are left ({source}); lower "
        msg += "min_out_tokens, give fewer prompts at once, or slice the model over more ranks"
        raise UsageError(msg)
