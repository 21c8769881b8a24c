"""Adam, its 1-bit variants, Adagrad, Lion and LAMB on tensors of a device, many in one launch; asynchronous.

The arithmetic is that of the host loops, operation by operation, so parameters and states are bitwise the same. Only
LAMB's sums of squares differ: fp64, in an order that depends on shapes alone. Its trust ratio is within `elements *
2^-53` of the host's, relatively.

Kernels take fp32 masters and states with gradients in fp32, bf16 or fp16 and a bf16 or fp16 copy; and bf16 or fp16
parameters with states and gradients in fp32 or their own dtype; those of the 1-bit variants take fp32 only. Everything
else is done by `native.reference_updates`, on the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpispeed.base.errors import UsageError
from mpispeed.native.cuda.catalog import TAGS
from mpispeed.native.cuda.launcher import Launcher, for_tensor
from mpispeed.native.flat import REFERENCE_SPAN, Terms
from mpispeed.native.multi_tensor_host import Row, check_row
from mpispeed.native.reference_updates import lamb_first, lamb_second, run_reference

CHUNK, THREADS = 16384, 256  # elements of a block, and its threads; cuda/include/multi_tensor.cuh has the same numbers

SKIPPING = frozenset({"adam", "adagrad", "lion"})
"""Rules that change nothing where the factor on the device is NaN, so the host need not know of it."""

_RULES = frozenset({"adam", "adagrad", "lion", "lamb"})
_ONEBIT = frozenset({"onebit_adam", "zero_one_coded", "zero_one_local", "zero_one_drift", "zero_one_settle"})
_POINTERS = ("param", "state_a", "state_b", "state_c", "grad", "out", "count")
_ROW = np.dtype([*((name, np.uint64) for name in _POINTERS), ("first_chunk", np.uint32), ("place", np.uint32)])
_CHUNK = np.dtype([("row", np.uint32), ("index", np.uint32)])


class _Terms(ctypes.Structure):
    """`RuleTerms` of the kernels; ctypes rounds to fp32 as C does, overflow to infinity included."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("beta1", "rest1", "beta2", "rest2")),
        *((name, ctypes.c_float) for name in ("step_size", "root_scale", "eps", "decay", "grad_scale")),
        *((name, ctypes.c_int) for name in ("decay_mode", "is_eps_inside", "unused")),
        *((name, ctypes.c_double) for name in ("full_step", "least", "most")),
    )


def pack_terms(t: Terms) -> bytes:
    """Terms as the kernels take them."""
    betas = (t.beta1, 1.0 - t.beta1, t.beta2, 1.0 - t.beta2)
    factors = (t.step_size, t.root_scale, t.eps, t.decay, t.grad_scale)
    return bytes(_Terms(*betas, *factors, t.decay_mode, t.is_eps_inside, 0, t.step_size, t.least, t.most))


class _Launch(NamedTuple):
    """Neighbouring rows of a table that share a launch."""

    kernels: tuple[str, ...]
    lot: int
    row: int
    rows: int
    chunk: int
    chunks: int


class _Uploaded(NamedTuple):
    """A table in the memory of the device, and the stream that uploaded it."""

    rows: Tensor
    chunks: Tensor
    stream: int


def kernels_of(rule: str, row: Row) -> tuple[str, ...]:
    """Names of the kernels for a row: one, or the first and the last of LAMB; empty if the reference has to do it."""
    states = {state.dtype for state in row.states}
    param, grad = row.param.dtype, row.grad.dtype
    if rule in _ONEBIT:
        return _onebit_kernel(rule, row) if {param, grad, *states} == {torch.float32} else ()
    if rule not in _RULES or len(states) != 1 or param not in TAGS or grad not in TAGS:
        return ()
    state = states.pop()
    if param == state == torch.float32:
        if row.out is not None and row.out.dtype not in (torch.bfloat16, torch.float16):
            return ()
        out = "" if row.out is None else f"_{TAGS[row.out.dtype]}"
        if rule == "lamb":
            return (f"lamb_moments_{TAGS[grad]}", f"lamb_apply{out}")
        return (f"{rule}_{TAGS[grad]}{out}",)
    own = {param, torch.float32}
    if param == torch.float32 or row.out is not None or state not in own or grad not in own:
        return ()
    middle = f"{TAGS[param]}w_{TAGS[state]}s"
    if rule == "lamb":
        return (f"lamb_moments_{middle}_{TAGS[grad]}", f"lamb_apply_{middle}")
    return (f"{rule}_{middle}_{TAGS[grad]}",)


def _onebit_kernel(rule: str, row: Row) -> tuple[str, ...]:
    outs = (torch.bfloat16, torch.float16, *((torch.float32,) if rule == "zero_one_local" else ()))
    if row.out is None:
        return (f"{rule}_f32",)
    return (f"{rule}_f32_{TAGS[row.out.dtype]}",) if row.out.dtype in outs else ()


