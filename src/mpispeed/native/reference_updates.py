"""Reference of the update rules in torch, operation by operation as the compiled loops: bitwise equal on every device.

Work is in fp64 for fp64 parameters and in fp32 otherwise; each stored value is rounded once to its own dtype.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from mpispeed.native.flat import DECAY_DECOUPLED, DECAY_L2, REFERENCE_SPAN, Terms, divisor

BLOCK = 1024  # elements of a block of LAMB's sums
_LANES = 16

Element = Callable[[Tensor, Sequence[Tensor], Tensor, Terms], tuple[Tensor, Sequence[Tensor]]]
"""(parameter, states, scaled gradient with L2 decay, terms) in the working dtype -> new parameter, new states."""


@torch.no_grad()
def run_reference(
    rule: str, param: Tensor, states: Sequence[Tensor], grad: Tensor, out: Tensor | None, terms: Terms
) -> float:
    """One update of contiguous tensors by a rule of `multi_tensor_host`; returns LAMB's trust ratio, or 1."""
    flat = [x.detach().view(-1) for x in (param, *states, grad)]
    flat_out = None if out is None else out.detach().view(-1)
    if rule == "lamb":
        return _lamb(flat[0], flat[1:-1], flat[-1], flat_out, terms)
    element = _ELEMENTS[rule]
    work = _working_dtype(param)
    for begin in range(0, param.numel(), REFERENCE_SPAN):
        p, *parts, g = (x[begin : begin + REFERENCE_SPAN] for x in flat)
        given = g.to(work) if rule in _NO_GRADIENT else _gradient(p, g, terms)
        updated, states_now = element(p.to(work), [x.to(work) for x in parts], given, terms)
        for part, value in zip(parts, states_now, strict=True):
            part.copy_(value)
        if rule != "zero_one_local":
            p.copy_(updated)
        if flat_out is not None:
            flat_out[begin : begin + REFERENCE_SPAN].copy_(updated)
    return 1.0


def _working_dtype(param: Tensor) -> torch.dtype:
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def _gradient(p: Tensor, g: Tensor, t: Terms) -> Tensor:
    work = _working_dtype(p)
    g = g.to(work) * t.grad_scale
    return g + p.to(work) * t.decay if t.decay_mode == DECAY_L2 else g


def root(x: Tensor) -> Tensor:
    """The square root, correctly rounded."""
    return x.double().sqrt().to(x.dtype)  # torch's own fp32 root can be one bit off


def _decayed(p: Tensor, t: Terms) -> Tensor:
    return p - p * t.decay if t.decay_mode == DECAY_DECOUPLED else p


def _moments(m: Tensor, v: Tensor, g: Tensor, t: Terms) -> tuple[Tensor, Tensor]:
    return m * t.beta1 + g * (1.0 - t.beta1), v * t.beta2 + g * (1.0 - t.beta2) * g


def _adam(p: Tensor, states: Sequence[Tensor], g: Tensor, t: Terms) -> tuple[Tensor, Sequence[Tensor]]:
    m, v = _moments(states[0], states[1], g, t)
    return _decayed(p, t) - m / (root(v) * t.root_scale + t.eps) * t.step_size, (m, v)


def _adagrad(p: Tensor, states: Sequence[Tensor], g: Tensor, t: Terms) -> tuple[Tensor, Sequence[Tensor]]:
    s = states[0] + g * g
    return _decayed(p, t) - g / (root(s) + t.eps) * t.step_size, (s,)


def _lion(p: Tensor, states: Sequence[Tensor], g: Tensor, t: Terms) -> tuple[Tensor, Sequence[Tensor]]:
    u = states[0] * t.beta1 + g * (1.0 - t.beta1)
    one = torch.ones_like(u)
    sign = torch.where(u > 0, one, torch.where(u < 0, -one, u))  # NaN stays
    return _decayed(p, t) - sign * t.step_size, (states[0] * t.beta2 + g * (1.0 - t.beta2),)


def _unless_unseen(x: Tensor, v: Tensor) -> Tensor:
    return torch.where(v == 0, torch.zeros_like(x), x)


def _quotient(m: Tensor, v: Tensor, t: Terms) -> Tensor:
    return _unless_unseen(m / (root(v) + t.eps), v)


def _onebit_adam(p: Tensor, states: Sequence[Tensor], v: Tensor, t: Terms) -> tuple[Tensor, Sequence[Tensor]]:
    return _decayed(p, t) - _quotient(states[0], v, t) * t.step_size, (_unless_unseen(states[0], v),)


def _zero_one_coded(p: Tensor, states: Sequence[Tensor], g: Tensor, t: Terms) -> tuple[Tensor, Sequence[Tensor]]:
    v = states[1]
    m = _unless_unseen(states[0] * t.beta1 + g * (1.0 - t.beta1), v)
    return _decayed(p, t) - _quotient(m, v, t) * t.step_size, (m, v)


