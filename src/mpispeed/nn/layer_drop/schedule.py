"""The part of the layers that a pass keeps: falls from all of them along the run.

Source: Zhang and He, "Accelerating Training of Transformer-Based Language Models with Progressive Layer Dropping",
arXiv 2010.13369; names are those of DeepSpeed's class.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class ProgressiveLayerDrop:
    """The schedule theta(t) = (1 - theta) exp(-gamma t) + theta.

    Attributes:
        theta: its limit: with what probability the last layer runs in the end.
        gamma: how fast it falls; the paper takes 100 / steps of the run.
        current_theta: its value now; 1 before the first update.
    """

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        """Begin with all layers."""
        self.theta, self.gamma = theta, gamma
        self.current_theta = 1.0

    def theta_at(self, global_step: int) -> float:
        """The schedule's value at a step."""
        return float((1.0 - self.theta) * np.exp(-self.gamma * global_step) + self.theta)

    def update_state(self, global_step: int) -> None:
        """Go to a step; the engine does it at each update, with the steps before it. Local."""
        self.current_theta = self.theta_at(global_step)

    def get_theta(self) -> float:
        """The value now."""
        return self.current_theta

    def get_state(self) -> dict[str, Any]:
        """What a model that drops layers itself is called with."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}
