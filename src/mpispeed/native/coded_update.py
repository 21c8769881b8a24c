"""Updates of parameters and states at rest: decoded, updated and coded again tile by tile, in one pass over memory.

The bits are those of decoding everything with `state_codes`, updating it with a rule of `multi_tensor_host` in fp32,
and coding it again; `update_reference` does that. A coded parameter is decoded once more for `out`, so that what is
published is what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpispeed.native import state_codes, status
from mpispeed.native.flat import KINDS, Terms
from mpispeed.native.multi_tensor_host import STATE_NAMES
from mpispeed.native.reference_updates import run_reference
from mpispeed.native.status import any_overlap, check_tensors, check_threads

RULES = ("adam", "adagrad", "lion")
"""Elementwise rules, in the order of their numbers in compiled code."""

_WIDE, _CODES, _HALVES, _PAIRS = range(4)


class Codes(NamedTuple):
    """8-bit codes. Shapes: codes uint8 [n], scales fp32 [ceil(n / 256)]; with a seed they are drawn."""

    codes: Tensor
    scales: Tensor
    signed: bool
    seed: int | None = None


class Halves(NamedTuple):
    """bf16 or fp16 [n]; with a seed rounded at random, else to the nearest."""

    values: Tensor
    seed: int | None = None


class Pairs(NamedTuple):
    """The nearest bf16 or fp16 [n], and those of what is left."""

    high: Tensor
    low: Tensor


Rest = Tensor | Codes | Halves | Pairs
"""What a parameter or a state rests in; a tensor is fp32, in place."""


def update(
    rule: str, param: Rest, states: Sequence[Rest], grad: Tensor, out: Tensor | None, terms: Terms, *, step: int,
    start: int = 0, threads: int = 1,
) -> None:  # fmt: skip
    """Update `param` and `states` in place by one of `RULES`.

    Args:
        rule: adam, adagrad or lion.
        param: [n].
        states: of `STATE_NAMES[rule]`, [n] each.
        grad: fp32, bf16 or fp16 [n].
        out: fp32, bf16 or fp16 [n]: receives the new parameter as it is kept, rounded to the nearest; None: nothing.
        terms: as for `HostTable.run`.
        step: of the training, and
        start: number of the first element, for random rounding.
        threads: on the host.

    Raises:
        ValueError: rule, numbers, layouts, lengths or devices do not fit.
        TypeError: a dtype does not fit.
    """
    count = _check(rule, param, states, grad, out, step, start, threads)
    if not count:
        return
    module = status.compiled("coded_optim") if grad.device.type == "cpu" else None
    if module is None:
        update_reference(rule, param, states, grad, out, terms, step=step, start=start, threads=threads)
        return
    places = [_place(rest) for rest in (param, *states)]
    target = (0, 0) if out is None else (out.data_ptr(), KINDS[out.dtype])
    source = (grad.data_ptr(), KINDS[grad.dtype])
    module.update(RULES.index(rule), places, source, target, count, tuple(terms), (step, start), threads)


@torch.no_grad()
def update_reference(
    rule: str, param: Rest, states: Sequence[Rest], grad: Tensor, out: Tensor | None, terms: Terms, *, step: int,
    start: int = 0, threads: int = 1,
) -> None:  # fmt: skip
    """As `update`, in passes over whole tensors, on any device, with the same bits."""
    _check(rule, param, states, grad, out, step, start, threads)
    wide = [_widened(rest, threads) for rest in (param, *states)]
    run_reference(rule, wide[0], wide[1:], grad, None, terms)
    for rest, values in zip((param, *states), wide, strict=True):
        if rest is not values:
            encode(rest, values, step=step, start=start, threads=threads)
    if out is not None:
        out.copy_(_widened(param, threads))


def decode(out: Tensor, rest: Rest, *, threads: int = 1) -> None:
    """Fill `out` with the values of what is at rest. Shapes: out [n], fp32.

    Raises:
        ValueError: lengths, layouts or devices do not fit.
        TypeError: a dtype does not fit.
    """
    if isinstance(rest, Tensor):
        out.copy_(rest)
    elif isinstance(rest, Codes):
        state_codes.decode8(out, rest.codes, rest.scales, signed=rest.signed, threads=threads)
    elif isinstance(rest, Halves):
        state_codes.decode16(out, rest.values, threads=threads)
    else:
        state_codes.join(out, rest.high, rest.low, threads=threads)


def encode(rest: Rest, values: Tensor, *, step: int = 0, start: int = 0, threads: int = 1) -> None:
    """Put values to rest; what `decode` gave comes back to the same codes. Shapes: values [n], fp32.

    Raises:
        ValueError: lengths, layouts, numbers or devices do not fit.
        TypeError: a dtype does not fit.
    """
    if isinstance(rest, Tensor):
        rest.copy_(values)
    elif isinstance(rest, Codes):
        state_codes.encode8(
            rest.codes, rest.scales, values, signed=rest.signed, seed=rest.seed, step=step, start=start, threads=threads
        )
    elif isinstance(rest, Pairs):
        # What is left of a value may round up to half of a last place, and the sum's own nearest be another: twice,
        # so that pairs made of sums, as a load makes them, are the same pairs.
        state_codes.split(rest.high, rest.low, values, threads=threads)
        total = torch.empty_like(values)
        state_codes.join(total, rest.high, rest.low, threads=threads)
        state_codes.split(rest.high, rest.low, total, threads=threads)
    elif rest.seed is not None:
        state_codes.round_stochastic(rest.values, values, seed=rest.seed, step=step, start=start, threads=threads)
    else:
        state_codes.encode16(rest.values, values, threads=threads)


def _widened(rest: Rest, threads: int) -> Tensor:
    if isinstance(rest, Tensor):
        return rest
    wide = torch.empty(rest[0].numel(), device=rest[0].device)
    decode(wide, rest, threads=threads)
    return wide


def _place(rest: Rest) -> tuple[int, tuple[int, int], int, bool, int | None]:
    if isinstance(rest, Tensor):
        return _WIDE, (rest.data_ptr(), 0), 0, False, None
    if isinstance(rest, Codes):
        places = (rest.codes.data_ptr(), rest.scales.data_ptr())
        return _CODES, places, 0, rest.signed, None if rest.seed is None else rest.seed % 2**64
    if isinstance(rest, Halves):
        seed = None if rest.seed is None else rest.seed % 2**64
        return _HALVES, (rest.values.data_ptr(), 0), KINDS[rest.values.dtype], False, seed
    return _PAIRS, (rest.high.data_ptr(), rest.low.data_ptr()), KINDS[rest.high.dtype], False, None


def _check(
    rule: str, param: Rest, states: Sequence[Rest], grad: Tensor, out: Tensor | None, step: int, start: int,
    threads: int,
) -> int:  # fmt: skip
    where = f"coded {rule}"
    check_threads(where, threads)
    if rule not in RULES or len(states) != len(STATE_NAMES[rule]):
        msg = f"{where} with {len(states)} states; rules are {', '.join(RULES)}, with those of STATE_NAMES"
        raise ValueError(msg)
    if not 0 <= step < 2**63 or not 0 <= start < 2**62:
        msg = f"{where}: step {step} and start {start}; pass numbers that are not negative"
        raise ValueError(msg)
    found: dict[str, Tensor] = {"grad": grad} if out is None else {"grad": grad, "out": out}
    for name, rest in zip(("param", *STATE_NAMES[rule]), (param, *states), strict=True):
        parts = {name: rest} if isinstance(rest, Tensor) else {
            f"{name}.{part}": x for part, x in rest._asdict().items() if isinstance(x, Tensor) and part != "scales"
        }  # fmt: skip
        found.update(parts)
        _check_dtypes(where, name, rest)
    kept = [x for name, x in found.items() if name != "out"]
    count = check_tensors(where, found, device=grad.device)
    if any_overlap(kept):
        msg = f"{where}: two tensors share memory; give each its own"
        raise ValueError(msg)
    for rest in (param, *states):
        if isinstance(rest, Codes):
            state_codes.check_codes(where, rest.codes, rest.scales)
    for name, x in {"grad": grad, **({} if out is None else {"out": out})}.items():
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            msg = f"{where}: {name} has dtype {x.dtype}; use fp32, bf16 or fp16"
            raise TypeError(msg)
    return count


def _check_dtypes(where: str, name: str, rest: Rest) -> None:
    if isinstance(rest, Codes):
        return  # `check_codes` has looked at them
    parts = [rest] if isinstance(rest, Tensor) else [x for x in rest if isinstance(x, Tensor)]
    wanted = (torch.float32,) if isinstance(rest, Tensor) else (torch.bfloat16, torch.float16)
    if any(x.dtype not in wanted or x.dtype != parts[0].dtype for x in parts):
        found = " and ".join(str(x.dtype) for x in parts)
        msg = f"{where}: {name} is {type(rest).__name__} of {found}; use one of {', '.join(map(str, wanted))}"
        raise TypeError(msg)
