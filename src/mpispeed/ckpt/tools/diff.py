"""`ckpt diff`: comparison of two checkpoints, tensor by tensor, in bounded memory. No torch."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpispeed.ckpt import digest
from mpispeed.ckpt.format import experts, numbers, objects, schema
from mpispeed.ckpt.format.index import TensorEntry
from mpispeed.ckpt.format.logical import ALL_EXPERTS
from mpispeed.ckpt.read.reader import Reader

#: elements that are compared together
_STEP = 128 << 10
#: counters of the engine that depend on the number of ranks
_OF_RANKS = ("micro_steps",)
#: differences of the state that are listed; more are counted
MOST_STATE = 1000


@dataclass(slots=True)
class Tally:
    """Differences between the elements of two tensors.

    Attributes:
        numel: elements compared.
        equal: elements equal by value or within the tolerances; NaN equals NaN.
        max_abs: largest absolute difference.
        max_rel: largest difference as a share of the larger of the two magnitudes.
        max_ulp: largest number of steps between neighbouring numbers of the dtype; None where dtypes differ or are
            not floating.
        nan: elements that are a number on one side only; the three above leave them out.
    """

    numel: int = 0
    equal: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulp: int | None = None
    nan: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor that both checkpoints have.

    Attributes:
        change: "equal", "values", "shape" or, where bits are compared, "dtype"; tensors of different shapes are not
            compared.
        experts: numbers of the experts whose elements differ, of a tensor of one or all.
    """

    name: str
    slot: str
    change: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    tally: Tally | None = None
    experts: tuple[int, ...] = ()

    def as_row(self) -> dict[str, Any]:
        """The row as JSON values."""
        row: dict[str, Any] = {"name": self.name, "slot": self.slot, "change": self.change}
        row |= {"shapes": [list(shape) for shape in self.shapes], "dtypes": list(self.dtypes)}
        if self.tally:
            own = self.tally
            row |= {"numel": own.numel, "equal": own.equal, "max_abs": _finite(own.max_abs)}
            row |= {"max_rel": _finite(own.max_rel), "max_ulp": own.max_ulp, "nan": own.nan}
        return row | ({"experts": list(self.experts)} if self.experts else {})


@dataclass(slots=True)
class Difference:
    """Differences between two checkpoints.

    Attributes:
        added: tensors and aliases that only the second has; for a tensor "name/slot".
        removed: those that only the first has.
        rows: tensors that both have.
        state: (path, value in the first, value in the second), if the state was compared.
        state_count: their number; at most MOST_STATE are listed.
        experts: (layer, experts of the layer, numbers of those that differ or are in one of the two).
    """

    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    state: list[tuple[str, str, str]] = field(default_factory=list)
    state_count: int = 0
    experts: list[tuple[str, int, list[int]]] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """True if nothing differs by more than the tolerances."""
        is_same = all(row.change == "equal" for row in self.rows)
        return is_same and not (self.added or self.removed or self.state_count)

    def as_row(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "equal": self.is_equal,
            "added": self.added,
            "removed": self.removed,
            "tensors": [row.as_row() for row in self.rows],
            "state": [dict(zip(("path", "first", "second"), entry, strict=True)) for entry in self.state],
            "state_count": self.state_count,
            "experts": [dict(zip(("layer", "experts", "differ"), entry, strict=True)) for entry in self.experts],
        }


