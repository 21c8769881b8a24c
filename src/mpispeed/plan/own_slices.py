"""Models that slice their layers by their own code: detection of sliced and of replicated parameters.

Megatron marks a slice with the attribute `tensor_model_parallel` (older: `model_parallel`) and says with
`partition_dim` which dim is sliced. Marked parameters are slices; so are those that differ between the ranks of a model
group. Nothing is changed: values, layers and reductions are the model's own.

Source: marks as in Megatron-LM, megatron/core/tensor_parallel/layers.py.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import ConfigError
from mpispeed.base.units import format_list
from mpispeed.ckpt.format.logical import persistent_buffers
from mpispeed.native.checksum import crc32c
from mpispeed.nn.tensor import TensorCut, cuts
from mpispeed.nn.tensor.tensor_cut import OWN, marks_of
from mpispeed.sharding import sharded_param

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from mpispeed.config.root import Config
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.mesh import Mesh

log = logging.getLogger(__name__)

MARKS = ("tensor_model_parallel", "model_parallel")
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class _Found:
    """One rank's part of a parameter; `dim` is the sliced dim by the model's mark, -1 without one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: int
    is_marked: bool
    dim: int


def asks_for_slices(config: Config) -> bool:
    """True if the config asks for automatic slicing of layers; an mpu or a topology alone does not."""
    section = config.tensor_parallel
    sizes = section.autotp_size, section.tensor_parallel.tp_size
    named = section.injection_policy_tuple is not None
    return max(sizes) > 1 or named or section.vocab_parallel or section.sequence_parallel


def is_marked(param: torch.Tensor) -> bool:
    """True if the model has marked `param` as a slice."""
    return any(bool(getattr(param, mark, False)) for mark in MARKS)


def find_own_cuts(mesh: Mesh, model: nn.Module) -> None:
    """Record in the model's marks which parameters are slices; if any is, buffers count as slices too.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank, if names or dtypes of parameters differ in a model group, if only some model groups
            have equal values of a parameter, or `zero.Init` has sharded slices over other ranks than the data ranks.
    """
    comm = mesh["model"]
    with mesh.world.comm.together(ConfigError):
        _refuse_sharded_elsewhere(mesh, model)
    named = dict(model.named_parameters())
    known = cuts(model)
    own = {name: _look_at(param) for name, param in named.items() if name not in known}
    everyone = comm.gather_objects(own)
    odd = sorted(set().union(*everyone) - set.intersection(*(set(found) for found in everyone)))
    problem = (
        f"parameters {', '.join(odd[:_SHOWN])} are not on all of the ranks {list(comm.ranks)[:_SHOWN]}, which share "
        "layers as the mpu says; build the same layers on all of them"
    )
    mesh.world.comm.agree(not odd, problem, ConfigError)
    found, unmarked = dict[str, TensorCut](), list[str]()
    for name in own:
        rows = [others[name] for others in everyone]
        if any(row.is_marked for row in rows):
            found[name] = own_cut([row.shape for row in rows], rows[0].dim)
        elif any((row.shape, row.values) != (rows[0].shape, rows[0].values) for row in rows):
            found[name] = own_cut([row.shape for row in rows])
            unmarked.append(name)
    problem = _find_odd_dtype(everyone) or _find_undecided(mesh["data"], found)
    mesh.world.comm.agree(not problem, problem, ConfigError)
    if found:
        shapes = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(model)}
        for name, rows_of in _aligned(comm, shapes).items():
            found[name] = own_cut(rows_of)
    _note(model, found)
    _report(mesh, bool(found or known), unmarked)


def _find_odd_dtype(everyone: Sequence[Mapping[str, _Found]]) -> str:
    """A sentence if the ranks of a model group have a parameter in several dtypes, else ""."""
    for name in everyone[0]:
        dtypes = sorted({str(found[name].dtype) for found in everyone})
        if len(dtypes) > 1:
            return (
                f"parameter {name} has the dtypes {' and '.join(dtypes)} on ranks that share its layer; build it in "
                "one dtype on all of them"
            )
    return ""


def _find_undecided(comm: Comm, found: Mapping[str, TensorCut]) -> str:
    """A sentence if data ranks find different slices, else "". Collective over: the data axis."""
    decided = comm.gather_objects(sorted(found))
    odd = sorted(set().union(*decided).difference(set.intersection(*map(set, decided))))
    if not odd:
        return ""
    return (
        f"parameter {odd[0]} differs between the ranks that share a layer in some data replicas and not in others, so "
        f"whether it is a slice is not known; mark it ({MARKS[0]}), or give all replicas the same values"
    )


def own_cut(shapes: Sequence[tuple[int, ...]], dim: int = -1) -> TensorCut:
    """The slicing of a tensor whose slices have these shapes, in the order of ranks.

    Slices are joined along the sliced dim if it is known, else stacked along a new first dim or concatenated flat.
    """
    first = shapes[0]
    differing = {i for shape in shapes if len(shape) == len(first) for i in range(len(shape)) if shape[i] != first[i]}
    if dim < 0 and len(differing) == 1:
        dim = next(iter(differing))
    if 0 <= dim < len(first) and differing <= {dim} and all(len(shape) == len(first) for shape in shapes):
        sizes = tuple(shape[dim] for shape in shapes)
        return TensorCut(OWN, dim, (*first[:dim], sum(sizes), *first[dim + 1 :]), sizes)
    if all(shape == first for shape in shapes):
        return TensorCut(OWN, 0, (len(shapes), *first), (1,) * len(shapes))
    sizes = tuple(torch.Size(shape).numel() for shape in shapes)
    return TensorCut(OWN, 0, (sum(sizes),), sizes)


