"""Weights as packed codes in an exported HDF5 file: the names and facts of their parts, and a reader. torch for values.

A weight W is the datasets `W_codes` (uint8, with the attributes bits, shape, is_signed and weight_dtype), `W_scales`
and maybe `W_offsets` (fp32), as a model that `redundancy_clean` made has them in its state dict.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import hdf5, kinds, numbers, schema
from mpispeed.ckpt.format.errors import CorruptCheckpoint
from mpispeed.ckpt.format.index import TensorEntry, shape_of, stored_dtype, translated, whole
from mpispeed.ckpt.tools.weight_files import HDF5_FORMAT, HDF5_VERSION, Weight

if TYPE_CHECKING:
    import torch
    from h5py import h5d

    from mpispeed.native.packed_codes import PackedCodes

log = logging.getLogger(__name__)

CODES, SCALES, OFFSETS = "_codes", "_scales", "_offsets"
"""Ends of the names of the parts, behind the name of the weight."""

SLOT = "made"
"""Begin of the slots of parts, which no checkpoint stores; behind it is the end of the name."""

_MOST_BITS = 8


def parts(name: str, aliases: tuple[str, ...], source: str, made: PackedCodes | np.ndarray, dtype: str) -> list[Weight]:
    """The datasets of a weight, in the order of `contents`.

    Args:
        name: to write it under.
        aliases: its other names.
        source: its name in the checkpoint.
        made: its codes, or its values.
        dtype: dtype name of the weight.
    """
    found = []
    for end, array in contents(made).items():
        entry = TensorEntry(source, SLOT + end, array.shape, array.dtype.name, -1, -1)
        facts: dict[str, Any] = {}
        if end == CODES and not isinstance(made, np.ndarray):
            facts = {"bits": made.bits, "shape": made.shape, "is_signed": int(made.is_signed), "weight_dtype": dtype}
        kind = array.dtype.name if end else dtype
        found.append(Weight(name + end, tuple(alias + end for alias in aliases), entry, kind, facts))
    return found


def contents(made: PackedCodes | np.ndarray) -> dict[str, np.ndarray]:
    """End of a part's name -> its elements; the end of values is empty."""
    if isinstance(made, np.ndarray):
        return {"": made}
    found = {CODES: made.codes.cpu().numpy(), SCALES: made.scales.cpu().numpy()}
    return found if made.offsets is None else found | {OFFSETS: made.offsets.cpu().numpy()}


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor of a file.

    Attributes:
        shape: of the weight.
        dtype: dtype name of the weight; not of its codes.
        bits: of a code; 0: it is stored as it is.
        groups: number of scales.
        has_offsets: True if there is one for each scale.

    Units:
        size_bytes: of codes, scales and offsets, or of the elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bits: int
    groups: int
    has_offsets: bool
    size_bytes: int


def rows(path: Path) -> list[Row]:
    """The tensors of a file of weights, without a look at their elements.

    Raises:
        CheckpointError: (CorruptCheckpoint) it is no such file, or damaged.
    """
    with _opened(path) as file:
        return [row for row, _ in _tensors(file)]


def load(path: str | Path) -> dict[str, torch.Tensor]:
    """The values of all tensors of an HDF5 file that `ckpt export` wrote; those of codes in the dtype of their weight.

    Names of one tensor have it in common.

    Raises:
        CheckpointError: (CorruptCheckpoint) it is no such file, or damaged.
    """
    found: dict[str, torch.Tensor] = {}
    known: dict[tuple[int, ...], torch.Tensor] = {}
    with _opened(Path(path)) as file:
        for row, stored in _tensors(file):
            place = tuple(h5py.h5o.get_info(dataset).addr for dataset in stored.values())
            if place not in known:
                known[place] = _values(row, stored)
            found[row.name] = known[place]
    return found


