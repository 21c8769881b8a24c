"""Parameters of 1-bit optimizers that are accepted, as in DeepSpeed, and change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ONEBIT: dict[str, tuple[Any, str]] = {
    "bias_correction": (False, "1-bit optimizers correct no bias"),
    "eps_inside_sqrt": (False, "eps is added to the square root"),
    "cuda_aware": (False, "MPI is asked what it can send"),
    "comm_backend_name": ("mpi", "the exchange always runs over MPI"),
}
"""Name -> what is done anyway, and why nothing else is."""


def find_ineffective(params: Mapping[str, Any]) -> dict[str, str]:
    """Why a parameter has no effect, for each that asks for something else than what is done."""
    return {key: why for key, (done, why) in ONEBIT.items() if params.get(key, done) not in (done, "auto")}
