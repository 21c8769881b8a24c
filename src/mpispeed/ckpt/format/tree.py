"""Typed trees in HDF5: nested Python values as groups, attributes and datasets, and back. No pickle.

Scalars (bool, int, float, str, None) are attributes of their container's group, or one JSON text if there are many;
containers are groups; arrays, tensors and long texts are datasets. The format's own names start with "%", which no
escaped user name does.

No text is of variable length: HDF5 keeps such in a heap without checksums, and one wrong byte in it can keep the
library busy for ever.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5g, h5i, h5o

from mpispeed.ckpt.format import hdf5, objects, schema
from mpispeed.ckpt.format.errors import UnsupportedValue

_KIND = "%kind"
_KEYS = "%keys"
_LENGTH = "%length"
_VALUES = "%values"

#: of a group, beside the format's own; with those there are fewer than `hdf5.MOST_ATTRIBUTES`
_PLAIN_ATTRIBUTES = 48
#: of a text that is an attribute
_ATTRIBUTE_CHARACTERS = 1000

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
    """Check that the format supports every part of `value`.

    Returns:
        Roughly the bytes it takes, for the estimate of free space.

    Raises:
        UnsupportedValue: names the path and the type of the first part that has none.
    """
    return _check(value, path, set())


def _check(value: Any, path: str, parents: set[int]) -> int:
    kind = kind_of(value, path)
    if kind in ("dict", "items", *_SEQUENCES, "size", *objects.GROUPS):
        if id(value) in parents:
            msg = f"{path} contains itself; a checkpoint stores trees only"
            raise UnsupportedValue(msg)
        parents = parents | {id(value)}
        if isinstance(value, Mapping):
            rows = [(f"{path}[{key!r}]", part) for key, item in value.items() for part in (key, item)]
        elif kind in objects.GROUPS:
            rows = [(f"{path}.{key}", item) for key, item in objects.parts(value).items()]
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
    special = _array_kind(value, path) or _object_kind(value, path)
    if special:
        return special
    msg = (
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold; convert it "
        "to dict, list, tuple, set, str, bytes, int, float, bool, None, a numpy array, a torch tensor or dtype, a "
        "Path, a Namespace, a dataclass or an enum"
    )
    raise UnsupportedValue(msg)


def _object_kind(value: Any, path: str) -> str:
    kind = objects.kind_of(value)
    if kind in objects.TEXTS:
        _text_kind(objects.text(value), path)
    if kind == "namespace" and not all(type(key) is str for key in vars(value)):
        msg = f"{path} is a Namespace with attributes whose names are no text; make it a dict"
        raise UnsupportedValue(msg)
    return kind


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
    """A deep copy of a tree: containers, arrays and tensors are new; dataclasses become records."""
    kind = objects.kind_of(value)
    if kind in ("namespace", "record"):
        return objects.made(kind, copied(objects.parts(value)))
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


def write(build: hdf5.Builder, parent: h5g.GroupID, name: str, value: Any) -> None:
    """Store `value` as `name` (escaped already) in `parent`: an attribute, a group or a dataset."""
    kind = kind_of(value, name)
    if kind == "plain":
        if isinstance(value, str) and not _is_short(value):
            build.attribute(build.text(parent, name, value), _KIND, "text")
        else:
            build.attribute(parent, name, value)
    elif kind in ("dict", "items", *objects.GROUPS):
        parts = objects.parts(value) if kind in objects.GROUPS else value
        _write_dict(build, build.group(parent, name), kind, parts)
    elif kind in _SEQUENCES or kind == "size":
        packed = _packed(value) if kind in ("list", "tuple") else None
        if packed is not None:
            _write_array(build, parent, name, kind, packed)
        else:
            _write_sequence(build, build.group(parent, name), kind, value)
    elif kind == "tensor":
        from mpispeed.ckpt.format import schema
        # a tensor is here, so torch is loaded already; readers may do without

        made = _write_array(build, parent, name, kind, schema.as_array(value))
        build.attribute(made, "dtype", schema.dtype_name(value.dtype))
    elif kind in ("array", "scalar", "complex"):
        _write_array(build, parent, name, kind, np.asarray(value))
    else:
        _write_array(build, parent, name, kind, np.frombuffer(_raw(kind, value), np.uint8))


def _raw(kind: str, value: Any) -> bytes:
    if kind == "bytes":
        return bytes(value)
    return (f"{value:x}" if kind == "int" else objects.text(value)).encode()


def _is_short(text: str) -> bool:
    """True if a text may be an attribute; these are in the header of their group, which is read as a whole."""
    return len(text) <= _ATTRIBUTE_CHARACTERS


def _write_array(build: hdf5.Builder, parent: h5g.GroupID, name: str, kind: str, array: np.ndarray) -> h5d.DatasetID:
    made = build.array(parent, name, array)
    build.attribute(made, _KIND, kind)
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


def _write_dict(build: hdf5.Builder, group: h5g.GroupID, kind: str, value: Mapping[Any, Any]) -> None:
    if kind == "items":
        _write_sequence(build, group, kind, value.items())
        return
    items = {schema.escape(key): item for key, item in value.items()}
    if items:
        _write_json(build, group, _KEYS, list(items))
    _write_items(build, group, kind, items)


def _write_sequence(build: hdf5.Builder, group: h5g.GroupID, kind: str, values: Iterable[Any]) -> None:
    # sets have no order of their own; sorting makes the file reproducible
    rows = sorted(values, key=lambda v: (type(v).__name__, repr(v))) if kind in ("set", "frozenset") else values
    _write_items(build, group, kind, {str(index): item for index, item in enumerate(rows)})


def _write_items(build: hdf5.Builder, group: h5g.GroupID, kind: str, items: Mapping[str, Any]) -> None:
    """Write the parts of a container by name; many scalars as one text, as attributes have to be few."""
    build.attribute(group, _KIND, kind)
    build.attribute(group, _LENGTH, len(items))
    plain = {name: item for name, item in items.items() if kind_of(item, name) == "plain"}
    if len(plain) > _PLAIN_ATTRIBUTES:
        _write_json(build, group, _VALUES, plain)
    else:
        plain = {}
    for name, item in items.items():
        if name not in plain:
            write(build, group, name, item)


def _write_json(build: hdf5.Builder, group: h5g.GroupID, name: str, value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False)
    if _is_short(text):
        build.attribute(group, name, text)
    else:
        build.text(group, name, text)


def read(parent: h5g.GroupID, name: str, make_tensor: TensorMaker | None = None) -> Any:
    """The value stored as `name` (escaped already) in `parent`, of the type it was stored with.

    Dataclasses and members of enums are `objects.Record` and `objects.Member`.

    Args:
        parent: the group.
        name: the escaped name.
        make_tensor: turns (stored array, dtype name) into what stands for a tensor; None makes torch tensors.

    Raises:
        KeyError: there is nothing of that name, or a part is missing.
        ValueError: a part is not in this file, or is larger than it.
    """
    walk = _Walk(parent, make_tensor or _torch_tensor)
    return walk.part(parent, hdf5.attributes(parent, may_be_empty=True), name)


class _Walk:
    """Reader of one tree; takes no more memory for elements and text than the file has bytes.

    Datasets of a crafted file may share bytes, which would be read again and again.
    """

    def __init__(self, parent: h5g.GroupID, make_tensor: TensorMaker) -> None:
        self._make_tensor = make_tensor
        self._left_bytes: int = h5i.get_file_id(parent).get_filesize()

    def part(self, parent: h5g.GroupID, own: Mapping[str, Any], name: str) -> Any:
        """The value stored as `name` in `parent`, whose attributes are `own`."""
        if name in own:
            return self._plain(own[name])
        child = hdf5.child(parent, name)
        where = f"{schema.unescape(name)!r:.80} of the state"
        if h5o.get_info(child).rc > 1:
            msg = f"{where} has several names; a checkpoint stores trees only"
            raise ValueError(msg)
        if isinstance(child, h5d.DatasetID):
            self._take(child, where)
            return _read_array(child, where, self._make_tensor)
        return self._container(child, where)

    def _container(self, group: h5g.GroupID, where: str) -> Any:
        own = hdf5.attributes(group, may_be_empty=True)
        kind, length = own.text(_KIND), int(own[_LENGTH])
        plain, has_keys = self._json(group, own, _VALUES, dict), kind in ("dict", *objects.GROUPS)
        if has_keys:
            names = self._json(group, own, _KEYS, list)
            if len(set(names)) < len(names):
                msg = f"{where} has a key twice"
                raise ValueError(msg)
        else:
            names = map(str, range(length))
        values = [_checked(plain[name]) if name in plain else self.part(group, own, name) for name in names]
        if has_keys:
            found = dict(zip(map(schema.unescape, names), values, strict=True))
            return found if kind == "dict" else objects.made(kind, found)
        if kind == "items":
            return dict(values)
        if kind == "size":
            import torch  # only values that torch made are of this kind

            return torch.Size(values)
        return _SEQUENCES[kind](values)

    def _json(self, group: h5g.GroupID, own: hdf5.Attributes, name: str, kind: type) -> Any:
        """The values that `_write_json` stored; empty if there are none."""
        if name in own:
            text = own.text(name)
        elif group.links.exists(name.encode()):
            self._take(hdf5.child_dataset(group, name), name)
            text = hdf5.read_text(group, name)
        else:
            return kind()
        value = json.loads(text)
        if type(value) is not kind:
            msg = f"{name} of a part of the state is no {kind.__name__}: {value!r:.80}"
            raise ValueError(msg)
        return value

    def _plain(self, value: Any) -> Any:
        if isinstance(value, bytes):
            return hdf5.text(value)
        if value is not None and not isinstance(value, (np.bool_, np.integer, np.floating)):
            msg = f"{value!r:.80} is no plain value"
            raise ValueError(msg)
        return None if value is None else value.item()

    def _take(self, dataset: h5d.DatasetID, where: str) -> None:
        self._left_bytes -= h5py.Dataset(dataset).nbytes
        if self._left_bytes < 0:
            msg = f"{where} and what was read before take more bytes than the file has"
            raise ValueError(msg)


def _checked(value: Any) -> Any:
    """Check a value of a JSON text."""
    if value is not None and type(value) not in (bool, int, float, str):
        msg = f"{value!r:.80} is no plain value"
        raise ValueError(msg)
    return value


def _read_array(child: h5d.DatasetID, where: str, make_tensor: TensorMaker) -> Any:
    own, array = hdf5.attributes(child), np.asarray(h5py.Dataset(child)[()])
    kind = own.text(_KIND)
    if array.dtype.kind == "S" and (kind != "text" or array.ndim):
        msg = f"{where} is of type {array.dtype}, which no {kind!r:.80} is"
        raise ValueError(msg)
    if kind == "tensor":
        dtype = own.text("dtype")
        if schema.STORAGE.get(dtype) != array.dtype:
            msg = f"{where}: elements of type {array.dtype} do not stand for {dtype!r:.80}"
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
    if kind not in ("bytes", "int", "text", *objects.TEXTS):
        msg = f"{where} is of the unknown kind {kind!r:.80}"
        raise ValueError(msg)
    raw = array.tobytes()
    if kind in objects.TEXTS:
        return objects.of_text(kind, raw.decode())
    return raw if kind == "bytes" else int(raw, 16) if kind == "int" else raw.decode()


def _torch_tensor(array: np.ndarray, dtype: str) -> Any:
    from mpispeed.ckpt.format import schema
    # listing commands read trees without torch

    return schema.from_array(array, dtype)
