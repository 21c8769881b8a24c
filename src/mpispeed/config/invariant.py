"""Settings that `reduction` "invariant" rules out: with them bits would depend on the ranks."""

from __future__ import annotations

from collections.abc import Iterator

from mpispeed.config import optimizer as known
from mpispeed.config.problems import Problem, show
from mpispeed.config.root import Config

_ZERO = "zero_optimization"
_OR = 'or set reduction to "ordered"'


def check_invariant(config: Config) -> Iterator[Problem]:
    """Conflicts with `reduction` "invariant"; none without it."""
    if config.reduction != "invariant":
        return
    for path, found, why, cure in (*_rows_of_data(config), *_rows(config)):
        yield Problem(path, f'{found} does not work with reduction "invariant": {why}', f"{cure}, {_OR}")


def _rows_of_data(config: Config) -> Iterator[tuple[str, str, str, str]]:
    """As `_rows`, for what looks at the micro-batches of a rank."""
    if config.eigenvalue.enabled:
        yield "eigenvalue.enabled", "true", "it looks at the last micro-batches of each rank", "set it to false"
    if config.elasticity.enabled:
        why = "it chooses the micro-batches of a step by the ranks"
        yield "elasticity.enabled", "true", why, "set it to false: a run takes up any divisor of its micro-batches"


def _rows(config: Config) -> Iterator[tuple[str, str, str, str]]:
    """Path, value, reason and cure."""
    zero, leave = config.zero_optimization, "leave the key out"
    whole = "nothing is divided before the sum over all micro-batches is complete"
    if config.prescale_gradients:
        yield "prescale_gradients", "true", whole, leave
    if config.gradient_predivide_factor != 1:
        yield "gradient_predivide_factor", f"{config.gradient_predivide_factor}", whole, leave
    if config.sparse_gradients:
        yield "sparse_gradients", "true", "rows are added in the order of ranks", leave
    cut = "blocks of codes are cut by the ranks"
    for key in ("zero_quantized_gradients", "zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        if getattr(zero, key):
            yield f"{_ZERO}.{key}", "true", cut, leave
    if zero.mics_shard_size > 0:
        why = "sums inside groups of ranks come before those between groups"
        yield f"{_ZERO}.mics_shard_size", f"{zero.mics_shard_size}", why, f"use {_ZERO}.zero_hpz_partition_size"
    yield from _optimizers(config)
    if config.pipeline.schedule in ("zb-h1", "interleaved"):
        why = "gradients of several micro-batches arrive at once"
        yield "pipeline.schedule", show(config.pipeline.schedule), why, "use 1f1b or gpipe"


def _optimizers(config: Config) -> Iterator[tuple[str, str, str, str]]:
    name, stage = (config.optimizer.type if config.optimizer else "") or "", config.zero_optimization.stage
    if name.lower() in known.ONEBIT:
        yield "optimizer.type", show(name), "each rank compresses what it has", "use Adam or AdamW"
    if name.lower() == "lamb" and stage:
        why = f"norms of parameters are added up from the parts of ranks at {_ZERO}.stage {stage}"
        yield "optimizer.type", show(name), why, f"set {_ZERO}.stage to 0, use AdamW"
