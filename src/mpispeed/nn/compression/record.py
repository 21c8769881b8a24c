"""A record of compressed layers as plain values: what checkpoints keep, so that tools need no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from mpispeed.nn.compression.matching import form_of, out_dim_of
from mpispeed.nn.compression.model import Compression
from mpispeed.nn.compression.quantizers import Quantizer
from mpispeed.nn.compression.techniques import PRUNINGS, Pruning

_ROWS = 0
"""Groups of a table: one for each row."""


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """The compression of the whole weight of one layer in the end.

    Attributes:
        out_dim: dim of the weight that counts outputs.
        bits: of the weight; 0: it is not quantized.
        quantizer: of the weight. Its groups are 0 where each row has a scale.
        prunings: in the order in which masks are laid on.
    """

    out_dim: int
    bits: int
    quantizer: Quantizer
    prunings: tuple[Pruning, ...]

    def quantizer_of(self, shape: tuple[int, ...]) -> Quantizer:
        """The quantizer of a weight of this shape."""
        groups = self.quantizer.groups or shape[0]
        return Quantizer(self.quantizer.kind, groups=groups)


def record_of(model: nn.Module, compression: Compression) -> dict[str, Any]:
    """The record of the layers of a model, by their names; of sliced ones that of the whole weight."""
    found: dict[str, Any] = {}
    for name, state in compression.layers.items():
        layer, weights = model.get_submodule(name), state.weight_quantization
        groups = 1 if weights is None else weights.quantizer.groups
        prunings = [pruning for kind in PRUNINGS.values() if (pruning := state.pruning(kind)) is not None]
        if weights is None and not prunings:
            continue
        found[name] = {
            "out_dim": out_dim_of(layer),
            "bits": 0 if weights is None else weights.target_bits,
            "kind": "symmetric" if weights is None else weights.quantizer.kind,
            "groups": _ROWS if form_of(layer) == "embedding" else groups,
            "prunings": [[each.kind, each.scores, each.dense_ratio, each.num_heads] for each in prunings],
        }
    return found


def read_record(values: Mapping[str, Any]) -> dict[str, LayerRecord]:
    """The records that `record_of` made.

    Raises:
        AttributeError, KeyError, OverflowError, TypeError, ValueError: these are none, or are of what no config allows.
    """
    found = {}
    for name, own in values.items():
        prunings = [
            Pruning(kind, float(ratio), scores, num_heads=int(heads)) for kind, scores, ratio, heads in own["prunings"]
        ]
        record = LayerRecord(
            int(own["out_dim"]), int(own["bits"]), Quantizer(own["kind"], groups=int(own["groups"])), tuple(prunings)
        )
        if not _can_be(record):
            msg = f"{name:.80}: {own!r:.200} is no record of a layer"
            raise ValueError(msg)
        found[name] = record
    return found


def _can_be(record: LayerRecord) -> bool:
    kind, groups = record.quantizer.kind, record.quantizer.groups
    has_bits = not record.bits or not Quantizer(kind).reason_against(record.bits, ())
    is_known = kind in ("symmetric", "asymmetric") and groups >= _ROWS and record.out_dim in (0, 1)
    return is_known and has_bits and all(map(_can_prune, record.prunings))


def _can_prune(pruning: Pruning) -> bool:
    is_known = pruning.kind in PRUNINGS.values() and pruning.scores in ("l1", "topk", "snip_momentum")
    return is_known and 0 < pruning.dense_ratio < 1 and pruning.num_heads >= (pruning.kind == "head")