def find_unplaced(mesh: Mesh, model: nn.Module) -> str:
    """A sentence if marked parameters differ between ranks although no model axis was given; else "".

    Collective over: the data axis.
    """
    marked = {name: param for name, param in model.named_parameters() if is_marked(param)}
    odd = _unequal(mesh["data"], marked)
    if not odd:
        return ""
    return (
        f"parameter {odd[0]} is marked as a slice of a layer ({MARKS[0]}) and differs between ranks, and nothing says "
        "which ranks share a layer; pass their mpu: mpispeed.initialize(mpu=...), or seed ranks alike if it is whole"
    )


def find_cut_twice(model: nn.Module, comm: Comm) -> str:
    """A sentence if the config asks to slice layers that the model has sliced already; else "".

    Collective over: the model axis.
    """
    odd = _unequal(comm, {name: param for name, param in model.named_parameters() if is_marked(param)})
    if not odd:
        return ""
    return (
        f"tensor_parallel in the config asks for layers to be cut over {comm.size} ranks, and parameter {odd[0]} is a "
        f"slice already (it is marked {MARKS[0]}, and ranks have different ones); remove the section, and pass the mpu "
        "of the model to initialize"
    )


def _unequal(comm: Comm, params: dict[str, nn.Parameter]) -> list[str]:
    """Names of parameters that are not equal on all ranks. Collective over: the group."""
    if comm.size == 1:
        return []
    found = comm.gather_objects({name: _look_at(param) for name, param in params.items()})
    return [name for name in found[0] if any(others.get(name) != found[0][name] for others in found)]


def _look_at(param: nn.Parameter) -> _Found:
    """Form, checksum and marks of a parameter. Collective over: the ranks of `zero.Init`, if it has sharded it."""
    with sharded_param.opened([param], "initialize"):
        values = crc32c(param.detach().cpu().contiguous())
    is_plain = int(getattr(param, "partition_stride", 1)) == 1
    dim = int(getattr(param, "partition_dim", -1)) if is_plain else -1
    return _Found(tuple(param.shape), param.dtype, values, is_marked(param), dim)


def _refuse_sharded_elsewhere(mesh: Mesh, model: nn.Module) -> None:
    ranks = list(mesh["data"].ranks)
    for name, param in model.named_parameters():
        owner = sharded_param.owner_of(param) if sharded_param.is_sharded(param) else None
        comm = getattr(owner, "comm", None)
        if comm is not None and list(comm.ranks) != ranks:
            msg = (
                f"parameter {name} was cut over the ranks {list(comm.ranks)[:_SHOWN]} by zero.Init, and its data ranks "
                f"are {ranks[:_SHOWN]}; build the model in zero.Init(data_parallel_group=...) with the group of these"
            )
            raise ConfigError(msg)


def _aligned(comm: Comm, shapes: dict[str, tuple[int, ...]]) -> dict[str, list[tuple[int, ...]]]:
    """Shapes of the buffers that all ranks have. Collective over: the model axis."""
    everyone = comm.gather_objects(shapes)
    return {name: [others[name] for others in everyone] for name in shapes if all(name in row for row in everyone)}


def _note(model: nn.Module, found: dict[str, TensorCut]) -> None:
    """Write slices into the marks of the modules that have the tensors, under each of their names."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    by_id = {id(tensors[name]): cut for name, cut in found.items()}
    for module in model.modules():
        for name, tensor in itertools.chain(
            module.named_parameters(recurse=False, remove_duplicate=False),
            module.named_buffers(recurse=False, remove_duplicate=False),
        ):
            if id(tensor) in by_id:
                marks_of(module).cuts[name] = by_id[id(tensor)]


def _report(mesh: Mesh, is_cut: bool, unmarked: Sequence[str]) -> None:
    """Log warnings on the first rank. Collective over: the pipe axis."""
    stages = mesh["pipe"].gather_objects((is_cut, list(unmarked)))
    if mesh.rank:
        return
    size, names = mesh["model"].size, [name for _, others in stages for name in others]
    if not any(has_some for has_some, _ in stages):
        log.warning(
            "every parameter is equal on the %d ranks of a model group: they all compute the same. To have layers cut, "
            'set "tensor_parallel": {"autotp_size": %d}', size, size,
        )  # fmt: skip
    if names:
        log.warning(
            "parameters %s differ between the %d ranks of a model group and are taken as slices of layers; mark "
            "slices with param.%s = True (what is not marked and starts equal is taken as a copy: counted once in the "
            "gradient norm and saved once), or seed these ranks alike where they are copies",
            format_list(names, _SHOWN), size, MARKS[0],
        )  # fmt: skip
