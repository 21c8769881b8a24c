"""Descriptions of parameters that layers cut over the model axis, for checkpoints and for matrices."""

from __future__ import annotations

import torch

from mpispeed.ckpt.format.logical import ParamInfo
from mpispeed.nn.tensor.tensor_cut import TensorCut


def info_of_cut(name: str, shape: tuple[int, ...], dtype: torch.dtype, cut: TensorCut) -> ParamInfo:
    """The description of the whole parameter.

    Args:
        name: of the parameter.
        shape: of the whole, unpadded tensor.
        dtype: the model's.
        cut: how ranks have parts of it.
    """
    return ParamInfo(
        name,
        shape,
        dtype,
        tp_kind=cut.kind,
        tp_dim=cut.dim,
        tp_sub_sizes=cut.sub_sizes,
        tp_grains=cut.grains,
        vocab_size=cut.shape[0] if cut.kind == "vocab" else -1,
    )