def diff(
    first: Reader,
    second: Reader,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    slots: Collection[str] = (),
    wants_state: bool = False,
    by_bits: bool = False,
) -> Difference:
    """Compare two checkpoints.

    Elements are compared by value, whatever their dtypes; they are equal when they differ by at most
    `atol + rtol * |second|`.

    By bits they are equal if dtypes and bytes are, so that 0.0 and -0.0 differ. Of the state that is compared which
    belongs to the run and decides how it goes on: counters of the engine, loss scale, schedule, and what the optimizer
    has; not identity, time, writers, random states of ranks, nor counts of a rank's own micro-batches.

    Args:
        first: one checkpoint.
        second: the other.
        rtol: relative tolerance.
        atol: absolute tolerance.
        slots: compare these only; empty for all. Aliases are compared with all.
        wants_state: compare the state, the configuration, the generators and the attributes of parameters too.
        by_bits: compare dtypes and bytes, and the state of the engine and the optimizer.

    Raises:
        ValueError: tolerances for bits.
        CorruptCheckpoint: the bytes of one are not those that were saved.
    """
    if by_bits and (rtol or atol):
        msg = f"bits are compared without tolerances; rtol is {rtol} and atol {atol}"
        raise ValueError(msg)
    made = Difference()
    mine, theirs = (
        {key: tensor for key, tensor in reader.index.tensors.items() if not slots or key[1] in slots}
        for reader in (first, second)
    )
    made.added = [f"{name}/{slot}" for name, slot in sorted(theirs.keys() - mine.keys())]
    made.removed = [f"{name}/{slot}" for name, slot in sorted(mine.keys() - theirs.keys())]
    if not slots:
        ours, others = (set(reader.aliases().items()) for reader in (first, second))
        made.added += [f"alias {alias} of {name}" for alias, name in sorted(others - ours)]
        made.removed += [f"alias {alias} of {name}" for alias, name in sorted(ours - others)]
    for tensor in digest.in_order(mine.values()):
        other = theirs.get((tensor.name, tensor.slot))
        if other is not None:
            add = _add_bits if by_bits else functools.partial(_add, rtol=rtol, atol=atol)
            made.rows.append(_row(first, tensor, second, other, add, by_bits=by_bits))
    made.experts = _expert_layers(first, second, mine.keys() ^ theirs.keys(), made.rows)
    if wants_state or by_bits:
        for entry in _state_differences(first, second) if wants_state else _run_differences(first, second):
            made.state_count += 1
            if len(made.state) < MOST_STATE:
                made.state.append(entry)
    return made


def _expert_layers(
    first: Reader, second: Reader, alone: Collection[tuple[str, str]], rows: Sequence[Row]
) -> list[tuple[str, int, list[int]]]:
    """Experts that differ, by layer; of tensors that only one of the two has, too."""
    apart: dict[str, set[int]] = {}
    for row in rows:
        apart.setdefault(row.name, set()).update(row.experts)
    found: dict[str, tuple[int, set[int]]] = {}
    for reader in (first, second):
        lonely = {name for name, slot in alone if (name, slot) in reader.index.tensors}
        for layer in experts.layers(reader.index.params.values()).values():
            numbers_of = found.setdefault(layer.name, (layer.total, set()))[1]
            for info in layer.params:
                numbers_of |= apart.get(info.name, set())
                if info.name in lonely and info.expert is not None:
                    numbers_of |= set(_numbers(info.expert))
    return [(name, total, sorted(own)) for name, (total, own) in found.items() if own]


def _numbers(expert: tuple[int, int]) -> range:
    if expert[0] != ALL_EXPERTS:
        return range(expert[0], expert[0] + 1)
    return range(expert[1] if expert[1] <= experts.MOST_SPLIT else 0)


