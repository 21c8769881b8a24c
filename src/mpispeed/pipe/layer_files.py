"""Names that DeepSpeed gives to files of single layers; checkpoints here hold whole tensors, and no such files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mpispeed.base.errors import UsageError

if TYPE_CHECKING:
    from mpispeed.pipe.grid import PipelineParallelGrid


class LayerFiles:
    """Methods of a `PipelineModule` that name files of layers, for code that reads or writes them itself.

    `engine.save_checkpoint` writes no file per layer.
    """

    grid: PipelineParallelGrid
    parts: list[int]
    stage_id: int
    num_stages: int
    num_chunks: int

    def ckpt_prefix(self, checkpoints_path: str, tag: str) -> str:
        """Path and beginning of the names of this rank's files; data ranks have the same."""
        topology = self.grid.topology()
        at = topology.get_coord(self.grid.get_global_rank())
        axes = [axis for axis in topology.get_axis_names() if axis != "data"]
        name = "-".join(["module", *(f"{axis}_{getattr(at, axis):02d}" for axis in axes)])
        return os.path.join(checkpoints_path, str(tag), name)  # noqa: PTH118 # a text, as DeepSpeed's

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """Path of the file of a layer of this stage.

        Args:
            ckpt_dir: the folder.
            local_layer_idx: index among the layers of this stage, from 0.

        Raises:
            UsageError: this stage has no such layer.
        """
        rank = self.grid.topology().get_rank_repr(self.grid.get_global_rank())
        name = "-".join(filter(None, (self._layer_stem(local_layer_idx), rank, "model_states.pt")))
        return os.path.join(ckpt_dir, name)  # noqa: PTH118

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """Paths of the files of a layer of this stage that are there, one for each slice of the layer, sorted.

        Raises:
            UsageError: this stage has no such layer.
        """
        return sorted(map(str, Path(ckpt_dir).glob(f"{self._layer_stem(local_layer_idx)}-*model_states.pt")))

    def save_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: layers have no files of their own.

        Raises:
            UsageError: always.
        """
        msg = (
            "PipelineModule.save_state_dict(): layers have no files of their own here; call engine.save_checkpoint(), "
            "whose checkpoints hold whole tensors for any number of stages"
        )
        raise UsageError(msg)

    def load_state_dir(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: layers have no files of their own.

        Raises:
            UsageError: always.
        """
        msg = (
            "PipelineModule.load_state_dir(): layers have no files of their own here; call engine.load_checkpoint(), "
            "with load_module_only=True for the weights alone"
        )
        raise UsageError(msg)

    def _layer_stem(self, local_index: int) -> str:
        own = [
            layer
            for virtual in range(self.stage_id, self.num_stages * self.num_chunks, self.num_stages)
            for layer in range(self.parts[virtual], self.parts[virtual + 1])
        ]
        if not 0 <= local_index < len(own):
            msg = f"local_layer_idx={local_index}: stage {self.stage_id} has {len(own)} layers, counted from 0"
            raise UsageError(msg)
        return f"layer_{own[local_index]:02d}"
