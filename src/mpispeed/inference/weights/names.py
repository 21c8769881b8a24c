"""Matching of the names of tensors in files with those of a model.

Beside equal names: prefixes that only one side has, tied tensors, old names of norms, and experts of a layer that are
one tensor on one side and a tensor for each on the other. Source of the latter: `conversion_mapping` of transformers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mpispeed.base.errors import CheckpointError
from mpispeed.base.registry import did_you_mean
from mpispeed.ckpt.foreign.values import Chain, Values
from mpispeed.inference.weights.sliced import joined
from mpispeed.inference.weights.sources import Shard, Sliced, Source, Sources
from mpispeed.inference.weights.targets import Target, Targets

#: heads of names that one side may have and the other not
_PREFIXES = ("model.", "transformer.", "bert.", "gpt_neox.", "decoder.", "language_model.")
_WRAPPERS = ("module.", "_orig_mod.")
#: (in the model, in files)
_OLD = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"), (".mlp.", ".block_sparse_moe."))
#: what files have beside weights, and modules compute for themselves
_USELESS = r"rotary_emb\.inv_freq$|(^|\.)position_ids$|\.attn\.(masked_)?bias$|\.attention\.(masked_)?bias$"
#: tensor of all experts -> the ones of an expert that are in it, one behind the other, by the names of two families
_PARTS = {"gate_up_proj": (("w1", "w3"), ("gate_proj", "up_proj")), "down_proj": (("w2",), ("down_proj",))}
_FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_SINGLE = re.compile(r"(.*\.experts)\.(\d{1,9})\.(w[123]|gate_proj|up_proj|down_proj)\.weight")


@dataclass(slots=True)
class Matched:
    """Values for the tensors of a model.

    Attributes:
        pairs: a tensor of the model, and what files have of it.
        missing: names in the model that files have nothing of.
        unexpected: names in the files that the model has no place for.
    """

    pairs: list[tuple[Target, Source]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


class Names:
    """The names in files, asked with those of a model."""

    def __init__(self, sources: Sources, base: str) -> None:
        """Args: `base`: prefix of the model's inner model, as `base_model_prefix` of transformers; "" for none."""
        self._sources, self.used = sources, set[str]()
        heads = dict.fromkeys(([f"{base}."] if base else []) + list(_PREFIXES))
        self._heads = ["", *_WRAPPERS, *heads, *(wrapper + head for wrapper in _WRAPPERS for head in heads)]

    def find(self, name: str) -> Source | Sliced | None:
        """The tensor for a name of the model, also where all experts of a layer, or each, have one."""
        for spelling in self._spellings(name):
            found = self._known(spelling)
            if found is not None:
                return found
        for spelling in self._spellings(name):
            stacked = self._fused(spelling) or self._of_fused(spelling)
            if stacked is not None:
                return stacked
        return None

    def _spellings(self, name: str) -> Iterator[str]:
        """Names under which files may have it, the most likely first."""
        for new, old in (("", ""), *_OLD):
            if new and new not in name:
                continue
            spelled = name.replace(new, old) if new else name
            for head in self._heads:
                yield head + spelled
            for head in self._heads[1:]:
                if spelled.startswith(head):
                    yield from (wrapper + spelled[len(head) :] for wrapper in ("", *_WRAPPERS))

    def _known(self, name: str) -> Source | Sliced | None:
        name = self._sources.aliases.get(name, name)
        found = self._sources.by_name.get(name)
        if found is not None:
            self.used.add(name)
        return found

    def _fused(self, name: str) -> Source | None:
        """The tensor of all experts from one or two for each of them."""
        match = _FUSED.fullmatch(name)
        if match is None:
            return None
        for parts in _PARTS[match[2]]:
            if f"{match[1]}.0.{parts[0]}.weight" in self._sources.by_name:
                return self._stacked(match[1], parts, name)
        return None

    def _stacked(self, prefix: str, parts: tuple[str, ...], name: str) -> Source:
        rows: list[Source] = []
        while f"{prefix}.{len(rows) // len(parts)}.{parts[0]}.weight" in self._sources.by_name:
            number = len(rows) // len(parts)
            for part in parts:
                found = self._known(f"{prefix}.{number}.{part}.weight")
                is_one = isinstance(found, Source) and len(found.shape) == 2
                if not isinstance(found, Source) or not is_one or found.shape != (rows or [found])[0].shape:
                    what = f"of shape {found.shape}" if isinstance(found, Source) else "missing"
                    msg = f"{self._sources.path}: {prefix}.{number}.{part}.weight is {what}; experts are alike"
                    raise CheckpointError(msg)
                rows.append(found)
        experts, (outputs, inputs) = len(rows) // len(parts), rows[0].shape
        values = Chain([(row.whole, 0, math.prod(row.shape)) for row in rows], rows[0].dtype)
        return _whole(name, (experts, outputs * len(parts), inputs), values, rows[0])

    def _of_fused(self, name: str) -> Source | None:
        """The tensor of one expert from that of all."""
        match = _SINGLE.fullmatch(name)
        if match is None:
            return None
        for all_of, families in _PARTS.items():
            for parts in families:
                source = self._known(f"{match[1]}.{all_of}") if match[3] in parts else None
                if not isinstance(source, Source) or len(source.shape) != 3 or int(match[2]) >= source.shape[0]:
                    continue
                shape = (source.shape[1] // len(parts), source.shape[2])
                first = (int(match[2]) * len(parts) + parts.index(match[3])) * math.prod(shape)
                values: Values = Chain([(source.whole, first, first + math.prod(shape))], source.dtype)
                return _whole(name, shape, values, source)
        return None


def _whole(name: str, shape: tuple[int, ...], values: Values, like: Source) -> Source:
    return Source(name, shape, values.dtype, (Shard(values, ((0, shape[0]),), shape[0]),), 0, like.where)


def match(targets: Targets, sources: Sources, model: Any) -> Matched:
    """Find values for the tensors of a model, by name.

    Args:
        targets: the tensors.
        sources: what files have.
        model: for its `base_model_prefix` and the names that it does without, as of transformers.

    Raises:
        CheckpointError: shapes do not fit.
    """
    names, made = Names(sources, str(getattr(model, "base_model_prefix", "") or "")), Matched()
    spare = _patterns(getattr(model, "_keys_to_ignore_on_load_missing", None))
    for target in targets.rows:
        found = next((source for name in target.names if (source := names.find(name)) is not None), None)
        if found is None:
            if not any(re.search(pattern, target.name) for pattern in spare) or target.held.is_meta:
                made.missing.append(target.name)
            continue
        if isinstance(found, Sliced):
            found = joined(found, target.shape, target.cut)
        if found.shape != target.shape:
            msg = f"{found.where} has {found.name!r} of shape {found.shape}, and {target.name} of the model has "
            msg += f"{target.shape}; the weights are of another model, or its config was changed"
            raise CheckpointError(msg)
        made.pairs.append((target, found))
    useless = [_USELESS, *_patterns(getattr(model, "_keys_to_ignore_on_load_unexpected", None))]
    tied = {name for name in sources.by_name for target in targets.rows if name in target.names[1:]}
    rest = sources.by_name.keys() - names.used - tied
    made.unexpected = sorted(name for name in rest if not any(re.search(pattern, name) for pattern in useless))
    return made


def _patterns(found: Iterable[str] | None) -> list[str]:
    return sorted(found or ())


def missing_message(matched: Matched, sources: Sources, targets: Targets) -> str:
    """The sentence about tensors of a model that files have nothing of."""
    first, count, total = matched.missing[0], len(matched.missing), len(targets.rows)
    more = f" and {count - 1} more" if count > 1 else ""
    text = f"{sources.path} has no {first!r}{more}, of {total} tensors of the model"
    if matched.unexpected:
        text += f", and {len(matched.unexpected)} that the model has no place for, such as {matched.unexpected[0]!r}"
    return f"{text}.{did_you_mean(first, matched.unexpected)}"


def first_names(rows: Mapping[str, Any] | Iterable[str], most: int = 3) -> str:
    """Some names for a message."""
    names = list(rows)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
