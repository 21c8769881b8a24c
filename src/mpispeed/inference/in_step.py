"""Ranks that run one model together, each with prompts of its own: what keeps their runs in step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import AgreementError, UsageError
from mpispeed.mesh.comm import text_of

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.mesh.comm import Comm

_DONE, _RUNS, _FAILED = 0, 1, 2


class InStep:
    """Lets ranks run a model whose layers communicate different numbers of times.

    Layers gather parameters from all ranks, or send tokens to experts on other ranks, so each rank has to run the model
    as often as the others. Before each run of one rank the others say whether they run it too; a rank that has nothing
    to run takes part with one token.
    """

    def __init__(self, model: nn.Module, comm: Comm, device: torch.device) -> None:
        """Nothing is watched yet.

        Args:
            model: takes tokens as `input_ids`, as transformers' models do.
            comm: the ranks that run it together.
            device: of its inputs.
        """
        self._model: Any = model
        self._comm, self._device = comm, device
        self._flag = torch.zeros(1, dtype=torch.int64)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context in which ranks may run the model different numbers of times, or not at all.

        A rank that leaves goes on with runs of one token until all have left. Of models with an encoder all ranks enter
        with an input: the encoder runs once.

        Collective over: the group.

        Raises:
            AgreementError: on the ranks that have not failed themselves, if others have.
        """
        if self._comm.size == 1:
            yield
            return
        handle = self._model.register_forward_pre_hook(self._announce)
        try:
            yield
        except AgreementError:  # of all ranks
            raise
        except Exception as failure:  # whatever it is: the others are on their way to the next run
            handle.remove()
            self._meet(_FAILED)
            self._comm.gather_objects(text_of(failure))
            raise
        finally:
            handle.remove()
        while self._meet(_DONE) == _RUNS:
            self._run_one_token()

    def _announce(self, *_: Any) -> None:
        self._meet(_RUNS)

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
            failed = [rank for rank, text in zip(self._comm.ranks, texts, strict=True) if text]
            text = next(text for text in texts if text)
            msg = f"generation failed on ranks {failed}, and all have to run the model together: {text}"
            raise AgreementError(msg)
        return found

    @torch.no_grad()
    def _run_one_token(self) -> None:
        model, token = self._model, torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            model(input_ids=token, use_cache=False)
            return
        width = getattr(model.config, "hidden_size", None) or getattr(model.config, "d_model", None)
        if width is None:
            msg = f"{type(model).__name__} does not say how wide its encoder is; give all ranks inputs of equal length"
            raise UsageError(msg)
        states = torch.zeros(1, 1, width, dtype=next(model.parameters()).dtype, device=self._device)
        model(encoder_outputs=(states,), decoder_input_ids=token, use_cache=False)
