"""Experts of a model for inference, shared out over neighbouring data ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpispeed.base.errors import ConfigError
from mpispeed.nn.expert.blocks import find_blocks, replace_block
from mpispeed.nn.expert.experts import Experts, ranged
from mpispeed.nn.expert.layer import RoutedExperts

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.mesh.comm import Comm


class ExpertShares:
    """The layers of experts of a model, and the ranks that share each of them out.

    Ranks of a group run the model together: see `InStep`.
    """

    def __init__(self, model: nn.Module, ep_size: int, data: Comm) -> None:
        """Make blocks of experts layers of ours; every rank still has all experts.

        Args:
            model: changed in place; may be on torch's meta device.
            ep_size: neighbouring ranks of `data` that share the experts of a layer out.
            data: the data axis.

        Collective over: `data`.

        Raises:
            ConfigError: on every rank, if there are no experts, too few, or `ep_size` does not divide the ranks.
        """
        with data.together(ConfigError):
            if data.size % ep_size:
                msg = f"moe.ep_size {ep_size} does not divide the {data.size} data ranks"
                raise ConfigError(msg)
            for path, row in find_blocks(model):
                replace_block(path, model.get_submodule(path), row, ep_size, config=getattr(model, "config", None))
            self._layers = {path: each for path, each in model.named_modules() if isinstance(each, RoutedExperts)}
            _check(model, self._layers, ep_size)
        group = data.rank // ep_size
        ranks = data.ranks[group * ep_size : (group + 1) * ep_size]
        self.comm = data.split(group, ranks, ("data",))

    def finish(self, path: str, module: nn.Module) -> None:
        """Drop the experts of other ranks, if the module at a path is complete and has experts. Local."""
        owner = self._layers.get(path.rpartition(".")[0])
        if isinstance(module, Experts) and owner is not None:
            module.keep(ranged(module.num_experts, self.comm))

    def share_out(self) -> None:
        """Drop the experts of other ranks everywhere, and let layers exchange tokens. Local."""
        for layer in self._layers.values():
            layer.set_expert_group(self.comm)

    def close(self) -> None:
        """Release the group; layers keep the experts of this rank. Collective over: the group."""
        for layer in self._layers.values():
            layer.leave_expert_group()
        self.comm.close()


def _check(model: nn.Module, layers: dict[str, RoutedExperts], ep_size: int) -> None:
    if not layers:
        msg = f"moe.ep_size is {ep_size}, and {type(model).__name__} has no layer of experts; remove it"
        raise ConfigError(msg)
    for path, layer in layers.items():
        if layer.experts.num_experts < ep_size:
            msg = (
                f"moe.ep_size {ep_size} is more than the {layer.experts.num_experts} experts of {path}; use fewer ranks"
            )
            raise ConfigError(msg)
