"""Reader of `torch.save` files that executes nothing in them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mpispeed.ckpt.foreign import torch_zips
from mpispeed.ckpt.foreign.faults import ForeignCorrupt, ForeignMismatch, ForeignMissing, RefusedPickle
from mpispeed.ckpt.foreign.mapping import current_notes, map_file
from mpispeed.ckpt.foreign.pickles import Damaged, Machine, Tidier
from mpispeed.ckpt.foreign.torch_tensors import Storage, Tensors

_DESCRIPTION, _BYTE_ORDER = "data.pkl", "byteorder"
#: of the pickles in a file, which take some hundred bytes per tensor
_PICKLE_BYTES = 64 << 20
_WINDOW = 1 << 20
#: the format before torch 1.6 begins with these two
_OLD_MAGIC, _OLD_VERSION = 0x1950A86A20F9469CFC6C, 1001


def read(path: Path) -> Any:
    """The content of a file of `torch.save`. Tensors are mapped into memory and read when they are used.

    Objects of other libraries that are known to stand there are `Inert`; numpy numbers and arrays are themselves.

    Raises:
        ForeignMissing: there is no such file.
        RefusedPickle: it has an object of another class; nothing was executed.
        ForeignCorrupt: it is damaged or half-written.
    """
    if not path.is_file():
        msg = f"{path} is missing"
        raise ForeignMissing(msg)
    try:
        content = map_file(path)
        is_zip = bytes(content[:4].tolist()) == torch_zips.START
        return Tidier().tidy(_read_zip(path, content) if is_zip else _read_old(content))
    except RefusedPickle as failure:
        msg = f"{path} holds {failure}"
        raise RefusedPickle(msg) from None
    except (torch_zips.BadDirectory, Damaged) as failure:
        msg = f"{path} cannot be read; it is damaged, half-written or no file of torch.save: {failure}"
        raise ForeignCorrupt(msg) from failure


def _read_zip(path: Path, content: torch.Tensor) -> Any:
    found = torch_zips.entries(path)
    if "constants.pkl" in found:
        msg = f"{path} is a program of TorchScript; save its state_dict with torch.save"
        raise ForeignMismatch(msg)
    order = _record(content, found, _BYTE_ORDER, 16) if _BYTE_ORDER in found else b"little"
    if order != b"little":
        msg = f"{path} was saved with the byte order {order!r}; only little-endian files can be imported"
        raise ForeignMismatch(msg)
    parts: dict[str, torch.Tensor] = {}

    def part(key: str) -> torch.Tensor:
        if key not in parts:
            parts[key] = _elements(path, content, found, f"data/{key}")
        return parts[key]

    if _DESCRIPTION in found and found[_DESCRIPTION].size > _PICKLE_BYTES:
        msg = (
            f"{path} describes its content in {found[_DESCRIPTION].size} bytes ({_DESCRIPTION}), and at most "
            f"{_PICKLE_BYTES} are read; save tensors instead of long lists and dicts, or several files"
        )
        raise ForeignMismatch(msg)
    tensors = Tensors(part, content.numel())
    machine = Machine(
        _record(content, found, _DESCRIPTION, _PICKLE_BYTES), tensors.find, tensors.storage, tensors.limits
    )
    made = machine.load()
    if machine.at != found[_DESCRIPTION].size:
        msg = f"{_DESCRIPTION} goes on behind its end"
        raise Damaged(msg)
    return made


def _elements(path: Path, content: torch.Tensor, found: Mapping[str, torch_zips.Entry], name: str) -> torch.Tensor:
    """The bytes of an entry with elements, compared with their checksum now or, where places are noted, later."""
    notes, entry = current_notes(), found.get(name)
    if notes is None or entry is None:
        return _checked(content, found, name)
    if entry.crc:
        notes.sums[str(path), entry.first, entry.last] = entry.crc
    return content[entry.first : entry.last]


def _checked(content: torch.Tensor, found: Mapping[str, torch_zips.Entry], name: str) -> torch.Tensor:
    """The bytes of an entry, compared with their checksum."""
    entry = found.get(name)
    if entry is None:
        msg = f"it has no entry {name!r:.80}"
        raise Damaged(msg)
    crc = 0
    for start in range(entry.first, entry.last, _WINDOW):
        crc = zlib.crc32(content[start : min(start + _WINDOW, entry.last)].numpy().data, crc)
    if entry.crc not in (0, crc):  # torch can be told to leave checksums out
        msg = f"the bytes of its entry {name!r:.80} do not match their checksum"
        raise Damaged(msg)
    return content[entry.first : entry.last]


def _record(content: torch.Tensor, found: Mapping[str, torch_zips.Entry], name: str, most: int) -> bytes:
    if name in found and found[name].size > most:
        msg = f"its entry {name!r} has {found[name].size} bytes, more than {most}"
        raise Damaged(msg)
    return _checked(content, found, name).numpy().tobytes()


def _read_old(content: torch.Tensor) -> Any:
    """The format before torch 1.6: pickles, and behind them each storage with the number of its elements."""
    raw = content[:_PICKLE_BYTES].numpy().tobytes()
    claims: dict[str, Storage] = {}
    counted = Tensors(None, content.numel(), claims)
    machine = Machine(raw, counted.find, counted.storage, counted.limits)
    if not _is(machine.load(), _OLD_MAGIC) or not _is(machine.load(), _OLD_VERSION):
        msg = "it does not begin as one"
        raise Damaged(msg)
    system = machine.load()
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        msg = "it was not saved by a little-endian machine"
        raise Damaged(msg)
    first = machine.at
    machine.load()
    keys = machine.load()
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or sorted(keys) != sorted(claims):
        msg = f"it does not hold the {len(claims)} storages that it speaks of"
        raise Damaged(msg)
    parts, at = {}, machine.at
    for key in keys:
        count = int.from_bytes(bytes(content[at : at + 8].tolist()), "little", signed=True)
        at += 8
        if count != claims[key].numel or at + claims[key].nbytes > content.numel():
            msg = f"its storage {key!r:.80} should have {claims[key].numel} elements"
            raise Damaged(msg)
        parts[key] = content[at : at + claims[key].nbytes]
        at += claims[key].nbytes
    if at != content.numel():
        msg = f"{content.numel() - at} bytes follow its last storage"
        raise Damaged(msg)
    tensors = Tensors(lambda key: parts[key], content.numel())
    machine = Machine(raw[first:], tensors.find, tensors.storage, tensors.limits)
    return machine.load()


def _is(value: Any, number: int) -> bool:
    """True if `value` is this int, and not an object with its own comparison."""
    return type(value) is int and value == number
