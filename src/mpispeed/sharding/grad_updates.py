"""Changes of many gradients at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpispeed.sharding.access import get_full_grads, safe_set_full_grad

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import nn


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace the averaged gradient of each parameter by `update_func(gradient, param)`, with one gather per unit.

    Args:
        param_list: parameters; frozen ones are left out.
        update_func: gets a copy of the full gradient, in fp16 with the loss scale; it returns the same on all ranks.

    Collective over: the data axis.

    Raises:
        NoGradient: (a ValueError) it is not between backward and step.
        UsageError: no engine has one of the parameters, or what `update_func` returns has not as many elements.
        StoreError: only on the rank whose swap files cannot be read or written.
    """
    for param, grad in zip(param_list, get_full_grads(param_list), strict=True):
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))
