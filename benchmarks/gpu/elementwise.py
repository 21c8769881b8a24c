"""Bandwidth of the norms and elementwise kernels of a transformer layer, as parts of a measured copy, and torch's.

Bytes are those that have to be moved: each input read once, each output written once. Partial sums of gradients of
parameters are not counted. What torch needs several operators for runs as those, eager and compiled.

    python benchmarks/gpu/elementwise.py                       into benchmarks/results/gpu-elementwise.json
    python benchmarks/gpu/elementwise.py --dtypes bf16 --cols 1024 4096
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from timing import copy_bandwidth, interleaved, need_gpu, parser_of, write_results
from torch import Tensor

from mpispeed.native.drop_norm import bias_dropout_layer_norm
from mpispeed.native.norm import add_layer_norm, layer_norm, rms_norm
from mpispeed.native.rotary import rotary_tables, split_qkv
from mpispeed.native.transformer import bias_dropout_residual, bias_gelu

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Function = Callable[..., Any]


class Case:
    """One operation: ours and torch's on the same tensors, and how many large tensors it moves in each direction."""

    def __init__(self, ours: Function, theirs: Function, leaves: list[Tensor], moved: tuple[int, int]) -> None:
        """Args: calls that take `leaves`; large tensors read and written in forward, and in backward."""
        self.ours, self.theirs, self.leaves, self.moved = ours, theirs, leaves, moved

    def forward(self) -> dict[str, Function]:
        """Calls without gradients, by name."""
        inputs = [t.detach() for t in self.leaves]
        whole = torch.compile(self.theirs)
        return {
            "ours": lambda: self.ours(*inputs),
            "torch": lambda: self.theirs(*inputs),
            "compiled": lambda: whole(*inputs),
        }

    def backward(self) -> dict[str, Function]:
        """Backward passes of a graph that is kept, by name."""
        calls: dict[str, Function] = {}
        for name, call in (("ours", self.ours), ("torch", self.theirs), ("compiled", torch.compile(self.theirs))):
            outs = call(*self.leaves)
            outs = list(outs) if isinstance(outs, tuple) else [outs]
            grads = [torch.ones_like(out) for out in outs]

            def run(outs: list[Tensor] = outs, grads: list[Tensor] = grads) -> object:
                return torch.autograd.grad(outs, self.leaves, grads, retain_graph=True)

            calls[name] = run
        return calls


def cases(rows: int, cols: int, dtype: torch.dtype) -> dict[str, Case]:
    """All operations on matrices of `rows` and `cols`."""

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(dtype).requires_grad_()

    x, other, weight, bias = leaf(rows, cols), leaf(rows, cols), leaf(cols), leaf(cols)
    heads, size, sequence = cols // 64, 64, 512
    qkv, qkv_bias = leaf(rows // sequence, sequence, 3 * cols), leaf(3 * cols)
    cosine, sine = rotary_tables(sequence, size, device="cuda")
    seed = torch.tensor(7)
    low_cosine, low_sine = (torch.cat((t, t), -1).to(dtype) for t in (cosine, sine))

    def torch_split(qkv: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (qkv + bias).unflatten(-1, (3, heads, size)).permute(2, 0, 3, 1, 4)
        q, k = (t * low_cosine + torch.cat((-t[..., size // 2 :], t[..., : size // 2]), -1) * low_sine for t in (q, k))
        return q.contiguous(), k.contiguous(), v.contiguous()

    def torch_add_norm(x: Tensor, other: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        total = x + other
        return total, F.layer_norm(total, (cols,), weight, bias)

    def torch_drop_norm(x: Tensor, b: Tensor, other: Tensor, w: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        total = other + F.dropout(x + b, 0.1)
        return total, F.layer_norm(total, (cols,), w, c)

    return {
        "layer_norm": Case(
            layer_norm, lambda x, w, b: F.layer_norm(x, (cols,), w, b), [x, weight, bias], (2, 3)
        ),
        "add_layer_norm": Case(add_layer_norm, torch_add_norm, [x, other, weight, bias], (4, 4)),
        "rms_norm": Case(rms_norm, lambda x, w: F.rms_norm(x, (cols,), w, 1e-6), [x, weight], (2, 3)),
        "bias_gelu": Case(bias_gelu, lambda x, b: F.gelu(x + b, approximate="tanh"), [x, bias], (2, 3)),
        "bias_dropout_residual": Case(
            lambda x, b, r: bias_dropout_residual(x, b, r, 0.1, seed),
            lambda x, b, r: r + F.dropout(x + b, 0.1),
            [x, bias, other],
            (3, 2),
        ),
        "bias_residual": Case(
            lambda x, b, r: bias_dropout_residual(x, b, r, 0.0), lambda x, b, r: r + (x + b), [x, bias, other], (3, 1)
        ),
        "bias_dropout_layer_norm": Case(
            lambda x, b, r, w, c: bias_dropout_layer_norm(x, b, r, w, c, 0.1, seed=seed),
            torch_drop_norm,
            [x, bias, other, weight, leaf(cols)],
            (4, 5),
        ),
        "split_qkv_rotary": Case(
            lambda x, b: split_qkv(x, b, heads, cosine=cosine, sine=sine), torch_split, [qkv, qkv_bias], (6, 6)
        ),
    }  # fmt: skip


def measured(case: Case, large_bytes: int, copy: float, rounds: int) -> list[dict[str, Any]]:
    """Records of forward and backward of one case."""
    records = []
    for index, (way, calls) in enumerate((("forward", case.forward()), ("backward", case.backward()))):
        seconds = interleaved(calls, rounds, is_device_only=True)
        moved = case.moved[index] * large_bytes
        records.append(
            {
                "pass": way,
                "bytes": moved,
                "seconds": seconds,
                "part_of_copy": moved / seconds["ours"] / copy,
                "times_torch": seconds["torch"] / seconds["ours"],
                "times_compiled": seconds["compiled"] / seconds["ours"],
            }
        )
    return records


def main() -> None:
    """Measure and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=["bf16", "f32"])
    parser.add_argument("--cols", nargs="+", type=int, default=[1024, 4096], help="multiples of 64")
    parser.add_argument("--mib", type=int, default=512, help="size of one large tensor")
    args = parser.parse_args()
    need_gpu()
    torch._functorch.config.donated_buffer = False  # graphs are kept for several backward passes
    copy = copy_bandwidth()
    print(f"copy: {copy / 1e12:.2f} TB/s, read and written")
    records: list[dict[str, Any]] = [{"copy_bytes_per_second": copy}]
    for tag in args.dtypes:
        dtype = DTYPES[tag]
        for cols in args.cols:
            rows = max(512, (args.mib << 20) // dtype.itemsize // cols // 512 * 512)
            large = rows * cols * dtype.itemsize
            for name, case in cases(rows, cols, dtype).items():
                torch.compiler.reset()
                for record in measured(case, large, copy, args.rounds):
                    records.append({"operation": name, "dtype": tag, "rows": rows, "cols": cols, **record})
                    line = "{part_of_copy:5.2f} of a copy, {times_torch:5.2f} x torch, {times_compiled:5.2f} x compiled"
                    print(f"{name:22} {record['pass']:8} {tag:5} {cols:6}: " + line.format(**record))
                # After each case: compiling takes most of the time, and a limit may end this script.
                options = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
                written = write_results("elementwise", records, options=options, path=args.json)
    print("written to", written)


if __name__ == "__main__":
    main()
