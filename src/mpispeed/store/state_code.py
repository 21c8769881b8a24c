"""Codes in which model states rest between updates: 16-bit numbers, pairs of them, 8-bit codes with scales. Pure.

Sources. 8 bits with a scale for each block: Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
arXiv 2110.02861. Stochastic rounding and compensated sums of weights in bf16: Zamirai et al., "Revisiting BFloat16
Training", arXiv 2010.06192.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from mpispeed.native import coded_update, state_codes

if TYPE_CHECKING:
    from torch import Tensor

    from mpispeed.native.coded_update import Rest

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.uint8}
"""Type of the elements of a code, by its word."""

UNSIGNED = frozenset({"exp_avg_sq", "sum"})
"""Slots of optimizers whose values are never negative: all 8 bits are for the size."""


SCALED = state_codes.BLOCK
"""Elements under one scale: shards are cut at multiples of it, so that codes do not depend on the cut."""


class Draws(NamedTuple):
    """Place of a range in the numbers that stochastic rounding draws.

    Attributes:
        step: number of the update.
        start: number of the first element, the same whatever the ranks are.
    """

    step: int
    start: int


class Part(NamedTuple):
    """One tensor of a code: its dtype, and the elements of the state for which it has one element."""

    dtype: torch.dtype
    stride: int = 1

    def count(self, numel: int) -> int:
        """Elements for `numel` elements of the state."""
        return -(-numel // self.stride)


@dataclass(frozen=True, slots=True)
class StateCode:
    """The form in which a state rests; an update sees it in fp32.

    Attributes:
        word: "bf16", "fp16" or "int8".
        rounding: of updates: "nearest", "stochastic", or, in 16 bits, "kahan", which keeps what the rounding lost in
            a second 16-bit number.
        is_signed: of 8-bit codes.
        seed: of stochastic rounding.
    """

    word: str
    rounding: str = "nearest"
    is_signed: bool = True
    seed: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements of its first part."""
        return DTYPES[self.word]

    @property
    def parts(self) -> tuple[Part, ...]:
        """Its tensors."""
        if self.word == "int8":
            return Part(torch.uint8), Part(torch.float32, SCALED)
        return (Part(self.dtype),) * (2 if self.rounding == "kahan" else 1)

    @property
    def step(self) -> int:
        """Coded ranges begin at multiples of this."""
        return max(part.stride for part in self.parts)

    def nbytes(self, numel: int) -> int:
        """Bytes of `numel` elements."""
        return sum(part.count(numel) * part.dtype.itemsize for part in self.parts)

    def encode(self, parts: Sequence[Tensor], values: Tensor, draws: Draws | None = None) -> None:
        """Fill the parts of a range that begins at a multiple of `step`.

        What a code holds is kept to the bit: decoding and encoding again gives the same values. Without `draws` values
        are rounded to the nearest.

        Shapes: parts [`Part.count` of n] each; values [n], fp32.
        """
        step, start = draws or (0, 0)
        rest = self.at_rest(parts, draws=draws is not None)
        coded_update.encode(rest, values, step=step, start=start, threads=torch.get_num_threads())

    def decode(self, out: Tensor, parts: Sequence[Tensor]) -> None:
        """Fill `out` with the values of a range. Shapes: as for `encode`."""
        coded_update.decode(out, self.at_rest(parts), threads=torch.get_num_threads())

    def at_rest(self, parts: Sequence[Tensor], *, draws: bool = False) -> Rest:
        """The parts of a range as coded updates take them; with `draws` as an update rounds them."""
        seed = self.seed if draws and self.rounding == "stochastic" else None
        if self.word == "int8":
            return coded_update.Codes(parts[0], parts[1], self.is_signed, seed)
        if self.rounding == "kahan":
            return coded_update.Pairs(parts[0], parts[1])
        return coded_update.Halves(parts[0], seed)


@dataclass(frozen=True, slots=True)
class StateCodes:
    """Codes of the states of a unit.

    Attributes:
        master: of masters; None: they rest as they are updated.
        words: of states of the optimizer, by slot: "fp32", "bf16" or "int8".
        word: of slots that have none in `words`.
        seed: of stochastic rounding.
    """

    master: StateCode | None = None
    words: tuple[tuple[str, str], ...] = ()
    word: str = "fp32"
    seed: int = 0

    @property
    def is_plain(self) -> bool:
        """True if all states rest as they are updated."""
        return self.master is None and all(word == "fp32" for word in (self.word, *dict(self.words).values()))

    def slot(self, name: str) -> StateCode | None:
        """The code of a slot of the optimizer; None: it rests as it is updated.

        16-bit slots and 8-bit ones without a sign are rounded stochastically: a second moment that moves by 1/1000 in
        a step, less than half of the last place of bf16 or of a step between levels, would not move at all. First
        moments move by 1/10, and lose less by the nearest of 127 levels than by draws.
        """
        word, is_signed = dict(self.words).get(name, self.word), name not in UNSIGNED
        if word == "fp32":
            return None
        seed = self.seed ^ zlib.crc32(name.encode())
        return StateCode(word, "nearest" if word == "int8" and is_signed else "stochastic", is_signed, seed)


PLAIN = StateCodes()
"""All states rest as they are updated."""
