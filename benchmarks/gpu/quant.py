"""Block codes, packed signs and tokens: bytes moved a second as part of a copy's, and torch's time over ours.

    python benchmarks/gpu/quant.py

2^28 elements in blocks of 4096 (sums: 8 addends), and tokens [32, 2048, 2048] of which half are picked. Only the work
of the device counts. Scales of blocks and indices are counted, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timing import copy_bandwidth, interleaved, need_gpu, parser_of, write_results
from torch import Tensor

from mpispeed.native import device_signs, one_bit
from mpispeed.native.block_quant import dequantize, dequantize_add, dequantize_sum, quantize, sum_requantize
from mpispeed.native.codes import Coded, Grid
from mpispeed.native.cuda import launcher
from mpispeed.native.token_drop import gather, scatter

TARGET, COUNT, BLOCK, ADDENDS = 0.85, 1 << 28, 4096, 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Work = dict[str, tuple[float, Callable[[], object]]]
"""Bytes that one call moves, and the call; by name."""


def quantizers(x: Tensor, bits: int) -> Work:
    """Codes of `bits` bits from and to x."""
    grid, floats = Grid(COUNT, BLOCK), COUNT * x.element_size()
    coded, error = Coded.zeros(grid, bits, "cuda"), Coded.zeros(grid, 8, "cuda")
    codes, errors = grid.nbytes(bits), grid.nbytes(8)
    work: Work = {
        f"quantize{bits}": (floats + codes, lambda: quantize(coded, x, grid)),
        f"quantize{bits} with error": (
            floats + codes + 2 * errors,
            lambda: quantize(coded, x, grid, error=error, beta=0.8),
        ),
        f"dequantize{bits}": (floats + codes, lambda: dequantize(x, coded, grid)),
        f"dequantize{bits} and add": (2 * floats + codes, lambda: dequantize_add(x, coded, grid)),
    }
    parts = [Coded(*(y.clone() for y in coded)) for _ in range(ADDENDS)]
    work[f"dequantize{bits} and sum"] = (
        floats + ADDENDS * codes,
        lambda: dequantize_sum(x, parts, grid, scale=1 / ADDENDS),
    )
    work[f"sum and quantize{bits}"] = ((ADDENDS + 1) * codes, lambda: sum_requantize(coded, parts, grid))
    return work


def signs(x: Tensor) -> Work:
    """Signs of x with errors, and back."""
    runs = launcher.for_tensor(x)
    if runs is None:
        msg = f"no kernels on {x.device}: {launcher.unusable_reason()}"
        raise RuntimeError(msg)
    error, bits = torch.zeros(COUNT, device="cuda"), torch.zeros(COUNT // 8, dtype=torch.uint8, device="cuda")
    grad = torch.randn_like(x)  # memory of its own: what is read twice comes from the cache
    parts, weights = [bits.clone() for _ in range(ADDENDS)], [1 / ADDENDS] * ADDENDS
    floats = COUNT * x.element_size()
    return {
        "compensate": (8 * COUNT + floats, lambda: device_signs.start_compensate(runs, error, x, 1.0, None, 0.0)),
        "compensate with gradient": (
            8 * COUNT + 2 * floats,
            lambda: device_signs.start_compensate(runs, error, x, 0.9, grad, 0.1),
        ),
        "sum of parts": (
            8 * COUNT + ADDENDS * COUNT / 8,
            lambda: device_signs.start_add_parts(runs, error, parts, weights),
        ),
        "encode": (8 * COUNT + COUNT / 8, lambda: one_bit.encode(bits, error, 0.5)),
        "decode": (floats + COUNT / 8, lambda: one_bit.decode(x, bits, 0.5)),
    }


def tokens(dtype: torch.dtype) -> tuple[Work, dict[str, Callable[[], object]]]:
    """Half of the tokens picked and put back; and what torch has for that."""
    batch, length, width = 32, 2048, 2048
    x = torch.randn(batch, length, width, device="cuda").to(dtype)
    index = torch.stack([torch.randperm(length, device="cuda")[: length // 2].sort().values for _ in range(batch)])
    y, wide = gather(x, index), index[:, :, None].expand(-1, -1, width)
    work: Work = {
        "gather": (2 * y.nbytes + index.nbytes, lambda: gather(x, index)),
        "scatter": (2 * x.nbytes + index.nbytes + 16 * batch * length, lambda: scatter(y, index, x)),
    }
    return work, {"gather": lambda: x.gather(1, wide), "scatter": lambda: x.scatter(1, wide, y)}


def measure(
    work: Work, theirs: dict[str, Callable[[], object]], dtype: torch.dtype, bandwidth: float, rounds: int
) -> list[dict[str, Any]]:
    """A record for each name."""
    calls = {name: call for name, (_, call) in work.items()} | {f"torch {name}": call for name, call in theirs.items()}
    seconds, records = interleaved(calls, rounds, is_device_only=True), []
    for name, (moved, _) in work.items():
        fraction = moved / seconds[name] / bandwidth
        record = {"name": name, "dtype": str(dtype).removeprefix("torch."), "seconds": seconds[name], "bytes": moved}
        record |= {"fraction_of_copy": fraction, "target": TARGET, "is_reached": fraction >= TARGET}
        if name in theirs:
            record["torch_over_ours"] = seconds[f"torch {name}"] / seconds[name]
        records.append(record)
        print(record)
    return records


def main() -> None:
    """Measure all of it and write the record."""
    args = parser_of(__doc__).parse_args()
    need_gpu()
    bandwidth, records = copy_bandwidth(), []
    for dtype in DTYPES:
        x = torch.randn(COUNT, device="cuda").to(dtype)
        for bits in (8, 4):
            records += measure(quantizers(x, bits), {}, dtype, bandwidth, args.rounds)
        records += measure(signs(x), {}, dtype, bandwidth, args.rounds)
        del x
        records += measure(*tokens(dtype), dtype, bandwidth, args.rounds)
    found = {"copy_bytes_per_second": bandwidth, "coders": records}
    print(write_results("quant", found, options=vars(args), path=args.json))


if __name__ == "__main__":
    main()
