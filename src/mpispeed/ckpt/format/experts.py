"""Experts of a checkpoint by layer: parameters of one expert each, known by number and name, or of all in one tensor.

The number of an expert is a part of its names (`layers.3.experts.5.up`); what comes before it is the layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from mpispeed.ckpt.format.logical import ALL_EXPERTS, ParamInfo

MOST_SPLIT = 1 << 13
"""Tensors of more experts are not looked at expert by expert, which takes a step or row for each."""
_WORD = "expert"


@dataclass(slots=True)
class ExpertLayer:
    """The experts of one layer.

    Attributes:
        name: what the names of its parameters begin with.
        totals: how many experts there are, as its parameters say; one number, unless they contradict each other.
        members: number of the expert -> what follows it in the name -> parameter.
        fused: what follows the name of the layer -> parameter with all experts along its first dim.
    """

    name: str
    totals: set[int] = field(default_factory=set)
    members: dict[int, dict[str, ParamInfo]] = field(default_factory=dict)
    fused: dict[str, ParamInfo] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """How many experts there are."""
        return max(self.totals)

    @property
    def params(self) -> Iterator[ParamInfo]:
        """Its parameters."""
        yield from self.fused.values()
        for own in self.members.values():
            yield from own.values()


def layers(params: Iterable[ParamInfo]) -> dict[str, ExpertLayer]:
    """Layer -> its experts; parameters whose names do not have the number of their expert are left out."""
    found: dict[str, ExpertLayer] = {}
    for param in params:
        place = _place(param)
        if param.expert is None or place is None:
            continue
        layer = found.setdefault(place[0], ExpertLayer(place[0]))
        layer.totals.add(param.expert[1])
        if param.expert[0] == ALL_EXPERTS:
            layer.fused[place[1]] = param
        else:
            layer.members.setdefault(param.expert[0], {})[place[1]] = param
    return found


def _place(param: ParamInfo) -> tuple[str, str] | None:
    """Layer, and the rest of the name; the number is taken behind a word with "expert", else at the end."""
    parts = param.name.split(".")
    if param.expert is None:
        return None
    if param.expert[0] == ALL_EXPERTS:
        return ".".join(parts[:-1]), parts[-1]
    behind = [at + 1 for at, (word, part) in enumerate(pairwise(parts)) if _WORD in word and part.isdecimal()]
    hits = [at for at in behind or range(len(parts)) if parts[at] == str(param.expert[0])]
    return (".".join(parts[: hits[-1]]), ".".join(parts[hits[-1] + 1 :])) if hits else None


def summary(params: Iterable[ParamInfo]) -> str:
    """Layers x experts, as "12x8", or "2x4,10x8"; "" without experts."""
    counts = Counter(layer.total for layer in layers(params).values())
    return ",".join(f"{count}x{total}" for total, count in sorted(counts.items()))


def faults(params: Mapping[str, ParamInfo]) -> Iterator[str]:
    """What is wrong with experts, in sentences: missing ones, numbers that are there twice, shapes that differ."""
    for name, param in params.items():
        if param.expert is not None and _place(param) is None and _has_number(name):
            yield (
                f"{name!r} is said to be of expert {param.expert[0]} of {param.expert[1]}: the number in its name is "
                "another, so that one is missing and one is there twice"
            )
    for layer in layers(params.values()).values():
        yield from _faults_of(layer)


def _has_number(name: str) -> bool:
    return any(_WORD in word and part.isdecimal() for word, part in pairwise(name.split(".")))


def _faults_of(layer: ExpertLayer) -> Iterator[str]:
    if len(layer.totals) > 1:
        yield f"experts of {layer.name} are said to be {' and '.join(map(str, sorted(layer.totals)))} in number"
        return
    if not layer.members:
        return
    have = sorted(layer.members)
    if len(have) < layer.total:
        missing = next((place for place, number in enumerate(have) if place != number), len(have))
        lacking = layer.total - len(have)
        more = f", and {lacking - 1} others of its {layer.total} are missing" if lacking > 1 else ""
        yield f"expert {missing} of {layer.total} of {layer.name} is missing{more}"
    first = layer.members[have[0]]
    for number in have[1:]:
        own = layer.members[number]
        for rest in sorted(first.keys() - own.keys()):
            yield f"expert {number} of {layer.name} lacks {rest!r}, which expert {have[0]} has"
        for rest in sorted(own.keys() - first.keys()):
            yield f"expert {number} of {layer.name} has {rest!r}, which expert {have[0]} lacks"
        for rest in sorted(own.keys() & first.keys()):
            if own[rest].shape != first[rest].shape:
                yield (
                    f"{own[rest].name!r} of expert {number} is of shape {own[rest].shape}, that of expert {have[0]} "
                    f"of shape {first[rest].shape}"
                )
