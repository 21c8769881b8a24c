"""Torch dtypes for a transport: datatypes to move them, and reductions that a library may do."""

from __future__ import annotations

import torch

from mpispeed.base.errors import CommError

HALF_FLOATS = frozenset({torch.bfloat16, torch.float16})
"""Summed here in fp32 and never by an MPI library: some add the bit patterns without an error."""

FLOATS = frozenset({torch.float32, torch.float64})
SUMMED_HERE = FLOATS | HALF_FLOATS
"""What the tree over ranks adds without the help of a transport."""

COMPLEX = frozenset({torch.complex64, torch.complex128})

MOVE_NAMES = {1: "UINT8_T", 2: "UINT16_T", 4: "UINT32_T", 8: "UINT64_T", 16: "C_DOUBLE_COMPLEX"}
"""MPI datatype by item size, for verbs that only move bytes."""

REDUCE_NAMES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
}
"""MPI datatype for reductions by the library; a dtype that is missing here is never handed to one."""

INTEGERS = frozenset(REDUCE_NAMES) - FLOATS - COMPLEX

BITWISE = ("band", "bor", "bxor")
OPS = ("sum", "avg", "prod", "min", "max", *BITWISE)

_BOOL_OPS = {"sum": "max", "max": "max", "bor": "max", "prod": "min", "min": "min", "band": "min", "bxor": "bxor"}


def move_name(dtype: torch.dtype) -> str:
    """Name of the MPI datatype with the size of one element."""
    return MOVE_NAMES[dtype.itemsize]


def as_reducible(x: torch.Tensor, op: str) -> tuple[torch.Tensor, str]:
    """An equivalent view of `x` and operation without special cases.

    Booleans become bytes with "or" as max and "and" as min; sums of complex numbers are sums of their parts.
    """
    if x.dtype == torch.bool and op in _BOOL_OPS:
        return x.view(torch.uint8), _BOOL_OPS[op]
    if x.dtype in COMPLEX and op in ("sum", "avg"):
        return torch.view_as_real(x).view(-1), op
    return x, op


def check_reduction(dtype: torch.dtype, op: str, scale: float, where: str) -> None:
    """Refuse reductions that have no meaning.

    Raises:
        CommError: naming the dtype, the operation and what is allowed.
    """
    if op not in OPS:
        msg = f"{where}: unknown operation {op!r}; choose one of {', '.join(OPS)}"
        raise CommError(msg)
    is_real_float = dtype in FLOATS or dtype in HALF_FLOATS
    if not is_real_float and dtype not in COMPLEX and dtype not in INTEGERS and dtype != torch.bool:
        msg = f"{where}: {dtype} tensors can be moved but not reduced; convert them to bfloat16 or float32 first"
        raise CommError(msg)
    if op == "avg" and not (is_real_float or dtype in COMPLEX):
        msg = f"{where}: an average of {dtype} is not defined; use op='sum' or a floating-point tensor"
        raise CommError(msg)
    if op in BITWISE and dtype not in INTEGERS and dtype != torch.bool:
        msg = f"{where}: op={op!r} combines the bits of integers and booleans, got {dtype}"
        raise CommError(msg)
    if op in ("min", "max") and dtype in COMPLEX:
        msg = f"{where}: complex numbers have no order, so op={op!r} is not defined for {dtype}"
        raise CommError(msg)
    if scale != 1.0 and (op not in ("sum", "avg") or not (is_real_float or dtype in COMPLEX)):
        msg = f"{where}: scale={scale} needs a sum or an average of floating-point numbers, got op={op!r} of {dtype}"
        raise CommError(msg)
