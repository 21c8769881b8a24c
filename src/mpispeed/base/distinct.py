"""A mark on parameters that neighbouring data ranks do not have in common, such as experts.

Set by the module that makes them, and read where units are dealt.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mpispeed.base.errors import UsageError

_MARK = "mpispeed_distinct_over"


def mark_distinct(params: Iterable[torch.Tensor], ranks: int) -> None:
    """Mark parameters of which each of `ranks` neighbours on the data axis has values of its own.

    The data axis is divided into groups of `ranks` neighbours. Ranks at the same place of their groups have equal
    values, and gradients that are partial sums. All ranks mark the same parameters, before `initialize`.

    Raises:
        UsageError: `ranks` is no positive number, or a parameter has another mark.
    """
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        msg = f"parameters differ over {ranks!r} ranks; give a whole number of at least 1"
        raise UsageError(msg)
    for param in params:
        known = getattr(param, _MARK, ranks)
        if known != ranks:
            msg = f"a parameter of shape {tuple(param.shape)} is marked to differ over {known} ranks, not over {ranks}"
            raise UsageError(msg)
        setattr(param, _MARK, ranks)


def distinct_over(param: torch.Tensor) -> int:
    """Number of neighbours on the data axis that have values of their own of `param`; 1 for ordinary parameters."""
    ranks: int = getattr(param, _MARK, 1)
    return ranks
