"""What a 1-bit optimizer's engine holds and sends in each step, beside what was predicted."""

from __future__ import annotations

from typing import Any

from mpispeed.engine.estimate.budget import gather_inputs, predict
from mpispeed.exchange.onebit.plan import PHASES
from mpispeed.optim.exchange import Exchange
from tests.helpers.onebit_training import kind_of, run_step, samples

STEPS = 12
"""All kinds of steps are among them: 0/1 Adam is local for the first time in step 11."""


def compare(engine: Any, model: Any) -> set[Exchange]:
    """Train for `STEPS` and compare every step; gives the kinds of steps that were seen. `model` is as at the start.

    Collective over: all ranks.
    """
    budget, comm_trace = predict(gather_inputs(engine.mpispeed.parts.plan, model)), engine.mesh.comm_trace
    phases = {phase.name: phase for phase in budget.phases}
    assert phases[PHASES[Exchange.GRADIENT]].sent == budget.sent
    seen: set[Exchange] = set()
    for step, batch in enumerate(samples(STEPS), start=1):
        kind = kind_of(engine, step)
        first = f"first {PHASES[kind]}"
        name = first if kind not in seen and first in phases else PHASES[kind]
        comm_trace.reset()
        run_step(engine, batch)
        sent: dict[str, int] = {}
        for (verb, _), entry in comm_trace.entries().items():
            sent[verb] = sent.get(verb, 0) + entry.bytes
        expected: dict[str, int] = {}
        for row in phases[name].sent:
            expected[row.verb] = expected.get(row.verb, 0) + row.bytes
        assert {verb: size for verb, size in sent.items() if size} == expected, (step, name)
        seen.add(kind)
    held = held_bytes(engine)
    assert {what: budget.bytes_of(what) for what in held} == held
    assert sum(phase.name.startswith("first") for phase in budget.phases) == (held["1-bit momentum"] > 0)
    return seen


def held_bytes(engine: Any) -> dict[str, int]:
    """Kind of state -> bytes on this rank, after a step in which momenta, gradients or drifts were coded."""
    parts, optimization = engine.mpispeed.parts.params, engine.mpispeed.parts.optimization
    coded = optimization.exchange.coder
    errors = sum(one.nbytes for one in coded.errors.values())
    return {
        "parameters": parts.shards.param_bytes,
        "masters": parts.shards.master_bytes,
        "optimizer state": optimization.states.state_bytes,
        "gradients": optimization.grads.shards.rest_bytes,
        "1-bit errors": errors,
        "1-bit momentum": coded.nbytes - errors,  # this model has no element without a gradient
    }
