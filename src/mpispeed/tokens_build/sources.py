"""Readers by the kind of an input, and the parts of a build: which slices of which inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType

from mpispeed.tokens_build import megatron, tables, texts
from mpispeed.tokens_build.errors import BuildError, Faults
from mpispeed.tokens_build.inputs import ARROW, JSON_LINES, MEGATRON, PARQUET, TEXT, Batch, Input, Reading, Slice

#: modules with `cut` and `read`
_READERS: dict[str, ModuleType] = {
    JSON_LINES: texts, TEXT: texts, PARQUET: tables, ARROW: tables, MEGATRON: megatron,
}  # fmt: skip

MOST_PARTS = 1 << 20

Parts = list[tuple[Slice, ...]]


def cut_parts(inputs: Sequence[Input], reading: Reading, part_bytes: int) -> Parts:
    """All inputs, in order, in parts of about `part_bytes`; they depend on nothing but the inputs.

    Raises:
        BuildError: an input cannot be read, or there are too many parts.
    """
    parts: Parts = []
    held: list[Slice] = []
    weight = 0
    for number, one in enumerate(inputs):
        for piece in _READERS[one.kind].cut(number, one, reading, part_bytes):
            if held and weight + piece.weight > part_bytes:
                parts.append(tuple(held))
                held, weight = [], 0
            weight += piece.weight
            if held and (held[-1].input, held[-1].stop) == (piece.input, piece.begin):
                piece = Slice(number, held[-1].begin, piece.stop, held.pop().weight + piece.weight)
            held.append(piece)
            if len(parts) > MOST_PARTS:
                msg = f"there are more than {MOST_PARTS} parts; take larger ones (--part-size)"
                raise BuildError(msg)
    return [*parts, tuple(held)] if held else parts


def most_vocabulary(inputs: Sequence[Input]) -> int:
    """Tokens of these inputs are smaller, as far as their types tell.

    Raises:
        BuildError: an input cannot be read.
    """
    widest = max((megatron.itemsize(one) if one.kind == MEGATRON else 4) for one in inputs)
    return 1 << 16 if widest <= 2 else 1 << 32


def read(inputs: Sequence[Input], piece: Slice, reading: Reading, faults: Faults) -> Iterator[Batch]:
    """The documents of a slice, in order.

    Raises:
        BuildError: an input cannot be read or has changed, or has a bad record and `faults` ends at the first.
    """
    one = inputs[piece.input]
    found: Iterator[Batch] = _READERS[one.kind].read(one, piece.begin, piece.stop, reading, faults)
    return found
