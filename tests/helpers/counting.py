"""An optimizer whose states are numbers, flags and tensors of one element: what is lost where only slots are saved."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VALUES: dict[str, Any] = {
    "number": 7,
    "rate": 0.1,
    "is_warm": True,
    "word": "warm",
    "nothing": None,
    "long": torch.tensor(2**40 + 1),
    "double": torch.tensor(1 / 3, dtype=torch.float64),
    "half": torch.tensor([1 / 3], dtype=torch.bfloat16),
    "flag": torch.tensor([[True]]),
    "bytes": torch.tensor([200], dtype=torch.uint8),
    "not_a_number": torch.tensor(float("nan"), dtype=torch.float16),
}


class Counting(torch.optim.Optimizer):
    """Steps get shorter with a count that each parameter keeps, of the kind its group names; some keep nothing."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "kind": "number", "momentum": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of all parameters that have a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None or group["kind"] == "none":
                    continue
                state = self.state[param]
                if not state:
                    state.update({name: _copy(value) for name, value in VALUES.items()})
                    state["step"] = {"number": 0, "tensor": torch.tensor(0.0), "one": torch.zeros(1)}[group["kind"]]
                    if group["momentum"]:
                        state["mean"] = torch.zeros_like(param)
                state["step"] = state["step"] + 1
                change = param.grad
                if group["momentum"]:
                    change = state["mean"].mul_(group["momentum"]).add_(change)
                param.sub_(change, alpha=group["lr"] / float(state["step"]))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Parameters with each kind of count, with and without a full-sized state, and some without any."""
    first, *rest = model.parameters()
    kinds = [("number", 0.0), ("tensor", 0.9), ("one", 0.0), ("none", 0.0), ("one", 0.9)]
    groups = [{"params": [first], "kind": "number", "momentum": 0.0}]
    for index, param in enumerate(rest):
        kind, momentum = kinds[index % len(kinds)]
        groups.append({"params": [param], "kind": kind, "momentum": momentum})
    return groups


def found_states(client: torch.optim.Optimizer) -> list[tuple[Any, ...]]:
    """Group by group the states of its parameters, without those of full size, comparable with ==."""
    return [
        tuple(_plain(client.state[param]) for param in group["params"] if param in client.state)
        for group in client.param_groups
    ]


def _plain(state: dict[str, Any]) -> tuple[Any, ...]:
    return tuple((name, type(value), _bits(value)) for name, value in sorted(state.items()) if name != "mean")


def _bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes()
    return repr(value)
