"""Gathers and reductions whose messages are quantized in blocks: 8 bits for values, 4 bits for sums.

Each is made of the verbs of its groups, so that the trace counts the bytes really sent: codes in one message and fp32
scales in a second one. A group of one rank sends nothing, and where all groups have one rank nothing is quantized.
Every rank passes the same lengths, dtypes and block.

Values are quantized and dequantized on their own device or host, to the same bytes: only codes are copied between them.

Source: ZeRO++ (arXiv 2306.10209), qwZ and qgZ; LoCo (arXiv 2407.04480), the error feedback.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mpispeed.base.device import HOST
from mpispeed.base.errors import CommError
from mpispeed.mesh.collectives.verbs import flat_view
from mpispeed.native.block_quant import dequantize, dequantize_sum, quantize, sum_requantize
from mpispeed.native.codes import LEVELS, Coded, Grid

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

VALUE_BITS, SUM_BITS, ERROR_BITS = 8, 4, 8
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CODES = {8: torch.int8, 4: torch.uint8}


class Feedback:
    """Error feedback: quantization errors of earlier reductions of one buffer, in 8 bits per element and hop.

    In a hop the error e is added to the values x before they are quantized, v = x + e; then e becomes the
    moving average beta * e + (1 - beta) * (v - dequantized v). So the mean over n reductions of the same
    values misses the true sum by about e / ((1 - beta) * n), down to the rounding of e itself.
    """

    def __init__(self, beta: float = 0.8, reset_after: int = 1024) -> None:
        """Args: `reset_after` is the number of reductions after which the errors are forgotten.

        Raises:
            ValueError: `beta` is not in [0, 1), or `reset_after` is below 1.
        """
        if not 0.0 <= beta < 1.0:
            msg = f"Feedback: beta is {beta}; the weight of the old error is at least 0 and below 1"
            raise ValueError(msg)
        if reset_after < 1:
            msg = f"Feedback: reset_after is {reset_after}; errors are kept for at least 1 reduction"
            raise ValueError(msg)
        self.beta, self.reset_after = beta, reset_after
        self.uses = 0
        self._errors: dict[str, tuple[Grid, Coded]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held, 0 before the first reduction."""
        return sum(x.nbytes for _, coded in self._errors.values() for x in coded)

    @property
    def elements(self) -> int:
        """Elements with a kept error, 0 before the first reduction."""
        return sum(grid.numel for grid, _ in self._errors.values())

    def error(self, hop: str, grid: Grid, device: torch.device = HOST) -> Coded:
        """The kept error of a hop, zeros at first, on `device`.

        Raises:
            CommError: the hop was used with another grid before.
        """
        kept = self._errors.get(hop)
        if kept is None:
            kept = self._errors[hop] = (grid, Coded.zeros(grid, ERROR_BITS, device))
        if kept[0] != grid:
            msg = f"a Feedback belongs to one buffer: hop {hop!r} had {kept[0]} before and has {grid} now"
            raise CommError(msg)
        if kept[1].codes.device != device:
            kept = self._errors[hop] = (grid, _moved(kept[1], device))
        return kept[1]

    def count_use(self) -> None:
        """Note a finished reduction; after `reset_after` of them the errors are forgotten."""
        self.uses += 1
        if self.uses >= self.reset_after:
            self.clear()

    def clear(self) -> None:
        """Forget all errors, as after an overflow."""
        self.uses = 0
        for _, coded in self._errors.values():
            for x in coded:
                x.zero_()

    def rescale(self, factor: float) -> None:
        """Multiply all errors, as when the loss scale changes by `factor`.

        Scales stay such that quantizing the errors again gives the same bytes.

        Raises:
            ValueError: `factor` is not a positive number.
        """
        if not (factor > 0.0 and math.isfinite(factor)):
            msg = f"Feedback.rescale: factor is {factor}; pass new loss scale / old loss scale"
            raise ValueError(msg)
        for _, coded in self._errors.values():
            coded.scales.mul_(factor)
            if math.frexp(factor)[0] != 0.5:  # no power of two: round as `quantize` does
                coded.scales.mul_(LEVELS[ERROR_BITS]).div_(LEVELS[ERROR_BITS])

    def values(self, hop: str, first: int, last: int) -> torch.Tensor:
        """The kept error of the elements [first, last) of a hop's buffer, in fp32 on the host."""
        grid, coded = self._errors[hop]
        at = torch.arange(first, last, device=coded.codes.device)
        blocks = at // grid.piece * (grid.scales // grid.pieces) + at % grid.piece // grid.block
        return (coded.codes[first:last].float() * coded.scales[blocks]).to(HOST)

    def put(self, hop: str, grid: Grid, values: torch.Tensor) -> None:
        """Keep `values` as the error of a hop; those that `values` of this class gave come back bit for bit."""
        coded = Coded.zeros(grid, ERROR_BITS)
        quantize(coded, values, grid)
        self._errors[hop] = (grid, coded)


