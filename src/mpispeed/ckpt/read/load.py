"""Reader of checkpoints that returns torch tensors."""

from __future__ import annotations

from pathlib import Path

import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import schema
from mpispeed.ckpt.read.reader import Reader, find


def open_checkpoint(folder: str | Path, tag: str | None = None) -> Checkpoint:
    """Open a committed checkpoint for reading.

    Manifest, file sizes and the index of model.h5 are checked here; elements when they are read. Arguments and errors
    as `reader.find`.
    """
    return Checkpoint(find(folder, tag))


class Checkpoint(Reader):
    """A reader that returns torch tensors."""

    def __enter__(self) -> Checkpoint:
        return self

    def read(self, name: str, slot: str, start: int, out: torch.Tensor, verify: bool = True) -> None:
        """Fill `out` from the flat range of the stored tensor that begins at element `start`.

        Bits are copied when the dtypes are equal, otherwise values are converted as `Tensor.copy_` does.

        Args:
            name: parameter or buffer.
            slot: "master", an optimizer slot, "weight16" or "buffer".
            start: first element, in the row-major order of the whole tensor.
            out: receives the elements.
            verify: compare the blocks that the range touches with their checksums.

        Shapes:
            out: one-dimensional; contiguous CPU memory of the stored dtype is filled without a copy.

        Raises:
            CheckpointError: no such tensor, or the range leaves it.
            CorruptCheckpoint: the bytes are not those that were saved.
        """
        tensor = self.stored(name, slot)
        stop = start + out.numel()
        if out.dim() != 1 or start < 0 or stop > tensor.numel:
            msg = (
                f"cannot read {name}/{slot}[{start}:{stop}] into a tensor of shape {tuple(out.shape)}: "
                f"the stored shape is {tensor.shape} ({tensor.numel} elements) and `out` has to be flat"
            )
            raise CheckpointError(msg)
        if out.numel() == 0:
            return
        dtype = schema.torch_dtype(tensor.dtype)
        if out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous():
            self.read_bytes(tensor, start * tensor.itemsize, schema.as_bytes(out), verify)
            return
        step = schema.BLOCK_BYTES // tensor.itemsize
        scratch = torch.empty(min(step, out.numel()), dtype=dtype)
        for first in range(0, out.numel(), step):
            part = scratch[: min(step, out.numel() - first)]
            self.read_bytes(tensor, (start + first) * tensor.itemsize, schema.as_bytes(part), verify)
            out[first : first + part.numel()].copy_(part)

    def read_whole(self, name: str, slot: str, verify: bool = True) -> torch.Tensor:
        """A whole stored tensor in its own shape and dtype.

        Raises:
            CheckpointError: no such tensor.
            CorruptCheckpoint: the bytes are not those that were saved.
        """
        tensor = self.stored(name, slot)
        out = torch.empty(tensor.numel, dtype=schema.torch_dtype(tensor.dtype))
        self.read(name, slot, 0, out, verify)
        return out.reshape(tensor.shape)
