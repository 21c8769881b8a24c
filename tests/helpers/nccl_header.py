"""What nccl.h says of the functions, numbers and structures that the package calls by address."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path

from mpispeed.mesh.backends import nccl_library

NAMES = {
    "int8": "ncclInt8", "uint8": "ncclUint8", "int32": "ncclInt32", "uint32": "ncclUint32", "int64": "ncclInt64",
    "uint64": "ncclUint64", "float16": "ncclFloat16", "float32": "ncclFloat32", "float64": "ncclFloat64",
    "bfloat16": "ncclBfloat16",
}  # fmt: skip
VALUES = {"int": ctypes.c_int, "size_t": ctypes.c_size_t, "ncclUniqueId": nccl_library.UniqueId}
ENUMS = ("ncclDataType_t", "ncclRedOp_t", "ncclResult_t")
HANDLES = ("ncclComm_t", "cudaStream_t")


def header() -> Path:
    """The header of the wheel that came with torch, whose library torch has loaded."""
    spec = importlib.util.find_spec("nvidia")
    found = [Path(place, "nccl/include/nccl.h") for place in (spec.submodule_search_locations or () if spec else ())]
    return next(path for path in found if path.is_file())


def differences(text: str) -> list[str]:
    """What the bindings have otherwise than the header."""
    plain = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S)
    found = []
    for name, types in {**nccl_library.FUNCTIONS, **nccl_library.TEXTS}.items():
        said = re.search(rf"(\w[\w ]*\**)\s*\b{name}\(([^)]*)\)\s*;", plain)
        if said is None:
            found.append(f"{name} is not there")
            continue
        wanted = tuple(_ctype(word) for word in said.group(2).split(",") if word.strip())
        if wanted != types:
            found.append(f"{name} takes {wanted}, not {types}")
        if (said.group(1).strip() == "ncclResult_t") != (name in nccl_library.FUNCTIONS):
            found.append(f"{name} returns {said.group(1)}")
    numbers = dict(re.findall(r"\b(nccl\w+)\s*=\s*(\d+)", plain))
    wanted_numbers = {NAMES[str(dtype).removeprefix("torch.")]: code for dtype, code in nccl_library.TYPES.items()}
    wanted_numbers |= {f"nccl{op.capitalize()}": code for op, code in nccl_library.OPS.items()}
    wanted_numbers |= {"ncclSuccess": nccl_library.SUCCESS, "ncclInProgress": nccl_library.IN_PROGRESS}
    found += [
        f"{name} is {numbers.get(name)}" for name, code in wanted_numbers.items() if numbers.get(name) != str(code)
    ]
    bytes_of_id = re.search(r"NCCL_UNIQUE_ID_BYTES (\d+)", plain)
    magic = re.search(r"NCCL_API_MAGIC (0x[0-9a-f]+)", plain)
    if bytes_of_id is None or int(bytes_of_id.group(1)) != ctypes.sizeof(nccl_library.UniqueId):
        found.append("another length of the unique id")
    if magic is None or int(magic.group(1), 16) != nccl_library.MAGIC:
        found.append("another magic number")
    fields = re.search(r"struct ncclConfig_v\w+ \{([^}]*)\}", plain)
    first = re.findall(r"([\w ]+?)\s+(\w+);", fields.group(1))[:4] if fields else []
    if [(kind.strip(), name) for kind, name in first] != [
        ("size_t", "size"), ("unsigned int", "magic"), ("unsigned int", "version"), ("int", "blocking"),
    ]:  # fmt: skip
        found.append(f"the configuration begins with {first}")
    return found


def _ctype(argument: str) -> type:
    words = argument.replace("*", " * ").split()
    kind = next(word for word in words if word != "const")
    if "*" in words or kind in HANDLES:
        return ctypes.c_void_p
    return ctypes.c_int if kind in ENUMS else VALUES[kind]
