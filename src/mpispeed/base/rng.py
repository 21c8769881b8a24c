"""Capture and restore the generators that training draws from: torch, numpy and Python's random."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch

from mpispeed.base import device as devices


def capture() -> dict[str, bytes]:
    """The state of all generators of this process, by kind, as plain bytes."""
    state = np.random.get_state(legacy=False)
    head = {key: state[key] for key in ("bit_generator", "has_gauss", "gauss")}
    version, numbers, gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": _pack({**head, "pos": state["state"]["pos"]}, state["state"]["key"]),
        "python": _pack({"version": version, "gauss": gauss}, np.asarray(numbers, dtype="<u4")),
    }
    device = devices.used()
    if device is not None:
        states[device.type] = devices.module_of(device).get_rng_state().cpu().numpy().tobytes()
    return states


def restore(states: dict[str, bytes]) -> None:
    """Restore generators to the state that `capture` saw; missing kinds stay as they are."""
    if "torch" in states:
        torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
    if "numpy" in states:
        head, keys = _unpack(states["numpy"])
        np.random.set_state({**head, "state": {"key": keys, "pos": head.pop("pos")}})
    if "python" in states:
        head, words = _unpack(states["python"])
        random.setstate((head["version"], tuple(int(w) for w in words), head["gauss"]))
    device = devices.used()
    if device is not None and device.type in states:
        state = torch.frombuffer(bytearray(states[device.type]), dtype=torch.uint8)
        devices.module_of(device).set_rng_state(state)


def seed_all(*numbers: int) -> None:
    """Seed all generators of this process from `numbers`; other numbers give unrelated streams."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _pack(head: dict[str, Any], words: np.ndarray) -> bytes:
    text = json.dumps(head).encode()
    return len(text).to_bytes(4, "little") + text + np.ascontiguousarray(words, dtype="<u4").tobytes()


def _unpack(data: bytes) -> tuple[dict[str, Any], np.ndarray]:
    size = int.from_bytes(data[:4], "little")
    return json.loads(data[4 : 4 + size]), np.frombuffer(data[4 + size :], dtype="<u4")
