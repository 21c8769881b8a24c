"""The weights of a checkpoint as the model computes with them in the end: quantized, masked, and packed.

For `mpispeed ckpt export --quantized`. Nothing gets smaller by shape: rows, heads and channels that are pruned are
zeros; `redundancy_clean` removes them. Masks and scores are in the weights then, and are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import schema
from mpispeed.ckpt.tools.casting import cast
from mpispeed.compression.last_weights import Cut, last_weight
from mpispeed.nn.compression.masks import l1_scores, spread, top_k_mask
from mpispeed.nn.compression.record import LayerRecord, read_record

if TYPE_CHECKING:
    from mpispeed.ckpt.read.reader import Reader
    from mpispeed.native.packed_codes import PackedCodes
    from mpispeed.nn.compression.techniques import Pruning

FEATURE, RECORD = "compression_training", "layers"
"""Where the record of layers stands in the state of a checkpoint."""


class CheckpointPacker:
    """Makes codes of the compressed weights of a checkpoint; a `Packer` of `ckpt.tools.exporting`.

    Attributes:
        left: weight of a compressed layer -> why it is exported as it is.

    Raises:
        CheckpointError: the run did not compress its model.
    """

    def __init__(self, reader: Reader) -> None:
        state = reader.state().get("features", {}).get(FEATURE) or {}
        try:
            records = read_record(state[RECORD])
        except (KeyError, TypeError, ValueError) as failure:
            msg = f"{reader.path} has no record of compressed layers: its run had no compression_training"
            raise CheckpointError(msg) from failure
        names, aliases = set(reader.names()), reader.aliases()
        self._reader = reader
        self._layers: dict[str, LayerRecord] = {}
        self.left: dict[str, str] = {}
        for name, record in records.items():
            weight = aliases.get(f"{name}.weight", f"{name}.weight")
            users = {weight, *(alias for alias, canonical in aliases.items() if canonical == weight)}
            if len(users) > 1 and record.prunings:
                self.left[f"{name}.weight"] = "other layers have it too, each with masks and a bias of its own"
                continue
            if weight not in names:
                self.left[f"{name}.weight"] = "it is stored under another name, or with those of other layers"
                continue
            if any(records.get(user.removesuffix(".weight")) != record for user in users):
                self.left[f"{name}.weight"] = "other layers have it too, and are not compressed alike"
                continue
            self._layers[weight.removesuffix(".weight")] = record
        self._out = {
            f"{name}.{pruning.kind}_{'scores' if pruning.is_learned else 'mask'}"
            for name, record in self._layers.items()
            for pruning in record.prunings
        }
        self._last: tuple[str, PackedCodes | np.ndarray | None] = ("", None)

    def leaves_out(self, name: str) -> bool:
        """True for masks and scores of weights that are exported with them."""
        return name in self._out

    def pack(self, name: str) -> PackedCodes | np.ndarray | None:
        """Codes of a weight; values in fp32 of one that codes do not hold, and of a bias; None for others."""
        layer, _, own = name.rpartition(".")
        record = self._layers.get(layer)
        if record is None or own not in ("weight", "bias"):
            return None
        if self._last[0] != name:
            self._last = (name, self._weight(layer, record) if own == "weight" else self._bias(layer, record))
        return self._last[1]

    def _weight(self, layer: str, record: LayerRecord) -> PackedCodes | np.ndarray:
        weight = self._trained(f"{layer}.weight")
        zeros = [
            spread(pruning.kind, self._mask(layer, record, pruning), weight, record.out_dim)
            for pruning in record.prunings
        ]
        quantizer = record.quantizer_of(tuple(weight.shape))
        packed, values = last_weight(weight, record.bits, quantizer, Cut(zeros))
        if packed is not None:
            return packed
        found: np.ndarray = torch.as_tensor(values).float().numpy()
        return found

    def _bias(self, layer: str, record: LayerRecord) -> np.ndarray | None:
        prunings = [each for each in record.prunings if each.kind in ("row", "channel")]
        masks = [self._mask(layer, record, each).view(-1) for each in prunings]
        if not masks:
            return None
        bias = self._trained(f"{layer}.bias").float()
        for mask in masks:
            bias = bias * mask
        found: np.ndarray = bias.numpy()
        return found

    def _mask(self, layer: str, record: LayerRecord, pruning: Pruning) -> Tensor:
        if pruning.is_learned:
            return top_k_mask(self._trained(f"{layer}.{pruning.kind}_scores"), pruning.dense_ratio) != 0
        name = f"{layer}.{pruning.kind}_mask"
        stored = self._reader.stored(name, schema.BUFFER_SLOT)
        mask = schema.from_array(self._reader.read_array(name, schema.BUFFER_SLOT), stored.dtype) != 0
        if pruning.scores != "l1" or not bool(mask.all()):
            return mask
        # Pruning has not begun: the mask is that which it would begin with, as in `redundancy_clean`.
        weight = self._trained(f"{layer}.weight")
        scores = l1_scores(pruning.kind, weight, record.out_dim, pruning.num_heads)
        return top_k_mask(scores, pruning.dense_ratio) != 0

    def _trained(self, name: str) -> Tensor:
        """A parameter as the model computes with it: in the dtype of training."""
        info, slots = self._reader.info(name), self._reader.slots(name)
        slot = schema.MASTER_SLOT if schema.MASTER_SLOT in slots else "weight16"
        stored, dtype = self._reader.stored(name, slot), str(info.train_dtype)
        flat = cast(self._reader.read_array(name, slot).reshape(-1), stored.dtype, dtype)
        return schema.from_array(flat, dtype).view(info.shape)
