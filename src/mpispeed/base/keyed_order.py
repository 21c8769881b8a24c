"""Keyed permutations of `range(length)`, computed number by number: no memory, no order of draws, no library's version.

A permutation is a Feistel cipher on a grid that just holds the numbers; what falls on one of the few cells more than
numbers is mapped on until it does not. Source of the mix: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014, in the finaliser of splitmix64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1

_ROUNDS = 8  # four suffice for a good mix of large ranges; short ones need more


def mix(words: Words) -> Words:
    """Scramble 64-bit words, one to one."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed


def seed_word(seed: int) -> np.uint64:
    """A whole number as a word that differs in many bits from that of its neighbours."""
    found: np.uint64 = np.uint64((seed * GOLDEN) & MASK)
    return found


def permuted(offsets: Words, lengths: Words | np.uint64, keys: Words) -> Words:
    """Where permutations take numbers: that of `keys[i]` over `range(lengths[i])` takes `offsets[i]` to the result.

    Args:
        offsets: [n]; each below its length.
        lengths: [n], or one for all; each from 1 to 2**62.
        keys: [n]; equal keys and lengths are the same permutation.
    """
    rows = _root(lengths)
    columns = (lengths - np.uint64(1)) // rows + np.uint64(1)
    shapes = np.broadcast_to(rows, offsets.shape), np.broadcast_to(columns, offsets.shape)
    limits = np.broadcast_to(lengths, offsets.shape)
    found = _scrambled(offsets, keys, *shapes)
    while (outside := found >= limits).any():
        found[outside] = _scrambled(found[outside], keys[outside], *(each[outside] for each in shapes))
    return found


def _root(lengths: Words | np.uint64) -> Words:
    """The least numbers whose squares are not below `lengths`."""
    found = np.asarray(np.sqrt(np.asarray(lengths).astype(np.float64)), np.uint64)  # off by one at most
    found = found - (found * found > lengths)
    root: Words = np.maximum(found + (found * found < lengths), np.uint64(1))
    return root


def _scrambled(cells: Words, keys: Words, rows: Words, columns: Words) -> Words:
    """Map the cells of a grid one to one onto themselves, differently for every key."""
    x, y = np.divmod(cells, rows)
    for turn in range(_ROUNDS):
        salted = keys + np.uint64((turn + 1) * GOLDEN & MASK)
        if turn % 2:
            x = (x + mix(y ^ salted) % columns) % columns
        else:
            y = (y + mix(x ^ salted) % rows) % rows
    found: Words = x * rows + y
    return found
