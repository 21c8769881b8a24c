"""`ckpt stats`: counts, moments and histograms of a checkpoint's tensors, a few MiB at a time.

Histograms take a second reading of a tensor: the first finds its least and greatest number, the second counts between
exactly these, as `numpy.histogram` does. Bins decided before the range is known would be fixed powers, too coarse for
weights of one size. A tensor of at most 4 MiB stays in memory and is read once; larger ones come from the page cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpispeed.base.errors import CheckpointError
from mpispeed.base.registry import did_you_mean
from mpispeed.ckpt.format import numbers, schema
from mpispeed.ckpt.format.experts import MOST_SPLIT
from mpispeed.ckpt.format.experts import layers as of_layers
from mpispeed.ckpt.format.index import Index, TensorEntry
from mpispeed.ckpt.format.logical import ALL_EXPERTS
from mpispeed.ckpt.read.reader import Reader
from mpispeed.ckpt.tools import show
from mpispeed.ckpt.tools.tally import Number, Tally, finite_of

#: slots that hold the parameter itself, the first that is stored counts
WEIGHT_SLOTS = (schema.MASTER_SLOT, "weight16")
#: what stands for every slot and the buffers
ALL_SLOTS = "all"
DEFAULT_BINS = 30
#: used where a parameter group has none, as optimizers do
_DEFAULT_EPS = 1e-8
#: a longer number in a name is no layer
_LAYER_DIGITS = 9
#: divides the elements of 4 MiB of every dtype, so that tensors of one shape come in pieces of one length
_PIECE_ELEMENTS = 1 << 17


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of finite numbers in bins of one width.

    Attributes:
        low, high: the outer edges: the least and the greatest number. Where both are the same there is one bin.
        counts: numbers per bin; the last bin includes its upper edge.
    """

    low: Number
    high: Number
    counts: list[int]


def layer_of(name: str) -> str:
    """The layer a parameter belongs to: its name up to the first number, without one its module (`blocks.3`, `embed`).

    A name that is only one word is its own layer.
    """
    parts = name.split(".")
    for place, part in enumerate(parts):
        if _is_number(part):
            return ".".join(parts[: place + 1])
    return ".".join(parts[:-1]) or name


