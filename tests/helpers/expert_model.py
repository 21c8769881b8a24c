"""A small model with two layers of experts, and its training by plain torch.

That loops over all experts in one process, with the tokens of all ranks, and uses nothing of mpispeed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import mpispeed
from mpispeed.moe import MoE
from mpispeed.nn.expert import RoutedExperts, Router, RouterOptions, SwiGLUExperts
from mpispeed.pipe import LayerSpec

HIDDEN, INNER, WIDE = 6, 5, 8
SEED, STEPS, LR = 11, 2, 0.3
BALANCE = 0.01
"""Factor of the balance losses."""

CAPACITY = 0.6
"""An expert takes this part of what it would have of balanced tokens, so that some are dropped."""

Params = dict[str, torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor]

TOKENS: dict[str, Callable[[int, int, int], int]] = {
    "none": lambda rank, micro, step: (0, 6, 3, 0)[(rank + micro + step) % 4] * (step == 0 or micro > 0),
    "unequal": lambda rank, micro, step: (7, 1, 4, 10)[(rank + 2 * micro + step) % 4],
    "equal": lambda rank, micro, step: 5,
}
"""Tokens of a data rank's micro-batch; with "none" some have none, and in the first of the second step no rank has."""

# -- the model ---------------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """What of the model can be chosen."""

    experts: int
    k: int
    has_capacity: bool
    is_residual: bool
    slices_experts: bool = False


State = tuple[torch.Tensor, torch.Tensor]
"""Hidden values and the sum of balance losses so far, which go from layer to layer."""


class Front(nn.Module):
    """The first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> State:
        return self.linear(x), x.new_zeros(())


class Block(nn.Module):
    """An expert that returns a tuple, as some do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str]:
        return self.outer(torch.tanh(self.inner(x))), "more"


class Mixture(nn.Module):
    """DeepSpeed's layer."""

    def __init__(self, shape: Shape, ep_size: int) -> None:
        super().__init__()
        self.moe = MoE(
            HIDDEN, Block(), shape.experts, k=shape.k, capacity_factor=CAPACITY, min_capacity=1, use_rts=False,
            drop_tokens=shape.has_capacity, enable_expert_tensor_parallelism=shape.slices_experts,
            use_residual=shape.is_residual, top2_2nd_expert_sampling=False,
        )  # fmt: skip
        for number, expert in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts.children()):
            for param in expert.parameters():
                param.data += 0.05 * number * torch.linspace(-1, 1, param.numel()).view_as(param)
        self.moe.ep_size = self.moe.deepspeed_moe.ep_size = ep_size  # made with all experts, as no two are alike

    def forward(self, state: State) -> State:
        y, loss, _ = self.moe(state[0])
        return state[0] + y, state[1] + loss


class Perceptron(nn.Module):
    """A part that slices cut."""

    def __init__(self) -> None:
        super().__init__()
        self.perceptron = nn.Sequential(nn.Linear(HIDDEN, WIDE), nn.Tanh(), nn.Linear(WIDE, HIDDEN))

    def forward(self, state: State) -> State:
        return state[0] + self.perceptron(state[0]), state[1]


class Fused(nn.Module):
    """A layer of parts, with experts in common tensors."""

    def __init__(self, shape: Shape, ep_size: int) -> None:
        super().__init__()
        capacity = CAPACITY if shape.has_capacity else None
        gate = Router(HIDDEN, shape.experts, RouterOptions(k=shape.k, capacity_factor=capacity, min_capacity=1))
        shared = nn.Linear(HIDDEN, HIDDEN) if shape.is_residual else None
        experts = SwiGLUExperts(HIDDEN, INNER, shape.experts)
        self.routed = RoutedExperts(gate, experts, shared, ep_size=ep_size, slices_experts=shape.slices_experts)

    def forward(self, state: State) -> State:
        y, routing = self.routed(state[0])
        return state[0] + y, state[1] + routing.balance_loss