def _row(
    first: Reader, mine: TensorEntry, second: Reader, theirs: TensorEntry, add: Callable[..., None], *, by_bits: bool
) -> Row:
    shapes, dtypes = (mine.shape, theirs.shape), (mine.dtype, theirs.dtype)
    expert = first.info(mine.name).expert if mine.slot != schema.BUFFER_SLOT else None
    held = _numbers(expert) if expert is not None else range(0)
    if mine.shape != theirs.shape:
        return Row(mine.name, mine.slot, "shape", shapes, dtypes, experts=tuple(held))
    tally = Tally(max_ulp=0 if mine.dtype == theirs.dtype and _has_steps(mine.dtype) else None)
    # The parts of experts in a tensor of all are compared one after the other.
    parts = range(len(held) if held and mine.shape[:1] == (len(held),) else 1)
    each, apart = mine.numel // len(parts), list[int]()
    for part in parts:
        before = tally.numel - tally.equal
        for ours, others in _pairs(first, mine, second, theirs, (part * each, (part + 1) * each)):
            tally.numel += len(ours)
            if mine.dtype == theirs.dtype and ours.tobytes() == others.tobytes():
                tally.equal += len(ours)
            else:
                add(tally, ours, others, dtypes)
        if tally.numel - tally.equal > before:  # of a slot of another shape it is not known which
            apart += held[part : part + 1] if len(parts) == len(held) else held
    change = "equal" if tally.equal == tally.numel else "values"
    if by_bits and mine.dtype != theirs.dtype:
        change = "dtype"
    return Row(mine.name, mine.slot, change, shapes, dtypes, tally, tuple(apart))


