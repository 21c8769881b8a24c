"""Comparisons, of which `same_bits` says where two results part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

SHOWN = 3
"""How many names of those that differ a message has."""


def has_same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if dtype, shape and every bit are equal: NaNs too, and the sign of zeros."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (first, second)))


def same_bits(found: Any, expected: Any, name: str = "") -> None:
    """Fail unless both are equal in every element, dtype and shape, however nested; zeros may differ in sign.

    `name` is what both are. The message has the first places that differ with both values there, and a count.
    """
    differing = list(_differences(found, expected, name))
    if differing:
        more = [f"and {len(differing) - SHOWN} more"] if len(differing) > SHOWN else []
        raise AssertionError("; ".join(differing[:SHOWN] + more))


def _differences(found: Any, expected: Any, name: str) -> Iterator[str]:
    where = name or "the value"
    if isinstance(expected, Iterator):
        found, expected = list(found), list(expected)
    if isinstance(expected, torch.Tensor):
        yield from _of_tensors(found, expected, where)
    elif isinstance(expected, Mapping):
        yield from _of_mappings(found, expected, name)
    elif isinstance(expected, list | tuple):
        if len(found) != len(expected):
            yield f"{where}: {len(found)} values for {len(expected)}"
        for index, (one, other) in enumerate(zip(found, expected, strict=False)):
            yield from _differences(one, other, f"{name}[{index}]")
    elif found != expected:
        yield f"{where}: {found!r} is not {expected!r}"


def _of_mappings(found: Any, expected: Mapping[str, Any], name: str) -> Iterator[str]:
    if found.keys() != expected.keys():
        lacking, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        yield f"{name or 'the value'}: lacks {lacking}, has besides {extra}"
    for key in (key for key in expected if key in found):
        yield from _differences(found[key], expected[key], f"{name}.{key}" if name else str(key))


def _of_tensors(found: torch.Tensor, expected: torch.Tensor, where: str) -> Iterator[str]:
    kinds = [f"{x.dtype} of {tuple(x.shape)}" for x in (found, expected)]
    if kinds[0] != kinds[1]:
        yield f"{where}: {kinds[0]} is not {kinds[1]}"
    elif not torch.equal(found, expected):
        places = (found != expected).nonzero()
        first = tuple(places[0].tolist())
        count = f"{len(places)} of {expected.numel()} elements differ"
        yield f"{where}: at {list(first)} {found[first].item()!r} is not {expected[first].item()!r}; {count}"


def check_near(found: torch.Tensor, expected: Any, *, rtol: float, atol: float) -> None:
    """Fail unless a tensor is near an array, both as fp64."""
    torch.testing.assert_close(found.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=rtol, atol=atol)
