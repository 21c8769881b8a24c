"""Functions of `deepspeed.runtime.utils` that scripts call."""

from __future__ import annotations

import logging
import math
import random
import resource
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpispeed.base.launched import launched_rank
from mpispeed.base.tensor_tree import map_tensors
from mpispeed.base.units import format_bytes
from mpispeed.compat.accelerator import get_accelerator
from mpispeed.compat.comm_groups import group_of

log = logging.getLogger(__name__)


def see_memory_usage(message: str, force: bool = False, ranks: Iterable[int] = (0,)) -> None:
    """Log the memory of this process and of its device.

    Args:
        message: begins the line.
        force: False: nothing is logged, as with DeepSpeed.
        ranks: who logs.
    """
    rank = launched_rank() or 0
    if not force or rank not in ranks:
        return
    accelerator = get_accelerator()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    now = pages * resource.getpagesize()
    log.info(
        "%s: host %s now, %s at most; device %s", message, format_bytes(now), format_bytes(peak),
        format_bytes(accelerator.memory_allocated()),
    )  # fmt: skip


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy and torch, on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def empty_cache() -> None:
    """Give unused device memory back."""
    get_accelerator().empty_cache()


def move_to_device(
    item: Any, device: torch.device | str, criterion_func: Callable[[torch.Tensor], bool] | None = None
) -> Any:
    """The tensors of nested lists, tuples and dicts moved to `device`, or those of them that `criterion_func` names."""
    chosen = criterion_func or (lambda _: True)
    return map_tensors(item, lambda tensor: tensor.to(device) if chosen(tensor) else tensor)


def get_global_norm(norm_list: Iterable[float]) -> float:
    """The norm of a vector whose parts have the given 2-norms."""
    return math.sqrt(math.fsum(float(norm) ** 2 for norm in norm_list))


def get_global_norm_of_tensors(
    input_tensors: Iterable[torch.Tensor], norm_type: float = 2, mpu: Any = None, **_: Any
) -> torch.Tensor:
    """The norm of all elements of some tensors, of all ranks of `mpu`'s model-parallel group together.

    Collective over: the model-parallel group of `mpu`, if it is given.
    """
    norms = [torch.linalg.vector_norm(tensor.detach().float(), norm_type) for tensor in input_tensors]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
    if mpu is None:
        return total
    group = group_of(mpu.get_model_parallel_group())
    parts = torch.tensor(group.gather_objects(float(total)))
    return torch.linalg.vector_norm(parts, norm_type).to(total.device)


def clip_grad_norm_(
    parameters: Iterable[torch.nn.Parameter] | torch.nn.Parameter,
    max_norm: float,
    norm_type: float = 2,
    mpu: Any = None,
) -> torch.Tensor:
    """Scale the gradients of plain parameters so that their norm is at most `max_norm`; return the norm before.

    For models outside of an engine: an engine clips by `gradient_clipping` in the config.

    Collective over: the model-parallel group of `mpu`, if it is given.
    """
    chosen = [parameters] if isinstance(parameters, torch.nn.Parameter) else list(parameters)
    grads = [param.grad for param in chosen if param.grad is not None]
    norm = get_global_norm_of_tensors(grads, norm_type, mpu)
    factor = min(1.0, float(max_norm) / (float(norm) + 1e-6))
    for grad in grads:
        grad.mul_(factor)
    return norm
