"""Findings of the doctor: one line each, with a verdict and a cure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

MOST_ALIKE = 2
"""Up to so many nodes, differing words are all shown."""


class Verdict(str, enum.Enum):
    """Verdict on a finding, from good to bad; `INFO` is neither."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    Attributes:
        area: heading it stands under.
        name: what was looked at.
        verdict: `FAIL` is what no run can do without.
        detail: what was seen.
        cure: what to do about it; "" where nothing needs to be done.
        place: nodes it holds for; "" for all that were looked at.
    """

    area: str
    name: str
    verdict: Verdict
    detail: str
    cure: str = ""
    place: str = ""

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return {
            "area": self.area, "name": self.name, "verdict": self.verdict.value, "detail": self.detail,
            "cure": self.cure, "place": self.place,
        }  # fmt: skip


def from_dict(plain: Mapping[str, Any]) -> Finding:
    """Make a finding from `as_dict`'s result."""
    return Finding(**{**plain, "verdict": Verdict(plain["verdict"])})


def merge(by_node: Mapping[str, Iterable[Finding]]) -> list[Finding]:
    """Merge findings of several nodes: those equal everywhere appear once, the rest with their nodes.

    If many nodes differ only in the words of good findings, those of the first one stand for all. The order is that
    of the first node; findings of other nodes only come last.
    """
    nodes = {node: list(dict.fromkeys(found)) for node, found in by_node.items()}
    subjects: dict[tuple[str, str], dict[Finding, list[str]]] = {}
    for node, found in nodes.items():
        for finding in found:
            subjects.setdefault((finding.area, finding.name), {}).setdefault(finding, []).append(node)
    return [finding for places in subjects.values() for finding in _merge_subject(places, len(nodes))]


def _merge_subject(places: Mapping[Finding, list[str]], nodes: int) -> list[Finding]:
    if len(places) > MOST_ALIKE and {finding.verdict for finding in places} <= {Verdict.OK, Verdict.INFO}:
        first, where = next(iter(places.items()))
        others = len({node for found in places.values() for node in found} - {where[0]})
        return [replace(first, detail=f"{first.detail} (on {where[0]}; {others} others are good too)")]
    return [
        finding if len(found) == nodes else replace(finding, place=list_names(found))
        for finding, found in places.items()
    ]


def list_names(names: Iterable[object], most: int = 8) -> str:
    """The first names, and their total number if there are more."""
    listed = [str(name) for name in names]
    shown = ", ".join(listed[:most])
    return shown if len(listed) <= most else f"{shown}, ... ({len(listed)} in all)"


def has_failed(findings: Iterable[Finding]) -> bool:
    """True if anything is missing that every run needs."""
    return any(finding.verdict is Verdict.FAIL for finding in findings)
