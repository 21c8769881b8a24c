"""Rows and sentences of `mpispeed plan` on activations and the longest sequence that fits."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mpispeed.base.units import format_bytes

if TYPE_CHECKING:
    from mpispeed.engine.estimate.activations import Activations
    from mpispeed.plan.plan import Plan


def as_values(found: Activations | None) -> dict[str, Any] | None:
    """For JSON; traffic is in a table of its own."""
    return None if found is None else {name: value for name, value in asdict(found).items() if name != "sent"}


def activation_rows(found: Activations | None) -> list[tuple[str, str, str]]:
    """Rows of the table of what one rank holds."""
    if found is None or found.refusal:
        return []
    rows = {
        "activations of a micro-batch, at most": found.peak_bytes,
        "of them after forward": found.kept_bytes,
        "of them of a layer": found.layer_bytes,
    }
    return [(what, "device", format_bytes(size)) for what, size in rows.items() if size]


def longest_sentence(resolved: Plan, longest: int) -> str:
    """The longest sequence that fits, in words."""
    if not longest:
        return "no sequence fits: states of the model need all memory"
    ranks = resolved.topology().group_size("sequence")
    shared = f", {-(-longest // ranks)} on each of {ranks} ranks that share it" if ranks > 1 else ""
    return f"longest sequence that fits: {longest} tokens{shared}"
