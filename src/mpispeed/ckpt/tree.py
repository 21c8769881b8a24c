"""Typed trees in HDF5: nested Python values as groups, attributes and datasets, and back. No pickle.

Scalars (bool, int, float, str, None) are attributes of their container's group; containers are
groups; arrays and tensors are datasets. The format's own attributes start with "%", which no
escaped user name does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5o

from mpispeed.ckpt import hdf5, schema
from mpispeed.ckpt.errors import UnsupportedValue

_KIND = "%kind"
_KEYS = "%keys"
_LENGTH = "%length"

#: lists and tuples of numbers at least this long are one dataset
_PACK_LENGTH = 16

_SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}

TensorMaker = Callable[[np.ndarray, str], Any]


def check(value: Any, path: str) -> int:
    """Every part of `value` has a place in the format.

    Returns:
        Roughly the bytes it takes, for the estimate of free space.

    Raises:
        UnsupportedValue: names the path and the type of the first part that has none.
    """
    return _check(value, path, set())


def _check(value: Any, path: str, parents: set[int]) -> int:
    kind = kind_of(value, path)
    if kind in ("dict", "items", *_SEQUENCES, "size"):
        if id(value) in parents:
            msg = f"{path} contains itself; a checkpoint stores trees only"
            raise UnsupportedValue(msg)
        parents = parents | {id(value)}
        if isinstance(value, Mapping):
            rows = [(f"{path}[{key!r}]", part) for key, item in value.items() for part in (key, item)]
        else:
            rows = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
        return 64 + sum(_check(item, where, parents) for where, item in rows)
    if kind in ("array", "tensor"):
        return int(value.nbytes) + 512
    return len(value) + 64 if isinstance(value, (str, bytes)) else 64


def kind_of(value: Any, path: str) -> str:
    """The format's word for the type of `value`.

    Raises:
        UnsupportedValue: there is none.
    """
    if value is None or type(value) in (bool, float):
        return "plain"
    if type(value) is int:
        return "plain" if -(2**63) <= value < 2**64 else "int"
    if type(value) is str:
        return _text_kind(value, path)
    if isinstance(value, dict):
        return "dict" if all(type(key) is str for key in value) else "items"
    if type(value) in (list, tuple, set, frozenset, bytes, complex):
        return type(value).__name__
    special = _array_kind(value, path)
    if special:
        return special
    msg = (
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold; convert it "
        "to dict, list, tuple, set, str, bytes, int, float, bool, None, a numpy array or a torch tensor"
    )
    raise UnsupportedValue(msg)


def _text_kind(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        msg = f"{path} is text that is not valid Unicode: {value!r}"
        raise UnsupportedValue(msg) from None
    return "text" if "\0" in value else "plain"


def _array_kind(value: Any, path: str) -> str:
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind in "biufc" and value.dtype.newbyteorder("<") in schema.STORAGE.values():
            return "array" if isinstance(value, np.ndarray) else "scalar"
        msg = f"{path} is a numpy value of dtype {value.dtype}, which a checkpoint cannot hold; convert it to numbers"
        raise UnsupportedValue(msg)
    torch = sys.modules.get("torch")  # a value can only be a tensor when torch is loaded
    if torch is None:
        return ""
    if type(value) is torch.Size:
        return "size"
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        if value.layout == torch.strided and value.device.type != "meta" and name in schema.STORAGE:
            return "tensor"
        msg = f"{path} is a tensor of {name}, {value.layout}, on {value.device}, which a checkpoint cannot hold"
        raise UnsupportedValue(msg)
    return ""


def copied(value: Any) -> Any:
    """A tree that nothing changes which changes `value`: containers, arrays and tensors are new ones."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(copied(item) for item in value)
    if isinstance(value, np.ndarray):
        return value.copy()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value


def write(parent: h5py.Group, name: str, value: Any) -> None:
    """Store `value` as `name` (escaped already) in `parent`: an attribute, a group or a dataset."""
    kind = kind_of(value, f"{parent.name}/{name}")
    if kind == "plain":
        _write_plain(parent, name, value)
    elif kind in ("dict", "items"):
        _write_dict(parent.create_group(name, track_order=True), kind, value)
    elif kind in _SEQUENCES or kind == "size":
        packed = _packed(value) if kind in ("list", "tuple") else None
        if packed is not None:
            _write_array(parent, name, kind, packed)
        else:
            _write_sequence(parent.create_group(name, track_order=True), kind, value)
    elif kind == "tensor":
        from mpispeed.ckpt import bits  # a tensor is here, so torch is loaded already; readers may do without

        made = _write_array(parent, name, kind, bits.as_array(value))
        made.attrs["dtype"] = schema.dtype_name(value.dtype)
    elif kind in ("array", "scalar", "complex"):
        _write_array(parent, name, kind, np.asarray(value))
    else:
        raw = value if kind == "bytes" else (f"{value:x}" if kind == "int" else value).encode()
        _write_array(parent, name, kind, np.frombuffer(raw, np.uint8))


def _write_plain(parent: h5py.Group, name: str, value: Any) -> None:
    if value is None:
        parent.attrs[name] = h5py.Empty("f8")
    elif isinstance(value, str):
        parent.attrs.create(name, value, dtype=h5py.string_dtype())
    elif isinstance(value, bool):
        parent.attrs[name] = np.bool_(value)
    elif isinstance(value, int):
        parent.attrs[name] = np.int64(value) if value < 2**63 else np.uint64(value)
    else:
        parent.attrs[name] = np.float64(value)