def _numbers(row: Row) -> tuple[int, ...]:
    states = [state.data_ptr() for state in row.states] + [0, 0]
    out = 0 if row.out is None else row.out.data_ptr()
    return (row.param.data_ptr(), *states[:3], row.grad.data_ptr(), out, row.param.numel())


def _lay_out(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The chunks of all rows, in order; enters the first chunk of each row."""
    counts = (rows["count"].astype(np.int64) + CHUNK - 1) // CHUNK
    ends = np.cumsum(counts)
    rows["first_chunk"] = ends - counts
    chunks = np.empty(int(counts.sum()), _CHUNK)
    chunks["row"] = np.repeat(np.arange(len(rows)), counts)
    chunks["index"] = np.arange(len(chunks)) - np.repeat(ends - counts, counts)
    return chunks


def upload(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """The bytes of an array on the device; the host does not wait, and may change the array at once.

    Raises:
        UsageError: a CUDA graph is being captured, whose replays would copy from memory that is somebody else's then.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        msg = "tables of an optimizer or a norm are copied to the device; they cannot be part of a captured CUDA graph"
        raise UsageError(msg)
    data = torch.from_numpy(array.view(np.uint8).reshape(-1))
    return data.clone() if device.type == "cpu" else data.pin_memory().to(device, non_blocking=True)


def stream_of(device: torch.device) -> int:
    """The current stream of the device as a number."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


class DeviceTable:
    """Tensors of one device that a rule updates together; as `HostTable`, but asynchronous.

    The table keeps parameters, states and outs alive, but gradients only until the first `run`. Addresses are uploaded
    at the first `run`, and again when those of gradients have changed or another stream is current.
    """

    def __init__(self, rule: str, rows: Iterable[Row]) -> None:
        """Raises as `check_row`; all tensors are on the device of the first."""
        self.rule = rule
        self._rows: list[Row] = list(rows)
        self._device = self._rows[0].param.device if self._rows else torch.device("cpu")
        for row in self._rows:
            check_row(rule, row, self._device)
        self._launcher: Launcher | None = for_tensor(self._rows[0].param) if self._rows else None
        names = [kernels_of(rule, row) if self._launcher is not None else () for row in self._rows]
        self._by_reference = [place for place, kernels in enumerate(names) if not kernels]
        order, self._launches = _grouped(names, [row.lot for row in self._rows])
        self._order = np.array(order, np.intp)
        self._array = np.zeros(len(self._order), _ROW)
        for at, place in enumerate(order):
            self._array[at] = (*_numbers(self._rows[place]), 0, place)
        self._chunks = _lay_out(self._array)
        self._launches = [_with_chunks(launch, self._array) for launch in self._launches]
        self._uploaded: _Uploaded | None = None
        self._partials: Tensor | None = None
        self._grads: list[Tensor] | None = [row.grad for row in self._rows]
        self._grad_dtypes = [row.grad.dtype for row in self._rows]
        self._lengths = [row.param.numel() for row in self._rows]
        nothing = torch.empty(0)
        self._rows = [row._replace(grad=nothing) for row in self._rows]
        held = [row.param for row in self._rows] + [row.out for row in self._rows if row.out is not None]
        self._addresses = [x.data_ptr() for x in held]

    @property
    def is_compiled(self) -> bool:
        """True if kernels do all rows; otherwise the reference does some."""
        return not self._by_reference

    def take(self, params: list[Tensor], grads: list[Tensor], outs: list[Tensor]) -> bool:
        """Take new gradients for the rows; False, and nothing taken, if the table does not fit these tensors.

        It fits if parameters and outs (all or none) are at their old addresses, and gradients are of the same dtypes,
        contiguous and on the device. The caller keeps the gradients alive until `run` returns.
        """
        fits = (
            list(map(Tensor.data_ptr, chain(params, outs))) == self._addresses
            and list(map(Tensor.numel, params)) == self._lengths == list(map(Tensor.numel, grads))
            and list(map(attrgetter("dtype"), grads)) == self._grad_dtypes
            and set(map(attrgetter("layout"), grads)) <= {torch.strided}
            and set(map(attrgetter("device"), grads)) <= {self._device}
            and all(map(Tensor.is_contiguous, grads))
        )
        self._grads = grads if fits else None
        return fits

    def run(
        self, terms: Sequence[Terms], *, threads: int = 1, scales: Sequence[Tensor | None] | None = None
    ) -> Tensor | list[float]:
        """Update everything in place with the terms of each lot.

        Gives the trust ratio of each row for LAMB, as an fp64 tensor on the device, else [].

        Args:
            terms: one for each lot.
            threads: of the host; nothing depends on it.
            scales: for each lot, an fp32 scalar on the device that gradients are multiplied by as well, or None. With
                NaN the rules of `SKIPPING` change nothing.

        Raises:
            UsageError: gradients were not given since the last run.
            ValueError: a scale is not an fp32 scalar on the device.
        """
        del threads
        grads, self._grads = self._grads, None
        if grads is None:
            msg = f"{self.rule}: the table has no gradients; give it those of this update with `take`"
            raise UsageError(msg)
        scales = [None] * len(terms) if scales is None else scales
        for scale in scales:
            _check_scale(self.rule, scale, self._device)
        ratios = torch.ones(len(self._rows) if self.rule == "lamb" else 0, dtype=torch.float64, device=self._device)
        if self._launcher is not None and self._launches:
            uploaded = self._upload(grads)
            for launch in self._launches:
                self._launch(self._launcher, launch, uploaded, terms[launch.lot], scales[launch.lot], ratios)
        for place in self._by_reference:
            row = self._rows[place]
            ratio = _by_reference(self.rule, row._replace(grad=grads[place]), terms[row.lot], scales[row.lot])
            if self.rule == "lamb":
                ratios[place] = ratio
        return ratios if self.rule == "lamb" else []

    def _upload(self, grads: list[Tensor]) -> _Uploaded:
        now = np.fromiter(map(Tensor.data_ptr, grads), np.uint64, len(grads))[self._order]
        stream, before = stream_of(self._device), self._uploaded
        is_moved = not np.array_equal(now, self._array["grad"])
        if before is not None and before.stream == stream and not is_moved:
            return before
        self._array["grad"] = now
        is_kept = before is not None and before.stream == stream
        chunks = before.chunks if before is not None and is_kept else upload(self._chunks, self._device)
        self._uploaded = _Uploaded(upload(self._array, self._device), chunks, stream)
        return self._uploaded

    def _launch(
        self, launcher: Launcher, launch: _Launch, table: _Uploaded, terms: Terms, scale: Tensor | None, ratios: Tensor
    ) -> None:
        if self.rule == "lamb" and self._partials is None:
            self._partials = torch.empty(2 * len(self._chunks), dtype=torch.float64, device=self._device)
        _run_kernels(launcher, launch, table, pack_terms(terms), scale, self._partials, ratios)


def _run_kernels(
    launcher: Launcher,
    launch: _Launch,
    table: _Uploaded,
    terms: bytes,
    scale: Tensor | None,
    partials: Tensor | None,
    ratios: Tensor,
) -> None:
    """Launch the kernel of some rows, or the three of LAMB."""
    rows = table.rows.data_ptr()
    chunks = table.chunks.data_ptr() + launch.chunk * _CHUNK.itemsize
    factor = 0 if scale is None else scale.data_ptr()
    grid, threads = (launch.chunks, 1, 1), (THREADS, 1, 1)
    if partials is None:
        if launch.chunks:
            launcher.launch(launch.kernels[0], grid, threads, rows, chunks, factor, terms)
        return
    first, last = launch.kernels
    own = rows + launch.row * _ROW.itemsize
    if launch.chunks:
        parts = partials.data_ptr() + 16 * launch.chunk
        launcher.launch(first, grid, threads, rows, chunks, factor, parts, terms)
    launcher.launch("lamb_ratios", (launch.rows, 1, 1), threads, own, partials.data_ptr(), ratios.data_ptr(), terms)
    if launch.chunks:
        launcher.launch(last, grid, threads, rows, chunks, ratios.data_ptr(), terms)


def lamb_first_row(row: Row, terms: Terms) -> Tensor:
    """First half of LAMB on a non-empty row: its states; returns the sums of squares of parameter and direction.

    Shapes: the result is of two fp64 elements, on the device of the row.

    Raises:
        As `check_row`.
    """
    device, found = row.param.device, _launch_of("lamb", row)
    if found is None:
        sums = lamb_first(row.param, row.states, row.grad, terms)
        return torch.tensor(sums, dtype=torch.float64, device=device)
    launcher, kernels, table, chunks = found
    partials = torch.empty((chunks, 2), dtype=torch.float64, device=device)
    words = (table.rows.data_ptr(), table.chunks.data_ptr(), 0, partials.data_ptr(), pack_terms(terms))
    launcher.launch(kernels[0], (chunks, 1, 1), (THREADS, 1, 1), *words)
    return partials.sum(0)


def lamb_second_row(row: Row, terms: Terms, ratio: Tensor) -> None:
    """Second half of LAMB on a non-empty row: the parameter and `out`, from its states and trust ratio.

    Shapes: `ratio` is one fp64 element on the device of the row.

    Raises:
        As `check_row`.
    """
    found = _launch_of("lamb", row)
    if found is None:
        lamb_second(row.param, row.states, row.out, terms, float(ratio))
        return
    launcher, kernels, table, chunks = found
    words = (table.rows.data_ptr(), table.chunks.data_ptr(), ratio.data_ptr(), pack_terms(terms))
    launcher.launch(kernels[1], (chunks, 1, 1), (THREADS, 1, 1), *words)


def _launch_of(rule: str, row: Row) -> tuple[Launcher, tuple[str, ...], _Uploaded, int] | None:
    """Launch of the kernels of one row: names, table, number of chunks; None if the reference has to do it."""
    device = row.param.device
    check_row(rule, row, device)
    launcher, kernels = for_tensor(row.param), kernels_of(rule, row)
    if launcher is None or not kernels:
        return None
    table = _table_of_one(device, stream_of(device), _numbers(row))
    return launcher, kernels, table, -(-row.param.numel() // CHUNK)


def _grouped(names: list[tuple[str, ...]], lots: list[int]) -> tuple[list[int], list[_Launch]]:
    """The order of rows in which those of one kernel and lot are neighbours, and these groups, without chunks yet."""
    groups: dict[tuple[tuple[str, ...], int], list[int]] = {}
    for place, (kernels, lot) in enumerate(zip(names, lots, strict=True)):
        if kernels:
            groups.setdefault((kernels, lot), []).append(place)
    order: list[int] = []
    launches = []
    for (kernels, lot), places in groups.items():
        launches.append(_Launch(kernels, lot, len(order), len(places), 0, 0))
        order += places
    return order, launches


def _with_chunks(launch: _Launch, rows: np.ndarray[Any, Any]) -> _Launch:
    own = rows[launch.row : launch.row + launch.rows]
    chunks = int(((own["count"].astype(np.int64) + CHUNK - 1) // CHUNK).sum())
    return launch._replace(chunk=int(own["first_chunk"][0]), chunks=chunks)


def _check_scale(rule: str, scale: Tensor | None, device: torch.device) -> None:
    if scale is None:
        return
    if scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != device:
        msg = (
            f"{rule}: the scale of gradients is a {scale.dtype} tensor of {scale.numel()} elements on {scale.device}; "
            f"expected one fp32 number on {device}"
        )
        raise ValueError(msg)


def _by_reference(rule: str, row: Row, terms: Terms, scale: Tensor | None) -> float:
    if scale is None:
        return run_reference(rule, row.param, row.states, row.grad, row.out, terms)
    factor: Any = scale.detach().view(()) * terms.grad_scale  # stays on the device
    terms = terms._replace(grad_scale=factor)
    if rule not in SKIPPING:
        return run_reference(rule, row.param, row.states, row.grad, row.out, terms)
    changed = [x.detach().view(-1) for x in (row.param, *row.states, *([] if row.out is None else [row.out]))]
    is_kept, grad = torch.isnan(factor), row.grad.detach().view(-1)
    for begin in range(0, grad.numel(), REFERENCE_SPAN):
        cut = slice(begin, begin + REFERENCE_SPAN)
        before = [x[cut].clone() for x in changed]
        param, *rest = (x[cut] for x in changed)
        states, out = rest[: len(row.states)], rest[len(row.states) :]
        run_reference(rule, param, states, grad[cut], out[0] if out else None, terms)
        for x, old in zip((param, *rest), before, strict=True):
            x.copy_(torch.where(is_kept, old, x))
    return 1.0


@lru_cache(maxsize=8192)  # one per parameter where LAMB has windows of whole parameters
def _table_of_one(device: torch.device, stream: int, numbers: tuple[int, ...]) -> _Uploaded:
    """A table of one row. It holds addresses and no tensors, so it stays right whatever lies there later."""
    rows = np.zeros(1, _ROW)
    rows[0] = (*numbers, 0, 0)
    chunks = _lay_out(rows)
    return _Uploaded(upload(rows, device), upload(chunks, device), stream)


def update_row(rule: str, row: Row, terms: Terms, scale: Tensor | None = None) -> float | Tensor:
    """Update one row that is not empty; gives LAMB's trust ratio (a scalar on the device, or a number), or 1.

    For windows that come one at a time at the same addresses in every step: their tables are kept. `scale` is as in
    `DeviceTable.run`.

    Raises:
        ValueError: `scale` is not an fp32 scalar on the device; otherwise as `check_row`.
    """
    device, found = row.param.device, _launch_of(rule, row)
    _check_scale(rule, scale, device)
    if found is None:
        return _by_reference(rule, row, terms, scale)
    launcher, kernels, table, chunks = found
    is_lamb = rule == "lamb"
    partials = torch.empty(2 * chunks, dtype=torch.float64, device=device) if is_lamb else None
    ratios = torch.empty(int(is_lamb), dtype=torch.float64, device=device)
    _run_kernels(launcher, _Launch(kernels, 0, 0, 1, 0, chunks), table, pack_terms(terms), scale, partials, ratios)
    return ratios[0] if is_lamb else 1.0