def _zero_one_local(p: Tensor, states: Sequence[Tensor], g: Tensor, t: Terms) -> tuple[Tensor, Sequence[Tensor]]:
    m, u, v = states
    m = _unless_unseen(m * t.beta1 + g * (1.0 - t.beta1), v)
    u = u - (p + u) * t.decay if t.decay_mode == DECAY_DECOUPLED else u
    u = u - _quotient(m, v, t) * t.step_size
    return p + u, (m, u, v)


def _zero_one_drift(_p: Tensor, states: Sequence[Tensor], v: Tensor, t: Terms) -> tuple[Tensor, Sequence[Tensor]]:
    return _unless_unseen(states[0] * (root(v) + t.eps), v), states


def _zero_one_settle(p: Tensor, states: Sequence[Tensor], g: Tensor, t: Terms) -> tuple[Tensor, Sequence[Tensor]]:
    _, u, v = states
    moved = torch.where(v == 0, u, g / (root(v) + t.eps))
    m = _unless_unseen(-g / divisor(t.root_scale, g), v)
    return p + moved, (m, torch.zeros_like(u), v)


_ELEMENTS: dict[str, Element] = {
    "adam": _adam,
    "adagrad": _adagrad,
    "lion": _lion,
    "onebit_adam": _onebit_adam,
    "zero_one_coded": _zero_one_coded,
    "zero_one_local": _zero_one_local,
    "zero_one_drift": _zero_one_drift,
    "zero_one_settle": _zero_one_settle,
}
_NO_GRADIENT = frozenset({"onebit_adam", "zero_one_drift", "zero_one_settle"})  # something else is in its place


def _lamb(param: Tensor, states: Sequence[Tensor], grad: Tensor, out: Tensor | None, t: Terms) -> float:
    ratio = trust_ratio(*lamb_first(param, states, grad, t), t)
    lamb_second(param, states, out, t, ratio)
    return ratio


@torch.no_grad()
def lamb_first(param: Tensor, states: Sequence[Tensor], grad: Tensor, t: Terms) -> tuple[float, float]:
    """Update the moments; gives the sums of squares of the parameter and of the direction. Flat tensors."""
    work = _working_dtype(param)
    weights: list[float] = []
    directions: list[float] = []
    for begin in range(0, param.numel(), REFERENCE_SPAN):
        p, m, v, g = (x[begin : begin + REFERENCE_SPAN] for x in (param, *states, grad))
        for part, value in zip((m, v), _moments(m.to(work), v.to(work), _gradient(p, g, t), t), strict=True):
            part.copy_(value)
        weights += block_squares(p.to(work))
        directions += block_squares(_direction(p, m, v, t))
    return reduce(operator.add, weights, 0.0), reduce(operator.add, directions, 0.0)


@torch.no_grad()
def lamb_second(param: Tensor, states: Sequence[Tensor], out: Tensor | None, t: Terms, ratio: float) -> None:
    """Update the parameter and `out` from the moments and the trust ratio. Flat tensors."""
    work = _working_dtype(param)
    for begin in range(0, param.numel(), REFERENCE_SPAN):
        p, m, v = (x[begin : begin + REFERENCE_SPAN] for x in (param, *states))
        updated = p.to(work) - _direction(p, m, v, t) * (t.step_size * ratio)
        p.copy_(updated)
        if out is not None:
            out[begin : begin + REFERENCE_SPAN].copy_(updated)


def trust_ratio(weights: float, directions: float, t: Terms) -> float:
    """|p| / |q| within the limits, from the sums of squares; 1 where one of them is 0."""
    if weights == 0.0 or directions == 0.0:
        return 1.0
    ratio = math.sqrt(weights) / math.sqrt(directions)
    ratio = t.most if ratio > t.most else ratio
    return t.least if ratio < t.least else ratio  # NaN stays


def _direction(p: Tensor, m: Tensor, v: Tensor, t: Terms) -> Tensor:
    work = _working_dtype(p)
    wide = v.to(work)
    q = m.to(work) / (root(wide + t.eps) if t.is_eps_inside else root(wide) + t.eps)
    return q + p.to(work) * t.decay if t.decay_mode == DECAY_DECOUPLED else q


def block_squares(x: Tensor) -> list[float]:
    """Sums of squares of blocks of `BLOCK` elements, each in sixteen fp64 lanes joined in the order of the loops."""
    wide = torch.zeros(-(-x.numel() // BLOCK) * BLOCK, dtype=torch.float64, device=x.device)
    wide[: x.numel()] = x
    rows = wide.square_().view(-1, BLOCK // _LANES, _LANES)
    lanes = rows[:, 0].clone()
    for row in range(1, BLOCK // _LANES):
        lanes += rows[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes.view(-1).tolist()
