"""ZeRO-Inference: parameters sharded over ranks, in memory or swap files, and gathered layer by layer as a model runs.

Source: ZeRO-Inference, https://www.deepspeed.ai/2022/09/09/zero-inference.html: stage 3 without an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpispeed.base.errors import AgreementError, UsageError
from mpispeed.engine.api import initialize
from mpispeed.mesh.comm import text_of
from mpispeed.mesh.world import start
from mpispeed.sharding.init import Init, InitSettings

if TYPE_CHECKING:
    from mpispeed.engine.engine import Engine

#: loads weights into a model; calls its argument with the path of each module that is complete
Load = Callable[[Callable[[str], None]], Any]

_DONE, _RUNS, _FAILED = 0, 1, 2


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
    """A model that is sharded for inference, and what keeps ranks in step.

    Every rank runs the model as often as the others, because layers are gathered from all of them.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._comm = start().comm
        self._flag = torch.zeros(1, dtype=torch.int64)

    @property
    def model(self) -> nn.Module:
        """The model."""
        module: nn.Module = self.engine.module
        return module

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Context in which ranks may run the model different numbers of times, or not at all.

        A rank that leaves goes on with runs of one token until all have left. With an encoder all ranks enter with an
        input: the encoder runs once.

        Collective over: all ranks.

        Raises:
            AgreementError: on the ranks that have not failed themselves, if others have.
        """
        if self._comm.size == 1:
            yield
            return
        handle = self.model.register_forward_pre_hook(self._announce)
        try:
            yield
        except AgreementError:  # of all ranks
            raise
        except Exception as failure:  # whatever it is: the others are on their way to the next run
            handle.remove()
            if self._meet(_FAILED) == _FAILED:
                self._comm.gather_objects(text_of(failure))
            raise
        finally:
            handle.remove()
        while self._any_runs():
            self._run_one_token()

    def close(self) -> None:
        """Give the model whole parameters back. Collective over: all ranks."""
        self.engine.destroy()

    def _announce(self, *_: Any) -> None:
        self._meet(_RUNS)

    def _any_runs(self) -> bool:
        return self._meet(_DONE) == _RUNS

    def _meet(self, own: int) -> int:
        """The largest number that a rank brings.

        Raises:
            AgreementError: another rank has failed.
        """
        self._flag.fill_(own)
        self._comm.all_reduce(self._flag, "max")
        found = int(self._flag.item())
        if found == _FAILED and own != _FAILED:
            texts = self._comm.gather_objects("")
            failed = [rank for rank, text in enumerate(texts) if text]
            msg = f"generation failed on ranks {failed}, and all have to run the model together: {texts[failed[0]]}"
            raise AgreementError(msg)
        return found

    @torch.no_grad()
    def _run_one_token(self) -> None:
        model: Any = self.model
        device = self.engine.device
        token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            model(input_ids=token, use_cache=False)
            return
        width = getattr(model.config, "hidden_size", None) or getattr(model.config, "d_model", None)
        if width is None:
            msg = f"{type(model).__name__} does not say how wide its encoder is; give all ranks inputs of equal length"
            raise UsageError(msg)
        dtype = next(model.parameters()).dtype
        states = torch.zeros(1, 1, width, dtype=dtype, device=device)
        model(encoder_outputs=(states,), decoder_input_ids=token, use_cache=False)
