"""Values for names and storages in a pickle of `torch.save`: plain values, inert records, dense tensors."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpispeed.ckpt.foreign import pickles
from mpispeed.ckpt.foreign.faults import RefusedPickle
from mpispeed.ckpt.foreign.mapping import is_aligned, typed
from mpispeed.ckpt.foreign.pickles import Array, Call, Damaged, Inert, Limits, NumpyDtype

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
_STORAGES = {
    "BFloat16": torch.bfloat16, "Bool": torch.bool, "Byte": torch.uint8, "Char": torch.int8,
    "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64, "Double": torch.float64,
    "Float": torch.float32, "Half": torch.float16, "Int": torch.int32, "Long": torch.int64, "Short": torch.int16,
    "QInt8": torch.qint8, "QInt32": torch.qint32, "QUInt8": torch.quint8,
}  # fmt: skip
_OTHER_TENSORS = (
    "torch._utils._rebuild_device_tensor_from_cpu_tensor",
    "torch._utils._rebuild_device_tensor_from_numpy",
    "torch._utils._rebuild_meta_tensor_no_storage",
    "torch._utils._rebuild_nested_tensor",
    "torch._utils._rebuild_qtensor",
    "torch._utils._rebuild_sparse_tensor",
    "torch._utils._rebuild_wrapper_subclass",
)
_NUMPY_CORES = ("numpy.core.multiarray", "numpy._core.multiarray")
#: a file whose tensors stand for more bytes than so many times its own is none that trains
_TIMES, _FREE_BYTES = 8, 1 << 30


class NotDense(Inert):
    """A tensor that is sparse, quantized, nested or of a class of its own."""


@dataclass(slots=True)
class Storage:
    """Bytes that tensors are made of; None while they are only counted.

    Attributes:
        dtype: of the elements; None if the tensors say it.
        numel: elements, or bytes without dtype.
    """

    key: str
    dtype: torch.dtype | None
    numel: int
    content: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.numel * (self.dtype.itemsize if self.dtype else 1)


class Tensors:
    """Values for the names and persistent ids in a pickle.

    Attributes:
        limits: for what reads the pickle too.
    """

    def __init__(
        self,
        part: Callable[[str], torch.Tensor] | None,
        file_bytes: int,
        claims: dict[str, Storage] | None = None,
    ) -> None:
        """Args: `part`: the bytes of a storage by its key; None: tensors stay empty, `claims` gets the storages."""
        self._part, self._file_bytes, self._claims = part, file_bytes, claims
        self._flat: dict[tuple[str, int, int, torch.dtype], torch.Tensor] = {}
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}
        self._noted: dict[tuple[int, bool, bool], tuple[torch.Tensor, torch.Tensor]] = {}
        self._bytes = 0
        self.limits = Limits(file_bytes)
        self._calls = self._callable()

    def find(self, name: str) -> Any:
        """The value for `name`.

        Raises:
            RefusedPickle: it is not known to be harmless.
        """
        if name in self._calls:
            return self._calls[name]
        module, _, last = name.rpartition(".")
        if module == "torch" and isinstance(getattr(torch, last, None), (torch.dtype, torch.qscheme, torch.layout)):
            return getattr(torch, last)
        if module == "torch" and last.endswith("Storage") and last.removesuffix("Storage") in _STORAGES:
            return _STORAGES[last.removesuffix("Storage")]
        msg = (
            f"an object of {name}, which is not on the list of harmless classes; reading it could run code, "
            "so it was not read. Save the checkpoint without it, as plain tensors, numbers and texts"
        )
        raise RefusedPickle(msg)

    def _callable(self) -> dict[str, Any]:
        rows: dict[str, Any] = {name: Call(Inert) for name in _RECORDS}
        rows |= {name: Call(NotDense) for name in _OTHER_TENSORS}
        rows |= {
            "numpy.dtype": Call(NumpyDtype),
            "numpy.ndarray": Call(Array),
            "_codecs.encode": Call(self.limits.encoded),
            "collections.OrderedDict": Call(self._ordered),
            "collections.Counter": Call(lambda rows: dict(self._ordered(rows.items()))),
            "torch.Size": Call(self._size),
            "torch.device": Call(lambda *args: Inert(*args)),
            "torch.serialization._get_layout": Call(_layout),
            "torch.storage.UntypedStorage": None,
            "torch.Tensor": Call(_none),
            "torch.nn.parameter.Parameter": Call(_first),
            "torch._utils._rebuild_parameter": Call(_first),
            "torch._utils._rebuild_parameter_with_state": Call(_first),
            "torch._tensor._rebuild_from_type_v2": Call(self._of_type),
            "torch._utils._rebuild_tensor": Call(self._tensor),
            "torch._utils._rebuild_tensor_v2": Call(self._tensor_2),
            "torch._utils._rebuild_tensor_v3": Call(self._tensor_3),
        }
        for module in ("builtins", "__builtin__"):
            rows[f"{module}.set"] = Call(self._set)
            rows[f"{module}.frozenset"] = Call(lambda items=(): frozenset(self._set(items)))
            rows[f"{module}.bytes"] = Call(lambda: b"")  # as protocol 2 writes those of no length
            rows[f"{module}.complex"] = Call(_complex)
            rows[f"{module}.bytearray"] = Call(
                lambda raw=b"", encoding="latin1": bytearray(self.limits.encoded(raw, encoding))
            )
        for core in _NUMPY_CORES:
            rows[f"{core}.scalar"] = Call(self._scalar)
            rows[f"{core}._reconstruct"] = Call(lambda *_: Array())
        return rows

    def storage(self, claim: Any) -> Storage:
        """The storage of a persistent id.

        Raises:
            Damaged: it is no id of one, or the file has another number of bytes for it.
        """
        if not isinstance(claim, tuple) or len(claim) not in (5, 6) or claim[0] != "storage":
            msg = f"{pickles.shown(claim)} stands for no storage"
            raise Damaged(msg)
        _, dtype, key, _, numel, *view = claim
        is_known = dtype is None or isinstance(dtype, torch.dtype)
        if not is_known or not isinstance(key, str) or type(numel) is not int or not 0 <= numel < 2**60:
            msg = f"{pickles.shown(claim)} stands for no storage"
            raise Damaged(msg)
        whole = Storage(key, dtype, numel, None)
        if self._claims is not None:
            known = self._claims.setdefault(key, whole)
            if known.nbytes != whole.nbytes:
                msg = f"its storage {key!r:.80} has {known.nbytes} bytes, and {whole.nbytes} in another place"
                raise Damaged(msg)
        elif self._part is not None:
            whole.content = self._part(key)
            if whole.content.numel() != whole.nbytes:
                msg = f"its storage {key!r:.80} has {whole.content.numel()} bytes, {whole.nbytes} are needed"
                raise Damaged(msg)
        return _viewed(whole, view[0]) if view and view[0] is not None else whole

    def _set(self, items: Any = ()) -> set[Any]:
        return {self.limits.key(item) for item in self.limits.entries(items)}

    def _ordered(self, rows: Any = ()) -> OrderedDict[Any, Any]:
        return OrderedDict((self.limits.key(key), value) for key, value in self.limits.entries(rows))

    def _size(self, sizes: Any = ()) -> torch.Size:
        return torch.Size(pickles.whole_numbers(self.limits.entries(sizes)))

    def _of_type(self, function: Any, _type: Any, args: Any, _state: Any) -> Any:
        return function.make(*self.limits.entries(args))

    def _scalar(self, dtype: Any, raw: Any) -> Any:
        return np.frombuffer(self.limits.encoded(raw), pickles.numpy_dtype(dtype))[0]

    def _tensor_2(
        self, storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, notes: Any = None
    ) -> torch.Tensor:
        return self._with_notes(self._tensor(storage, offset, size, stride), notes)

    def _tensor_3(
        self, storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, notes: Any = None
    ) -> torch.Tensor:
        return self._with_notes(self._tensor(storage, offset, size, stride, dtype), notes)

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, dtype: Any = None) -> torch.Tensor:
        """A tensor in the bytes of its storage, and in no others."""
        dtype = getattr(storage, "dtype", None) if dtype is None else dtype
        if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
            msg = f"a tensor has a {type(storage).__name__} for a storage and {pickles.shown(dtype)} for a dtype"
            raise Damaged(msg)
        (offset,), size, stride = map(pickles.whole_numbers, ((offset,), size, stride))
        held = storage.nbytes // dtype.itemsize
        last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True)) if all(size) else -1
        if last >= held:
            msg = f"a tensor of shape {size} needs {last + 1} elements of a storage of {held}"
            raise Damaged(msg)
        if storage.content is None or not all(size):
            return torch.empty(size if storage.content is not None else 0, dtype=dtype)
        place = (storage.key, int(storage.content.storage_offset()), storage.nbytes, dtype)
        if place not in self._flat:
            if dtype == torch.bool or not is_aligned(storage.content, dtype):  # is gone through, or copied
                self.limits.copy(storage.nbytes)
            try:
                self._flat[place] = typed(storage.content[: held * dtype.itemsize], dtype)
            except ValueError as failure:
                raise Damaged(str(failure)) from failure
        return self._strided(place, offset, size, stride)

    def _strided(
        self, place: tuple[str, int, int, torch.dtype], offset: int, size: tuple[int, ...], stride: tuple[int, ...]
    ) -> torch.Tensor:
        key = (place, offset, size, stride)
        if key not in self._made:
            self._bytes += math.prod(size) * place[3].itemsize
            if self._bytes > _TIMES * self._file_bytes + _FREE_BYTES:
                msg = f"its tensors repeat the bytes of its storages: they would have {self._bytes} bytes and more"
                raise Damaged(msg)
            flat = self._flat[place]
            self._made[key] = flat.as_strided(size, stride, flat.storage_offset() + offset)
        return self._made[key]

    def _with_notes(self, tensor: torch.Tensor, notes: Any) -> torch.Tensor:
        """A tensor with what it says of itself besides: to be taken conjugated or negative."""
        if not notes:
            return tensor
        if not isinstance(notes, dict) or not notes.keys() <= {"conj", "neg"}:
            msg = f"{pickles.shown(notes)} says nothing of a tensor"
            raise Damaged(msg)
        is_conj, is_neg = bool(notes.get("conj")), bool(notes.get("neg"))
        key = (id(tensor), is_conj, is_neg)
        if key not in self._noted:
            self.limits.copy((is_conj + is_neg) * tensor.numel() * tensor.itemsize)
            made = tensor.conj_physical() if is_conj else tensor
            self._noted[key] = tensor, -made if is_neg else made  # holds the tensor, so that its id stays its own
        return self._noted[key][1]


def _viewed(whole: Storage, view: Any) -> Storage:
    """A part of a storage, as it is named in files of old."""
    if not isinstance(view, tuple) or len(view) != 3 or whole.dtype is None:
        msg = f"{pickles.shown(view)} is no part of a storage"
        raise Damaged(msg)
    first, numel = pickles.whole_numbers(view[1:])
    if first + numel > whole.numel:
        msg = f"elements {first} to {first + numel} of a storage that has {whole.numel}"
        raise Damaged(msg)
    size = whole.dtype.itemsize
    content = None if whole.content is None else whole.content[first * size : (first + numel) * size]
    return Storage(whole.key, whole.dtype, numel, content)


def _first(value: Any, *_: Any) -> Any:
    return value


def _none(*args: Any) -> Any:
    msg = f"a tensor of {pickles.shown(args)}"
    raise Damaged(msg)


def _layout(name: Any) -> str:
    if not isinstance(name, str):
        msg = f"the layout of a tensor is {pickles.shown(name)}"
        raise Damaged(msg)
    return name


def _complex(real: float, imag: float) -> complex:
    if not isinstance(real, float) or not isinstance(imag, float):  # of a text it would be parsed
        msg = f"a complex number of {pickles.shown((real, imag))}"
        raise Damaged(msg)
    return complex(real, imag)
