"""Multi-tensor apply on the host: many tensors updated by one rule in one call into compiled code.

All work is in fp32 (fp64 for fp64 parameters), with t = step and g = grad * grad_scale; each stored value is
rounded once to its dtype, to nearest even. L2 decay adds weight_decay * p to g; decoupled decay takes
lr * weight_decay * p from p before the step:

    Adam     m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
             p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    Adagrad  s = s + g^2;  p = p - lr / (1 + (t - 1) lr_decay) * g / (sqrt(s) + eps)
    Lion     p = p - lr * sign(beta1 m + (1 - beta1) g);  m = beta2 m + (1 - beta2) g
    LAMB     m, v as Adam;  q = m / (sqrt(v) + eps) + weight_decay * p
             p = p - lr * sqrt(1 - beta2^t) / (1 - beta1^t) * r * q,  r = |p| / |q| between its limits

Parameter and states are fp32, both of one 16-bit dtype, or a 16-bit parameter with fp32 states; gradients are fp32,
bf16 or fp16. `out` (bf16 or fp16) receives the new parameter, rounded; it may be the memory of the gradient. Compiled
code runs for these, the reference in torch for fp64. Bits do not depend on threads, on the vector width, nor, except
for LAMB, on the division of tensors into ranges. LAMB's norms are sums of fp64 over fixed blocks in a fixed order.

Sources: Kingma and Ba, ICLR 2015; Loshchilov and Hutter, ICLR 2019; Duchi et al., JMLR 2011; Chen et al.,
NeurIPS 2023 (Lion); You et al., ICLR 2020 (LAMB).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpispeed.base.errors import UsageError
from mpispeed.native import status
from mpispeed.native.flat import KINDS, Terms
from mpispeed.native.reference_updates import lamb_first, lamb_second, run_reference
from mpispeed.native.status import any_overlap, check_tensors, check_threads, is_same_memory, overlaps

STATE_NAMES = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "adagrad": ("sum",),
    "lion": ("exp_avg",),
    "lamb": ("exp_avg", "exp_avg_sq"),
    "onebit_adam": ("exp_avg",),
    "zero_one_coded": ("exp_avg", "exp_avg_sq"),
    "zero_one_local": ("exp_avg", "momentum_accumulator", "exp_avg_sq"),
    "zero_one_drift": ("momentum_accumulator",),
    "zero_one_settle": ("exp_avg", "momentum_accumulator", "exp_avg_sq"),
}
"""States of every rule, in the order of `Row.states`.

