"""ZeRO-Inference: parameters sharded over ranks, in memory or swap files, and gathered layer by layer as a model runs.

Source: ZeRO-Inference, https://www.deepspeed.ai/2022/09/09/zero-inference.html: stage 3 without an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from mpispeed.base.site_file import set_aside
from mpispeed.engine.api import initialize
from mpispeed.inference.in_step import InStep
from mpispeed.mesh.world import start
from mpispeed.sharding.init import Init, InitSettings

if TYPE_CHECKING:
    from mpispeed.engine.engine import Engine

#: loads weights into a model; calls its argument with the path of each module that is complete
Load = Callable[[Callable[[str], None]], Any]


def stream_model(model: nn.Module, zero: Mapping[str, Any], *, tensor: int = 1, load: Load | None = None) -> Streamed:
    """Shard a model at stage 3, without an optimizer.

    Parameters keep their dtypes. They rest where `offload_param` says; each is gathered when its module runs.

    Args:
        model: with values, the same on all ranks; or on torch's meta device, with `load`. Changed in place.
        zero: a section `zero_optimization` of stage 3.
        tensor: neighbouring ranks among which large layers are sliced as well; slices are sharded over the others.
        load: reads the values; a rank then holds its shards and one module in full.

    Collective over: all ranks.

    Raises:
        ConfigError: the section has mistakes, or layers cannot be sliced.
    """
    if load is not None:
        _load_sharded(model, zero, load)
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": dict(zero)}
    if tensor > 1:
        config["tensor_parallel"] = {"autotp_size": tensor}
    with set_aside():  # the section has what the site says of it, and the rest is about training
        return Streamed(initialize(model=model.eval().requires_grad_(False), config=config)[0])


def _load_sharded(model: nn.Module, zero: Mapping[str, Any], load: Load) -> None:
    """Load values and shard each module as soon as it has its own. Collective over: all ranks."""
    param = zero.get("offload_param") or {}
    device, folder = param.get("device"), param.get("nvme_path")
    init = Init(settings=InitSettings(device=device, nvme_path=None if folder is None else str(folder)))

    def finish(path: str) -> None:
        init.sharded_init.cut(model.get_submodule(path))

    load(finish)
    for module in model.modules():
        init.sharded_init.cut(module)
    init.sharded_init.finish()


class Streamed:
    """A model that is sharded for inference.

    Every rank has to run it as often as the others, because layers are gathered from all of them: see `InStep`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.in_step = InStep(engine.module, start().comm, engine.device)

    @property
    def model(self) -> nn.Module:
        """The model."""
        module: nn.Module = self._engine.module
        return module

    def close(self) -> None:
        """Let the shards go; the model, which may not fit on a rank, has no values any more.

        Collective over: all ranks.
        """
        self._engine.mpispeed.parts.params.keeps_values = False
        self._engine.destroy()