def _write_array(parent: h5py.Group, name: str, kind: str, array: np.ndarray) -> h5py.Dataset:
    made = parent.create_dataset(name, data=array.astype(array.dtype.newbyteorder("<"), copy=False))
    made.attrs[_KIND] = kind
    return made


def _packed(values: list[Any] | tuple[Any, ...]) -> np.ndarray | None:
    if len(values) < _PACK_LENGTH:
        return None
    kinds = set(map(type, values))
    if kinds == {float}:
        return np.array(values, np.float64)
    if kinds == {int} and min(values) >= -(2**63) and max(values) < 2**63:
        return np.array(values, np.int64)
    return None


def _write_dict(group: h5py.Group, kind: str, value: Mapping[Any, Any]) -> None:
    if kind == "items":
        _write_sequence(group, kind, value.items())
        return
    group.attrs[_KIND] = kind
    group.attrs[_LENGTH] = len(value)
    keys = [schema.escape(key) for key in value]
    if keys:
        group.attrs.create(_KEYS, keys, dtype=h5py.string_dtype())
    for key, item in zip(keys, value.values(), strict=True):
        write(group, key, item)


def _write_sequence(group: h5py.Group, kind: str, values: Iterable[Any]) -> None:
    # sets have no order of their own; sorting makes the file reproducible
    rows = sorted(values, key=lambda v: (type(v).__name__, repr(v))) if kind in ("set", "frozenset") else list(values)
    group.attrs[_KIND] = kind
    group.attrs[_LENGTH] = len(rows)
    for index, item in enumerate(rows):
        write(group, str(index), item)


def read(parent: h5py.Group, name: str, make_tensor: TensorMaker | None = None) -> Any:
    """The value stored as `name` (escaped already) in `parent`, of the type it was stored with.

    Args:
        parent: the group.
        name: the escaped name.
        make_tensor: turns (stored array, dtype name) into what stands for a tensor; None makes torch tensors.

    Raises:
        KeyError: there is nothing of that name, or a part is missing.
        ValueError: a part is not in this file, or is larger than it.
    """
    return _Walk(parent, make_tensor or _torch_tensor).read(parent, name)


class _Walk:
    """Reads one tree; takes no more memory for elements and text than the file has bytes.

    Datasets and texts may share bytes of a file that was made to be read again and again.
    """

    def __init__(self, parent: h5py.Group, make_tensor: TensorMaker) -> None:
        self._make_tensor = make_tensor
        self._left_bytes: int = parent.file.id.get_filesize()

    def read(self, parent: h5py.Group, name: str) -> Any:
        """The value stored as `name` in `parent`."""
        if name in parent.attrs:
            return self._plain(parent.attrs[name])
        found = hdf5.child(parent.id, name)
        child = h5py.Dataset(found) if isinstance(found, h5d.DatasetID) else h5py.Group(found)
        if h5o.get_info(found).rc > 1:
            msg = f"{child.name} has several names; a checkpoint stores trees only"
            raise ValueError(msg)
        kind = hdf5.text(child.attrs[_KIND])
        if isinstance(child, h5py.Dataset):
            self._take(child.nbytes, child.name)
            return _read_array(child, kind, self._make_tensor)
        if kind == "dict":
            keys = [hdf5.text(key) for key in child.attrs[_KEYS]] if child.attrs[_LENGTH] else []
            if len(set(keys)) < len(keys):
                msg = f"{child.name} has a key twice"
                raise ValueError(msg)
            return {schema.unescape(key): self.read(child, key) for key in keys}
        values = [self.read(child, str(index)) for index in range(int(child.attrs[_LENGTH]))]
        if kind == "items":
            return dict(values)
        if kind == "size":
            import torch  # only values that torch made are of this kind

            return torch.Size(values)
        return _SEQUENCES[kind](values)

    def _plain(self, value: Any) -> Any:
        if isinstance(value, h5py.Empty):
            return None
        if isinstance(value, (bytes, str)):
            self._take(len(value), "its text")
            return hdf5.text(value)
        if not isinstance(value, (np.bool_, np.integer, np.floating)):
            msg = f"{value!r:.80} is no plain value"
            raise ValueError(msg)  # noqa: TRY004 - the file is wrong, not the call
        return value.item()

    def _take(self, size_bytes: int, where: str) -> None:
        self._left_bytes -= size_bytes
        if self._left_bytes < 0:
            msg = f"{where} and what was read before take more bytes than the file has"
            raise ValueError(msg)


def _read_array(child: h5py.Dataset, kind: str, make_tensor: TensorMaker) -> Any:
    array = np.asarray(child[()])
    if kind == "tensor":
        dtype = hdf5.text(child.attrs["dtype"])
        if schema.STORAGE.get(dtype) != array.dtype:
            msg = f"{child.name}: elements of type {array.dtype} do not stand for {dtype!r:.80}"
            raise ValueError(msg)
        return make_tensor(array, dtype)
    if kind in ("list", "tuple"):
        return _SEQUENCES[kind](array.tolist())
    if kind == "array":
        return array
    if kind == "scalar":
        return array[()]
    if kind == "complex":
        return complex(array[()])
    if kind not in ("bytes", "int", "text"):
        msg = f"{child.name} is of the unknown kind {kind!r:.80}"
        raise ValueError(msg)
    raw = array.tobytes()
    return raw if kind == "bytes" else int(raw, 16) if kind == "int" else raw.decode()


def _torch_tensor(array: np.ndarray, dtype: str) -> Any:
    from mpispeed.ckpt import bits  # listing commands read trees without torch

    return bits.from_array(array, dtype)
