"""DeepSpeed's estimates of model-state memory: rules of thumb for a setup of nodes with accelerators.

Source: DeepSpeed documentation 0.14, "Memory Requirements". They assume 16-bit training with Adam. `mpispeed plan`
predicts the need of this library for a configuration.

Units: parameters are counts of elements, results are bytes; tables show bytes / 2**30 as GB.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from torch import nn

Write = Callable[[str], object]
"""Function that takes the text of a table."""

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Need:
    """One line of a table. Units: bytes for each node (`cpu`) and for each accelerator (`gpu`)."""

    cpu: int
    gpu: int
    options: str


# -- numbers ---------------------------------------------------------------------------------------------------------


def count_params(model: nn.Module) -> tuple[int, int]:
    """(elements of all parameters, elements of the module with the most parameters of its own).

    Parameters that share memory count once in the first number. Sharded parameters count with their full shape.
    """
    sizes = {_identity(param): math.prod(param.shape) for param in model.parameters()}
    layers = (sum(math.prod(p.shape) for p in m.parameters(recurse=False)) for m in model.modules())
    return sum(sizes.values()), max(layers, default=0)


def _identity(param: nn.Parameter) -> Hashable:
    """A key that is equal for parameters in the same memory; without memory, it identifies the object."""
    if type(param).__torch_function__ is not nn.Parameter.__torch_function__ or param.device.type == "meta":
        return id(param)
    address = param.data_ptr()
    return (param.device, address) if address else id(param)


def estimate_zero2_model_states_mem_needs(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes (for each node, for each accelerator) with gradients and optimizer states sharded over all accelerators.

    Formula: offloaded, gpu = 2P and cpu = P * max(4g, 16) * f; else gpu = 4P + 16P/n and cpu = P * 4g * f, with g
    accelerators for each node and n in all.
    """
    if cpu_offload:
        return int(total_params * max(4 * num_gpus_per_node, 16) * additional_buffer_factor), int(2 * total_params)
    gpu = 4 * total_params + int(16 * total_params / (num_nodes * num_gpus_per_node))
    return int(total_params * 4 * num_gpus_per_node * additional_buffer_factor), int(gpu)


def estimate_zero3_model_states_mem_needs(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes (for each node, for each accelerator, of the largest layer) with parameters sharded too.

    Formula: L = 4 * largest layer; gpu = L + (0, 2P/n or 18P/n); cpu = f times (18, 16 or 0) * P / nodes, without
    `zero_init` at least 4gP, which every process needs to build the model.
    """
    largest = int(4 * largest_layer_params)
    total_gpus = num_nodes * num_gpus_per_node
    building = 4 * num_gpus_per_node * (largest_layer_params if zero_init else total_params)
    if not cpu_offload:
        return int(building * additional_buffer_factor), largest + int(18 * total_params / total_gpus), largest
    resting = (18 if cpu_offload_params else 16) * total_params / num_nodes
    cpu = resting if zero_init else max(building, resting)
    gpu = largest if cpu_offload_params else largest + int(2 * total_params / total_gpus)
    return int(cpu * additional_buffer_factor), gpu, largest


def zero2_needs(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> list[Need]:
    """The rows of the table for sharded gradients and optimizer states."""
    setup = num_gpus_per_node, num_nodes
    return [
        Need(
            *estimate_zero2_model_states_mem_needs(total_params, *setup, offloads, additional_buffer_factor),
            f"offload_optimizer={_device(offloads)}",
        )
        for offloads in (True, False)
    ]


def zero3_needs(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> list[Need]:
    """The rows of the table for sharded parameters."""
    rows = []
    for offloads_params, offloads in ((True, True), (False, True), (False, False)):
        for zero_init in (True, False):
            cpu, gpu, _ = estimate_zero3_model_states_mem_needs(
                total_params, largest_layer_params, num_gpus_per_node, num_nodes, offloads, offloads_params,
                zero_init, additional_buffer_factor,
            )  # fmt: skip
            what = f"offload_param={_device(offloads_params)}, offload_optimizer={_device(offloads)}"
            rows.append(Need(cpu, gpu, f"{what}, zero_init={int(zero_init)}"))
    return rows


def _device(is_host: bool) -> str:
    return "cpu " if is_host else "none"


# -- tables ------------------------------------------------------------------------------------------------------------


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    write: Write | None = None,
) -> None:
    """Write the table for `model` with gradients and optimizer states sharded over all accelerators.

    Args:
        model: its parameters are counted; it may be on torch's meta device.
        num_gpus_per_node: accelerators (processes) on one node.
        num_nodes: nodes.
        additional_buffer_factor: reserve factor for host memory.
        write: function that takes the text; standard output by default.
    """
    estimate_zero2_model_states_mem_needs_all_cold(
        count_params(model)[0], num_gpus_per_node, num_nodes, additional_buffer_factor, write=write
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    write: Write | None = None,
) -> None:
    """The same table for a model of `total_params` parameters."""
    rows = zero2_needs(total_params, num_gpus_per_node, num_nodes, additional_buffer_factor)
    _write_table(rows, f"{int(total_params / 1e6)}M total params.", num_gpus_per_node, num_nodes, write)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    write: Write | None = None,
) -> None:
    """Write the table for `model` with parameters sharded too; arguments as for the first table.

    The largest layer is the module that has the most parameters of its own.
    """
    estimate_zero3_model_states_mem_needs_all_cold(
        *count_params(model), num_gpus_per_node, num_nodes, additional_buffer_factor, write=write
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    write: Write | None = None,
) -> None:
    """The same table for a model of `total_params` parameters whose largest layer has `largest_layer_params`."""
    rows = zero3_needs(total_params, largest_layer_params, num_gpus_per_node, num_nodes, additional_buffer_factor)
    sizes = f"{int(total_params / 1e6)}M total params, {int(largest_layer_params / 1e6)}M largest layer params."
    _write_table(rows, sizes, num_gpus_per_node, num_nodes, write)


def _write_table(rows: list[Need], sizes: str, gpus: int, nodes: int, write: Write | None) -> None:
    lines = [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {nodes} node{'s' if nodes > 1 else ''}, {gpus} GPU{'s' if gpus > 1 else ''} per node.",
        f"SW: Model with {sizes}",
        "  per CPU  |  per GPU |   Options",
    ]
    lines += [f" {row.cpu / GIB:7.2f}GB | {row.gpu / GIB:6.2f}GB | {row.options}" for row in rows]
    (write or sys.stdout.write)("".join(f"{line}\n" for line in lines))
