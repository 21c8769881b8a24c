"""Features that change the numbers of a run: sums by slots, optimizers of matrices and widths, dtypes; and memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.engine.matrix_update import MatrixUpdate
from tests.helpers.feature import BATCH, CLOSE, EXACT, FINAL, UP, Feature, put, together, zero
from tests.helpers.feature_models import Block

if TYPE_CHECKING:
    from tests.helpers.pairs import Run

SLOTS = 4
"""Micro-batches of a global batch, unless accumulation asks for more of each rank."""


def _invariant(settings: dict[str, Any], folder: Path) -> None:
    del folder
    slots = SLOTS * int(settings.get("gradient_accumulation_steps", 1))
    settings |= {"reduction": "invariant", "train_micro_batch_size_per_gpu": BATCH // slots}


def _has_slots(run: Run) -> bool:
    slots = run.engine.plan.slots
    return slots is not None and slots.per_rank == len(run.engine.slots) == run.engine.gradient_accumulation_steps()


def _has_owners(run: Run) -> bool:
    """True if matrices were made orthogonal by owners."""
    parts = [part for part in run.engine.updates._parts if isinstance(part, MatrixUpdate)]
    return len(parts) == 1 and any(group.matrices for group in parts[0].found)


def _scales_by_width(run: Run) -> bool:
    rates = run.engine.get_lr()
    return min(rates) == 0.5 * max(rates)


def _states_rest_in(words: set[str]) -> Any:
    def seen(run: Run) -> bool:
        """All states of the optimizer on this rank are stores of codes."""
        states, units = run.engine.mpispeed.parts.optimization.states, run.engine.mpispeed.parts.table.units
        found = [(unit, name, stored) for unit in units for name, stored in states.tensors(unit).items()]
        return all(unit.states.codes.slot(name).word in words for unit, name, _ in found) and all(
            type(stored).__name__ == "CodedTensor" for _, _, stored in found
        )

    return seen


def _masters_are_pairs(run: Run) -> bool:
    """Masters of this rank rest in two numbers of 16 bits."""
    return all(
        unit.states.codes.master.rounding == "kahan" and unit.states.codes.master.dtype == torch.bfloat16
        for unit in run.engine.mpispeed.parts.table.units
    )


def _ran_in(dtype: torch.dtype, param: torch.dtype | None = None) -> Any:
    """True if the last block of this rank, where it has any, ran under autocast; and what parameters are."""

    def seen(run: Run) -> bool:
        has_blocks = any(isinstance(each, Block) for each in run.engine.module.modules())
        kinds = {each.dtype for each in run.engine.module.parameters()}
        return (not has_blocks or Block.ran_in == dtype) and (param is None or kinds <= {param})

    return seen


def _limits(run: Run) -> Any:
    return run.engine.plan.fetch_limits


NUMBERS: tuple[Feature, ...] = (
    Feature("invariant sums", ("invariant", "micro-batch"), _has_slots, _invariant, keeps=CLOSE),
    Feature(
        "Muon", ("muon",), _has_owners, put("optimizer", {"type": "Muon", "params": {"lr": 1e-2}}), keeps=FINAL,
        kind="optimizer",
    ),
    Feature(
        "MuAdamW", ("muadamw", "infshape"), _scales_by_width,
        put("optimizer", {"type": "MuAdamW", "params": {"lr": 1e-2}}), keeps=FINAL, kind="optimizer",
    ),
    Feature(
        "states in 8 bits", ("optimizer_states", "states"), _states_rest_in({"int8"}),
        put("data_types.optimizer_states", "int8"), keeps=FINAL, is_rounding=True,
    ),
    Feature(
        "masters in bf16", ("master_dtype", "masters"), _masters_are_pairs,
        together(put("bf16", {"enabled": True}), put("data_types.master_dtype", "bf16"),
                 put("data_types.master_rounding", "kahan")),
        keeps=FINAL, is_rounding=True,
    ),
    Feature(
        "torch_autocast", ("autocast",), _ran_in(torch.bfloat16),
        put("torch_autocast", {"enabled": True, "dtype": "bfloat16"}), keeps=FINAL, is_rounding=True,
    ),
    Feature(
        "amp", ("amp",), _ran_in(torch.float16, torch.float16),
        put("amp", {"enabled": True, "opt_level": "O2", "max_loss_scale": 64}), keeps=FINAL, is_rounding=True,
    ),
    Feature(
        "stage3_max_live_parameters", ("live",), lambda run: _limits(run).live == _limits(run).reuse == 10**9,
        together(zero("stage3_max_live_parameters", 10**9), zero("stage3_max_reuse_distance", 10**9)), UP, EXACT,
    ),
)  # fmt: skip