"onebit_adam" and "zero_one_drift" take exp_avg_sq, which they only read, as the gradient, and the latter the buffer
to fill as the parameter. "zero_one_local" leaves the parameter as it is; the new one goes to `Row.out`, also in fp32.
"""

PAIRS = frozenset(
    {
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float64),
    }
)
"""(parameter, state) dtypes that can be updated; the last pair only by the reference."""

_NUMBERS = {name: number for number, name in enumerate(STATE_NAMES)}
_COMPILED = (torch.float32, torch.bfloat16, torch.float16)


class Row(NamedTuple):
    """One tensor of a table. Shapes: all tensors are contiguous, on one device and of equal length."""

    param: Tensor
    states: tuple[Tensor, ...]
    grad: Tensor
    out: Tensor | None = None
    lot: int = 0  # which of the terms given to `run`


class HostTable:
    """Tensors that a rule updates together, with their addresses prepared once for many calls.

    The table keeps parameters, states and outs alive, but gradients only until the first `run`.
    """

    def __init__(self, rule: str, rows: Iterable[Row]) -> None:
        """Raises as `check_row`."""
        self.rule = rule
        self._rows: list[Row] = list(rows)
        for row in self._rows:
            check_row(rule, row)
        fits = all(_has_loop(row) for row in self._rows)
        module = status.compiled("cpu_optim") if fits else None
        self._table: Any = None if module is None else module.Table([_packed(row) for row in self._rows])
        self._grads: list[Tensor] | None = [row.grad for row in self._rows]
        self._grad_dtypes = [row.grad.dtype for row in self._rows]
        nothing = torch.empty(0)
        self._rows = [row._replace(grad=nothing) for row in self._rows]
        held = [row.param for row in self._rows] + [row.out for row in self._rows if row.out is not None]
        self._addresses = [x.data_ptr() for x in held]

    def take(self, params: list[Tensor], grads: list[Tensor], outs: list[Tensor]) -> bool:
        """Take new gradients for the rows; False, and nothing taken, if the table does not fit these tensors.

        It fits if parameters and outs (all or none) are at their old addresses, and gradients are of the same dtypes,
        contiguous and in host memory. The caller keeps the gradients alive until `run` returns.
        """
        capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)  # not in every supported torch
        if self._table is not None and capsule is not None:
            taken: bool = self._table.take(capsule, (Tensor, nn.Parameter), params, grads, outs)
        else:
            taken = self._take_slowly(params, grads, outs)
        self._grads = grads if taken else None
        return taken

    def _take_slowly(self, params: list[Tensor], grads: list[Tensor], outs: list[Tensor]) -> bool:
        lengths = [row.param.numel() for row in self._rows]
        if [x.data_ptr() for x in (*params, *outs)] != self._addresses or [x.numel() for x in params] != lengths:
            return False
        if [x.dtype for x in grads] != self._grad_dtypes or any(x.layout != torch.strided for x in grads):
            return False
        if any(x.device.type != "cpu" or not x.is_contiguous() for x in grads) or [x.numel() for x in grads] != lengths:
            return False
        if self._table is not None:
            self._table.set_grads([grad.data_ptr() for grad in grads])
        return True

    @property
    def is_compiled(self) -> bool:
        """True if compiled loops run; otherwise the reference does."""
        return self._table is not None

    def run(self, terms: Sequence[Terms], *, threads: int = 1) -> list[float]:
        """Update everything in place with the terms of each lot; gives the trust ratio of each row for LAMB, else [].

        Bits do not depend on `threads`.

        Raises:
            ValueError: `threads` is below 1.
            UsageError: gradients were not given since the last run.
        """
        check_threads(self.rule, threads)
        grads = self._used_grads()
        if self._table is not None:
            ratios: list[float] = self._table.run(_NUMBERS[self.rule], [tuple(entry) for entry in terms], threads)
            return ratios
        found = [
            run_reference(self.rule, row.param, row.states, grad, row.out, terms[row.lot])
            for row, grad in zip(self._rows, grads, strict=True)
        ]
        return found if self.rule == "lamb" else []

    def _used_grads(self) -> list[Tensor]:
        grads, self._grads = self._grads, None
        if grads is None:
            msg = f"{self.rule}: the table has no gradients; give it those of this update with `take`"
            raise UsageError(msg)
        return grads

    def run_first(self, terms: Sequence[Terms], *, threads: int = 1) -> list[tuple[float, float]]:
        """First half of LAMB: the states; returns the sums of squares of parameter and direction of each row.

        Raises:
            ValueError: `threads` is below 1.
            UsageError: gradients were not given since the last run.
        """
        check_threads(self.rule, threads)
        grads = self._used_grads()
        if self._table is not None:
            found = self._table.run(_NUMBERS["lamb"], [tuple(entry) for entry in terms], threads, 1)
            return list(zip(found[::2], found[1::2], strict=True))
        rows = zip(self._rows, grads, strict=True)
        return [lamb_first(row.param, row.states, grad, terms[row.lot]) for row, grad in rows]

    def run_second(self, terms: Sequence[Terms], ratios: Sequence[float], *, threads: int = 1) -> None:
        """Second half of LAMB: parameters and outs, from the states and the trust ratio of each row, without gradients.

        Raises:
            ValueError: `threads` is below 1.
        """
        check_threads(self.rule, threads)
        if self._table is not None:
            self._table.run(_NUMBERS["lamb"], [tuple(entry) for entry in terms], threads, 2, list(ratios))
            return
        for row, ratio in zip(self._rows, ratios, strict=True):
            lamb_second(row.param, row.states, row.out, terms[row.lot], ratio)


def check_row(rule: str, row: Row, device: torch.device | None = None) -> None:
    """Check that a row can be updated, on the host or on `device`.

    Raises:
        ValueError: lengths, layouts, devices or overlaps do not fit.
        TypeError: a tensor is not of a floating dtype, or parameter and state are of dtypes that do not go together.
    """
    tensors = {"master": row.param, **dict(zip(STATE_NAMES[rule], row.states, strict=True)), "grad": row.grad}
    if row.out is not None:
        tensors["out"] = row.out
    elif rule == "zero_one_local":
        msg = f"{rule}: there is no out; the new parameter goes there, and the master stays as it is"
        raise ValueError(msg)
    check_tensors(rule, tensors, device=device)
    for name, x in tensors.items():
        if not x.dtype.is_floating_point:
            msg = f"{rule}: {name} has dtype {x.dtype}; this rule works on floating-point tensors"
            raise TypeError(msg)
    for name, state in zip(STATE_NAMES[rule], row.states, strict=True):
        check_pair(rule, row.param.dtype, state.dtype, name)
    if any_overlap(tensors.values()):
        _refuse_overlap(rule, tensors)


def check_pair(rule: str, param: torch.dtype, state: torch.dtype, name: str = "state") -> None:
    """Check that there is an update for parameters and states of these dtypes.

    Raises:
        TypeError: there is none; the message names both.
    """
    if (param, state) not in PAIRS:
        msg = (
            f"{rule}: the parameter has dtype {param} and {name} has dtype {state}; a state is fp32, or of the "
            "parameter's dtype, which is fp32, fp16, bf16 or fp64"
        )
        raise TypeError(msg)


def _refuse_overlap(rule: str, tensors: dict[str, Tensor]) -> None:
    """Name the two that share memory, unless it is only `out` in the place of the gradient."""
    for (name_a, a), (name_b, b) in combinations(tensors.items(), 2):
        if overlaps(a, b) and not ((name_a, name_b) == ("grad", "out") and is_same_memory(a, b)):
            msg = f"{rule}: {name_a} and {name_b} share memory; give each its own buffer"
            raise ValueError(msg)


def _has_loop(row: Row) -> bool:
    dtypes = (row.param.dtype, row.grad.dtype, *(state.dtype for state in row.states))
    is_one_state = len({state.dtype for state in row.states}) == 1
    return is_one_state and all(x in _COMPILED for x in dtypes) and (row.out is None or row.out.dtype in _COMPILED)


def _packed(row: Row) -> tuple[int, ...]:
    states = [state.data_ptr() for state in row.states] + [0, 0]
    out = 0 if row.out is None else row.out.data_ptr()
    kinds = (KINDS[x.dtype] for x in (row.param, row.states[0], row.grad))
    out_kind = 0 if row.out is None else KINDS[row.out.dtype]
    return (row.param.data_ptr(), *states[:3], row.grad.data_ptr(), out, row.param.numel(), *kinds, out_kind, row.lot)