class Head(nn.Module):
    """The last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, state: State) -> State:
        return self.linear(state[0]), state[1]


SLICES = {"perceptron.0": "column", "perceptron.2": "row"}
EXPERT_SLICES = {"inner": "column", "outer": "row"}


def specs(shape: Shape, ep_size: int = 1) -> list[LayerSpec]:
    """The layers."""
    inner = LayerSpec(Mixture, shape, ep_size), LayerSpec(Perceptron), LayerSpec(Fused, shape, ep_size)
    return [LayerSpec(Front), *inner, LayerSpec(Head)]


def loss_of(state: State, y: torch.Tensor) -> torch.Tensor:
    """A sum over tokens, so that it is 0 without tokens."""
    return (state[0].float() - y).square().sum() / 32 + BALANCE * state[1]


def mean_loss(state: State, y: torch.Tensor) -> torch.Tensor:
    """A mean over tokens, which does not depend on the ranks that they are on."""
    return (state[0] - y).square().mean()


class Whole(nn.Sequential):
    """All layers in one module, with values that no stage changes."""

    def __init__(
        self,
        shape: Shape,
        ep_size: int = 1,
        *,
        recomputes: bool = False,
        loss_fn: Callable[..., torch.Tensor] = loss_of,
    ) -> None:
        made = []
        with torch.random.fork_rng(devices=[]):
            for index, spec in enumerate(specs(shape, ep_size)):
                torch.manual_seed(SEED + index)
                made.append(spec.build())
        super().__init__(*made)
        self.recomputes, self.loss_fn = recomputes, loss_fn

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        for layer in self:
            x = mpispeed.checkpointing.checkpoint(layer, x) if self.recomputes else layer(x)
        return self.loss_fn(x, y)


# -- the same by plain torch -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What one process found. `batches` by step, micro-batch and data rank; the others by step."""

    batches: list[list[list[Batch]]]
    losses: list[float]
    grads: list[Params]
    norms: list[float]
    weights: list[Params]


@cache
def expected(shape: Shape, data: int, tokens: str, accumulation: int, clip: float, margin: float) -> Expected:
    """Train in one process.

    Args:
        shape: of the model.
        data: ranks whose tokens there are.
        tokens: a key of `TOKENS`.
        accumulation: micro-batches of each rank and step.
        clip: largest norm; 0: any.
        margin: least distance of a chosen logit and any other, so that no rounding changes a choice.
    """
    params = {name: value.detach().clone().requires_grad_() for name, value in Whole(shape).named_parameters()}
    generator = torch.Generator().manual_seed(3)
    found = Expected([], [], [], [], [])
    for step in range(STEPS):
        batches: list[list[Batch]] = []
        total = torch.zeros(())
        for micro in range(accumulation):
            counts = [TOKENS[tokens](rank, micro, step) for rank in range(data)]
            batches.append([_draw(params, shape, count, margin, generator) for count in counts])
            total = total + sum(_plain_loss(params, shape, x[0], y[0])[0] for x, y in batches[-1])
        loss = total / (data * accumulation)
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True, materialize_grads=True)
        norm = float(torch.cat([grad.reshape(-1) for grad in grads]).norm())
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        with torch.no_grad():
            for param, grad in zip(params.values(), grads, strict=True):
                param -= LR * factor * grad
        found.batches.append(batches)
        found.losses.append(float(loss.detach()))
        found.grads.append(dict(zip(params, grads, strict=True)))
        found.norms.append(norm)
        found.weights.append({name: param.detach().clone() for name, param in params.items()})
    return found


def _draw(params: Params, shape: Shape, count: int, margin: float, generator: torch.Generator) -> Batch:
    """Tokens whose choices are clear. Shapes: [1, count, HIDDEN]."""
    x, y = torch.randn(2, 40 + 40 * count, HIDDEN, generator=generator)
    with torch.no_grad():
        _, distances = _plain_loss(params, shape._replace(has_capacity=False), x, y)
    is_clear = distances >= margin
    x, y = x[is_clear][:count], y[is_clear][:count]
    assert len(x) == count, f"{is_clear.sum()} of {len(is_clear)} tokens are clear"
    return x[None], y[None]


