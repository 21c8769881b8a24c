"""The table of exchanges: which one serves an update rule, what it costs, and how it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpispeed.exchange.cost import SUMS_ALONE, ExchangeCost
from mpispeed.exchange.onebit import attach as onebit
from mpispeed.exchange.quantized_sums import QuantizedSums
from mpispeed.exchange.strategy import ExchangeStrategy
from mpispeed.optim.exchange import Exchanges
from mpispeed.sharding.quantized import QuantizedReducer

if TYPE_CHECKING:
    from mpispeed.exchange.making import Making
    from mpispeed.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class ExchangeKind:
    """One row of the table.

    Attributes:
        serves: True for the rules whose exchange it is.
        make: makes the strategy of a run. Collective over: all ranks.
        cost: its costs under a plan, for a rule; a ConfigError if the plan rules it out.
    """

    serves: Callable[[Any], bool]
    make: Callable[[Making], ExchangeStrategy]
    cost: Callable[[Plan, Any], ExchangeCost]


def _make_sums(making: Making) -> ExchangeStrategy:
    """Sums of gradients: quantized with kept errors, or plain."""
    reducer = making.sums.reducer
    if isinstance(reducer, QuantizedReducer) and reducer.keeps_errors:
        return QuantizedSums(making.mesh, making.params.table, making.sums, reducer, making.rule)
    return ExchangeStrategy(making.sums, making.rule)


KINDS = (
    ExchangeKind(lambda rule: isinstance(rule, Exchanges), onebit.make, onebit.cost),
    ExchangeKind(lambda _: True, _make_sums, lambda _, __: SUMS_ALONE),
)
"""The first that serves a rule counts."""


def kind_of(rule: Any) -> ExchangeKind:
    """The row for a rule; None or no rule at all: sums of gradients."""
    return next(kind for kind in KINDS if kind.serves(rule))
