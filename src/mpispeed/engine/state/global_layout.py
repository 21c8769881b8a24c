"""Place of this rank's parameters in the whole model: slices of layers, a stage, copies of shared parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mpispeed.ckpt.format.logical import LogicalTensor, ParamInfo, Piece, persistent_buffers
from mpispeed.ckpt.slices import TensorSlice, gather_pieces, read_slice
from mpispeed.nn.tensor import cuts
from mpispeed.nn.tensor.tensor_cut import OWN
from mpispeed.pipe.module import PipelineModule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpispeed.ckpt.format.logical import Deferred
    from mpispeed.ckpt.read.reader import Checkpoint
    from mpispeed.engine.build.parts import Parts
    from mpispeed.store.table import Unit

T = TypeVar("T")

LAST = 1 << 30
"""Sort key of parameters that belong to no layer, such as those of the loss."""

_CUT_FIELDS = ("shape", "tp_kind", "tp_dim", "tp_sub_sizes", "tp_grains", "vocab_size")


@dataclass(frozen=True, slots=True)
class GlobalLayout:
    """This rank's part in the whole model.

    Attributes:
        parts: components of the engine.
        slices: parameters and buffers of which this rank has a slice, by name.
    """

    parts: Parts
    slices: Mapping[str, TensorSlice] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Parts) -> GlobalLayout:
        """Read this rank's part off the model. Local."""
        comm = parts.mesh["model"]
        if comm.size == 1:
            return cls(parts)
        named = {**dict(parts.module.named_parameters()), **dict(persistent_buffers(parts.module))}
        found = {}
        for name, cut in cuts(parts.module).items():
            if name in named:
                info = ParamInfo(
                    name,
                    cut.shape,
                    named[name].dtype,
                    tp_kind=cut.kind,
                    tp_dim=cut.dim,
                    tp_sub_sizes=cut.sub_sizes,
                    tp_grains=cut.grains,
                    vocab_size=cut.shape[0] if cut.kind == "vocab" else -1,
                )
                found[name] = TensorSlice(info, comm.rank, comm.size)
        return cls(parts, found)

    def describe(self, info: ParamInfo) -> ParamInfo:
        """`info` of a local parameter, completed by the attributes of the logical one."""
        cut, model = self.slices.get(info.name), self.parts.module
        if cut is not None:
            info = replace(info, **{name: getattr(cut.info, name) for name in _CUT_FIELDS})
        elif self.parts.mesh["model"].size > 1:
            info = replace(info, tp_kind="replicated")
        if isinstance(model, PipelineModule):
            kind = "replicated" if self._stages(info.name) else "owned"  # whatever the number of stages is
            info = replace(info, pp_layer=model.layer_of(info.name), pp_kind=kind)
        return info

    def shape(self, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
        """Shape of the logical parameter or buffer of which this rank holds `tensor`."""
        return self.slices[name].info.shape if name in self.slices else tuple(tensor.shape)

    # -- saving ------------------------------------------------------------------------------------------------------

    def pieces(
        self, unit: Unit, name: str, start: int, values: torch.Tensor | Deferred, *, before: int = 0
    ) -> tuple[Piece, ...]:
        """The pieces to save for a flat range of this rank's parameter in a unit.

        In a tensor with one row for each of several ranks, `before` is the number of elements in earlier rows.
        """
        made = gather_pieces(self.slices[name], start, values) if name in self.slices else [Piece(start, values)]
        if not self.parts.sharing.is_counted(unit):
            made = [replace(piece, is_replica=True) for piece in made]
        return tuple(replace(piece, start=piece.start + before) if before else piece for piece in made)

    def outside(self, name: str, slot: str, tensor: torch.Tensor) -> LogicalTensor:
        """A parameter or buffer that is in no unit; data rank 0 writes it."""
        mesh, cut = self.parts.mesh, self.slices.get(name)
        pieces: Iterable[Piece] = ()
        if mesh.index("data") == 0 and self._owns(name):
            flat = tensor.detach().contiguous().reshape(-1).cpu()
            if cut is not None:
                pieces = gather_pieces(cut, 0, flat)
            elif mesh.index("model") == 0:
                pieces = (Piece(0, flat),)
        return LogicalTensor(name, slot, self.shape(name, tensor), tensor.dtype, tuple(pieces))

    def _stages(self, name: str) -> Sequence[int]:
        model, words = self.parts.module, name.split(".")
        if isinstance(model, PipelineModule) and words[0] == "tied_modules":
            return model.tied(words[1]).stages
        return ()

    def _owns(self, name: str) -> bool:
        stages = self._stages(name)
        return not stages or stages[0] == self.parts.mesh.index("pipe")

    # -- over stages -------------------------------------------------------------------------------------------------

    def over_stages(self, items: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
        """Named items of all stages in the order of layers, each name once, from the first stage that has it.

        Collective over: the pipe axis.
        """
        model, own = self.parts.module, list(items)
        if not isinstance(model, PipelineModule):
            return own
        placed = []
        for position, (name, item) in enumerate(own):
            layer = model.layer_of(name)
            placed.append((layer if layer >= 0 else LAST, self.parts.mesh.index("pipe"), position, name, item))
        everyone = self.parts.mesh["pipe"].gather_objects(placed)
        found: dict[str, tuple[str, T]] = {}
        for *_, name, item in sorted((row for rows in everyone for row in rows), key=lambda row: row[:3]):
            found.setdefault(name, (name, item))
        return list(found.values())

    def infos(self, own: Iterable[ParamInfo]) -> list[ParamInfo]:
        """Descriptions of the parameters of all stages. Collective over: the pipe axis."""
        return [info for _, info in self.over_stages((info.name, self.describe(info)) for info in own)]

    def tensors(self, own: Iterable[LogicalTensor]) -> list[LogicalTensor]:
        """Tensors of all stages, those of others without pieces. Collective over: the pipe axis."""
        here = {(tensor.name, tensor.slot): tensor for tensor in own}
        if not isinstance(self.parts.module, PipelineModule):
            return list(here.values())
        slots: dict[str, list[Any]] = {}
        for tensor in here.values():
            slots.setdefault(tensor.name, []).append((tensor.slot, tensor.shape, tensor.dtype))
        found = []
        for name, rows in self.over_stages(slots.items()):
            found += [here.get((name, row[0])) or LogicalTensor(name, *row) for row in rows]
        return found

    def names_by_group(self, own: Sequence[Sequence[str]]) -> list[list[str]]:
        """Names of all stages by parameter group. Collective over: the pipe axis."""
        flat = [(name, index) for index, names in enumerate(own) for name in names]
        members: list[list[str]] = [[] for _ in own]
        for name, index in self.over_stages(flat):
            members[index].append(name)
        return members

    # -- loading -----------------------------------------------------------------------------------------------------

    def misfit(self, source: Checkpoint) -> str:
        """The reason why stored slices do not fit layers that the model's own code slices, or ""."""
        own = dict(self.parts.module.named_parameters())  # other stages check theirs
        for name in sorted(own.keys() & set(source.names())):
            stored, here = source.info(name), self.slices[name].info if name in self.slices else None
            cuts_of = [
                (info.shape, info.tp_sub_sizes) if info is not None and info.tp_kind == OWN else None
                for info in (stored, here)
            ]
            if cuts_of[0] != cuts_of[1]:
                had, has = (f"{len(cut[1])} pieces of {cut[0]}" if cut else "one whole" for cut in cuts_of)
                return (
                    f"parameter {name} is {had} in {source.path} and {has} in the model, of a layer that the model "
                    "cuts by its own code; only that code knows how other pieces are made: load with the mpu and the "
                    "number of ranks for a layer as when it was saved"
                )
        return ""

    def read(
        self, source: Checkpoint, name: str, slot: str, start: int, out: torch.Tensor, *, row: int | None = None
    ) -> None:
        """Fill `out` with a flat range, from `start`, of this rank's part of a parameter or buffer.

        `row` selects the row of a stored tensor that has one for each of several ranks.
        """
        if name in self.slices:
            read_slice(source, name, slot, self.slices[name], start, out, row=row)
        else:
            before = 0 if row is None else row * math.prod(source.stored(name, slot).shape[1:])
            source.read(name, slot, before + start, out)


def named(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, None]]:
    """The names alone, for `GlobalLayout.over_stages`."""
    return ((name, None) for name, _ in tensors)