def _values(row: Row, stored: dict[str, h5d.DatasetID]) -> torch.Tensor:
    from mpispeed.native.packed_codes import PackedCodes

    arrays = {end: h5py.Dataset(dataset)[()] for end, dataset in stored.items()}
    if not row.bits:
        return schema.from_array(np.asarray(arrays[""]), row.dtype)
    made = {end: schema.from_array(array, array.dtype.name) for end, array in arrays.items()}
    packed = PackedCodes(made[CODES], made[SCALES], made.get(OFFSETS), row.bits, row.shape, _is_signed(stored[CODES]))
    if problem := packed.check():
        msg = f"{row.name}: {problem}"
        raise ValueError(msg)
    return packed.values(schema.torch_dtype(row.dtype))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    """Context with the open file, in which any error names it."""
    if not path.is_file():
        msg = f"{path} is no file"
        raise CheckpointError(msg)
    with translated(path), hdf5.open_reading(path) as file:
        found = kinds.of_root(file.id)
    _check_version(path, found)
    try:
        with translated(path), hdf5.open_reading(path) as file:
            yield file
    except CorruptCheckpoint:
        raise
    except CheckpointError as failure:  # of a dtype, which does not know the file
        msg = f"{path} is damaged or no file of weights: {failure}"
        raise CorruptCheckpoint(msg) from failure


def _check_version(path: Path, found: kinds.Kind) -> None:
    """Refuse a later format; files of the first days, and of others, say of none."""
    if found.form != HDF5_FORMAT:
        return
    if why := kinds.refusal(found.version, HDF5_VERSION):
        msg = f"{path} has weights {why}"
        raise CheckpointError(msg)
    if found.version and (warning := kinds.warning(found.version, HDF5_VERSION)):
        log.warning("%s has weights %s", path, warning)


def _tensors(file: h5py.File) -> Iterator[tuple[Row, dict[str, h5d.DatasetID]]]:
    """Each tensor with the datasets that it is made of, by the ends of their names."""
    names = dict.fromkeys(hdf5.names(file.id))
    taken: set[str] = set()
    for stored in names:
        if stored.endswith(CODES) and h5py.h5a.exists(hdf5.child_dataset(file.id, stored), b"bits"):
            taken.update(stored.removesuffix(CODES) + end for end in (CODES, SCALES, OFFSETS))
    for stored in names:
        dataset = hdf5.child_dataset(file.id, stored)
        if stored not in taken:
            dtype = stored_dtype(dataset)
            size = math.prod(dataset.shape) * dataset.dtype.itemsize
            yield Row(schema.unescape(stored), dataset.shape, dtype, 0, 0, False, size), {"": dataset}
        elif stored.endswith(CODES) and stored in taken:
            yield _packed(file, stored.removesuffix(CODES), has_offsets=stored.removesuffix(CODES) + OFFSETS in names)


def _packed(file: h5py.File, stored: str, *, has_offsets: bool) -> tuple[Row, dict[str, h5d.DatasetID]]:
    ends = (CODES, SCALES, OFFSETS) if has_offsets else (CODES, SCALES)
    found = {end: hdf5.child_dataset(file.id, stored + end) for end in ends}
    values = hdf5.attributes(found[CODES])
    shape, bits, dtype = shape_of(values), whole(values, "bits"), values.text("weight_dtype")
    is_known = dtype in schema.STORAGE and numbers.is_float(dtype) and whole(values, "is_signed") in (0, 1)
    if not is_known or not 1 <= bits <= _MOST_BITS:
        msg = f"{stored}: no weight of {dtype:.80} has codes of {bits} bits"
        raise ValueError(msg)
    if found[CODES].shape != (-(-math.prod(shape) * bits // 8),):
        msg = f"{stored}: {found[CODES].shape} bytes of codes are no {bits} bits for each element of {shape}"
        raise ValueError(msg)
    for end in ends[1:]:
        part = found[end]
        if part.dtype != np.float32 or part.shape != found[SCALES].shape[:1]:
            msg = f"{stored}{end} has {part.dtype} {part.shape}; expected one row of float32, as long as the scales"
            raise ValueError(msg)
    size = sum(math.prod(part.shape) * part.dtype.itemsize for part in found.values())
    return Row(schema.unescape(stored), shape, dtype, bits, math.prod(found[SCALES].shape), has_offsets, size), found


def _is_signed(codes: h5d.DatasetID) -> bool:
    return bool(whole(hdf5.attributes(codes), "is_signed"))
