"""Files of `torch.save`, read without executing anything in them."""

from __future__ import annotations

import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpispeed.ckpt.foreign.faults import ForeignCorrupt, ForeignMissing, RefusedPickle

#: classes of other libraries that stand in such files; each becomes an `Inert`
_RECORDS = (
    "argparse.Namespace",
    "deepspeed.runtime.bf16_optimizer.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScalerBase",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "megatron.enums.AttnMaskType",
    "megatron.enums.ModelType",
    "megatron.enums.PositionEmbeddingType",
    "megatron.model.enums.AttnMaskType",
    "megatron.model.enums.ModelType",
    "megatron.model.enums.PositionEmbeddingType",
)
_NUMPY_CORES = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMBERS = re.compile(r"[<>|=]?[biufc]\d+")
#: how torch tells what it refuses
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_REFUSALS = re.compile(r"(Trying to call|Can only|numpy data of|text in the encoding)[^\n]*")


class Inert:
    """Stands for an object of another library: its arguments and attributes, no behaviour.

    Attributes:
        args: arguments it was made with.
        fields: attributes.
    """

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.fields: dict[str, Any] = {}

    def __new__(cls, *args: Any) -> Inert:
        """An object that has its attributes even if `__init__` is never called, as when it is unpickled."""
        made = super().__new__(cls)
        made.args, made.fields = args, {}
        return made

    def __setstate__(self, state: Any) -> None:
        """Take the attributes; two dicts where the class has slots."""
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.fields.update(part)


class _Dtype(Inert):
    """A numpy dtype."""


class _Array:
    """A numpy array whose content comes with its state."""

    value: Any = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, raw = state
        flat = np.frombuffer(_encoded(raw), _dtype(dtype))
        self.value = flat.reshape(shape, order="F" if is_fortran else "C").copy()


def _dtype(record: Any) -> np.dtype:
    text = record.args[0] if isinstance(record, _Dtype) and record.args else None
    if not isinstance(text, str) or not _NUMBERS.fullmatch(text):
        msg = f"numpy data of dtype {text!r} in a pickle; only numbers are read"
        raise pickle.UnpicklingError(msg)
    return np.dtype(text)


def _encoded(value: Any, encoding: str = "latin1") -> bytes:
    if isinstance(value, str) and encoding == "latin1":
        return value.encode("latin1")
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    msg = f"text in the encoding {encoding!r} in a pickle; only latin1 is read"
    raise pickle.UnpicklingError(msg)


def _scalar(dtype: Any, raw: Any) -> Any:
    return np.frombuffer(_encoded(raw), _dtype(dtype))[0]


def _empty_array(*_: Any) -> _Array:
    return _Array()


def _known() -> list[Any]:
    """What may stand in a file besides what torch itself allows: (stand-in, name in the file)."""
    rows: list[Any] = [(Inert, name) for name in _RECORDS]
    rows += [(_Dtype, "numpy.dtype"), (_Array, "numpy.ndarray"), (_encoded, "_codecs.encode")]
    for core in _NUMPY_CORES:
        rows += [(_scalar, f"{core}.scalar"), (_empty_array, f"{core}._reconstruct")]
    return rows


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
        with torch.serialization.safe_globals(_known()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as failure:
                if "mmap can only be used" not in str(failure):
                    raise
                content = torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6
            content = _tidy(content)
    except pickle.UnpicklingError as failure:
        raise _refusal(path, str(failure)) from None
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError) as failure:
        msg = f"{path} cannot be read; it is damaged or half-written: {type(failure).__name__}: {_first_line(failure)}"
        raise ForeignCorrupt(msg) from failure
    return content


def _refusal(path: Path, text: str) -> Exception:
    named, other = _GLOBAL.search(text), _REFUSALS.search(text)
    if named is None and other is None:
        problem = next((line for line in reversed(text.splitlines()) if line.startswith("Unsupported")), "no pickle")
        return ForeignCorrupt(f"{path} cannot be read; it is damaged or no file of torch.save: {problem}")
    what = named[1] if named else f"a kind that is refused ({other[0] if other else ''})"
    return RefusedPickle(
        f"{path} holds an object of {what}, which is not on the list of harmless classes; reading it could run code, "
        "so it was not read. Save the checkpoint without it, as plain tensors, numbers and texts"
    )


def _first_line(failure: BaseException) -> str:
    return (str(failure).splitlines() or [""])[0]


def _tidy(value: Any) -> Any:
    """The same with arrays in the place of their stand-ins."""
    if isinstance(value, _Array):
        return value.value
    if isinstance(value, dict):
        for key in value:
            value[key] = _tidy(value[key])
    elif isinstance(value, list):
        value[:] = [_tidy(item) for item in value]
    elif type(value) is tuple:
        return tuple(_tidy(item) for item in value)
    elif isinstance(value, Inert):
        value.fields = _tidy(value.fields)
        value.args = _tidy(value.args)
    return value