def _pairs(
    first: Reader, mine: TensorEntry, second: Reader, theirs: TensorEntry, span: tuple[int, int]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The same elements of both, as stored, a part at a time; each is valid until the next is requested."""
    step = schema.BLOCK_BYTES // max(mine.itemsize, theirs.itemsize)
    buffers = [np.empty(min(step, span[1] - span[0]), schema.STORAGE[tensor.dtype]) for tensor in (mine, theirs)]
    for start in range(*span, step):
        parts = [buffer[: span[1] - start] for buffer in buffers]
        for reader, tensor, part in zip((first, second), (mine, theirs), parts, strict=True):
            reader.read_bytes(tensor, start * tensor.itemsize, part.data.cast("B"))
        for at in range(0, len(parts[0]), _STEP):
            yield parts[0][at : at + _STEP], parts[1][at : at + _STEP]


def _add_bits(tally: Tally, ours: np.ndarray, others: np.ndarray, dtypes: tuple[str, str]) -> None:
    """As `_add`, of which elements with the same bytes are equal."""
    before = tally.equal
    _add(tally, ours, others, dtypes, 0.0, 0.0)
    if dtypes[0] == dtypes[1]:
        raw = [part.view(np.uint8).reshape(len(part), -1) for part in (ours, others)]
        tally.equal = before + int(np.count_nonzero((raw[0] == raw[1]).all(1)))


def _add(tally: Tally, ours: np.ndarray, others: np.ndarray, dtypes: tuple[str, str], rtol: float, atol: float) -> None:
    a, b = numbers.as_numbers(ours, dtypes[0]), numbers.as_numbers(others, dtypes[1])
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        nan_a, nan_b = _is_nan(a), _is_nan(b)
        same = (a == b) | (nan_a & nan_b)
        one_nan = nan_a != nan_b
        tally.nan += int(np.count_nonzero(one_nan))
        odd = ~(same | one_nan)
        tally.equal += int(np.count_nonzero(same))
        if not odd.any():
            return
        wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
        x, y = a[odd].astype(wide), b[odd].astype(wide)
        gap = np.abs(x - y)  # 0 for integers above 2^53 that are neighbours: they are not equal all the same
        tally.equal += int(np.count_nonzero(np.isfinite(gap) & (gap <= atol + rtol * np.abs(y)))) if rtol or atol else 0
        larger = np.maximum(np.abs(x), np.abs(y))
        share = np.where(np.isinf(gap), np.inf, gap / larger)
        tally.max_abs = max(tally.max_abs, float(gap.max()))
        tally.max_rel = max(tally.max_rel, float(np.nan_to_num(share, nan=0.0, posinf=np.inf).max()))
    if tally.max_ulp is not None:
        tally.max_ulp = max(tally.max_ulp, _steps(ours[odd], others[odd]))


def _is_nan(values: np.ndarray) -> np.ndarray:
    return np.isnan(values) if values.dtype.kind in "fc" else np.zeros(len(values), bool)


def _has_steps(dtype: str) -> bool:
    # e8m0 has powers of two only, and no sign
    return numbers.is_float(dtype) and dtype != "float8_e8m0fnu"


def _steps(ours: np.ndarray, others: np.ndarray) -> int:
    """Largest number of representable numbers between two elements; none is a NaN. The zeros are one number."""
    bits = ours.dtype.itemsize * 8
    mask = np.uint64((1 << (bits - 1)) - 1)
    raw = [part.view(f"u{bits // 8}").astype(np.uint64) for part in (ours, others)]
    sizes, signs = [part & mask for part in raw], [part > mask for part in raw]
    apart = np.maximum(*sizes) - np.minimum(*sizes)
    return int(np.where(signs[0] == signs[1], apart, sizes[0] + sizes[1]).max())


def _run_differences(first: Reader, second: Reader) -> Iterator[tuple[str, str, str]]:
    """What belongs to the run and not to its ranks."""
    mine, theirs = (objects.opened(reader.state(_described)) for reader in (first, second))
    for part in ("engine", "lr_scheduler", "optimizer"):
        ours, others = (objects.opened(state.get(part, {})) for state in (mine, theirs))
        if part == "engine":
            ours, others = (
                {key: value for key, value in each.items() if key != "micro_steps"} for each in (ours, others)
            )
        yield from _compared(f"state.{part}", ours, others)
    for name in first.names():
        if name in second.index.params:
            infos = [dataclasses.asdict(reader.info(name)) for reader in (first, second)]
            yield from _compared(f"params.{name}", *infos)


def _state_differences(first: Reader, second: Reader) -> Iterator[tuple[str, str, str]]:
    yield from _compared("state", first.state(_described), second.state(_described))
    yield from _compared("config", _parsed(first.config()), _parsed(second.config()))
    kinds = sorted({*first.rng_kinds(), *second.rng_kinds()})
    yield from _compared("rng", *({kind: reader.rng(kind) for kind in kinds} for reader in (first, second)))
    for name in first.names():
        if name in second.index.params:
            infos = [dataclasses.asdict(reader.info(name)) for reader in (first, second)]
            yield from _compared(f"params.{name}", *infos)


def _described(array: np.ndarray, dtype: str) -> dict[str, Any]:
    return {"dtype": dtype, "elements": array}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _compared(path: str, mine: Any, theirs: Any) -> Iterator[tuple[str, str, str]]:
    """Leaves in which two trees differ; a leaf missing on one side is "(none)"."""
    mine, theirs = objects.opened(mine), objects.opened(theirs)
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in [*mine, *(key for key in theirs if key not in mine)]:
            where = f"{path}.{key}"
            if key not in mine or key not in theirs:
                yield where, _short(mine.get(key, _NONE)), _short(theirs.get(key, _NONE))
            else:
                yield from _compared(where, mine[key], theirs[key])
    elif isinstance(mine, (list, tuple)) and type(mine) is type(theirs) and len(mine) == len(theirs):
        for number, (own, other) in enumerate(zip(mine, theirs, strict=True)):
            yield from _compared(f"{path}[{number}]", own, other)
    elif not _is_same(mine, theirs):
        yield path, _short(mine), _short(theirs)


_NONE = object()


def _is_same(mine: Any, theirs: Any) -> bool:
    if type(mine) is not type(theirs):
        return False
    if isinstance(mine, (np.ndarray, np.generic)):
        is_alike = mine.dtype == theirs.dtype and mine.shape == theirs.shape
        return bool(is_alike and mine.tobytes() == theirs.tobytes())
    if isinstance(mine, float) and math.isnan(mine):
        return math.isnan(theirs)
    return bool(mine == theirs)


def _short(value: Any) -> str:
    if value is _NONE:
        return "(none)"
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {list(value.shape)}"
    if isinstance(value, dict) and value.keys() == {"dtype", "elements"}:
        return f"tensor {value['dtype']} {list(value['elements'].shape)}"
    text = f"{len(value)} bytes {value[:8].hex()}" if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
