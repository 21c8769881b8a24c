"""Experts of DeepSpeed's mixtures: a file for each expert of each layer, optimizer state by expert-parallel rank.

Files of experts have the numbers that experts have in the whole layer. Beside optimizer state stand the names of
expert-parallel rank 0: all ranks count their experts from 0, so that a name is another expert on each of them.

Source: DeepSpeed 0.19.6, `DeepSpeedEngine._save_moe_checkpoint`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mpispeed.ckpt.foreign import torch_files
from mpispeed.ckpt.foreign.faults import ForeignCorrupt, ForeignIncomplete, ForeignMismatch
from mpispeed.ckpt.foreign.flat_parts import Cut, Share
from mpispeed.ckpt.foreign.folders import OLD_LAYOUT, RankFiles
from mpispeed.ckpt.foreign.found import MASTER, WEIGHT16, Found, FoundParam, ReadOptions
from mpispeed.ckpt.foreign.values import Chain, Plain, Rounded, Values, are_equal
from mpispeed.ckpt.format.logical import ALL_EXPERTS

#: prefix, number, rest: experts that are modules
_NUMBERED = re.compile(r"((?:.*\.)?deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,18})\.(.+)")
#: prefix, rest, number: slices of the tensors of all experts that AutoEP makes
_FUSED = re.compile(r"((?:.*\.)?experts\.)(w[123])\.(\d{1,18})")
_ROUTER = re.compile(r"((?:.*\.)?deepspeed_moe\.)gate\..+")
_DATA_FIRST = "use_data_before_expert_parallelism"


@dataclass(slots=True)
class ExpertLayer:
    """The experts of one layer.

    Attributes:
        prefix: of the names of their parameters, up to the number, or to the last part where they are fused.
        total: how many they are.
        is_fused: the model has one tensor for all experts, of which files have slices.
        tensors: number -> last part of the name -> tensor.
    """

    prefix: str
    total: int
    is_fused: bool
    tensors: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    def name(self, number: int, rest: str) -> str:
        """The parameter of the whole model."""
        return f"{self.prefix}{rest}" if self.is_fused else f"{self.prefix}{number}.{rest}"

    def held(self, ranks: int) -> int:
        """Experts on each of `ranks` expert-parallel ranks.

        Raises:
            ForeignMismatch: the ranks do not divide them.
        """
        if self.total % ranks:
            msg = f"{self.prefix}: {self.total} experts were on {ranks} expert-parallel ranks, which do not divide them"
            raise ForeignMismatch(msg)
        return self.total // ranks

    def weights(self) -> Iterator[tuple[str, tuple[int, ...], Values, tuple[int, int]]]:
        """Name, shape, elements, (number, experts of the layer) of each tensor of the model; in its order."""
        if self.is_fused:
            for rest, first in self.tensors[0].items():
                links: list[tuple[Values, int, int]] = [
                    (Plain(self.tensors[number][rest]), 0, first.numel()) for number in range(self.total)
                ]
                of_all = (ALL_EXPERTS, self.total)
                yield self.name(0, rest), (self.total, *first.shape), Chain(links, first.dtype), of_all
            return
        for number in range(self.total):
            for rest, tensor in self.tensors[number].items():
                yield self.name(number, rest), tuple(tensor.shape), Plain(tensor), (number, self.total)


class Experts:
    """All layers of experts of one model-parallel rank, in the order of the model."""

    def __init__(self, folder: Path, layers: Sequence[ExpertLayer], is_data_first: bool) -> None:
        """Args: `is_data_first`: ranks with the same experts were neighbours, not ranks with different ones."""
        self._folder, self._is_data_first, self.layers = folder, is_data_first, list(layers)
        self._by_prefix = {layer.prefix: layer for layer in layers if not layer.is_fused}
        self._fused = {layer.name(0, rest): layer for layer in layers if layer.is_fused for rest in layer.tensors[0]}

    def has(self, name: str) -> bool:
        """True for a name of a parameter or buffer of experts, whatever its number."""
        match = _NUMBERED.fullmatch(name)
        return name in self._fused or (match is not None and match[1] in self._by_prefix)

    def shares(self, shapes: Sequence[Iterable[str]], optimizers: Sequence[Mapping[str, Any]]) -> list[list[Share]]:
        """For each parameter group, data ranks with the same experts, and the names that their parameters have.

        Args:
            shapes: names by parameter group, as rank 0 has them.
            optimizers: files of the data ranks.

        Raises:
            ForeignMismatch: a group is divided over ranks in no way that experts are.
        """
        counts, ranks = optimizers[0].get("partition_count"), len(optimizers)
        listed = list(counts) if isinstance(counts, (list, tuple)) else [ranks] * len(shapes)
        if len(listed) != len(shapes):
            msg = f"{self._folder}: {len(shapes)} parameter groups, partition_count is of {len(listed)}"
            raise ForeignMismatch(msg)
        return [self._of_group(index, set(names), listed[index], ranks) for index, names in enumerate(shapes)]

    def _of_group(self, index: int, names: set[str], count: Any, ranks: int) -> list[Share]:
        if type(count) is not int or not 0 < count <= ranks or ranks % count:
            msg = f"{self._folder}: group {index} is cut over {count!r:.40} of {ranks} data ranks (partition_count)"
            raise ForeignMismatch(msg)
        if count == ranks:
            return [(range(ranks), str)]
        other = next((name for name in sorted(names) if not self.has(name)), None)
        if other is not None:
            msg = (
                f"{self._folder}: {other!r} is of no expert, and its group {index} is cut over {count} of {ranks} ranks"
            )
            raise ForeignMismatch(msg)
        sizes = ranks // count
        made: list[Share] = []
        for rank in range(sizes):
            held = range(rank * count, (rank + 1) * count) if self._is_data_first else range(rank, ranks, sizes)
            made.append((held, partial(self.renumbered, rank=rank, ranks=sizes)))
        return made

    def renumbered(self, name: str, rank: int, ranks: int) -> str:
        """The name in the whole model of what one of `ranks` expert-parallel ranks calls `name`.

        Raises:
            ForeignMismatch: it is of no expert that such a rank has.
        """
        match = _NUMBERED.fullmatch(name)
        if match is None:
            return name
        layer = self._by_prefix[match[1]]
        held, own = layer.held(ranks), int(match[2])
        if own >= held:
            msg = f"{self._folder}: {name!r} is on a rank that has {held} of {layer.total} experts"
            raise ForeignMismatch(msg)
        return layer.name(rank * held + own, match[3])

    def joined(self, cuts: Iterable[Cut]) -> Iterator[Cut]:
        """The cuts, with slices of fused experts put together.

        Raises:
            ForeignMismatch: slices are of no whole tensor.
        """
        waiting: dict[str, list[Cut]] = {}
        for cut in cuts:
            layer = self._fused.get(cut[0])
            if layer is None:
                yield cut
                continue
            rows = waiting.setdefault(cut[0], [])
            rows.append(cut)
            if sum(row[1][0] if row[1] else layer.total for row in rows) == layer.total:
                yield _stacked(waiting.pop(cut[0]))
        for name, rows in waiting.items():
            msg = f"{self._folder}: slices of {name!r} of the shapes {[row[1] for row in rows]!r:.200} make no whole"
            raise ForeignMismatch(msg)

    def take(self, found: Found, options: ReadOptions, buffers: Iterable[str]) -> None:
        """Add the weights of all experts, and bring parameters into the order of the model.

        Args:
            found: has all other parameters, and masters of experts where there is partitioned state of them.
            options: options for reading.
            buffers: names of buffers, as expert-parallel rank 0 has them.

        Raises:
            ForeignMismatch: files of experts and optimizer state contradict each other.
            ForeignIncomplete: there is optimizer state of experts without a file.
        """
        listed, known = set(buffers), bool(found.groups)
        names: dict[str, list[str]] = {}
        for layer in self.layers:
            inert = {rest for rest in layer.tensors[0] if layer.name(0, rest) in listed}
            for name, shape, values, expert in layer.weights():
                rest = name.removeprefix(layer.name(expert[0], ""))
                if rest in inert or not values.dtype.is_floating_point or re.search(options.buffers, name):
                    found.buffers[name] = (shape, values)
                    continue
                names.setdefault(layer.prefix, []).append(name)
                param = found.params.get(name)
                if param is None:
                    is_frozen = known or bool(options.frozen and re.search(options.frozen, name))
                    slot = MASTER if values.dtype in (torch.float32, torch.float64) and not is_frozen else WEIGHT16
                    found.add(FoundParam(name, shape, values.dtype, {slot: values}, is_frozen, expert=expert))
                else:
                    _check_same(self._folder, param, shape, values)
                    param.train_dtype, param.expert = values.dtype, expert
        taken = {name for own in names.values() for name in own}
        alone = next((name for name in found.params if self.has(name) and name not in taken), None)
        if alone is not None:
            msg = f"{self._folder} has optimizer state of {alone!r}, and no file of experts has it; files are missing"
            raise ForeignIncomplete(msg)
        self._sort(found, names)

    def _sort(self, found: Found, names: Mapping[str, list[str]]) -> None:
        """Put experts behind the router of their layer, as the model has them."""
        waiting = dict(names)
        order: list[str] = []
        for name in [name for name in found.params if not self.has(name)]:
            order.append(name)
            if match := _ROUTER.fullmatch(name):
                order += waiting.pop(f"{match[1]}experts.deepspeed_experts.", [])
        order += [name for own in waiting.values() for name in own]
        found.params = {name: found.params[name] for name in order}


def _check_same(folder: Path, param: FoundParam, shape: tuple[int, ...], values: Values) -> None:
    if param.shape != shape:
        msg = f"{folder}: {param.name!r} has the shape {shape} in its file and {param.shape} beside optimizer state"
        raise ForeignMismatch(msg)
    if not are_equal(Rounded(param.weight, values.dtype), values, has_nan=True):
        msg = (
            f"{folder}: the weight of {param.name!r} is not the rounded one beside optimizer state; files are of two "
            "saves, or experts were on other ranks than the configuration says; import from files of one save"
        )
        raise ForeignMismatch(msg)


def _stacked(cuts: Sequence[Cut]) -> Cut:
    name, shape, group, step, slots = cuts[0]
    if any(cut[1][1:] != shape[1:] or cut[4].keys() != slots.keys() for cut in cuts):
        msg = f"slices of {name!r} have different shapes or optimizer state"
        raise ForeignMismatch(msg)
    whole = {slot: Chain([(cut[4][slot], 0, cut[4][slot].numel) for cut in cuts], slots[slot].dtype) for slot in slots}
    return name, (sum(cut[1][0] for cut in cuts), *shape[1:]), group, step, dict(whole)


def mark_universal(found: Found, counts: Any) -> None:
    """Note the numbers of experts in a universal checkpoint, which has all of them or none.

    Args:
        found: has all parameters.
        counts: experts of each layer, as a file with weights says.

    Raises:
        ForeignMismatch: it has the experts of one rank. DeepSpeed's conversion writes those of others over them.
    """
    layers: dict[str, list[tuple[str, int]]] = {}
    for name in found.params:
        if match := _NUMBERED.fullmatch(name):
            layers.setdefault(match[1], []).append((name, int(match[2])))
    totals = counts if isinstance(counts, list) and len(counts) == len(layers) else [None] * len(layers)
    for (prefix, rows), total in zip(layers.items(), totals, strict=True):
        numbers = {number for _, number in rows}
        if total != len(numbers) or numbers != set(range(len(numbers))):
            msg = (
                f"{found.path} has {len(numbers)} of {total or 'an unknown number of'} experts of {prefix}: conversion "
                "to this format keeps those of one rank; import the checkpoint that it was made from"
            )
            raise ForeignMismatch(msg)
        for name, number in rows:
            found.params[name].expert = (number, len(numbers))


def read(files: RankFiles, mp: int, model: Mapping[str, Any]) -> Experts | None:
    """The experts of a model-parallel rank; None if the model has none.

    Args:
        files: files of the tag.
        mp: model-parallel rank.
        model: content of its file with weights.

    Raises:
        ForeignIncomplete: an expert has no file.
        ForeignMismatch: files contradict each other.
        ForeignCorrupt: a file is damaged.
        RefusedPickle: a file holds objects that could run code.
    """
    paths, counts = files.experts.get(mp, {}), model.get("num_experts")
    if not counts and not paths:
        return None
    _refuse(files, model)
    rows = _by_layer(files, mp, counts)
    config = model.get("ds_config")
    is_data_first = isinstance(config, Mapping) and bool(config.get(_DATA_FIRST))
    layers: dict[str, ExpertLayer] = {}
    for number, total in rows:
        for prefix, layer in _read_layer(paths, number, total).items():
            if prefix in layers:
                msg = f"{files.folder}: files of two layers have experts named {prefix}..."
                raise ForeignMismatch(msg)
            layers[prefix] = layer
    return Experts(files.folder, list(layers.values()), is_data_first)


def _refuse(files: RankFiles, model: Mapping[str, Any]) -> None:
    """Refuse what is not read.

    Raises:
        ForeignMismatch: names it.
    """
    rows = model.get("ds_autoep_layers") or []
    if any(isinstance(row, Mapping) and row.get("checkpoint_format") == "zero3_partitioned" for row in rows):
        msg = f"{files.folder} has experts cut by ZeRO stage 3 (AutoEP); convert it by ds_to_universal of DeepSpeed"
        raise ForeignMismatch(msg)
    if files.layers:
        msg = f"{files.folder} has files of pipeline layers and of experts; pipelines with experts cannot be imported"
        raise ForeignMismatch(msg)


def _by_layer(files: RankFiles, mp: int, counts: Any) -> list[tuple[int, int]]:
    """(number, experts) of each layer; every expert has a file, and every file is of an expert.

    Raises:
        ForeignIncomplete, ForeignMismatch: it is not so.
    """
    totals = dict(enumerate(counts)) if isinstance(counts, list) else {OLD_LAYOUT: counts}
    if not all(type(total) is int and total > 0 for total in totals.values()):
        msg = f"{files.folder}: the file with weights counts {counts!r:.80} experts (num_experts)"
        raise ForeignMismatch(msg)
    paths = files.experts.get(mp, {})
    for layer, total in totals.items():
        have = sorted(number for own, number in paths if own == layer)
        missing = next((place for place, number in enumerate(have) if place != number), len(have))
        what = f"layer {layer}" if layer != OLD_LAYOUT else "the model"
        if missing < total:
            msg = f"{files.folder} has no file of expert {missing} of {what}, which has {total}; files are missing"
            raise ForeignIncomplete(msg)
        if have[-1] >= total:
            _too_many(paths[layer, have[-1]], f"{what} has {total} experts")
    for layer, number in paths:
        if layer not in totals:
            _too_many(paths[layer, number], f"the model has {len(totals)} layers of experts")
    return list(totals.items())


def _too_many(path: Path, why: str) -> None:
    msg = f"{path} is of another save: by the file with weights {why} (num_experts); remove it"
    raise ForeignMismatch(msg)


def _read_layer(paths: Mapping[tuple[int, int], Path], number: int, total: int) -> dict[str, ExpertLayer]:
    """The experts of a layer by prefix; of several layers where files were written so, before DeepSpeed 0.5.4."""
    layers: dict[str, ExpertLayer] = {}
    for expert in range(total):
        path = paths[number, expert]
        content = torch_files.read(path)
        if not isinstance(content, Mapping) or not content:
            msg = f"{path} holds a {type(content).__name__} where tensors of an expert are expected"
            raise ForeignCorrupt(msg)
        for key, tensor in content.items():
            prefix, own, rest, is_fused = _parsed(path, key, tensor)
            if own != expert:
                msg = f"{path} has {key!r}, which is of expert {own}"
                raise ForeignMismatch(msg)
            layer = layers.setdefault(prefix, ExpertLayer(prefix, total, is_fused))
            layer.tensors.setdefault(expert, {})[rest] = tensor
    if number != OLD_LAYOUT and len(layers) > 1:
        msg = f"{paths[number, 0].parent}: files of layer {number} have experts named {' and '.join(sorted(layers))}"
        raise ForeignMismatch(msg)
    for layer in layers.values():
        _check_alike(paths[number, 0].parent, layer)
    return layers


def _parsed(path: Path, key: Any, tensor: Any) -> tuple[str, int, str, bool]:
    """Prefix, number and rest of a name; whether it is of fused experts."""
    name = key.removeprefix(".") if isinstance(key, str) else ""  # of a model that is itself a layer of experts
    if isinstance(tensor, torch.Tensor):
        if match := _NUMBERED.fullmatch(name):
            return match[1], int(match[2]), match[3], False
        if match := _FUSED.fullmatch(name):
            return match[1], int(match[3]), match[2], True
    msg = f"{path} has {key!r:.200}, which is no tensor of an expert of DeepSpeed's MoE or AutoEP"
    raise ForeignMismatch(msg)


def _check_alike(folder: Path, layer: ExpertLayer) -> None:
    """Require that experts of a layer have the same tensors, as copies of one module have."""
    first = {rest: (tuple(tensor.shape), tensor.dtype) for rest, tensor in layer.tensors.get(0, {}).items()}
    for number in range(layer.total):
        own = {rest: (tuple(tensor.shape), tensor.dtype) for rest, tensor in layer.tensors.get(number, {}).items()}
        if own != first:
            rest = sorted(rest for rest in first.keys() | own.keys() if first.get(rest) != own.get(rest))[0]
            msg = (
                f"{folder}: {rest!r} of expert {number} of {layer.prefix} is {own.get(rest, 'missing')}, and of expert "
                f"0 {first.get(rest, 'missing')}; experts of a layer are alike"
            )
            raise ForeignMismatch(msg)
