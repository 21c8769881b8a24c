"""`deepspeed.runtime.sequence_parallel.ulysses_sp`: sequences over ranks for models of transformers.

Source: DeepSpeed's tutorial "Arctic Long Sequence Training (ALST) for HF Transformers integration"; Accelerate's
concept guide "Sequence parallelism". Heads and lengths need not divide by the ranks here, and nothing is padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from mpispeed.base.errors import ConfigError, DataError
from mpispeed.base.tensor_tree import tensors
from mpispeed.compat import sequence_groups
from mpispeed.compat.comm_groups import group_of
from mpispeed.compat.sequence_groups import SequenceMpu
from mpispeed.nn.hf_attention import NAME, adopt, register_with_transformers
from mpispeed.nn.sequence.cut import Shape, Wants, cut_inputs, shifted
from mpispeed.nn.sequence.handed import hand
from mpispeed.nn.sequence.running import Running

_KERNELS = ("sdpa", "flash_attention_2", "flash_attention_3", NAME)


class UlyssesSPAttentionHF:
    """Attention of transformers' models over ranks that share sequences."""

    @staticmethod
    def register_with_transformers(
        model_name_or_path: str | nn.Module,
        core_attn_implementation: str | None = "sdpa",
        sequence_parallel_size: int = 1,
        micro_batch_size: int | None = None,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
    ) -> SequenceMpu:
        """The places of the ranks, for `initialize(mpu=...)`, which gives the model this library's attention.

        Args:
            model_name_or_path: a model gets the attention at once; a name is not read.
            core_attn_implementation: the kernel is chosen by device and dtype here; only checked.
            sequence_parallel_size: ranks that share a sequence.
            micro_batch_size: not needed.
            seq_length: not needed: each batch may have its own length.
            seq_length_is_variable: as `seq_length`.
            disable_in_eval: batches that no loader has cut are whole sequences; in `eval` they always may be.

        Collective over: all ranks.

        Raises:
            ConfigError: the size does not divide the ranks, or attention is no kernel that works on parts.
        """
        if core_attn_implementation is not None:
            kernel = core_attn_implementation
            if kernel not in _KERNELS and "flash" not in kernel:
                msg = f"core_attn_implementation={kernel!r} does not work on parts of sequences; use {_KERNELS[0]!r}"
                raise ConfigError(msg)
        mpu = sequence_groups.register(sequence_parallel_size)
        register_with_transformers()
        if isinstance(model_name_or_path, nn.Module) and sequence_parallel_size > 1:
            adopt(model_name_or_path)
        return mpu

    @staticmethod
    def unregister_from_transformers(core_attn_implementation: str | None = None) -> None:
        """Let go of the places. Kernels of transformers were never changed, so there is nothing to restore. Local."""
        sequence_groups.forget()


class UlyssesSPDataLoaderAdapter(IterableDataset[dict[str, Any]]):
    """Batches of a loader, cut along the sequence: each rank gets its part of every batch of its group.

    The ranks that share sequences may have loaded different batches: all get their parts of the first rank's batch,
    then of the second's, and so on. `labels` become `shift_labels`, shifted before the cut; `position_ids` are made
    where they are missing; `attention_mask` and ends of documents (`cu_seq_lens_q`) go to the attention beside the
    batch.

    It is a data set as well, of its own batches, so that a Trainer that resumes can skip some of them.
    """

    batch_size = None
    drop_last = False
    num_workers = 0
    prefetch_factor = None
    pin_memory = False
    sampler = None

    def __init__(
        self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any, pad_to_sp_multiple: bool = True
    ) -> None:
        """Around the loader `dl`, whose batches are dicts; `pad_to_sp_multiple` has no effect, since nothing is padded.

        Collective over: `sp_group`, if it is not that of the registered places.

        Raises:
            ConfigError: rank and size are not those of the group.
        """
        self.dl, self.device = dl, device
        self._comm = group_of(sp_group)
        if (self._comm.rank, self._comm.size) != (sp_rank, sp_world_size):
            msg = (
                f"UlyssesSPDataLoaderAdapter: sp_rank={sp_rank}, sp_world_size={sp_world_size}, but this rank is "
                f"{self._comm.rank} of {self._comm.size} in sp_group"
            )
            raise ConfigError(msg)
        self._group = sequence_groups.sequence_group_of(sp_group)
        self._iterator: Iterator[dict[str, Any]] | None = None

    def __len__(self) -> int:
        """Batches: those of all ranks of the group."""
        return len(self.dl) * self._comm.size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Begin anew."""
        self._iterator = self._parts()
        return self._iterator

    def __next__(self) -> dict[str, Any]:
        """The next part.

        Collective over: the ranks that share sequences.
        """
        if self._iterator is None:
            iter(self)
        return next(self._iterator)  # type: ignore[arg-type]

    @property
    def dataset(self) -> UlyssesSPDataLoaderAdapter:
        """These batches."""
        return self

    @staticmethod
    def collate_fn(batch: dict[str, Any]) -> dict[str, Any]:
        """Batches are made already."""
        return batch

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader its epoch. Local."""
        if hasattr(self.dl, "set_epoch"):
            self.dl.set_epoch(epoch)

    def _parts(self) -> Iterator[dict[str, Any]]:
        loader = iter(self.dl)
        while True:
            batch, failure = None, ""
            try:
                batch = next(loader, None)
            except Exception as error:  # others would wait for this rank for ever
                failure = f"{type(error).__name__}: {error}"
            self._comm.agree(not failure, f"the loader of rank {self._comm.rank} failed: {failure}", DataError)
            if not all(self._comm.gather_objects(batch is not None)):
                return
            for root in range(self._comm.size):
                yield self._part(self._comm.share(batch, root) if self._comm.size > 1 else batch)

    def _part(self, batch: Any) -> dict[str, Any]:
        """This rank's part of a batch that all ranks of the group have."""
        if not hasattr(batch, "items"):
            kind = type(batch).__name__
            msg = f"UlyssesSPDataLoaderAdapter takes batches that are dicts, as transformers' models do, not a {kind}"
            raise DataError(msg)
        shape = Shape(self._group.ulysses.size, self._group.ring.size, self._group.rank)
        whole = dict(batch)
        labels = whole.pop("labels", None)
        if labels is not None and whole.get("shift_labels") is None:
            whole["shift_labels"] = shifted(labels)
        _, part, layout = cut_inputs((), whole, shape, Wants(positions=True, mask=False))
        moved = {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value for name, value in part.items()
        }
        hand(tensors(moved), Running(self._group, layout))
        return moved
