"""Launches of the passes between the products of a transformer layer, for rows of whole, aligned 16 bytes.

Each function looks up, or prepares, what a pass needs beside addresses; `Pass.run` launches it. Nothing here is seen by
autograd.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mpispeed.native.columns import tile, vector
from mpispeed.native.cuda import philox
from mpispeed.native.cuda.catalog import TAGS
from mpispeed.native.cuda.launcher import Launcher, Prepared, keep
from mpispeed.native.norm_kernels import forward_shape, prepare_add_up

_SEED_AT = 24  # bytes before the seed, in each structure that has one


class Rows(NamedTuple):
    """Kernels' view of a tensor: `rows` rows of `cols` elements of one dtype, on the device of a launcher."""

    runs: Launcher
    rows: int
    cols: int
    dtype: torch.dtype

    @property
    def tag(self) -> str:
        """How kernels for it are called."""
        return TAGS[self.dtype]

    def grid(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Grid and block of a pass that walks down columns by 16 bytes."""
        return tile(self.runs, self.rows, self.cols, vector(self.dtype))


@dataclass(frozen=True, slots=True)
class ColumnPass:
    """A backward pass with the sums of its columns.

    Attributes:
        launch: takes dx, partial sums, and its inputs.
        add_up: adds the partial sums.
        parts: floats of the partial sums.
    """

    launch: Prepared
    add_up: Prepared
    parts: int

    def run(self, dx: Tensor | None, dbias: Tensor, *inputs: Tensor, seed: int | None = None) -> None:
        """Launch both. Without `dx` only the sums are made; a seed is that of a dropout."""
        partial = torch.empty(self.parts, dtype=torch.float32, device=dbias.device)
        if seed is None:
            self.launch(dx, partial, *inputs)
        else:
            self.launch.seeded(seed, dx, partial, *inputs)
        self.add_up(dbias, None, partial)


def gelu_pass(rows: Rows, form: str = "tanh") -> Prepared:
    """GELU of x + bias: to be called with y, x, bias."""
    key = ("gelu", form, rows.rows, rows.cols, rows.dtype)
    found: Prepared | None = rows.runs.kept.get(key)
    if found is None:
        terms = struct.pack("QQii", rows.rows, rows.cols, 1, 0)
        found = keep(rows.runs, key, rows.runs.prepare(f"gelu_{form}_{rows.tag}", *rows.grid(), terms))
    return found


def gelu_backward_pass(rows: Rows, form: str = "tanh") -> ColumnPass:
    """Its gradient: inputs are dy, x, bias."""
    key = ("gelu back", form, rows.rows, rows.cols, rows.dtype)
    found: ColumnPass | None = rows.runs.kept.get(key)
    if found is None:
        terms = struct.pack("QQii", rows.rows, rows.cols, 1, 0)
        found = keep(rows.runs, key, _column_pass(rows, f"gelu_{form}_grad_{rows.tag}", terms, -1))
    return found


def drop_pass(rows: Rows, ratio: float, is_place: bool) -> Prepared:
    """Sum of residual and dropout(x + bias): to be called `seeded`, with y, x, bias, residual."""
    key = ("drop", rows.rows, rows.cols, rows.dtype, ratio, is_place)
    found: Prepared | None = rows.runs.kept.get(key)
    if found is None:
        name, terms = f"bias_dropout_residual_{rows.tag}", _drop_terms(rows, ratio, is_place)
        found = keep(rows.runs, key, rows.runs.prepare(name, *rows.grid(), terms, 0, _SEED_AT))
    return found


def drop_backward_pass(rows: Rows, ratio: float, is_place: bool) -> ColumnPass:
    """Its gradient: the input is dy."""
    key = ("drop back", rows.rows, rows.cols, rows.dtype, ratio, is_place)
    found: ColumnPass | None = rows.runs.kept.get(key)
    if found is None:
        name = f"bias_dropout_residual_grad_{rows.tag}"
        found = keep(rows.runs, key, _column_pass(rows, name, _drop_terms(rows, ratio, is_place), _SEED_AT))
    return found


def drop_norm_pass(rows: Rows, ratio: float, eps: float, is_place: bool, *, is_whole: bool = True) -> Prepared:
    """The sum of a residual and dropout(x + bias) with its layer norm; rows need not be of whole 16 bytes.

    To be called `seeded`, with y, sum, mean, rstd, x, bias of x, residual, weight, bias.
    """
    key = ("drop norm", rows.rows, rows.cols, rows.dtype, ratio, eps, is_place, is_whole)
    found: Prepared | None = rows.runs.kept.get(key)
    if found is None:
        way, grid, block, terms = forward_shape(rows.dtype, rows.rows, rows.cols, eps, is_whole)
        terms += struct.pack("QIfI4x", 0, philox.threshold(ratio), 1 / (1 - ratio), is_place)
        name = f"drop_layer_norm_{way}_{rows.tag}"
        found = keep(rows.runs, key, rows.runs.prepare(name, grid, block, terms, 0, _SEED_AT))
    return found


def _drop_terms(rows: Rows, ratio: float, is_place: bool) -> bytes:
    return drop_terms(rows.rows, rows.cols, 0, 0, ratio, is_place, True)


def drop_terms(rows: int, cols: int, first: int, seed: int, ratio: float, is_place: bool, is_wide: bool) -> bytes:
    """The structure DropTerms for a launch from element `first` on."""
    numbers = (rows, cols, first, seed, philox.threshold(ratio), 1 / (1 - ratio))
    return struct.pack("QQQQIfI4xii", *numbers, is_place, is_wide, 0)


def _column_pass(rows: Rows, kernel: str, terms: bytes, seed_at: int) -> ColumnPass:
    grid, block = rows.grid()
    shared = block[0] * block[1] * vector(rows.dtype) * 4
    launch = rows.runs.prepare(kernel, grid, block, terms, shared, seed_at)
    add_up = prepare_add_up(rows.runs, rows.dtype, grid[1], rows.cols, 1)
    return ColumnPass(launch, add_up, grid[1] * rows.cols)