def quantized_all_gather(comm: Comm, out: torch.Tensor, shard: torch.Tensor, *, block: int) -> None:
    """Collect the shards of all ranks in rank order through 8-bit codes; all ranks get the same values.

    The owner, too, ends with the dequantized values. `shard` may be its own slice of `out`.

    Collective over: `comm`.
    Shapes: out has `comm.size` times the elements of shard; their float dtypes may differ.

    Raises:
        CommError: tensors or block do not fit.
    """
    quantized_gather_through([comm], out, shard, block=block)


def quantized_gather_through(comms: Sequence[Comm], out: torch.Tensor, shard: torch.Tensor, *, block: int) -> None:
    """Collect shards over several groups, one after the other: quantized once by the owner, dequantized at the end.

    `comms` are in the order of gathering, for a buffer sharded over `inner`, then `outer`: [outer, inner].
    Every gather joins neighbouring pieces: the coordinate in the last group is the slowest in `out`.

    Collective over: all of `comms`.
    Shapes: out has the elements of shard times the sizes of all groups; their float dtypes may differ.

    Raises:
        CommError: tensors or block do not fit.
    """
    where = "quantized gather"
    grid, hops, whole, part = _gather_grid(comms, out, shard, block, where)
    if not hops:
        whole.copy_(part)
        return
    own = Grid(grid.piece, block)
    have = _room(hops[0], "own", own, VALUE_BITS, part.device)
    quantize(have, part, own, threads=hops[0].group.threads)
    _gather_codes(hops, whole, have, grid)


def gather_codes_through(comms: Sequence[Comm], out: torch.Tensor, own: Coded, *, block: int) -> None:
    """`quantized_gather_through` of a shard that is kept as 8-bit codes.

    Collective over: all of `comms`.
    Shapes: out has the elements of the quantized shard, one piece, times the sizes of all groups.

    Raises:
        CommError: tensors or block do not fit.
    """
    where = "gather of codes"
    grid, hops, whole, _ = _gather_grid(comms, out, own.codes, block, where)
    if not hops:
        dequantize(whole, _moved(own, whole.device), grid)
        return
    _gather_codes(hops, whole, own, grid)


def _gather_grid(
    comms: Sequence[Comm], out: torch.Tensor, shard: torch.Tensor, block: int, where: str
) -> tuple[Grid, list[Comm], torch.Tensor, torch.Tensor]:
    if not comms:
        msg = f"{where}: no groups; pass at least one, which may be of one rank"
        raise CommError(msg)
    hops = [comm for comm in comms if comm.size > 1]
    pieces = math.prod(comm.size for comm in hops)
    whole = _floats(comms[0], out, where)
    part = shard if shard.dtype == torch.int8 else _floats(comms[0], shard, where)
    if whole.numel() != pieces * part.numel():
        msg = f"{where}: out has {whole.numel()} elements, {pieces} shards of {part.numel()} have another number"
        raise CommError(msg)
    return _grid(where, part.numel(), block, pieces), hops, whole, part


def _gather_codes(hops: Sequence[Comm], whole: torch.Tensor, have: Coded, grid: Grid) -> None:
    count = 1
    if have.codes.device != whole.device:
        have = _moved(have, HOST)
    for comm in hops:
        count *= comm.size
        gathered = _room(comm, "gathered", Grid(grid.piece, grid.block, count), VALUE_BITS, have.codes.device)
        for target, source in zip(gathered, have, strict=True):
            comm.all_gather(target, source)
        have = gathered
    dequantize(whole, _moved(have, whole.device), grid, threads=hops[0].group.threads)


