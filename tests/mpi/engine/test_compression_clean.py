"""`redundancy_clean` of engines: whole, plain models on every rank, with the outputs of the engine before."""

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import mpispeed
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.ckpt.tools import packed_weights
from mpispeed.cli.ckpt import ckpt
from mpispeed.compression import init_compression, redundancy_clean
from mpispeed.compression.packed_layers import packed_weight
from mpispeed.moe import MoE
from mpispeed.pipe import LayerSpec, PipelineModule
from tests.helpers.covering import in_turn
from tests.zoo.training import ADAM, config, start, train

pytestmark = pytest.mark.mpi(min_size=1)

WIDTH, BATCH = 16, 12


class MLP(nn.Module):
    """Returns a loss in training, the output else."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.act, self.last = nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)

    def forward(self, x):
        out = self.last(self.act(self.first(x)))
        return (out - x.roll(1, 1)).square().mean() if self.training else out


def technique(groups, **shared):
    return {"shared_parameters": {"enabled": True, "schedule_offset": 0, **shared}, "different_groups": {"all": groups}}


SECTIONS = {
    "weight_quantization": technique(
        {"params": {"start_bits": 5, "target_bits": 5}, "modules": ["first", "last"]},
        quantize_weight_in_forward=True, quantize_groups=8,
    ),
    "row_pruning": technique(
        {"params": {"dense_ratio": 0.5}, "modules": ["first"], "related_modules": [["last"]]}, method="topk"
    ),
}  # fmt: skip
HOST = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(("stage", "zero"), in_turn([(0, {}), (3, HOST), (3, {}), (2, {})]))
def test_an_engine_becomes_a_plain_model(world, stage, zero):
    sections = {"train_batch_size": BATCH, "compression_training": SECTIONS}
    model = init_compression(MLP(), sections)
    engine = start(config(stage, BATCH, zero=zero, **ADAM), model)
    torch.manual_seed(6)
    train(engine, [torch.randn(BATCH, WIDTH) for _ in range(3)])
    engine.eval()
    x = torch.randn(4, WIDTH)
    with torch.no_grad():
        before = engine(x)
        if stage == 3 and zero:
            engine.offload_states()
        cleaned = redundancy_clean(engine, sections)
        after = cleaned(x)
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-5)
    assert cleaned is model
    assert (model.first.out_features, model.last.in_features) == (12, 12)
    assert packed_weight(model.first).nbytes == 12 * WIDTH * 5 // 8 + 4 * 12
    assert packed_weight(model.last).nbytes == 12 * WIDTH * 5 // 8 + 4 * 8
    states = world.comm.gather_objects({name: value.tolist() for name, value in model.state_dict().items()})
    assert all(state == states[0] for state in states)


@pytest.mark.parametrize(("stage", "dtype"), in_turn([(0, "fp32"), (3, "bf16")], (1, 2, 3)))
def test_a_checkpoint_gives_the_weights_that_the_model_computes_with(world, mpi_tmp_path, stage, dtype):
    sparse = technique({"params": {"dense_ratio": 0.75}, "modules": ["last"]}, method="l1")
    settings = config(stage, BATCH, dtype=dtype, **ADAM)
    engine = start(settings | {"compression_training": SECTIONS | {"sparse_pruning": sparse}}, MLP())
    torch.manual_seed(6)
    kind = engine.module.first.weight.dtype
    train(engine, [torch.randn(BATCH, WIDTH).to(kind) for _ in range(3)])
    engine.save_checkpoint(str(mpi_tmp_path))
    engine.eval()
    x = torch.randn(4, WIDTH).to(kind)
    with torch.no_grad():
        before = engine(x)
    engine.destroy()
    path = mpi_tmp_path / "weights.h5"
    if world.rank == 0:
        words = ["export", str(mpi_tmp_path), str(path), "--quantized", "--dtype", "keep"]
        result = CliRunner().invoke(ckpt, words)
        assert result.exit_code == 0, result.output
    world.comm.barrier()
    rows = {row.name: row for row in packed_weights.rows(path)}
    assert (rows["first.weight"].bits, rows["last.weight"].bits) == (5, 5)
    assert rows["first.weight"].size_bytes == 24 * WIDTH * 5 // 8 + 4 * 8
    plain = MLP().to(kind).eval()
    plain.load_state_dict(packed_weights.load(path))
    with torch.no_grad():
        assert torch.equal(plain(x), before)
    assert (plain.last.weight == 0).sum() >= 24 * WIDTH // 4
    assert (plain.first.bias == 0).sum() == 12


@pytest.mark.ranks(2, 4)
def test_slices_are_exported_whole_and_not_cleaned(world, mpi_tmp_path):
    sections = {"compression_training": SECTIONS}
    slices = {"autotp_size": 2, "injection_policy_tuple": {"first": "column", "last": "row"}}
    engine = start(config(1, BATCH, 1, tensor_parallel=slices, **ADAM) | sections, MLP())
    torch.manual_seed(6)
    train(engine, [torch.randn(BATCH, WIDTH) for _ in range(3)])
    engine.save_checkpoint(str(mpi_tmp_path))
    x = torch.randn(4, WIDTH)
    with torch.no_grad():
        before = engine.eval()(x)
    with pytest.raises(UsageError, match="first is sliced over ranks"):
        redundancy_clean(engine, sections | {"train_batch_size": BATCH})
    engine.destroy()
    path = mpi_tmp_path / "weights.h5"
    if world.rank == 0:
        result = CliRunner().invoke(ckpt, ["export", str(mpi_tmp_path), str(path), "--quantized"])
        assert result.exit_code == 0, result.output
    world.comm.barrier()
    assert {row.name: row.groups for row in packed_weights.rows(path) if row.bits} == {
        "first.weight": 8,
        "last.weight": 8,
    }
    plain = MLP().eval()
    plain.load_state_dict(packed_weights.load(path))
    with torch.no_grad():
        torch.testing.assert_close(plain(x), before, atol=1e-6, rtol=1e-5)


@pytest.mark.ranks(2)
def test_stages_of_a_pipeline_are_exported_and_cleaned(world, mpi_tmp_path):
    sparse = technique({"params": {"dense_ratio": 0.5}, "modules": ["*"]}, method="l1")
    quantized = technique({"params": {"start_bits": 4, "target_bits": 4}}, quantize_weight_in_forward=True)
    settings = config(1, BATCH, 2, **ADAM)
    settings["compression_training"] = {"weight_quantization": quantized, "sparse_pruning": sparse}
    layers = [LayerSpec(nn.Linear, WIDTH, 24), nn.GELU(), LayerSpec(nn.Linear, 24, WIDTH)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, seed_layers=True)
    engine = start(settings, model)
    torch.manual_seed(6)
    engine.train_batch(iter([(torch.randn(BATCH // 2, WIDTH),) * 2 for _ in range(2)]))
    engine.save_checkpoint(str(mpi_tmp_path))
    path = mpi_tmp_path / "weights.h5"
    if world.rank == 0:
        result = CliRunner().invoke(ckpt, ["export", str(mpi_tmp_path), str(path), "--quantized"])
        assert (result.exit_code, "as it is" in result.output) == (0, False), result.output
    world.comm.barrier()
    found = packed_weights.load(path)
    assert {row.bits for row in packed_weights.rows(path) if row.name.endswith("weight")} == {4}
    cleaned = redundancy_clean(engine, settings)
    for name, layer in cleaned.named_modules():
        if isinstance(layer, nn.Linear):
            assert packed_weight(layer).bits == 4
            assert torch.equal(layer.weight, found[f"{name}.weight"])
            assert (layer.weight == 0).float().mean() >= 0.5


@pytest.mark.ranks(1, 2)
def test_what_is_not_in_its_last_state_is_told_once(world, caplog):
    """By one rank, for the layers of all stages."""
    sparse = technique({"params": {"dense_ratio": 0.5}}, schedule_offset=10)
    settings = config(1, BATCH, world.size, **ADAM, compression_training={"sparse_pruning": sparse})
    layers = [LayerSpec(nn.Linear, WIDTH, 24), nn.GELU(), LayerSpec(nn.Linear, 24, WIDTH)]
    model = PipelineModule(layers, num_stages=world.size, loss_fn=nn.functional.mse_loss, seed_layers=True)
    engine = start(settings, model)
    with caplog.at_level("WARNING", logger="mpispeed"):
        redundancy_clean(engine, settings)
    said = [each.getMessage() for each in caplog.records if each.name.endswith("compression.clean")]
    assert len(said) == (world.rank == 0)
    assert all(name in text for text in said for name in ("0 (sparse_pruning)", "2 (sparse_pruning)", "no step was"))


@pytest.mark.ranks(2)
def test_settings_that_fit_to_one_stage_only_are_refused_on_all():
    """Of an engine that was not compressed."""
    layers = [LayerSpec(nn.Linear, WIDTH, 24), LayerSpec(nn.Linear, 24, WIDTH)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, seed_layers=True)
    engine = start(config(1, BATCH, 2, **ADAM), model)
    sparse = technique({"params": {"dense_ratio": 0.5}, "modules": ["^0$"]})
    with pytest.raises(ConfigError, match="matches no linear"):
        redundancy_clean(engine, {"compression_training": {"sparse_pruning": sparse}})


@pytest.mark.ranks(1)
def test_masks_that_training_has_not_made_yet_are_those_of_cleaning(mpi_tmp_path):
    late = {"params": {"dense_ratio": 0.5}, "modules": ["first"]}
    settings = config(0, BATCH, **ADAM)
    settings["compression_training"] = {
        f"{kind}_pruning": technique(late, method="l1", schedule_offset=10) for kind in ("sparse", "row")
    }
    engine = start(settings, MLP())
    engine.save_checkpoint(str(mpi_tmp_path))
    path = mpi_tmp_path / "w.h5"
    result = CliRunner().invoke(ckpt, ["export", str(mpi_tmp_path), str(path), "--quantized"])
    assert result.exit_code == 0, result.output
    found, cleaned = packed_weights.load(path), redundancy_clean(engine, settings)
    assert found.keys() == cleaned.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in cleaned.state_dict().items())
    assert (cleaned.first.bias == 0).sum() == 12


@pytest.mark.ranks(1, 2)
def test_masks_are_looked_at_again_after_a_load_of_weights_alone(mpi_tmp_path, world):
    folder = world.comm.share(str(mpi_tmp_path))
    sparse = technique({"params": {"dense_ratio": 0.5}, "modules": ["first"]}, method="l1", schedule_offset=1)
    engine = start(config(2, BATCH, **ADAM) | {"compression_training": {"sparse_pruning": sparse}}, MLP())
    engine.save_checkpoint(folder)  # with a mask of ones
    torch.manual_seed(6)
    train(engine, [torch.randn(BATCH, WIDTH) for _ in range(2)])
    first = engine.module.first
    assert first.sparse_mask.sum() == first.weight.numel() // 2
    engine.load_checkpoint(folder, load_module_only=True)
    assert first.sparse_mask.all()
    train(engine, [torch.randn(BATCH, WIDTH)])
    assert first.sparse_mask.sum() == first.weight.numel() // 2
    engine.destroy()


@pytest.mark.ranks(1, 2)
def test_a_refusal_on_one_rank_leaves_the_engine_alive_on_all(world):
    engine = start(config(3, BATCH, **ADAM) | {"compression_training": SECTIONS}, MLP())
    own = {} if world.rank == world.size - 1 else SECTIONS
    with pytest.raises(ConfigError, match="other settings"):
        redundancy_clean(engine, {"train_batch_size": BATCH, "compression_training": own})
    train(engine, [torch.randn(BATCH, WIDTH)])
    engine.destroy()


@pytest.mark.ranks(2, 4)
def test_experts_of_all_ranks_are_packed(world, mpi_tmp_path):
    torch.manual_seed(3)
    expert = nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, WIDTH))
    model = nn.Sequential(MoE(WIDTH, expert, num_experts=4, ep_size=2, k=1, drop_tokens=False))
    model.forward = lambda x: model[0](x)[0].square().mean()
    experts = {"modules": [r"experts.*\.0$"]}
    sections = {
        "weight_quantization": technique(
            experts | {"params": {"start_bits": 6, "target_bits": 6}}, quantize_weight_in_forward=True
        ),
        "row_pruning": technique(experts | {"params": {"dense_ratio": 0.5}}, method="topk"),
    }
    engine = start(config(1, BATCH, **ADAM) | {"compression_training": sections}, model)
    train(engine, [torch.randn(BATCH, WIDTH)])
    engine.save_checkpoint(str(mpi_tmp_path))
    engine.destroy()
    if world.rank == 0:
        path = mpi_tmp_path / "w.h5"
        result = CliRunner().invoke(ckpt, ["export", str(mpi_tmp_path), str(path), "--quantized"])
        assert result.exit_code == 0, result.output
        rows = {row.name: row.bits for row in packed_weights.rows(path)}
        assert [bits for name, bits in rows.items() if name.endswith(".0.weight")] == [6] * 4
        assert not any(name.endswith("_scores") for name in rows)
        found = packed_weights.load(path)
        first = [value for name, value in found.items() if name.endswith(".0.weight")]
        assert all((value == 0).all(1).sum() == 12 for value in first)


@pytest.mark.ranks(1)
def test_a_weight_of_two_pruned_layers_is_exported_as_it_is(mpi_tmp_path):
    model = MLP()
    model.act = nn.Linear(WIDTH, 24)
    model.act.weight = model.first.weight
    model.forward = lambda x: model.last(model.first(x) * model.act(x)).square().mean()
    settings = config(0, BATCH, **ADAM)
    pruned = technique({"params": {"dense_ratio": 0.5}, "modules": ["first", "act"]}, method="l1")
    engine = start(settings | {"compression_training": {"row_pruning": pruned}}, model)
    train(engine, [torch.randn(BATCH, WIDTH)])
    engine.save_checkpoint(str(mpi_tmp_path))
    engine.destroy()
    path = mpi_tmp_path / "w.h5"
    result = CliRunner().invoke(ckpt, ["export", str(mpi_tmp_path), str(path), "--quantized"])
    assert (result.exit_code, result.output.count("each with masks and a bias of its own")) == (0, 2), result.output
    found = packed_weights.load(path)
    for name in ("first", "act"):
        assert found[f"{name}.weight"].all() and found[f"{name}.bias"].all()
        assert found[f"{name}.row_mask"].sum() == 12


@pytest.mark.ranks(2)
def test_a_model_in_shards_is_refused():
    with mpispeed.zero.Init():
        model = MLP()
    with pytest.raises(UsageError, match="first has no values on this rank; pass the engine"):
        redundancy_clean(model, {"train_batch_size": BATCH, "compression_training": SECTIONS})


@pytest.mark.ranks(1)
def test_a_run_without_compression_has_no_record(mpi_tmp_path):
    engine = start(config(0, BATCH, **ADAM), MLP())
    engine.save_checkpoint(str(mpi_tmp_path))
    engine.destroy()
    words = ["export", str(mpi_tmp_path), str(mpi_tmp_path / "w.h5"), "--quantized"]
    result = CliRunner().invoke(ckpt, words)
    assert result.exit_code != 0
    assert "had no compression_training" in result.output
    result = CliRunner().invoke(ckpt, [*words[:2], str(mpi_tmp_path / "w.npz"), "--quantized"])
    assert result.exit_code != 0