def _plain_loss(params: Params, shape: Shape, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of one rank's tokens, and each token's distance to another choice."""
    x = _linear(params, "0.linear", x)
    added, first_loss, first = _routed(params, "1.moe.deepspeed_moe", shape, x, _module_expert)
    if shape.is_residual:
        share = torch.softmax(_linear(params, "1.moe.coefficient", x), -1)
        added = added * share[:, :1] + _two_linears(params, "1.moe.mlp", x) * share[:, 1:]
    x = x + added
    x = x + _linear(params, "2.perceptron.2", torch.tanh(_linear(params, "2.perceptron.0", x)))
    added, second_loss, second = _routed(params, "3.routed", shape, x, _fused_expert)
    if shape.is_residual:
        added = added + _linear(params, "3.routed.shared", x)
    x = _linear(params, "4.linear", x + added)
    return (x - y).square().sum() / 32 + BALANCE * (first_loss + second_loss), torch.minimum(first, second)


def _linear(params: Params, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, params[f"{name}.weight"], params[f"{name}.bias"])


def _two_linears(params: Params, name: str, x: torch.Tensor) -> torch.Tensor:
    return _linear(params, f"{name}.outer", torch.tanh(_linear(params, f"{name}.inner", x)))


def _module_expert(params: Params, layer: str, number: int, x: torch.Tensor) -> torch.Tensor:
    return _two_linears(params, f"{layer}.experts.deepspeed_experts.{number}", x)


def _fused_expert(params: Params, layer: str, number: int, x: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ params[f"{layer}.experts.gate_up_proj"][number].t()).chunk(2, -1)
    return (F.silu(gate) * up) @ params[f"{layer}.experts.down_proj"][number].t()


def _routed(
    params: Params, layer: str, shape: Shape, x: torch.Tensor, expert: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weighted outputs of experts, balance loss, distance of each token's choices to others."""
    count, k, tokens = shape.experts, shape.k, max(len(x), 1)
    logits = x @ params[f"{layer}.gate.wg.weight"].t()
    probabilities = torch.softmax(logits, -1)
    best = logits.topk(min(k + 1, count), -1)
    chosen = best.indices[:, :k]
    rule = {2: "first", 3: "score"}.get(k, "position") if layer.startswith("1.") else "position"
    kept = _kept(chosen.tolist(), logits.tolist(), shape, rule)
    weights = probabilities.gather(1, chosen) * kept
    if k > 1:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).eps)
    y = torch.zeros_like(x)
    for number in range(count):
        at, choice = (kept.bool() & (chosen == number)).nonzero(as_tuple=True)
        y = y.index_add(0, at, weights[at, choice, None] * expert(params, layer, number, x[at]))
    counted = chosen[:, :1] if k == 2 else chosen
    share = torch.bincount(counted.reshape(-1), minlength=count) / tokens
    loss = count / (k if k > 2 else 1) * (probabilities.sum(0) / tokens * share).sum()
    distance = (best.values[:, :-1] - best.values[:, 1:]).detach().min(-1).values
    return y, loss, distance


def _kept(chosen: list[list[int]], logits: list[list[float]], shape: Shape, rule: str) -> torch.Tensor:
    """1 for choices that their expert takes, in the order of the rule."""
    kept = torch.ones(len(chosen), shape.k)
    if not shape.has_capacity:
        return kept
    capacity = max(math.ceil(len(chosen) / shape.experts * CAPACITY * shape.k), 1)
    numbers = [(token, choice) for token in range(len(chosen)) for choice in range(shape.k)]
    order = {"first": lambda at: at[::-1], "score": lambda at: -logits[at[0]][chosen[at[0]][at[1]]]}
    taken = [0] * shape.experts
    for token, choice in sorted(numbers, key=order.get(rule, lambda at: at)):
        number = chosen[token][choice]
        kept[token, choice] = taken[number] < capacity
        taken[number] += 1
    return kept