def quantized_reduce_scatter(
    inner: Comm,
    outer: Comm,
    shard: torch.Tensor,
    full: torch.Tensor,
    *,
    block: int,
    scale: float = 1.0,
    feedback: Feedback | None = None,
    codes_inner: bool = True,
) -> None:
    """Sum `full` over both groups in two hops of 4-bit codes, and leave `scale` times this rank's part in `shard`.

    The buffer is sharded over `inner`, then `outer`: with sizes I and O and P elements, the rank with the indices
    (i, o) gets the P / (I * O) elements from i * P / I + o * P / (I * O) on. Values are quantized before each
    hop, sums run in rank order in fp32, and `shard` (which may be a slice of `full`) is rounded once. Without
    `codes_inner` the first hop is a plain reduce-scatter to fp32, with `full` as scratch.

    Collective over: `inner` and `outer`.
    Shapes: full has I * O times the elements of shard; their float dtypes may differ.

    Raises:
        CommError: tensors, block or feedback do not fit.
    """
    where = "quantized reduce-scatter"
    part, whole = (_floats(inner, x, where) for x in (shard, full))
    pieces = inner.size * outer.size
    if whole.numel() != pieces * part.numel():
        msg = f"{where}: full has {whole.numel()} elements, {pieces} shards of {part.numel()} have another number"
        raise CommError(msg)
    hops = [(name, comm) for name, comm in _named(inner, outer) if comm.size > 1]
    if not codes_inner and inner.size > 1:
        whole, hops, pieces = _summed(inner, whole), hops[1:], outer.size
    grid = _grid(where, part.numel(), block, pieces)
    if not hops:
        part.copy_(whole.float() * scale if scale != 1.0 else whole)
        return
    threads, beta, place = hops[0][1].group.threads, feedback.beta if feedback else 0.0, whole.device
    result = part if part.device == place else torch.empty_like(part, device=place)
    coded = _room(hops[0][1], "sent", grid, SUM_BITS, place)
    error = feedback.error(hops[0][0], grid, place) if feedback else None
    quantize(coded, whole, grid, error=error, beta=beta, threads=threads)
    for i, (_, comm) in enumerate(hops):
        received = _room(comm, "received", grid, SUM_BITS, place)
        for target, source in zip(received, coded, strict=True):
            comm.all_to_all(target, source)
        grid = Grid(grid.piece, block, grid.pieces // comm.size)
        parts = _parts(received, comm.size)
        if i == len(hops) - 1:
            dequantize_sum(result, parts, grid, scale=scale, threads=threads)
        else:
            name, following = hops[i + 1]
            coded = _room(following, "sent", grid, SUM_BITS, place)
            error = feedback.error(name, grid, place) if feedback else None
            sum_requantize(coded, parts, grid, error=error, beta=beta, threads=threads)
    if result is not part:
        part.copy_(result)
    if feedback:
        feedback.count_use()


def _named(inner: Comm, outer: Comm) -> list[tuple[str, Comm]]:
    """The groups with the names of their hops in `Feedback`: whichever sums first has errors of whole buffers."""
    return [("first", inner), ("second" if inner.size > 1 else "first", outer)]


def _summed(comm: Comm, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of the sum of `whole`, in fp32: a slice of it, or room of the group."""
    numel, place = whole.numel() // comm.size, whole.device
    if whole.dtype == torch.float32:
        shard = whole[comm.rank * numel : (comm.rank + 1) * numel]
    elif place == HOST:
        shard = comm.group.scratch("codec plain sums", numel, torch.float32)
    else:
        shard = torch.empty(numel, dtype=torch.float32, device=place)
    comm.reduce_scatter(shard, whole)
    return shard


def _floats(comm: Comm, x: torch.Tensor, where: str) -> torch.Tensor:
    flat = flat_view(comm.group, x, where)
    if flat.dtype not in _FLOATS:
        msg = f"{where}: a tensor has dtype {flat.dtype}; use fp32, bf16 or fp16"
        raise CommError(msg)
    return flat


def _grid(where: str, piece: int, block: int, pieces: int) -> Grid:
    try:
        return Grid(piece, block, pieces)
    except ValueError as error:
        msg = f"{where}: {error}"
        raise CommError(msg) from error


def _room(comm: Comm, name: str, grid: Grid, bits: int, device: torch.device) -> Coded:
    """Room for codes: scratch of the group, or new on a device, whose allocator reuses memory in stream order."""
    if device != HOST:
        codes = torch.empty(grid.codes(bits), dtype=_CODES[bits], device=device)
        return Coded(codes, torch.empty(grid.scales, dtype=torch.float32, device=device))
    codes = comm.group.scratch(f"codec {name} codes", grid.codes(bits), _CODES[bits])
    return Coded(codes, comm.group.scratch(f"codec {name} scales", grid.scales, torch.float32))


def _moved(coded: Coded, device: torch.device) -> Coded:
    """The same code on `device`; itself if it is there."""
    return Coded(*(x.to(device) for x in coded))


def _parts(coded: Coded, count: int) -> list[Coded]:
    """Equal parts, one from each rank."""
    rows = (x.view(count, x.numel() // count) for x in coded)
    return [Coded(codes, scales) for codes, scales in zip(*rows, strict=True)]
