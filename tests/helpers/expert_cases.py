"""Every way that an engine trains the model of `expert_model`, compared with plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mpispeed import features as registry
from mpispeed.nn.expert import RoutedExperts
from mpispeed.nn.tensor import cuts
from mpispeed.pipe import PipelineModule, PipeModelDataParallelTopology
from mpispeed.sharding.access import get_full_grads
from tests.helpers.covering import IS_FULL, pairwise
from tests.helpers.expert_model import (
    EXPERT_SLICES,
    LR,
    SEED,
    SLICES,
    STEPS,
    TOKENS,
    Batch,
    Expected,
    Params,
    Shape,
    Whole,
    expected,
    loss_of,
    specs,
)  # fmt: skip
from tests.zoo.training import config, start, weights

CLIP = 0.05
EXACT = 1e-5
"""Of the largest element of a tensor, fp32: sums have another order."""


def _offload(tier: str, device: str) -> dict[str, Any]:
    section: dict[str, Any] = {"device": device}
    if device == "nvme":
        section |= {"nvme_path": "FOLDER", **({"max_in_cpu": 0} if tier == "param" else {})}
    return {f"offload_{tier}": section}


@dataclass(frozen=True)
class Way:
    """Something else that a run has beside experts.

    Attributes:
        zero: keys of zero_optimization.
        more: other sections.
        stages: of ZeRO at which it can be.
        ranks: numbers of ranks at which it can be.
        pipe, model: sizes of axes.
        slices_experts: experts are cut too.
        bound: of gradients and weights; `EXACT`, or after the first step and relative to the largest of all.
        is_exact_for_experts: it is `EXACT` for gradients of experts that are shared out.
    """

    zero: dict[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = (0, 1, 2, 3)
    ranks: tuple[int, ...] = (1, 2, 3, 4)
    pipe: int = 1
    model: int = 1
    slices_experts: bool = False
    bound: float = EXACT
    is_exact_for_experts: bool = False
    more: dict[str, Any] = field(default_factory=dict)


WAYS = {
    "plain": Way(),
    "slices": Way(ranks=(2, 4), model=2),
    "slices of experts": Way(ranks=(2, 4), model=2, slices_experts=True),
    "pipeline": Way(ranks=(2, 4), pipe=2),
    "both": Way(ranks=(4,), pipe=2, model=2),
    # Values are off by 2**-9 (bf16) and 2**-12 after each of some dozens of operations.
    "bf16": Way(bound=0.05, more={"bf16": {"enabled": True}}),
    "fp16": Way(bound=0.01, more={"fp16": {"enabled": True, "initial_scale_power": 8}}),
    "mics": Way({"mics_shard_size": 2}, (3,), (2, 4)),
    "hpz": Way({"zero_hpz_partition_size": 2}, (3,), (2, 4)),
    # 8 bits: a weight is off by 1/254 of its block's largest, and gradients are products of several; 0.03 was found.
    "qwz": Way({"zero_quantized_weights": True, "zero_quantized_in_node": True}, (3,), (2, 3, 4), bound=0.05),
    # 4 bits: a rank's gradient is off by 1/14 of its block's largest, which is above that of the mean; 0.12 was found.
    "qgz": Way({"zero_quantized_gradients": True}, (1, 2, 3), (4,), bound=0.2, is_exact_for_experts=True),
    **{f"states in {at}": Way(_offload("optimizer", at), (1, 2, 3)) for at in ("cpu", "nvme")},
    **{f"weights in {at}": Way(_offload("param", at), (3,)) for at in ("cpu", "nvme")},
}


class Steps(NamedTuple):
    """What a step is: its micro-batches, the largest norm (0: any), and whether passes are recomputed."""

    accumulation: int = 1
    clip: float = 0.0
    recomputes: bool = False

    def __str__(self) -> str:
        return f"a{self.accumulation}{'-clip' * bool(self.clip)}{'-recomputed' * self.recomputes}"


LAYOUTS = ((4, 2), (4, 4), (3, 3), (2, 2), (1, 1), (4, 1), *(((3, 1), (2, 1)) if IS_FULL else ()))
"""Numbers of ranks, and those that share experts out; the most telling first, which fill rows up."""

STEPPING = (Steps(2, clip=CLIP), Steps(2, recomputes=True), Steps())


class Case(NamedTuple):
    """One way to train. `ep`: ranks that share experts out."""

    ranks: int
    ep: int
    way: str
    stage: int
    k: int
    tokens: str
    has_capacity: bool
    is_residual: bool
    steps: Steps

    def __str__(self) -> str:
        marks = [("capacity", self.has_capacity), ("residual", self.is_residual)]
        more = "".join(f"-{word}" for word, holds in marks if holds)
        text = f"ep{self.ep}-{self.way}-z{self.stage}-k{self.k}-{self.tokens}{more}-{self.steps}"
        return text.replace(" ", "_")

    @property
    def data(self) -> int:
        """Size of the data axis."""
        way = WAYS[self.way]
        return self.ranks // (way.pipe * way.model)

    @property
    def is_rounded(self) -> bool:
        """True if some message has fewer bits."""
        return WAYS[self.way].bound > EXACT

    @property
    def shape(self) -> Shape:
        """The model, whose experts divide over their ranks or not; 4 ranks may be more than there are experts."""
        experts = {1: 6 if self.ep == 4 else 3, 2: 6, 3: 5}[self.k]
        return Shape(experts, self.k, self.has_capacity, self.is_residual, WAYS[self.way].slices_experts)

    def fits(self) -> bool:
        """True if there is such a run."""
        way = WAYS[self.way]
        if self.stage not in way.stages or self.ranks not in way.ranks:
            return False
        if (self.ranks, self.ep) == (4, 1) and not (IS_FULL or way.pipe * way.model > 1):
            return False  # one rank has it too
        # Which tokens are dropped by their scores has no distance that rounded weights leave alone.
        return self.data % self.ep == 0 and not (self.is_rounded and self.k == 3 and self.has_capacity)


def cases() -> list[Case]:
    """Every pair of values of two fields in few cases; under MPISPEED_MATRIX=full all, with `STEPPING` in turn."""
    kinds = tuple(itertools.product((True, False), (True, False)))
    values = [LAYOUTS, tuple(WAYS), (3, 2, 1, 0), (2, 1, 3), tuple(TOKENS), kinds, STEPPING]
    found = [_case(row) for row in pairwise(*values, fits=lambda *row: _case(row).fits())]
    count = len(STEPPING)
    return [case for at, case in enumerate(found) if at % count == at // count % count] if IS_FULL else found


def _case(row: tuple[Any, ...]) -> Case:
    (ranks, ep), way, stage, k, tokens, (has_capacity, is_residual), steps = row
    return Case(ranks, ep, way, stage, k, tokens, has_capacity, is_residual, steps)


# -- runs --------------------------------------------------------------------------------------------------------------


def of_case(case: Case) -> Expected:
    """What plain torch finds."""
    margin = 0.05 if case.is_rounded else 1e-3
    return expected(case.shape, case.data, case.tokens, case.steps.accumulation, case.steps.clip, margin)


Loss = Callable[..., torch.Tensor]


def make(case: Case, folder: Path, shape: Shape | None = None, loss_fn: Loss = loss_of, **more: Any) -> Any:
    """The engine; `shape` and `more` replace what the case says of the model and the config.

    Collective over: all ranks.
    """
    shape = shape or case.shape
    way = WAYS[case.way]
    zero = {key: _placed(value, folder) for key, value in way.zero.items()}
    micros, clip = case.steps.accumulation, case.steps.clip
    settings = config(
        case.stage, case.data * micros, micros, zero=zero, gradient_clipping=clip,
        optimizer={"type": "SGD", "params": {"lr": LR}}, zero_allow_untested_optimizer=True,
    )  # fmt: skip
    if way.model > 1:
        settings["tensor_parallel"] = {"autotp_size": way.model, "injection_policy_tuple": dict(SLICES)}
        if way.slices_experts:
            settings["tensor_parallel"]["injection_policy_tuple"] |= EXPERT_SLICES
    if way.pipe == 1:
        return start(
            settings | way.more | more, Whole(shape, case.ep, recomputes=case.steps.recomputes, loss_fn=loss_fn)
        )
    model = PipelineModule(
        specs(shape, case.ep), loss_fn=loss_fn, seed_layers=True, base_seed=SEED,
        topology=PipeModelDataParallelTopology(num_pp=way.pipe, num_mp=way.model, num_dp=case.data),
        activation_checkpoint_interval=int(case.steps.recomputes),
    )  # fmt: skip
    return start(settings | way.more | more, model)


def _placed(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {key: str(folder) if found == "FOLDER" else found for key, found in value.items()}
    return value


@contextmanager
def collected() -> Iterator[list[Params]]:
    """Context in which engines are built whose summed gradients of each step are in the list, of this rank's parts."""
    found: list[Params] = []

    def attach(context: Any) -> registry.Hooks:
        def collect(ctx: Any) -> None:
            named = dict(context.module.named_parameters())
            grads = get_full_grads(named.values())
            found.append(
                {name: grad.float() / ctx.scale for name, grad in zip(named, grads, strict=True) if grad is not None}
            )

        return registry.Hooks([(registry.Place.SUMMED, collect)])  # type: ignore[list-item]

    registry.register(registry.Feature("collected", attach))
    try:
        yield found
    finally:
        registry.unregister("collected")


