"""A small text task with exact labels, like natural language inference: does a sentence follow from another one?

    all dogs clearly sleep [SEP] some animals rest today      follows
    no students run        [SEP] all pupils sprint            contradicts
    some cats walk         [SEP] all cats move                neither

A sentence is a quantifier, a noun, a verb, and up to two adverbs that mean nothing. Nouns and verbs are kinds of each
other as `NOUNS` and `VERBS` say; kinds beside each other exclude each other, anything else may overlap. "All" says that
there are some. Labels are found by going through all possible worlds, so that there is no noise in them: a model that
has learned the words and the logic is right always.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

Kinds = dict[str, dict[str, tuple[str, ...]]]

NOUNS: Kinds = {
    "animals": {
        "dogs": ("poodles", "terriers"),
        "cats": ("tabbies", "siamese"),
        "birds": ("robins", "gulls"),
    },
    "people": {
        "artists": ("painters", "singers"),
        "doctors": ("surgeons", "dentists"),
    },
}
VERBS: Kinds = {
    "move": {"walk": ("stroll", "march"), "run": ("sprint", "jog")},
    "speak": {"whisper": (), "shout": ()},
}
QUANTIFIERS = ("some", "all", "no")
ADVERBS = ("clearly", "today", "often", "indeed")
LABELS = ("follows", "neither", "contradicts")
PAD, START, END = 0, 1, 2
LENGTH = 13
"""Tokens of an example: a start, twice a sentence of at most five words and an end, then padding."""


def _paths(kinds: Kinds) -> dict[str, tuple[str, ...]]:
    """Each word with the words of which it is a kind, the widest first, itself last."""
    paths: dict[str, tuple[str, ...]] = {}
    for top, middles in kinds.items():
        paths[top] = (top,)
        for middle, bottoms in middles.items():
            paths[middle] = (top, middle)
            paths.update({bottom: (top, middle, bottom) for bottom in bottoms})
    return paths


_NOUN_PATHS, _VERB_PATHS = _paths(NOUNS), _paths(VERBS)
WORDS = ("[PAD]", "[CLS]", "[SEP]", *QUANTIFIERS, *_NOUN_PATHS, *_VERB_PATHS, *ADVERBS)
_BEFORE = (END + 1, END + 1 + len(QUANTIFIERS), END + 1 + len(QUANTIFIERS) + len(_NOUN_PATHS))
"""Numbers of the first quantifier, noun and verb."""

_REGIONS = {  # those that can hold something: in the first only, in the second only, in both, in neither
    "equal": (False, False, True, True),
    "narrower": (False, True, True, True),
    "wider": (True, False, True, True),
    "apart": (True, True, False, True),
    "free": (True, True, True, True),
}


def _relation(first: tuple[str, ...], second: tuple[str, ...]) -> str:
    """How the meaning of a word stands to that of another one, both given by their paths."""
    if first == second:
        return "equal"
    if first[: len(second)] == second:
        return "narrower"
    if second[: len(first)] == first:
        return "wider"
    return "apart" if first[0] == second[0] else "free"


def _label(premise: str, hypothesis: str, nouns: str, verbs: str) -> int:
    """The label for two quantifiers and the relations of the nouns and of the verbs.

    A world says which of the regions that two nouns and two verbs make hold anything.
    """
    cells = [
        (noun, verb)
        for noun, verb in itertools.product(range(4), range(4))
        if _REGIONS[nouns][noun] and _REGIONS[verbs][verb]
    ]
    worlds = (np.arange(2 ** len(cells))[:, None] >> np.arange(len(cells))) % 2 == 1

    def is_true(quantifier: str, regions: tuple[int, int]) -> np.ndarray:
        within = np.array([noun in regions for noun, _ in cells])
        doing = np.array([verb in regions for _, verb in cells])
        if quantifier == "all":
            return worlds[:, within].any(1) & ~worlds[:, within & ~doing].any(1)
        return worlds[:, within & doing].any(1) == (quantifier == "some")

    given, said = is_true(premise, (0, 2)), is_true(hypothesis, (1, 2))
    if said[given].all():
        return LABELS.index("follows")
    return LABELS.index("neither" if said[given].any() else "contradicts")


@functools.cache
def _labels() -> np.ndarray:
    """The label of every premise and hypothesis, by both quantifiers, nouns and verbs."""
    kinds = list(_REGIONS)
    of_relations = np.array(
        [
            [[[_label(q1, q2, nouns, verbs) for verbs in kinds] for nouns in kinds] for q2 in QUANTIFIERS]
            for q1 in QUANTIFIERS
        ]
    )
    nouns, verbs = (
        np.array([[kinds.index(_relation(first, second)) for second in paths.values()] for first in paths.values()])
        for paths in (_NOUN_PATHS, _VERB_PATHS)
    )
    return of_relations[:, :, nouns[:, :, None, None], verbs]


def label_of(premise: str, hypothesis: str) -> str:
    """The label of two sentences of three words."""
    words = zip(premise.split(), hypothesis.split(), (QUANTIFIERS, tuple(_NOUN_PATHS), tuple(_VERB_PATHS)), strict=True)
    return LABELS[_labels()[tuple(known.index(word) for *pair, known in words for word in pair)]]


@dataclass(frozen=True)
class Pairs:
    """Examples.

    Attributes:
        ids: tokens, int64 [examples, LENGTH].
        labels: int64 [examples].
    """

    ids: torch.Tensor
    labels: torch.Tensor

    def batches(self, size: int) -> Iterator[dict[str, torch.Tensor]]:
        """Arguments of a BERT for `size` examples after the other."""
        for ids, labels in zip(self.ids.split(size), self.labels.split(size), strict=True):
            yield {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def make_pairs(
    count: int, seed: int, held_out: bool = False, nouns: int | None = None, verbs: int | None = None
) -> Pairs:
    """Examples in a random order, each label as often as the others but for chance.

    Args:
        held_out: from the fifth of all premises and hypotheses, adverbs aside, that no example is trained on.
        nouns, verbs: only the first so many, an easier task.
    """
    rng = np.random.default_rng(seed)
    table = _labels()
    numbers = np.arange(table.size).reshape(table.shape)[:, :, :nouns, :nouns, :verbs, :verbs].ravel()
    mixed = numbers * 2654435761 >> 7  # spread as in Knuth's multiplicative hashing
    pool = numbers[(mixed % 5 == 0) == held_out]
    labels = rng.integers(len(LABELS), size=count)
    chosen = np.empty(count, dtype=np.int64)
    for label in range(len(LABELS)):
        of_label = labels == label
        chosen[of_label] = rng.choice(pool[table.flat[pool] == label], int(of_label.sum()))
    q1, q2, n1, n2, v1, v2 = np.unravel_index(chosen, table.shape)
    rows = np.full((count, LENGTH), PAD)
    rows[:, 0], rows[:, 6], rows[:, 12] = START, END, END
    for first, words in ((1, (q1, n1, v1)), (7, (q2, n2, v2))):
        for place, before, word in zip((0, 1, 3), _BEFORE, words, strict=True):
            rows[:, first + place] = before + word
        for place in (first + 2, first + 4):
            adverbs = len(WORDS) - 1 - rng.integers(len(ADVERBS), size=count)
            rows[:, place] = np.where(rng.random(count) < 0.5, adverbs, PAD)
    order = np.argsort(rows == PAD, axis=1, kind="stable")  # what is left out goes to the end
    return Pairs(torch.from_numpy(np.take_along_axis(rows, order, axis=1)), torch.from_numpy(labels))
