"""Tokens chosen by a key: distinct places of a sample, the same wherever and whenever they are asked for.

A place gets a number that is made of the key of its sample and of itself alone; those with the least numbers are
chosen, so all sets of places are alike likely. A compiled loop does it on the host; the reference in torch, which has
the same result, also runs on devices and waits for nothing there.

Source: SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpispeed.native import status

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def key_of(*numbers: int) -> int:
    """A key of 64 bits, made of whole numbers in their order."""
    key = _SECOND
    for number in numbers:
        key = _mixed_number(key + ((number & _WORD) + 1) * _GOLDEN)
    return key


def choose(key: int, first: int, batch: int, tokens: int, count: int, device: torch.device) -> Tensor:
    """For each sample some of its places, ascending.

    Args:
        key: of `key_of`.
        first: number of the first sample; that of sample b is first + b, and its places depend on no other.
        batch: samples.
        tokens: places of a sample.
        count: how many are chosen.
        device: of the result, int32 [batch, count].

    Raises:
        ValueError: more places are wanted than there are, or there are 2^31 tokens or more.
    """
    if not 0 <= count <= tokens < 1 << 31:
        msg = f"choose: {count} of {tokens} tokens; choose at most all, of fewer than 2^31"
        raise ValueError(msg)
    module = status.compiled("token_choice") if device.type == "cpu" else None
    if module is None:
        return choose_reference(key, first, batch, tokens, count, device)
    places = torch.empty(batch, count, dtype=torch.int32)
    module.choose(places.data_ptr(), key, first & _WORD, batch, tokens, count)
    return places


def choose_reference(key: int, first: int, batch: int, tokens: int, count: int, device: torch.device) -> Tensor:
    """As `choose`, in torch."""
    samples = _mixed(_counted(first, batch, device) + _signed(key)).unsqueeze(1)
    numbers = _mixed(samples + _counted(0, tokens, device))
    # Unsigned numbers in the order of signed ones.
    ordered = (numbers ^ -(1 << 63)).sort(dim=1, stable=True).indices
    return ordered[:, :count].sort(dim=1).values.int()


def _counted(first: int, count: int, device: torch.device) -> Tensor:
    """(first + i + 1) times the golden number."""
    return (torch.arange(1, count + 1, device=device) + _signed(first)) * _signed(_GOLDEN)


def _mixed_number(z: int) -> int:
    z &= _WORD
    z = (z ^ (z >> 30)) * _FIRST & _WORD
    z = (z ^ (z >> 27)) * _SECOND & _WORD
    return z ^ (z >> 31)


def _mixed(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _signed(_FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(_SECOND)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """To the right, with zeros in front: torch shifts signed numbers."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    number &= _WORD
    return number - (1 << 64) if number >> 63 else number