def step(engine: Any, case: Case, batches: list[list[Batch]]) -> float:
    """One step; the loss of this data rank, or of all in a pipeline. Collective over: all ranks."""
    own = [micro[engine.mesh.index("data")] for micro in batches]
    if WAYS[case.way].pipe > 1:
        return float(engine.train_batch(iter(own)))
    total = 0.0
    dtype = next(engine.module.parameters()).dtype
    for x, y in own:
        total += float(engine.backward(engine(x.to(dtype), y)).detach())
        engine.step()
    return total


Visit = Callable[[Any, int, Params], None]


def run(case: Case, folder: Path, visit: Visit) -> None:
    """Train; `visit` gets the engine, the number of the step and its gradients. Collective over: all ranks."""
    wanted = of_case(case)
    with collected() as grads:
        engine = make(case, folder)
    for number in range(1 if case.is_rounded else STEPS):
        step(engine, case, wanted.batches[number])
        visit(engine, number, grads[number])
    engine.destroy()


def bits(case: Case, folder: Path) -> list[torch.Tensor]:
    """Norms, gradients and weights of all steps. Collective over: all ranks."""
    found: list[torch.Tensor] = []

    def visit(engine: Any, number: int, grads: Params) -> None:
        found.extend([torch.tensor(engine.get_global_grad_norm()), *grads.values(), *weights(engine).values()])

    run(case, folder, visit)
    return found


