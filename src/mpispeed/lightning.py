"""PyTorch Lightning: `Trainer(strategy="mpispeed")`, or `Trainer(strategy=MpispeedStrategy(stage=3))`.

Importing this registers the names with Lightning. Ranks, nodes and devices are those of MPI, on CPUs as on GPUs; a
checkpoint is a folder that any number of ranks resumes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.compat.as_deepspeed import activate, find_real
from mpispeed.engine.api import initialize
from mpispeed.engine.distributed import init_distributed, join_world
from mpispeed.engine.ownership import engine_of, newest_mesh
from mpispeed.mesh import launcher
from mpispeed.plan.device import VARIABLE

try:
    from lightning.fabric.strategies.deepspeed import _validate_checkpoint_directory
    from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.pytorch.plugins.environments import ClusterEnvironment
    from lightning.pytorch.strategies import DeepSpeedStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.rank_zero import rank_zero_only
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] != "lightning":
        raise
    msg = 'mpispeed.lightning needs PyTorch Lightning; install it: pip install "lightning>=2.6"'
    raise ModuleNotFoundError(msg, name=missing.name) from None

if TYPE_CHECKING:
    from datetime import timedelta

    from torch import nn

    from mpispeed.mesh.world import World

__all__ = ["MpiEnvironment", "MpispeedStrategy"]

T = TypeVar("T")

_CLIENT = "lightning"  # of Lightning's own state within the client state

_NO_EFFECT = {"allgather_bucket_size": (200_000_000, 0), "sub_group_size": (1_000_000_000_000, 2)}
"""Lightning's own values, and the last stage at which the keys have no effect."""


class MpiEnvironment(ClusterEnvironment):
    """Numbers of ranks and nodes as MPI has them; MPI is joined when the first is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._node_rank: int | None = None

    @property
    def world(self) -> World:
        """All ranks. Collective over: all ranks, at the first call."""
        return join_world()

    @property
    def creates_processes_externally(self) -> bool:
        """True: srun, mpirun or `mpispeed run` has started the ranks."""
        return True

    @property
    def main_address(self) -> str:
        """MASTER_ADDR, if anything has set it: ranks meet over MPI."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """MASTER_PORT, likewise; 0 without it."""
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        """False: the strategy chooses this one."""
        return False

    def world_size(self) -> int:
        """Number of ranks."""
        return self.world.size

    def set_world_size(self, size: int) -> None:
        """Nothing: MPI's number counts."""

    def global_rank(self) -> int:
        """This rank."""
        return self.world.rank

    def set_global_rank(self, rank: int) -> None:
        """Nothing: MPI's number counts."""

    def local_rank(self) -> int:
        """Place among the ranks of this node."""
        return self.world.local_rank

    def node_rank(self) -> int:
        """Number of this node, in the order of first ranks. Collective over: all ranks, at the first call.

        The strategy calls it on every rank before the Trainer, which asks for it on some.
        """
        if self._node_rank is None:
            world = self.world
            first = world.node.share(world.rank)
            self._node_rank = sorted(set(world.comm.gather_objects(first))).index(first)
        return self._node_rank


def _given(part: T | None, name: str) -> T:
    """A part that the Trainer has set.

    Raises:
        UsageError: there is no Trainer.
    """
    if part is None:
        msg = f"MpispeedStrategy has no {name} yet; pass it to a Trainer: Trainer(strategy=MpispeedStrategy())"
        raise UsageError(msg)
    return part


def _let_go(model: nn.Module) -> None:
    """Give the model its whole weights back, if an engine has it. Collective over: all ranks."""
    engine = engine_of(model)
    if engine is not None:
        engine.destroy()


