"""Reductions as torch.distributed names them, for the verbs of a group."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp

from mpispeed.base.errors import CommError

_KINDS: Any = ReduceOp.RedOpType  # its stub lists no members
_NAMES = {
    _KINDS.SUM: "sum",
    _KINDS.AVG: "avg",
    _KINDS.PRODUCT: "prod",
    _KINDS.MIN: "min",
    _KINDS.MAX: "max",
    _KINDS.BAND: "band",
    _KINDS.BOR: "bor",
    _KINDS.BXOR: "bxor",
    _KINDS.PREMUL_SUM: "sum",
}


class Reduction(NamedTuple):
    """The name of a verb's operation, and the factor of a sum whose parts are multiplied first."""

    op: str = "sum"
    factor: float = 1.0


SUM = Reduction()


def reduction_of(options: Any) -> Reduction:
    """The reduction in the options of a call, or given in their place.

    Raises:
        CommError: torch knows an operation that is unknown here, or the factors of a sum are not one number.
    """
    given = getattr(options, "reduceOp", options)
    if given is None:
        return SUM
    kind = getattr(given, "op", given)
    name = _NAMES.get(kind)
    if name is None:
        msg = f"the reduction {given!r} is unknown; choose one of {', '.join(str(known) for known in _NAMES)}"
        raise CommError(msg)
    if kind != _KINDS.PREMUL_SUM:
        return Reduction(name)
    # The factor has no accessor; its pickle is the one public place that has it.
    factor = given.__getstate__()[1]
    if isinstance(factor, torch.Tensor) and factor.numel() != 1:
        msg = f"PREMUL_SUM with a factor of {factor.numel()} elements; give one number, or multiply the tensor before"
        raise CommError(msg)
    return Reduction(name, float(factor))