def check(case: Case, folder: Path) -> None:
    """Train and compare gradients, weights and norms of each step. Collective over: all ranks."""
    wanted, way = of_case(case), WAYS[case.way]
    problems: list[str] = []

    def visit(engine: Any, number: int, grads: Params) -> None:
        of_experts = EXACT if way.is_exact_for_experts else way.bound
        problem = compare(engine, grads, wanted.grads[number], way.bound, of_experts)
        problem = problem or compare(engine, weights(engine), wanted.weights[number], way.bound, way.bound)
        norm, least = engine.get_global_grad_norm(), wanted.norms[number]
        if abs(norm - least) > way.bound * least:
            problem = problem or f"the norm is {norm}, not {least}"
        problems.extend(filter(None, engine.mesh.world.comm.gather_objects(problem and f"step {number}: {problem}")))

    run(case, folder, visit)
    assert not problems, "; ".join(dict.fromkeys(problems))


def compare(engine: Any, found: Params, whole: Params, usual: float, of_experts: float) -> str:
    """The first parameter that is not this rank's part of what there is, or "".

    `usual` and `of_experts` are bounds, the latter of experts that are shared out.

    Collective over: the slices.
    """
    known, slices, problem = cuts(engine.module), engine.mesh["model"], ""
    layers = [(name, part) for name, part in engine.module.named_modules() if isinstance(part, RoutedExperts)]
    for name, value in found.items():
        cut, part, bound = known.get(name), whole[name], usual
        if cut is not None and cut.kind != "replicated":
            value = cut.join(slices.gather_objects(value))
        for layer, routed in layers:
            if name.startswith(f"{layer}.experts."):
                part = (
                    part
                    if ".deepspeed_experts." in name
                    else part[routed.experts.held.start : routed.experts.held.stop]
                )
                bound = of_experts if routed.ep_size > 1 else bound
        scale = part if bound == EXACT else torch.cat([each.reshape(-1) for each in whole.values()])
        largest = max(float(scale.abs().max()), 1e-3)
        error = float((value - part).abs().max())
        if value.shape != part.shape or error > bound * largest:
            problem = problem or f"{name}: {error} of {largest}"
    return problem
