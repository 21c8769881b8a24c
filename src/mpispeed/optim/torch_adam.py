"""Adam and AdamW of torch over flat windows whose states come with them, so that files may hold them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mpispeed.base.device import HOST
from mpispeed.base.errors import ConfigError
from mpispeed.optim.foreign import make_empty
from mpispeed.optim.rule import Window


class TorchAdam:
    """`torch.optim.Adam` or `AdamW` for `torch_adam` in the params of a JSON file: torch's code updates every window.

    State: `exp_avg` and `exp_avg_sq`, and `max_exp_avg_sq` if the rule is made with `amsgrad`. Gradients are not
    modified. Windows are taken one at a time. Bits do not depend on the division into windows, except with `fused`,
    where torch's kernel on the host rounds the last elements of a tensor in another way than the others.
    """

    wants_whole = False
    is_elementwise: bool | None = True

    def __init__(self, cls: type[torch.optim.Optimizer], params: Mapping[str, Any] | None = None) -> None:
        """Args: `params` are keywords of `cls`, which become the defaults of groups.

        Raises:
            ConfigError: torch refuses them.
        """
        self.name = cls.__name__
        self.optimizer = make_empty(cls, dict(params or {}))
        self.defaults: dict[str, Any] = dict(self.optimizer.defaults)
        maxima = ("max_exp_avg_sq",) if self.defaults.get("amsgrad") else ()
        self.state_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq", *maxima)

    def update(self, windows: Iterable[Window], *, grad_scale: float = 1.0, threads: int = 1) -> None:
        """Update the master, state and `out` of every window from its gradient times `grad_scale`.

        The number of threads is that of torch; `threads` is not used.

        Raises:
            ConfigError: a group has amsgrad but the rule was made without.
        """
        del threads
        for window in windows:
            if window.master.numel():
                self._update_one(window, {**self.defaults, **window.group}, grad_scale)

    def scalars(self) -> dict[str, Any]:
        """Nothing: the step number comes with the windows."""
        return {}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Do nothing."""

    def _update_one(self, window: Window, hyper: dict[str, Any], grad_scale: float) -> None:
        if hyper.get("amsgrad") and "max_exp_avg_sq" not in window.state:
            msg = (
                f"a parameter group has amsgrad, but the optimizer {self.name} was set up without; give amsgrad in "
                "optimizer.params, so that its maxima are kept and saved"
            )
            raise ConfigError(msg)
        parameter = nn.Parameter(window.master)
        grad: Tensor = window.grad.to(window.master.dtype)
        parameter.grad = grad * grad_scale if grad_scale != 1.0 else grad
        # As torch keeps it: on the host unless kernels on the device read it.
        device = window.master.device if hyper.get("capturable") or hyper.get("fused") else HOST
        step = torch.tensor(float(window.step - 1), dtype=torch.float32, device=device)
        self.optimizer.param_groups.append({**hyper, "params": [parameter]})
        self.optimizer.state[parameter] = {"step": step, **window.state}
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups.clear()
            self.optimizer.state.clear()
        if window.out is not None:
            window.out.copy_(window.master)
