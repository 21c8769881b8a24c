"""The layers that a pass leaves out, and the scale of those that it keeps.

Layer l of L (l from 1) runs with probability p = 1 - (l / L) (1 - theta); what it adds is scaled by 1 / p, so that its
expectation is that of the layer which always runs. A decision is a function of seed, global step, micro-batch and
layer: it is the same on all ranks, which gather parameters together, and when backward runs a pass again. Where results
may not depend on the ranks, it is the same for all micro-batches of a global step: ranks have others at once.

Source: Zhang and He, arXiv 2010.13369, sections 4.2 and 4.3; Huang et al., "Deep Networks with Stochastic Depth", arXiv
1603.09382, for the rule along the depth.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpispeed.base.passes import Pass, Passes
    from mpispeed.nn.layer_drop.schedule import ProgressiveLayerDrop


@dataclass(frozen=True, slots=True)
class Depth:
    """The place of a layer in its model.

    Attributes:
        number: among all layers of the model that may be left out, from 0.
        index: in its stack, from 1.
        total: layers of the stack.
    """

    number: int
    index: int
    total: int


def number_layers(names: Iterable[str]) -> dict[str, Depth]:
    """The places of layers by their names in the whole model, in its order.

    Names that differ in their numbers only are a stack, in the order of these numbers.
    """
    stacks: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for name in sorted(set(names)):
        words = name.split(".")
        order = tuple(int(word) for word in words if word.isdecimal())
        stacks.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), []).append((order, name))
    found: dict[str, Depth] = {}
    for stack in stacks.values():
        for index, (_, name) in enumerate(sorted(stack), 1):
            found[name] = Depth(len(found), index, len(stack))
    return found


class LayerDrop:
    """The decisions of one model.

    Attributes:
        schedule: the part that is kept.
        passes: the pass that runs.
        seed: other seeds leave out others.
    """

    def __init__(self, schedule: ProgressiveLayerDrop, passes: Passes, seed: int) -> None:
        """Decide for the passes of `passes`, which have to be watched."""
        self.schedule, self.passes, self.seed = schedule, passes, seed

    def probability(self, depth: Depth) -> float:
        """The probability that a layer runs in a training pass now."""
        return 1.0 - (depth.index / depth.total) * (1.0 - self.schedule.get_theta())

    def is_kept(self, depth: Depth, of: Pass) -> bool:
        """True if a layer runs in a pass of the current global step."""
        return not of.is_training or _draw(self.seed, of, depth.number) < self.probability(depth)

    def scale(self, depth: Depth) -> float:
        """The factor of what a layer adds in the current pass; 0 if it does not run."""
        current = self.passes.current
        if not current.is_training:
            return 1.0
        return 1.0 / self.probability(depth) if self.is_kept(depth, current) else 0.0


def _draw(seed: int, of: Pass, number: int) -> float:
    """A number of [0, 1) that depends on all of these and on nothing else."""
    key = struct.pack("<4q", seed, of.global_step, of.micro_step if of.slot is None else 0, number)
    word: int = struct.unpack("<Q", hashlib.blake2b(key, digest_size=8, person=b"layer drop").digest())[0]
    return (word >> 11) * 2.0**-53
