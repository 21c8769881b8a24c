"""Every kernel once, through its face, at odd sizes and places: for checkers of memory, on a GPU or on the host.

python -m tests.helpers.every_face cuda          on the current GPU
python -m tests.helpers.every_face host          the kernels that were compiled for the host
python -m tests.helpers.every_face host fault    one that writes past the end of its memory, to try the checker
"""

from __future__ import annotations

import struct
import sys
from itertools import product

import torch

from mpispeed.native import (
    block_quant,
    device_clip,
    device_norm,
    device_sum,
    exact_squares,
    exact_sum,
    one_bit,
    state_codes,
    token_drop,
)
from mpispeed.native.codes import Coded, Grid
from mpispeed.native.cuda import launcher
from mpispeed.native.cuda.catalog import KERNELS
from mpispeed.native.device_optim import DeviceTable
from mpispeed.native.drop_norm import bias_dropout_layer_norm
from mpispeed.native.multi_tensor_host import STATE_NAMES, Row
from mpispeed.native.norm import add_layer_norm, layer_norm, rms_norm
from mpispeed.native.rotary import rotary_tables, split_qkv
from mpispeed.native.row_ops import combine, permute
from mpispeed.native.softmax import causal_softmax, masked_softmax, run_dropout
from mpispeed.native.transformer import bias_dropout_residual, bias_gelu
from mpispeed.optim.adagrad import adagrad_terms
from mpispeed.optim.adam import adam_terms
from mpispeed.optim.lamb import lamb_terms
from mpispeed.optim.lion import lion_terms
from mpispeed.optim.onebit_params import onebit_terms

KINDS = (torch.float32, torch.bfloat16, torch.float16)
_COMMON = {"lr": 1e-3, "weight_decay": 0.1}
_BETAS = {"betas": (0.9, 0.99)}
TERMS = {
    "adam": adam_terms(step=2, eps=1e-8, decoupled=True, **_BETAS, **_COMMON),
    "adagrad": adagrad_terms(step=2, eps=1e-8, lr_decay=0.0, decoupled=False, **_COMMON),
    "lion": lion_terms(decoupled=True, **_BETAS, **_COMMON),
    "lamb": lamb_terms(step=2, eps=1e-8, decoupled=True, **_BETAS, **_COMMON),
}


