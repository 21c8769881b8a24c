"""`save_16bit_model` of pipelines and sliced layers: one file of the whole model, as a checkpoint has it."""

import pytest
import torch
from torch import nn

from mpispeed.base.errors import CheckpointError, UsageError
from mpispeed.compat.fp32 import get_fp32_state_dict_from_zero_checkpoint
from mpispeed.nn.tensor import RowLinear, VocabEmbedding
from mpispeed.pipe import LayerSpec, PipelineModule, PipelineParallelGrid, PipeModelDataParallelTopology, TiedLayerSpec
from tests.helpers.pipes import Case, Layout, Plain, train
from tests.zoo.training import config, start

pytestmark = pytest.mark.mpi(min_size=2)
ZERO = {"stage3_gather_16bit_weights_on_model_save": True, "stage3_param_persistence_threshold": 0}
CASES = [
    Case(Layout(*sizes), schedule, stage, dtype, is_tied=is_tied)
    for sizes, schedule, stage, dtype, is_tied in (
        ((2, 1, 1), "interleaved", 1, "bf16", True),
        ((2, 1, 1), "1f1b", 0, "fp32", False),
        ((1, 2, 1), "1f1b", 2, "bf16", True),
        ((1, 2, 1), "1f1b", 0, "fp32", False),
        ((2, 2, 1), "1f1b", 1, "bf16", True),
        ((2, 1, 2), "1f1b", 3, "bf16", True),
        ((2, 1, 2), "1f1b", 2, "fp32", False),
        ((1, 2, 2), "1f1b", 3, "bf16", False),
    )
]


def engine_of(case):
    return case.engine(zero_optimization={"stage": case.stage, **(ZERO if case.stage == 3 else {})})


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=pytest.mark.ranks(case.layout.ranks)) for case in CASES]
)
def test_the_file_has_the_whole_model_as_the_checkpoint_has_it(case, mpi_tmp_path):
    engine = engine_of(case)
    train(engine, range(1))
    engine.save_checkpoint(str(mpi_tmp_path / "all"))
    assert engine.save_16bit_model(str(mpi_tmp_path))
    written = torch.load(mpi_tmp_path / "pytorch_model.bin", weights_only=True)
    exact = get_fp32_state_dict_from_zero_checkpoint(str(mpi_tmp_path / "all"))
    dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    assert written.keys() == exact.keys()
    for name, value in exact.items():
        assert written[name].dtype == dtype
        assert torch.equal(written[name], value.to(dtype)), name
    whole = Plain(is_tied=case.is_tied)
    assert sum(value.numel() for value in written.values()) == sum(param.numel() for param in whole.parameters())
    losses = train(engine, range(1, 2))  # and nothing is broken
    assert losses[0] > 0
    engine.destroy()


class Extra(nn.Module):
    """A frozen parameter, a buffer, and state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.fixed = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.tensor([5]))

    def get_extra_state(self):
        return "a word"

    def set_extra_state(self, state):
        pass


def odd_engine(pipe, model):
    """Seven words on slices of four, five columns on slices of three and two; a tied layer on both ends."""
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=pipe, num_mp=model, num_dp=1))
    comm = grid.mesh["model"]
    layers = [
        LayerSpec(VocabEmbedding, 7, 5, comm),
        TiedLayerSpec("ends", nn.LayerNorm, 5),
        LayerSpec(RowLinear, 5, 3, comm),
        LayerSpec(Extra),
        TiedLayerSpec("ends", nn.LayerNorm, 5),
    ]
    module = PipelineModule(layers, grid=grid, seed_layers=True, partition_method="uniform", loss_fn=nn.MSELoss())
    return start(config(1, 4, 1, optimizer={"type": "Adam", "params": {"lr": 1e-3}}), module)


@pytest.mark.parametrize(
    ("pipe", "model"), [pytest.param(*sizes, marks=pytest.mark.ranks(2 * sizes[0])) for sizes in ((1, 2), (2, 2))]
)
def test_padding_frozen_parameters_and_buffers(pipe, model, mpi_tmp_path):
    engine = odd_engine(pipe, model)
    engine.save_checkpoint(str(mpi_tmp_path / "all"))
    assert engine.save_16bit_model(str(mpi_tmp_path))
    assert engine.save_fp16_model(str(mpi_tmp_path), "small.bin", exclude_frozen_parameters=True)
    written = torch.load(mpi_tmp_path / "pytorch_model.bin", weights_only=True)
    exact = get_fp32_state_dict_from_zero_checkpoint(str(mpi_tmp_path / "all"))
    assert written.pop("3._extra_state") == "a word"
    assert written["0.weight"].shape == (7, 5)
    assert written["3.seen"].dtype == torch.int64
    assert {name: value.float().tolist() for name, value in written.items()} == {
        name: value.tolist() for name, value in exact.items()
    }
    small = torch.load(mpi_tmp_path / "small.bin", weights_only=True)
    assert written.keys() - small.keys() == {"3.fixed"}
    engine.destroy()


@pytest.mark.ranks(2)
def test_failures_of_any_stage_are_told_to_all(mpi_tmp_path):
    engine = Case(Layout(2, 1, 1)).engine()
    if engine.global_rank == 1:
        engine.module.register_buffer("nowhere", torch.empty(3, device="meta"))
    with pytest.raises(CheckpointError, match=r"cannot be gathered on rank 0: .*meta"):
        engine.save_16bit_model(str(mpi_tmp_path))
    if engine.global_rank == 1:
        del engine.module.nowhere
        undo = engine.module.register_state_dict_post_hook(refuse)
    with pytest.raises(CheckpointError, match="no state"):
        engine.save_16bit_model(str(mpi_tmp_path))
    if engine.global_rank == 1:
        undo.remove()
    assert not (mpi_tmp_path / "pytorch_model.bin").exists()
    engine.offload_states(device="nvme", nvme_path=str(mpi_tmp_path))
    with pytest.raises(UsageError, match=r"engine\.reload_states\(\) first"):
        engine.save_16bit_model(str(mpi_tmp_path))
    engine.reload_states()
    assert engine.save_16bit_model(str(mpi_tmp_path))
    engine.destroy()


def refuse(*_):
    msg = "no state"
    raise ValueError(msg)