def natural(text: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 10 after layer 9."""
    return [(int(part), "") if _is_number(part) else (-1, part) for part in text.split(".")]


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdecimal() and len(part) <= _LAYER_DIGITS


def fitting(index: Index, pattern: str) -> set[str]:
    """Names of parameters and buffers that fit, as `show.rows` says; an alias stands for what it names."""
    return {index.aliases.get(row["name"], row["name"]) for row in show.rows(index, pattern)}


def weight_of(reader: Reader, name: str) -> TensorEntry | None:
    """The tensor that holds a parameter itself; None when it is not stored."""
    have = reader.slots(name)
    return next((reader.stored(name, slot) for slot in WEIGHT_SLOTS if slot in have), None)


def select(
    reader: Reader, pattern: str = "", slots: Sequence[str] = (), *, may_be_empty: bool = False
) -> list[TensorEntry]:
    """The tensors to look at, by name with layer 10 after layer 9, the slots of a parameter side by side.

    Args:
        reader: an open checkpoint.
        pattern: as for `show.rows`.
        slots: names of slots, "buffer" or "all"; empty for the parameters themselves.
        may_be_empty: it is no error if nothing fits.

    Raises:
        CheckpointError: nothing fits, or a slot is not stored at all.
    """
    stored = {tensor.slot for tensor in reader.tensors()}
    for slot in slots:
        if slot not in stored and slot != ALL_SLOTS:
            have = ", ".join(sorted(stored)) or "none"
            msg = f"{reader.path} has no slot {slot!r}; it has {have}.{did_you_mean(slot, stored)}"
            raise CheckpointError(msg)
    names = fitting(reader.index, pattern)
    found = [tensor for tensor in reader.tensors() if tensor.name in names]
    if ALL_SLOTS not in slots:
        found = [tensor for tensor in found if _is_wanted(reader, tensor, slots)]
    if not found and not may_be_empty:
        of = f"in the slots {', '.join(slots)}" if slots else "that is a parameter"
        msg = f"nothing in {reader.path} {of} fits {pattern!r}; see `mpispeed ckpt show` for the names"
        raise CheckpointError(msg)
    return sorted(found, key=lambda tensor: (natural(tensor.name), schema.slot_order(tensor.slot)))


def _is_wanted(reader: Reader, tensor: TensorEntry, slots: Sequence[str]) -> bool:
    return tensor.slot in slots if slots else tensor == weight_of(reader, tensor.name)


def statistics(
    reader: Reader,
    pattern: str = "",
    slots: Sequence[str] = (),
    bins: int = DEFAULT_BINS,
    *,
    may_be_empty: bool = False,
) -> dict[str, list[dict[str, Any]]]:
    """Statistics of every tensor that `select` gives, and of the layers they belong to.

    Args:
        reader: an open checkpoint.
        pattern: which names, as for `select`.
        slots: which slots, as for `select`.
        bins: of each histogram.
        may_be_empty: as for `select`.

    Returns:
        "params": rows with the keys name, slot, layer, shape, dtype, count, min, max, mean, std, rms, zeros, nan, inf,
        histogram (low, high, counts, or None) and update_ratio (see there; None beside other slots than the weight).
        "layers": rows with the keys layer, slot, tensors and, over all of them, the same from count to inf.
        "experts": rows with the keys layer, expert, experts (of the layer), slot, tensors and the same, over the
        parameters of one expert.
        Of complex numbers the magnitudes are taken. NaN and infinite elements are counted and left out of the rest.

    Raises:
        CheckpointError: nothing fits.
        CorruptCheckpoint: the bytes are not those that were saved.
    """
    rates = _rates(reader)
    rows: list[dict[str, Any]] = []
    layers: dict[tuple[str, str], list[Tally]] = {}
    experts = _Experts(reader)
    for tensor in select(reader, pattern, slots, may_be_empty=may_be_empty):
        tally, histogram = describe(reader, tensor, bins)
        layer = layer_of(tensor.name)
        row: dict[str, Any] = {"name": tensor.name, "slot": tensor.slot, "layer": layer}
        row |= {"shape": list(tensor.shape), "dtype": tensor.dtype} | _columns(tally)
        row["histogram"] = histogram and {"low": histogram.low, "high": histogram.high, "counts": histogram.counts}
        row["update_ratio"] = update_ratio(reader, tensor, rates) if tensor.slot in WEIGHT_SLOTS else None
        rows.append(row)
        layers.setdefault((layer, tensor.slot), []).append(tally)
        experts.add(tensor, tally)
    summary = [_layer_row(key[0], key[1], layers[key]) for key in sorted(layers, key=_layer_order)]
    return {"params": rows, "layers": summary, "experts": experts.rows()}


class _Experts:
    """Tallies of the experts of each layer."""

    def __init__(self, reader: Reader) -> None:
        self._reader, self._tallies = reader, dict[tuple[str, int, str], list[Tally]]()
        layers = of_layers(reader.index.params.values()).values()
        self._layers = {info.name: layer for layer in layers for info in layer.params}

    def add(self, tensor: TensorEntry, tally: Tally) -> None:
        """Count a tensor, if it is of an expert, or of all: then it is read again."""
        layer = self._layers.get(tensor.name)
        expert = self._reader.info(tensor.name).expert if layer is not None else None
        if layer is None or expert is None:
            return
        parts = {expert[0]: tally} if expert[0] != ALL_EXPERTS else self._split(tensor, expert[1])
        for number, part in parts.items():
            self._tallies.setdefault((layer.name, number, tensor.slot), []).append(part)

    def _split(self, tensor: TensorEntry, total: int) -> dict[int, Tally]:
        """Number -> tally of its part of a tensor; nothing where the first dim is not that of experts, or too long."""
        if tensor.shape[:1] != (total,) or not tensor.numel or total > MOST_SPLIT:
            return {}
        each, made, at = tensor.numel // total, dict[int, Tally](), 0
        for piece in pieces(self._reader, tensor, verify=False):
            start = 0
            while start < len(piece):
                number, into = divmod(at, each)
                part = piece[start : start + each - into]
                made.setdefault(number, Tally()).add(part)
                start, at = start + len(part), at + len(part)
        return made

    def rows(self) -> list[dict[str, Any]]:
        """Rows of `statistics`, by layer, slot and number."""
        order = sorted(self._tallies, key=lambda key: (natural(key[0]), schema.slot_order(key[2]), key[1]))
        totals = {layer.name: layer.total for layer in self._layers.values()}
        return [
            {"layer": layer, "expert": number, "experts": totals[layer]}
            | _layer_row(layer, slot, self._tallies[layer, number, slot])
            for layer, number, slot in order
        ]


def describe(reader: Reader, tensor: TensorEntry, bins: int) -> tuple[Tally, Histogram | None]:
    """Moments and histogram of one tensor; None for the latter when no element is finite.

    Raises:
        CorruptCheckpoint: the bytes are not those that were saved.
    """
    again: Callable[[], Iterable[np.ndarray]]
    if tensor.size_bytes <= schema.BLOCK_BYTES:
        kept = list(pieces(reader, tensor))
        again = kept.copy
    else:
        kept = []

        def again() -> Iterable[np.ndarray]:
            return pieces(reader, tensor, verify=False)

    tally = Tally()
    for piece in kept or pieces(reader, tensor):
        tally.add(piece)
    if tally.low is None or tally.high is None:
        return tally, None
    if tally.low == tally.high:
        return tally, Histogram(tally.low, tally.high, [tally.finite])
    counts = np.zeros(bins, np.int64)
    for piece in again():
        counts += _bin_counts(finite_of(piece), float(tally.low), float(tally.high), bins)
    return tally, Histogram(tally.low, tally.high, counts.tolist())


def pieces(reader: Reader, tensor: TensorEntry, verify: bool = True) -> Iterator[np.ndarray]:
    """The elements of a tensor in order as real numbers numpy computes with; of complex ones the magnitudes.

    Tensors of equally many elements come in pieces of equal lengths, whatever their dtypes. A piece may be of use
    only until the next is asked for, unless the tensor has at most 4 MiB.

    Raises:
        CorruptCheckpoint: the bytes are not those that were saved.
    """
    for chunk in reader.chunks(tensor, verify):
        for start in range(0, len(chunk), _PIECE_ELEMENTS):
            values = numbers.as_numbers(chunk[start : start + _PIECE_ELEMENTS], tensor.dtype)
            yield np.abs(values) if values.dtype.kind == "c" else values


def update_ratio(reader: Reader, weight: TensorEntry, rates: Mapping[int, tuple[float, float]]) -> float | None:
    """Estimate of one update beside the weight: lr * rms(exp_avg / (sqrt(exp_avg_sq) + eps)) / rms(weight).

    lr and eps are those of the parameter's group in the stored state (optimizer.param_groups). An estimate, because
    the correction of the bias of the first steps, weight decay, clipping and what else an optimizer does between these
    slots and the weight are left out. Elements where any of the three is not finite, or exp_avg_sq is negative, are
    left out.

    Args:
        reader: an open checkpoint.
        weight: the tensor of the parameter itself.
        rates: index of the parameter group -> lr and eps.

    Returns:
        None where one of the two slots or lr is missing, shapes differ, the weight is all zero or the estimate is not
        finite.

    Raises:
        CorruptCheckpoint: the bytes are not those that were saved.
    """
    have = reader.slots(weight.name)
    rate = rates.get(reader.info(weight.name).param_group)
    if rate is None or not {"exp_avg", "exp_avg_sq"} <= set(have):
        return None
    moments = [reader.stored(weight.name, slot) for slot in ("exp_avg", "exp_avg_sq")]
    if any(moment.shape != weight.shape for moment in moments):
        return None
    squares = np.zeros(2)
    lr, eps = rate
    for parts in zip(*(pieces(reader, tensor) for tensor in (weight, *moments)), strict=True):
        value, mean, square = (part.astype(np.float64) for part in parts)
        is_used = np.isfinite(value) & np.isfinite(mean) & np.isfinite(square) & (square >= 0)
        value, mean, square = value[is_used], mean[is_used], square[is_used]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            step = mean / (np.sqrt(square) + eps)
            squares += float(np.dot(step, step)), float(np.dot(value, value))
    ratio = lr * float(np.sqrt(squares[0] / squares[1])) if squares[1] > 0 else float("nan")
    return ratio if np.isfinite(ratio) else None


def _rates(reader: Reader) -> dict[int, tuple[float, float]]:
    """Index of a parameter group -> its lr and eps; without groups that tell no lr."""
    optimizer = reader.state(lambda array, dtype: numbers.as_numbers(array, dtype)).get("optimizer")
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    rates = {}
    for place, group in enumerate(groups if isinstance(groups, (list, tuple)) else ()):
        lr = _number(group.get("lr")) if isinstance(group, dict) else None
        eps = _number(group.get("eps")) if isinstance(group, dict) else None
        if lr is not None:
            rates[place] = (lr, _DEFAULT_EPS if eps is None else eps)
    return rates


def _number(value: Any) -> float | None:
    is_one = isinstance(value, (int, float)) or (isinstance(value, (np.ndarray, np.generic)) and value.size == 1)
    is_one = is_one and not np.iscomplexobj(value)
    return float(np.asarray(value).reshape(())) if is_one else None


def _bin_counts(values: np.ndarray, low: float, high: float, bins: int) -> np.ndarray:
    """Finite values between low and high, counted in `bins` bins of one width."""
    wide = values.astype(np.float64)
    if not np.isfinite(high - low):
        wide, low, high = wide / 4, low / 4, high / 4
    wide -= low
    wide /= high - low
    wide *= bins
    places = wide.astype(np.int64)
    np.clip(places, 0, bins - 1, out=places)
    return np.bincount(places, minlength=bins)


def _layer_row(layer: str, slot: str, tallies: Sequence[Tally]) -> dict[str, Any]:
    whole = Tally()
    for tally in tallies:
        whole.merge(tally)
    return {"layer": layer, "slot": slot, "tensors": len(tallies)} | _columns(whole)


def _layer_order(key: tuple[str, str]) -> tuple[list[tuple[int, str]], tuple[bool, str]]:
    return natural(key[0]), schema.slot_order(key[1])


def _columns(tally: Tally) -> dict[str, Any]:
    moments = {"min": tally.low, "max": tally.high, "mean": tally.mean, "std": tally.std, "rms": tally.rms}
    return {"count": tally.count} | moments | {"zeros": tally.zeros, "nan": tally.nan, "inf": tally.inf}