class Faces:
    """Runs them on one device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def odd(self, *shape: int, dtype: torch.dtype = torch.float32, offset: int = 1) -> torch.Tensor:
        """Random numbers that end with their memory and, with an offset, do not begin at an aligned address."""
        count = torch.Size(shape).numel()
        whole = torch.randn(count + offset).to(self.device, dtype)
        return whole[offset:].view(shape).requires_grad_()

    def optimizers(self, param: torch.dtype, grad: torch.dtype, state: torch.dtype, out: torch.dtype | None) -> None:
        """Tensors of one element, of some, and of more than a block takes."""
        for rule, terms in TERMS.items():
            rows = []
            for count, offset in ((1, 0), (37, 1), (17_001, 0)):
                made = [self.odd(count, dtype=kind, offset=offset).detach() for kind in (param, grad)]
                states = [
                    self.odd(count, dtype=state, offset=offset).detach().abs() for _ in range(len(STATE_NAMES[rule]))
                ]
                low = None if out is None else self.odd(count, dtype=out, offset=offset).detach()
                rows.append(Row(made[0], tuple(states), made[1], low))
            DeviceTable(rule, rows).run([terms])

    def onebit(self, out: torch.dtype | None) -> None:
        """The elementwise rules of 1-bit optimizers; one of them writes its parameters to `out` only."""
        terms = onebit_terms(eps=1e-8, **_BETAS, **_COMMON)
        for rule in ("onebit_adam", "zero_one_coded", "zero_one_local", "zero_one_drift", "zero_one_settle"):
            low = torch.float32 if out is None and rule == "zero_one_local" else out
            rows = []
            for count, offset in ((1, 0), (37, 1), (17_001, 0)):
                param, grad, *states = (
                    self.odd(count, offset=offset).detach().abs() for _ in range(2 + len(STATE_NAMES[rule]))
                )
                copy = None if low is None else self.odd(count, dtype=low, offset=offset).detach()
                rows.append(Row(param, tuple(states), grad, copy))
            DeviceTable(rule, rows).run([terms])

    def layers(self, dtype: torch.dtype) -> None:
        """Forward and backward passes; rows shorter and longer than a block, of any and of whole 16 bytes."""
        for rows, cols, offset in ((3, 65, 1), (5, 1024, 0), (2, 2064, 0), (2, 5001, 1)):
            x, residual = (self.odd(rows, cols, dtype=dtype, offset=offset) for _ in range(2))
            weight, bias = (self.odd(cols, dtype=dtype, offset=offset) for _ in range(2))
            total = layer_norm(x, weight, bias).sum() + rms_norm(x, weight).sum()
            total = total + bias_gelu(x, bias).sum() + bias_gelu(x, bias, "none").sum()
            total = total + sum(part.sum() for part in add_layer_norm(x, residual, weight, bias))
            total = total + bias_dropout_residual(x, bias, residual, 0.3).sum()
            total = total + bias_dropout_layer_norm(x, bias, residual, weight, bias, 0.3)[0].sum()
            total.backward()
        qkv = self.odd(2, 9, 3 * 64, dtype=dtype)
        cosine, sine = rotary_tables(9, 8, device=self.device)
        sum(x.sum() for x in split_qkv(qkv, self.odd(192, dtype=dtype), 4, cosine=cosine, sine=sine)).backward()

    def attention(self, dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
        """Rows for a part of a warp, for a warp, a block, and longer ones."""
        for length, offset in product(lengths, (0, 1)):
            scores = self.odd(1, 2, 3, length, dtype=dtype, offset=offset)
            mask = torch.zeros(1, 1, 1, length, dtype=dtype, device=self.device)
            for ratio in (0.0, 0.1):
                probs = masked_softmax(scores, mask, ratio=ratio)
                # A gradient of its own memory: that of a sum is one number, which is copied to an aligned place.
                probs.backward(self.odd(*scores.shape, dtype=dtype, offset=offset).detach())
            causal_softmax(self.odd(2, 3, length, dtype=dtype)).sum().backward()
        probs = self.odd(7, 33, dtype=dtype).detach()
        run_dropout(probs, torch.tensor(5), 0.2)

    def codes(self, dtype: torch.dtype) -> None:
        """Codes of 8 and 4 bits, their sums, with kept errors, and signs."""
        grid = Grid(piece=1301, block=256, pieces=3)
        x = self.odd(grid.numel, dtype=dtype).detach()
        for bits in (8, 4):
            coded = [Coded.zeros(grid, bits, self.device) for _ in range(2)]
            error = Coded.zeros(grid, 8, self.device)
            block_quant.quantize(coded[0], x, grid)
            block_quant.quantize(coded[1], x, grid, error=error, beta=0.5)
            for other in (8, 4):
                into = Coded.zeros(grid, other, self.device)
                block_quant.sum_requantize(into, coded, grid)
                block_quant.sum_requantize(into, coded, grid, error=error, beta=0.5)
            block_quant.dequantize(x, coded[0], grid)
            block_quant.dequantize_add(x, coded[0], grid)
            block_quant.dequantize_sum(x, coded, grid, scale=0.5)
        for grad in (None, *KINDS):
            error = self.odd(2056).detach()
            x = self.odd(2051, dtype=dtype).detach()
            packed = torch.empty(257, dtype=torch.uint8, device=self.device)
            more = None if grad is None else self.odd(2051, dtype=grad).detach()
            one_bit.compensate(error[:2051], x, grad=more, take=0.5)
            one_bit.add_parts(error, [packed.fill_(5), packed], [0.5, 0.25])
            one_bit.encode(packed, error, 0.7)
            one_bit.decode(x, packed, 0.7)

    def states(self) -> None:
        """States in 8 bits, with and without signs and draws, and in 16, at odd places."""
        for count, offset, signed, seed in product((3, 2051), (0, 1), (True, False), (None, 5)):
            x, codes = self.odd(count, offset=offset).detach().abs(), torch.empty(count, dtype=torch.uint8)
            codes = codes.to(self.device)
            scales = torch.empty(state_codes.scale_count(count), device=self.device)
            state_codes.encode8(codes, scales, x, signed=signed, seed=seed, start=77)
            state_codes.decode8(x, codes, scales, signed=signed)
        for count, offset, kind in product((3, 2051), (0, 1), KINDS[1:]):
            x = self.odd(count, offset=offset).detach()
            high, low = (self.odd(count, dtype=kind, offset=offset).detach() for _ in range(2))
            state_codes.round_stochastic(high, x, seed=1, step=2, start=77)
            state_codes.split(high, low, x)
            state_codes.join(x, high, low)

    def tokens(self) -> None:
        """Tokens of 16, 8, 4, 2 and 1 bytes' alignment, named by both kinds of places."""
        for kind, width, offset in (
            (torch.float32, 8, 0), (torch.float32, 6, 0), (torch.float32, 3, 1), (torch.float16, 3, 1),
        ):  # fmt: skip
            for places in (torch.int64, torch.int32):
                into = self.odd(2, 10, width, dtype=kind, offset=offset)
                index = torch.tensor([[3, 1, 9], [0, 2, 4]], dtype=places, device=self.device)
                token_drop.scatter(token_drop.gather(into, index), index, into).sum().backward()
        bytes_ = torch.arange(60, dtype=torch.uint8).to(self.device).view(2, 10, 3)
        index = torch.tensor([[3, 1], [0, 2]], device=self.device)
        token_drop.scatter(token_drop.gather(bytes_, index), index, bytes_)
        token_drop.scatter(token_drop.gather(bytes_, index.int()), index.int(), bytes_)

    def rows(self, dtype: torch.dtype) -> None:
        """Rows of experts, whole packets and not, some choices dropped."""
        index = torch.tensor([[4, -1, 0], [2, 5, 1]], device=self.device)
        for width, offset in ((8, 0), (264, 0), (13, 1)):
            x = self.odd(2, width, dtype=dtype, offset=offset)
            weights = self.odd(2, 3).detach().requires_grad_()
            combine(permute(x, index, 7), index, weights).sum().backward()

    def sums(self, dtype: torch.dtype) -> None:
        """Sums of few and of most parts, of whole packets and not, into their own dtype and fp32."""
        for count, offset, out in product((2, device_sum.MOST_PARTS), (0, 1), {dtype, torch.float32}):
            parts = [self.odd(2051, dtype=dtype, offset=offset).detach() for _ in range(count)]
            device_sum.combine(self.odd(2051, dtype=out, offset=offset).detach(), parts, "sum", 0.5)

    def run(self) -> None:
        """All of them."""
        for kind in KINDS:
            for out in (None, torch.bfloat16, torch.float16):
                self.optimizers(torch.float32, kind, torch.float32, out)
            if kind != torch.float32:
                for grad in (torch.float32, kind):
                    for state in (torch.float32, kind):
                        self.optimizers(kind, grad, state, None)
            self.onebit(None if kind == torch.float32 else kind)
            self.layers(kind)
            self.attention(kind, (7, 64, 400, 704, 701, 8200, 9001))
            self.codes(kind)
            self.rows(kind)
            tensors = [self.odd(count, dtype=kind).detach() for count in (1, 33, 40_001)]
            device_norm.norm_and_finite(tensors)
            limbs = torch.zeros(exact_sum.LIMBS, dtype=torch.int64, device=self.device)
            exact_squares.add_squares(limbs, tensors, block=exact_squares.TILE)
            device_clip.norm_and_factor(limbs, limit=1.0)
            self.sums(kind)
        self.states()
        self.tokens()


def fault(device: str) -> None:
    """Writes the second element behind the last."""
    rows, index = torch.zeros(4099, dtype=torch.int64, device=device), torch.tensor([4100], device=device)
    found = launcher.for_tensor(rows)
    assert found is not None
    sizes = struct.pack("QQQQ", 1, 1, 4102, 1)
    found.launch("row_sources", (1, 1, 1), (32, 1, 1), rows.data_ptr(), index.data_ptr(), sizes)


def main() -> int:
    """Exit code 1 and the names if some kernels of the catalog were not run."""
    device, *rest = sys.argv[1:]
    if device != "host":
        fault(device) if rest else Faces(device).run()
        torch.cuda.synchronize()
        return 0
    from tests.helpers.cuda_host import HostLauncher

    host = HostLauncher()
    with launcher.standing_in(host):
        if rest:
            fault("cpu")
            return 0
        Faces("cpu").run()
    if missing := sorted(set(KERNELS) - set(host.launched)):
        sys.stderr.write(f"never launched: {missing}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
