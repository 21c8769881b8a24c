"""ZeRO as a table: which state is cut over which axes at which stage. The only module that maps stages.

Source: Rajbhandari et al., SC20, section 5 (P_os, P_os+g).
"""

from __future__ import annotations

from dataclasses import dataclass

from mpispeed.store.placement import WHOLE, Placement

DATA = Placement(("data",))


@dataclass(frozen=True, slots=True)
class States:
    """Where each kind of model state rests. Gradients are summed into the masters' placement."""

    param: Placement
    grad: Placement
    master: Placement


STATES_BY_STAGE: dict[int, States] = {
    0: States(param=WHOLE, grad=WHOLE, master=WHOLE),
    1: States(param=WHOLE, grad=WHOLE, master=DATA),
    2: States(param=WHOLE, grad=DATA, master=DATA),
}
