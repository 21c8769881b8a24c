"""Sequence parallelism of an injected model: between its sites every rank has a part of the sequence.

The sequence is sliced before the first block and joined behind the last one, in training only; in evaluation sequences
are full.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.mesh.comm import Comm
from mpispeed.nn.cut_marks import mark_cut
from mpispeed.nn.tensor import regions
from mpispeed.nn.tensor.dropout import give_own_stream, has_dropout
from mpispeed.nn.tensor.entry import SequenceCut
from mpispeed.nn.tensor.linear import CutLayer
from mpispeed.nn.tensor.shard_plan import Site, child, shape_of
from mpispeed.nn.tensor.tensor_cut import marks_of


def blocks_of(model: nn.Module, sites: list[Site]) -> str:
    """Path of the list of blocks that has all sites.

    Raises:
        ConfigError: there is none, there are several, or a block has a linear layer that would not be sliced.
    """
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    used = [path for path in outer if any(site.scope.startswith(f"{path}.") for site in sites)]
    if len(used) != 1 or not all(site.scope.startswith(f"{used[0]}.") and site.row for site in sites):
        msg = f"sequence parallelism needs one list of blocks that has all cut layers, found {used or 'none'}; "
        msg += "inject without sequence_parallel"
        raise ConfigError(msg)
    layers = {path for site in sites for path in (site.row, *(column.path for column in site.columns))}
    blocks: Any = child(model, used[0])
    for path, module in blocks.named_modules(prefix=used[0]):
        if path not in layers and (shape_of(module) or isinstance(module, nn.MultiheadAttention)):
            msg = f"sequence parallelism needs every linear layer of a block to be cut, and {path} is not; name it in "
            msg += "a policy, or inject without sequence_parallel"
            raise ConfigError(msg)
    return used[0]


def cut_sequence(model: nn.Module, path: str, comm: Comm, sequence: SequenceCut) -> None:
    """Slice the sequence before the blocks at `path` and join it behind them; call after all sites are sliced.

    Local: the hooks communicate when the model runs.
    """
    blocks: Any = child(model, path)
    for block in blocks:
        for part in block.modules():
            if not isinstance(part, CutLayer):
                marks_of(part).partial.update(name for name, _ in part.named_parameters(recurse=False))
        if any(has_dropout(part) for part in block.modules()):
            give_own_stream(block, comm.rank)
    blocks[0].register_forward_pre_hook(Cut(comm, sequence), with_kwargs=True)
    for block in list(blocks)[:-1]:
        block.register_forward_hook(Mark(comm, sequence))
    blocks[-1].register_forward_hook(Join(comm, sequence))


class _Hook:
    def __init__(self, comm: Comm, sequence: SequenceCut) -> None:
        self.comm, self.sequence = comm, sequence

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        memo[id(self.comm)] = self.comm
        return type(self)(self.comm, copy.deepcopy(self.sequence, memo))


class Cut(_Hook):
    """A hook before the first block that slices the sequence."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Arguments with this rank's part of the hidden states."""
        self.sequence.is_on = module.training and self.comm.size > 1
        if not self.sequence.is_on:
            return None
        x = args[0] if args else kwargs["hidden_states"]
        regions.check_divisible(x.shape[self.sequence.dim], self.comm, "a sequence")
        x = mark_cut(regions.scatter_to(x, self.comm, self.sequence.dim))
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})


class Mark(_Hook):
    """A hook behind blocks that marks their outputs, so that recomputation does not slice them once more."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        """Mark the hidden states, where they are sliced."""
        if self.sequence.is_on:
            mark_cut(out if isinstance(out, torch.Tensor) else out[0])


class Join(_Hook):
    """A hook behind the last block that joins the sequence."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        """The output with full hidden states."""
        if not self.sequence.is_on:
            return None
        if isinstance(out, torch.Tensor):
            return regions.gather_from(out, self.comm, self.sequence.dim)
        return (regions.gather_from(out[0], self.comm, self.sequence.dim), *out[1:])


def uncut_layers(model: nn.Module) -> list[str]:
    """Paths of linear layers and embeddings that are not sliced."""
    kinds = (nn.Linear, nn.Embedding)
    return [path for path, part in model.named_modules() if shape_of(part) or isinstance(part, kinds)]
