"""Merging of tensor-parallel slices into whole parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.foreign.faults import ForeignMismatch
from mpispeed.ckpt.foreign.found import FoundParam
from mpispeed.ckpt.foreign.values import Chain, Mean, SideBySide, Values, are_equal

#: of a pattern that comes with a file: repeats without end and choices multiply the time that a name may take
_MOST_REPEATS, _MOST_CHOICES = 1, 8
#: of such a pattern, and of a name that is compared with one
_MOST_SIGNS = 300
#: how slices are put together
KINDS = ("replicated", "average", "row", "column", "halves")
#: names of transformer libraries whose cut does not depend on settings; searched for anywhere in a name
_KNOWN = (
    ("replicated", r"(layer_?norm|rms_?norm|\bnorm|_norm)[\w.]*\.(weight|bias)$"),
    ("replicated", r"(position_embeddings\.weight|(attention\.dense|dense_4h_to_h|o_proj|down_proj)\.bias)$"),
    ("row", r"(attention\.dense|dense_4h_to_h|o_proj|down_proj)\.weight$"),
    ("column", r"(word_embeddings|embed_tokens|lm_head)\.weight$"),
    ("column", r"(query_key_value|[qkv]_proj|gate_proj|up_proj)\.(weight|bias)$"),
)
#: keys of what DeepSpeed's scripts write beside the weights about their parallel parameters
_LISTS = {
    "tp_replicated_parameter_patterns": "replicated",
    "parameter_to_average_patterns": "average",
    "parameter_with_row_parallelism_patterns": "row",
    "parameter_with_2_sub_params_cat_dim_0": "halves",
}


class Merger:
    """Merges slices of a parameter in the way that its name tells."""

    def __init__(self, patterns: Sequence[tuple[str, str]], info: Mapping[str, Any] | None) -> None:
        """Args: `patterns`: (kind, regular expression) of the user; `info`: universal_checkpoint_info, if there."""
        for kind, _ in patterns:
            if kind not in KINDS:
                msg = f"--tp-pattern has the kind {kind!r}; it may be {', '.join(KINDS)}"
                raise CheckpointError(msg)
        self._patterns = list(patterns)
        self._listed = [
            (kind, _quick(pattern)) for key, kind in _LISTS.items() for pattern in (info or {}).get(key) or () if kind
        ]
        self._subs = [
            row if isinstance(row, Mapping) else row.fields
            for row in (info or {}).get("parameter_with_sub_params") or ()
        ]
        # with such a description, parameters that it does not name are sliced along dim 0
        self._default = "column" if self._listed or self._subs else ""

    def merge(self, slices: Sequence[FoundParam]) -> FoundParam:
        """The whole parameter.

        Raises:
            ForeignMismatch: it is not known how, or the slices do not fit.
        """
        first = slices[0]
        have = {tuple(sorted(part.slots)) for part in slices}
        if len(have) > 1:
            msg = f"the slices of {first.name!r} have different optimizer state: {sorted(have)}"
            raise ForeignMismatch(msg)
        sizes = self._sub_sizes(first.name)
        kind = "sub" if sizes else self._kind(first)
        shape = _shape(kind, slices)
        slots = {
            slot: _joined(kind, [part.slots[slot] for part in slices], slices, sizes, slot) for slot in first.slots
        }
        tp_kind = {"average": "averaged", "halves": "sub"}.get(kind, kind)
        tp_dim = {"row": 1, "column": 0, "halves": 0, "sub": 0}.get(kind, -1)
        whole = FoundParam(first.name, shape, first.train_dtype, slots, first.is_frozen, first.group, first.step)
        whole.tp_kind, whole.tp_dim = (
            (tp_kind, tp_dim) if kind in ("replicated", "average", "row", "column") else ("none", -1)
        )
        whole.expert = first.expert
        return whole

    def _kind(self, first: FoundParam) -> str:
        name = first.name
        for kind, pattern in self._patterns:
            if re.search(pattern, name):
                return kind
        hits = {kind for kind, pattern in self._listed if re.match(pattern, _short(name))}
        known = {kind for kind, pattern in _KNOWN if re.search(pattern, name)} if not self._default else set()
        hits = hits or known or ({self._default} if self._default else set())
        if len(hits) != 1:
            why = "patterns say " + " and ".join(sorted(hits)) if hits else "its name tells nothing"
            msg = (
                f"how the slices of {name!r} (shape {first.shape}) are put together is not known: {why}; say it with "
                f"--tp-pattern KIND={re.escape(name)}, KIND one of {', '.join(KINDS)}"
            )
            raise ForeignMismatch(msg)
        return hits.pop()

    def _sub_sizes(self, name: str) -> list[int]:
        if any(re.search(pattern, name) for _, pattern in self._patterns):
            return []
        for row in self._subs:
            if any(re.match(_quick(pattern), _short(name)) for pattern in row.get("patterns") or ()):
                shape = row.get("shape") or ()
                first = shape[0] if shape else 0
                if int(row.get("partition_dim", 0)) != 0 or not isinstance(first, (list, tuple)):
                    msg = f"the parts of {name!r} are described by {dict(row)}; only parts along dim 0 can be merged"
                    raise ForeignMismatch(msg)
                return [int(size) for size in first]
        return []


def _quick(pattern: str) -> str:
    """A pattern of a file, if its matching cannot take long.

    Raises:
        ForeignMismatch: it repeats groups, repeats or chooses too much, or is too long.
    """
    repeats, choices = len(re.findall(r"[*+{]", pattern)), len(re.findall(r"[?|]", pattern))
    is_large = repeats > _MOST_REPEATS or choices > _MOST_CHOICES or len(pattern) > _MOST_SIGNS
    if is_large or re.search(r"\)[*+?{]", pattern):
        msg = f"the pattern {pattern!r:.80} of parameters is not as they are written; say it with --tp-pattern"
        raise ForeignMismatch(msg)
    return pattern


def _short(name: str) -> str:
    """A name that may be compared with patterns of a file.

    Raises:
        ForeignMismatch: it is too long.
    """
    if len(name) > _MOST_SIGNS:
        msg = (
            f"the name {name!r:.80} of a parameter has {len(name)} signs, and only up to {_MOST_SIGNS} are compared "
            "with patterns of the checkpoint; say it with --tp-pattern"
        )
        raise ForeignMismatch(msg)
    return name


def _shape(kind: str, slices: Sequence[FoundParam]) -> tuple[int, ...]:
    first, dim = slices[0].shape, 1 if kind == "row" else 0
    if kind in ("replicated", "average"):
        fits = all(part.shape == first for part in slices)
        merged = first
    else:
        fits = len(first) > dim and all(
            part.shape[:dim] + part.shape[dim + 1 :] == first[:dim] + first[dim + 1 :] for part in slices
        )
        merged = (*first[:dim], sum(part.shape[dim] for part in slices), *first[dim + 1 :]) if fits else first
    if not fits:
        shapes = ", ".join(str(part.shape) for part in slices)
        msg = f"the slices of {slices[0].name!r} have the shapes {shapes}, which do not fit as {kind}"
        raise ForeignMismatch(msg)
    return tuple(merged)


def _joined(
    kind: str, parts: Sequence[Values], slices: Sequence[FoundParam], sizes: Sequence[int], slot: str
) -> Values:
    name = slices[0].name
    if kind == "replicated":
        if not all(are_equal(parts[0], other) for other in parts[1:]):
            msg = f"the copies of {name!r} ({slot}) differ between ranks; say --tp-pattern average={re.escape(name)}"
            raise ForeignMismatch(msg)
        return parts[0]
    if kind == "average":
        return Mean(parts)
    if kind == "row":
        return SideBySide(parts, slices[0].shape[0])
    if kind == "column":
        return Chain([(part, 0, part.numel) for part in parts], parts[0].dtype)
    rows, width, count = slices[0].shape[0], math.prod(slices[0].shape[1:]), len(slices)
    own = [rows // 2, rows // 2] if kind == "halves" else [size // count for size in sizes]
    if sum(own) != rows or any(part.shape != slices[0].shape for part in slices):
        msg = f"{name!r} has slices of {rows} rows, which are not parts of {own} rows each"
        raise ForeignMismatch(msg)
    links, start = [], 0
    for size in own:
        links += [(part, start * width, (start + size) * width) for part in parts]
        start += size
    return Chain(links, parts[0].dtype)