class MpispeedStrategy(DeepSpeedStrategy):
    """Lightning's DeepSpeedStrategy, with its arguments, over this library.

    `devices` and `num_nodes` of the Trainer have no effect: the launcher has started the ranks. Each rank has the CPU,
    or one of its node's GPUs in turn.

    Raises:
        ConfigError: DeepSpeed itself is installed, or MPISPEED_DEVICE contradicts the Trainer's accelerator.
    """

    strategy_name = "mpispeed"

    def __init__(self, *, timeout: timedelta | None = None, **kwargs: Any) -> None:
        real = find_real()
        if real or not activate():
            msg = f"MpispeedStrategy: DeepSpeed itself is installed ({real}) and would be imported; uninstall it"
            raise ConfigError(msg)
        self._kind = ""
        super().__init__(timeout=timeout, **kwargs)
        if self.cluster_environment is None:
            self.cluster_environment = MpiEnvironment()

    # -- places ------------------------------------------------------------------------------------------------------

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """Devices of the ranks of this node; None before the Trainer has chosen a kind."""
        if not self._kind:
            return None
        return [self._device_of(local_rank) for local_rank in range(join_world().local_size)]

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices:
            self._kind = torch.device(devices[0]).type

    @property
    def root_device(self) -> torch.device:
        """The device of this rank, which is also its engine's."""
        return self._device_of(join_world().local_rank)

    @property
    def num_nodes(self) -> int:
        """Number of nodes that MPI sees."""
        return join_world().node_count

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        """Nothing: MPI's number counts."""

    def _device_of(self, local_rank: int) -> torch.device:
        if self._kind in ("", "cpu"):
            return torch.device("cpu")
        given = torch.device(os.environ.get(VARIABLE) or self._kind)
        count = max(torch.get_device_module(self._kind).device_count(), 1)
        return torch.device(self._kind, local_rank % count if given.index is None else given.index)

    def set_world_ranks(self) -> None:
        """Tell Lightning which rank may speak. Collective over: all ranks, at the first call."""
        _given(self.cluster_environment, "cluster environment").node_rank()
        for speaks in (rank_zero_only, fabric_rank_zero_only):
            vars(speaks)["rank"] = self.global_rank

    # -- start and end -----------------------------------------------------------------------------------------------

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Parts of the data for samplers: ranks that share sequences or slices have the same part."""
        mesh = newest_mesh()
        if mesh is None:
            return super().distributed_sampler_kwargs
        return {"num_replicas": mesh["batch"].size, "rank": mesh.index("batch")}

    def _configure_launcher(self) -> None:
        """No launcher: the ranks are there."""
        self._launcher = None

    def setup_environment(self) -> None:
        """Choose the device and join MPI. Collective over: all ranks."""
        kind = os.environ.setdefault(VARIABLE, self._kind)
        if torch.device(kind or "cpu").type != self._kind:
            msg = f"{VARIABLE} is {kind!r} and the Trainer's accelerator takes {self._kind}; make them the same"
            raise ConfigError(msg)
        _given(self.accelerator, "accelerator").setup_device(self.root_device)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        """Make torch's default process group over MPI. Collective over: all ranks."""
        reset_seed()
        world = init_distributed() if self._timeout is None else init_distributed(timeout=self._timeout)
        self.set_world_ranks()
        if world.size > 1 and not torch.distributed.is_initialized():
            msg = "MpispeedStrategy: Lightning needs torch.distributed, and there is no process group (see the warning)"
            raise UsageError(msg)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Lightning's reduction; a mean of whole numbers is rounded towards zero. Collective over: the group."""
        is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        if not isinstance(tensor, torch.Tensor) or not is_mean or tensor.is_floating_point():
            return super().reduce(tensor, group, reduce_op)
        total = super().reduce(tensor, group, "sum")
        return total.copy_(total / (self.world_size if group is None else group.size()))

    def teardown(self) -> None:
        """Leave the model where the engine has it: a later `test` or `fit` of this Trainer goes on with it."""
        _given(self.cluster_environment, "cluster environment").teardown()
        self.precision_plugin.teardown()
        _given(self.accelerator, "accelerator").teardown()

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        """An engine without an optimizer. Collective over: all ranks."""
        config = {key: value for key, value in (self.config or {}).items() if key not in ("optimizer", "scheduler")}
        _let_go(model)
        self.model, *_ = initialize(model=model, model_parameters=[], config=config)

    def _initialize_deepspeed_train(self, model: nn.Module) -> None:
        """An engine with the optimizer of the model or of the config. Collective over: all ranks."""
        _let_go(model)
        super()._initialize_deepspeed_train(model)

    def _create_default_config(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Lightning's config, without its own values of keys that have no effect at its stage."""
        config = super()._create_default_config(*args, **kwargs)
        zero = config.get("zero_optimization", {})
        for key, (value, last) in _NO_EFFECT.items():
            if zero.get(key) == value and zero.get("stage", 0) <= last:
                del zero[key]
        return config

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Nothing: `save_checkpoint` writes it from where it is."""
        return {}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: `save_checkpoint` writes the weights from where they are, which may be other ranks."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write the folder `filepath`, with the state in its tag "checkpoint". Collective over: all ranks.

        Raises:
            TypeError: `storage_options` are given.
        """
        if storage_options is not None:
            msg = "MpispeedStrategy.save_checkpoint: storage_options have no effect here; leave them out"
            raise TypeError(msg)
        kept = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        self.deepspeed_engine.save_checkpoint(
            str(self.broadcast(filepath)),
            tag="checkpoint",
            client_state={_CLIENT: kept},
            exclude_frozen_parameters=self.exclude_frozen_parameters,
        )

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder that any number of ranks has written; returns Lightning's state.

        Collective over: all ranks.

        Raises:
            UsageError: the folder was not written by this strategy.
        """
        if self.load_full_weights and Path(checkpoint_path).is_file():
            return super().load_checkpoint(checkpoint_path, weights_only)
        module = _given(self.lightning_module, "model")
        _validate_checkpoint_directory(checkpoint_path)
        _, client_state = self.deepspeed_engine.load_checkpoint(
            str(checkpoint_path),
            tag="checkpoint",
            load_optimizer_states=module.trainer.state.fn == TrainerFn.FITTING,
            load_lr_scheduler_states=False,
            load_module_strict=module.strict_loading,
        )
        if not client_state or _CLIENT not in client_state:
            msg = (
                f"{checkpoint_path} holds no state of Lightning; give a folder that Trainer(strategy='mpispeed') wrote"
            )
            raise UsageError(msg)
        return client_state[_CLIENT]

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Enter "mpispeed" (ZeRO stage 2) and "mpispeed_stage_0" to "mpispeed_stage_3"."""
        strategy_registry.register("mpispeed", cls, "ZeRO stage 2 over MPI", override=True)
        for stage in range(4):
            text = f"ZeRO stage {stage} over MPI"
            strategy_registry.register(f"mpispeed_stage_{stage}", cls, text, override=True, stage=stage)


launcher.prepare()  # Lightning may join MPI while it looks for its own environments
MpispeedStrategy.register_strategies(StrategyRegistry)
