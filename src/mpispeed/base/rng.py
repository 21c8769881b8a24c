"""Capture and restore the generators that training draws from: torch, numpy and Python's random."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, bytes]:
    """The state of all generators of this process, by kind, as plain bytes."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    version, words, gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": _pack({"name": name, "position": position, "has_gauss": has_gauss, "cached": cached}, keys),
        "python": _pack({"version": version, "gauss": gauss}, np.asarray(words, dtype="<u4")),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return states


def restore(states: dict[str, bytes]) -> None:
    """Put generators back to what `capture` saw; kinds that are missing stay as they are."""
    if "torch" in states:
        torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
    if "numpy" in states:
        head, keys = _unpack(states["numpy"])
        np.random.set_state((head["name"], keys, head["position"], head["has_gauss"], head["cached"]))
    if "python" in states:
        head, words = _unpack(states["python"])
        random.setstate((head["version"], tuple(int(w) for w in words), head["gauss"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(states["cuda"]), dtype=torch.uint8))


def _pack(head: dict[str, Any], words: np.ndarray) -> bytes:
    text = json.dumps(head).encode()
    return len(text).to_bytes(4, "little") + text + np.ascontiguousarray(words, dtype="<u4").tobytes()


def _unpack(data: bytes) -> tuple[dict[str, Any], np.ndarray]:
    size = int.from_bytes(data[:4], "little")
    return json.loads(data[4 : 4 + size]), np.frombuffer(data[4 + size :], dtype="<u4")
