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
from mpispeed.base.plain import printable
from mpispeed.ckpt.format import schema
from mpispeed.ckpt.format.errors import CorruptCheckpoint
from mpispeed.ckpt.tools.casting import cast
from mpispeed.compression.last_weights import Cut, last_weight
from mpispeed.nn.compression.masks import kept_count, l1_scores, mask_shape, spread, top_k_mask
from mpispeed.nn.compression.record import LayerRecord, read_record

if TYPE_CHECKING:
    from mpispeed.ckpt.read.reader import Reader
    from mpispeed.native.packed_codes import PackedCodes
    from mpispeed.nn.compression.quantizers import Quantizer
    from mpispeed.nn.compression.techniques import Pruning

FEATURE, RECORD = "compression_training", "layers"
"""Where the record of layers stands in the state of a checkpoint."""


_SHOWN_SIGNS = 300


class CheckpointPacker:
    """Makes codes of the compressed weights of a checkpoint; a `Packer` of `ckpt.tools.exporting`.

    Attributes:
        left: weight of a compressed layer -> why it is exported as it is.

    Raises:
        CheckpointError: the run did not compress its model.
    """

    def __init__(self, reader: Reader) -> None:
        try:
            state = reader.state().get("features", {}).get(FEATURE)
            records = None if state is None else read_record(state[RECORD])
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as failure:
            msg = (
                f"the record of compressed layers of {reader.path} is damaged: {printable(str(failure), _SHOWN_SIGNS)}"
            )
            raise CorruptCheckpoint(msg) from failure
        if records is None:
            msg = f"{reader.path} has no record of compressed layers: its run had no compression_training"
            raise CheckpointError(msg)
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
            self._place(name, pruning)[0] for name, record in self._layers.items() for pruning in record.prunings
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
        quantizer = self._fitting(layer, record, tuple(weight.shape))
        zeros = [
            spread(pruning.kind, self._mask(layer, record, pruning), weight, record.out_dim)
            for pruning in record.prunings
        ]
        packed, values = last_weight(weight, record.bits, quantizer, Cut(zeros))
        if packed is not None:
            return packed
        found: np.ndarray = torch.as_tensor(values).float().numpy()
        return found

    def _fitting(self, layer: str, record: LayerRecord, shape: tuple[int, ...]) -> Quantizer:
        """The quantizer of a weight of this shape.

        Raises:
            CorruptCheckpoint: the weight cannot have been compressed as the record says.
        """
        quantizer = record.quantizer_of(shape) if shape else record.quantizer
        wrong = f"a weight of shape {shape}" if len(shape) < 2 else ""
        if not wrong and record.bits:
            wrong = quantizer.reason_against(record.bits, shape)
        for pruning in () if wrong else record.prunings:
            name, slot = self._place(layer, pruning)
            found = self._reader.stored(name, slot).shape
            wanted = mask_shape(pruning.kind, shape, record.out_dim, pruning.num_heads)
            if found != wanted or (pruning.kind == "head" and shape[1 - record.out_dim] % pruning.num_heads):
                wrong = f"{name} has shape {found}, and the weight {shape}"
        if wrong:
            msg = f"the record of compressed layers of {self._reader.path} does not fit to {layer}: {wrong}"
            raise CorruptCheckpoint(msg)
        return quantizer

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
        name, slot = self._place(layer, pruning)
        if pruning.is_learned:
            return top_k_mask(self._trained(name), pruning.dense_ratio) != 0
        stored = self._reader.stored(name, slot)
        mask = schema.from_array(self._reader.read_array(name, slot), stored.dtype) != 0
        if pruning.scores != "l1" or int(mask.sum()) == kept_count(mask.numel(), pruning.dense_ratio):
            return mask
        # Not made yet, or by another ratio: the mask is that with which pruning would begin, as in `redundancy_clean`.
        weight = self._trained(f"{layer}.weight")
        scores = l1_scores(pruning.kind, weight, record.out_dim, pruning.num_heads)
        return top_k_mask(scores, pruning.dense_ratio) != 0

    def _place(self, layer: str, pruning: Pruning) -> tuple[str, str]:
        """Name and slot of the scores or the mask of a pruning."""
        name = f"{layer}.{pruning.kind}_{'scores' if pruning.is_learned else 'mask'}"
        return name, self._slot(name) if pruning.is_learned else schema.BUFFER_SLOT

    def _trained(self, name: str) -> Tensor:
        """A parameter as the model computes with it: in the dtype of training."""
        info, slot = self._reader.info(name), self._slot(name)
        stored, dtype = self._reader.stored(name, slot), str(info.train_dtype)
        flat = cast(self._reader.read_array(name, slot).reshape(-1), stored.dtype, dtype)
        return schema.from_array(flat, dtype).view(info.shape)

    def _slot(self, name: str) -> str:
        return schema.MASTER_SLOT if schema.MASTER_SLOT in self._reader.slots(name) else "weight16"
