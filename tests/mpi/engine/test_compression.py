"""Compression under an engine: the same bits at every stage, schedules to the step, checkpoints, recomputation."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import mpispeed
from mpispeed import checkpointing
from mpispeed.base.errors import ConfigError
from mpispeed.compression import init_compression
from mpispeed.moe import MoE
from mpispeed.nn.compression import Quantizer, compression_of, fake_quantize
from mpispeed.pipe import LayerSpec, PipelineModule
from tests.helpers import compression as given
from tests.helpers.compression import ALL, BATCH, SHAPE, batches, bits, model, settings
from tests.helpers.pipes import gpt_layers
from tests.helpers.steady_gpt import SteadyGPT
from tests.zoo import same_bits
from tests.zoo.training import start, train, train_averaged, weights

pytestmark = pytest.mark.mpi(min_size=1)

OFFLOAD = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


def outcome(section, stage, accumulation=1, steps=4, recompute=None, **more):
    """Losses, and weights and buffers, of a run."""
    engine = start(settings(section, stage, accumulation, **more), model(recompute))
    found = train_averaged(engine, batches(steps)), weights(engine) | dict(engine.module.named_buffers())
    engine.destroy()
    return found


@pytest.mark.ranks(1, 2, 3, 4)
def test_all_techniques_train_the_same_bits_at_all_stages():
    runs = [outcome(ALL, stage) for stage in (0, 1, 2, 3)]
    for losses, trained in runs[1:]:
        same_bits(losses, runs[0][0])
        same_bits(trained, runs[0][1])
    plain, _ = outcome({}, 0)
    assert runs[0][0][0] != plain[0]  # from the first pass on
    assert {name.rpartition(".")[2] for name in runs[0][1]} >= {"row_scores", "head_scores", "sparse_mask"}
    assert all(value.float().mean() == 0.5 for name, value in runs[0][1].items() if name.endswith("sparse_mask"))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("section", [given.STOCHASTIC, given.STATIC, bits(6, 4, 2)], ids=["drawn", "ranges", "bits"])
def test_recomputation_accumulation_and_offload_change_no_bit(section):
    """Also with numbers that are drawn, and ranges that a pass takes part in once."""
    more = {"bf16": {"enabled": True}} if section is not given.STOCHASTIC else {}
    whole = outcome(section, 3, 2, **more)
    again = outcome(section, 3, 2, recompute=checkpointing.checkpoint, **more)
    moved = outcome(section, 3, 2, zero_optimization={"stage": 3, **OFFLOAD}, **more)
    for losses, trained in (again, moved):
        same_bits(losses, whole[0])
        same_bits(trained, whole[1])


@pytest.mark.ranks(1, 2)
def test_bits_fall_at_their_steps_and_layers_compute_with_them():
    """From the offset 1 on: 6 bits, 5 after 2 steps, 4 after 4."""
    mixed = {"enabled": True, "quantize_change_ratio": 0.5}
    section = bits(6, 4, 2, schedule_offset=1, fp16_mixed_quantize=mixed, quantization_type="asymmetric")
    engine = start(settings(section, 1, bf16={"enabled": True}), model())
    states, (x, y) = engine.compression.layers, batches(1)[0]
    for expected in [(6, 1), (6, 1), (6, 0.5), (5, 1), (5, 0.5), (4, 1), (4, 0.5), (4, 0)]:
        assert {(state.bits, state.mixed) for state in states.values()} == {expected}
        plain = SteadyGPT(SHAPE).bfloat16()
        plain.load_state_dict(engine.module.state_dict())
        for name in states:
            weight = plain.get_submodule(name).weight.data
            quantized = fake_quantize(weight, expected[0], Quantizer("asymmetric"))
            weight.copy_(weight * expected[1] + quantized * (1 - expected[1]) if expected[1] else quantized)
        engine.eval()
        with torch.no_grad():
            same_bits(engine(x, y), plain(x, y))
        engine.train()
        train(engine, batches(1))
    engine.destroy()


@pytest.mark.ranks(1, 2)
def test_steps_that_are_skipped_do_not_count():
    engine = start(settings(bits(6, 4, 1), 1, fp16={"enabled": True, "initial_scale_power": 24}), model())
    train(engine, batches(14))
    applied = engine.global_steps - engine.skipped_steps
    assert engine.skipped_steps > 2 and applied > 0
    assert engine.compression.progress.step == applied
    assert {state.bits for state in engine.compression.layers.values()} == {4 if applied > 1 else 5}
    engine.destroy()


@pytest.mark.ranks(1, 2)
def test_the_older_section_is_the_same_for_all_layers():
    half = {"bf16": {"enabled": True}}
    everywhere = bits(6, 4, 2, ["*"], schedule_offset=1, quantize_groups=2)
    old = {
        "enabled": True, "quantize_bits": {"start_bits": 6, "target_bits": 4}, "quantize_groups": 2,
        "quantize_schedule": {"quantize_period": 2, "schedule_offset": 1},
    }  # fmt: skip
    new = outcome(everywhere, 1, **half)
    same_bits(outcome({}, 1, quantize_training=old, **half)[0], new[0])


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", ["all", "bits and ranges"])
def test_a_resumed_run_goes_on_as_if_it_had_not_ended(tmp_path_factory, name):
    """In the middle of a schedule; with masks in fp32 also at another stage."""
    folder = mpispeed.init_distributed().comm.share(str(tmp_path_factory.mktemp("saved")))
    section, more, stages = ALL, {}, (1, 3)
    if name != "all":
        section, more, stages = bits(8, 4, 1) | given.STATIC, {"bf16": {"enabled": True}}, (1, 1)
    engine = start(settings(section, stages[0], **more), model())
    data = batches(6)
    train(engine, data[:3])
    engine.save_checkpoint(folder)
    expected = train_averaged(engine, data[3:])
    there = {key: (state.bits, state.mixed) for key, state in engine.compression.layers.items()}
    engine.destroy()
    engine = start(settings(section, stages[1], **more), model())
    engine.load_checkpoint(folder)
    same_bits(train_averaged(engine, data[3:]), expected)
    assert {key: (state.bits, state.mixed) for key, state in engine.compression.layers.items()} == there
    engine.destroy()


@pytest.mark.ranks(1, 2)
def test_updates_without_compression_count(tmp_path_factory, caplog):
    """Bits are where the schedule has them after as many updates; a ramp that would be over is told of."""
    folder = mpispeed.init_distributed().comm.share(str(tmp_path_factory.mktemp("saved")))
    engine = start(settings({}, 1, bf16={"enabled": True}), model())
    train(engine, batches(3))
    engine.save_checkpoint(folder)
    engine.destroy()
    ramp = {"method": "snip_momentum", "dense_ratio": 0.5, "schedule_offset": 1, "schedule_offset_end": 2}
    section = bits(8, 4, 1) | {"sparse_pruning": {"shared_parameters": {"enabled": True, **ramp}}}
    engine = start(settings(section, 1, bf16={"enabled": True}), model())
    with caplog.at_level("WARNING", logger="mpispeed"):
        engine.load_checkpoint(folder, load_module_strict=False)
    assert {state.bits for state in engine.compression.layers.values() if state.weight_quantization} == {6}
    assert engine.compression.progress.step == 3
    assert caplog.text.count("no weight of the groups all will be pruned") == (engine.mesh.rank == 0)
    engine.destroy()


@pytest.mark.ranks(1, 2, 3)
def test_running_ranges_are_the_same_on_all_ranks_and_of_single_precision():
    engine = start(settings(given.STATIC, 1, bf16={"enabled": True}), model())
    train(engine, batches(3))
    ranges = {name: value for name, value in engine.module.named_buffers() if name.endswith("activation_range")}
    assert len(ranges) == 2 * SHAPE.layers and {value.dtype for value in ranges.values()} == {torch.float32}
    everyone = engine.mesh["data"].gather_objects({name: value.tolist() for name, value in ranges.items()})
    assert all(each == everyone[0] for each in everyone)
    assert all(low < 0 < high for low, high in everyone[0].values())
    engine.destroy()


def pipeline(stages, **more):
    layers = [LayerSpec(gpt_layers.Bytes, SHAPE), *(LayerSpec(gpt_layers.PipeBlock, SHAPE),) * SHAPE.layers]
    layers.append(LayerSpec(gpt_layers.Head, SHAPE))
    return PipelineModule(layers, num_stages=stages, loss_fn=gpt_layers.cross_entropy, seed_layers=True, **more)


@pytest.mark.ranks(2, 4)
def test_stages_of_a_pipeline_compress_their_own_layers():
    """Losses are those of one stage, up to the order of sums; a keyword may find layers of one stage only."""
    section = bits(5, 4, 1, ["1.attention", "2.attention"]) | given.ROWS | given.HEADS | given.SPARSE
    size, outcomes = mpispeed.init_distributed().size, []
    for stages in (1, 2):
        engine = start(settings(section, 1, 2, bf16={"enabled": True}), pipeline(stages))
        share, losses = BATCH // 2 // (size // stages), []
        for x, y in batches(4):
            first = engine.mesh.index("data") * share
            micro = [(a[first : first + share], b[first : first + share])
                     for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]  # fmt: skip
            losses.append(float(engine.train_batch(iter(micro))))
        assert engine.mpispeed.parts.features.state()["compression_training"]["bits"].keys() == {
            f"{place}.attention.{name}" for place in (1, 2) for name in ("qkv", "out")
        }
        engine.destroy()
        outcomes.append(losses)
    assert outcomes[0] == pytest.approx(outcomes[1], rel=1e-3)  # bf16 rounds gradients of other sums


@pytest.mark.ranks(1, 2)
def test_what_cannot_be_is_refused_on_all_ranks(tmp_path_factory):
    with pytest.raises(ConfigError, match=r"weight_quantization.different_groups.g.modules: 'encoder' matches no"):
        start(settings(bits(8, 8, modules=["encoder"], quantize_weight_in_forward=True)), model())
    folder = mpispeed.init_distributed().comm.share(str(tmp_path_factory.mktemp("saved")))
    engine = start(settings(bits(8, 4), bf16={"enabled": True}), model())
    feature = engine.mpispeed.parts.features._rows["compression_training"][1]
    with pytest.raises(ConfigError, match="the bits of layers are -1"):
        feature.check({"bits": -1})
    engine.save_checkpoint(folder)
    engine.destroy()
    assert compression_of(engine.module).progress.passes is None


class Mixture(nn.Module):
    """Two experts, one on each of two ranks."""

    def __init__(self):
        super().__init__()
        self.first, expert = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
        self.moe = MoE(6, expert, num_experts=2, ep_size=2, k=1, drop_tokens=False)

    def forward(self, x):
        return self.moe(self.first(x))[0].square().mean()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("is_early", [True, False])
def test_scores_of_experts_belong_to_them(is_early):
    """Ranks with the same expert agree on its scores, and others have their own."""
    rows = {"row_pruning": given.technique([r"experts.*\.0$"], {"dense_ratio": 0.5}, method="topk")}
    torch.manual_seed(3)
    net, section = Mixture(), settings(rows | bits(8, 8, modules=["experts"], quantize_weight_in_forward=True), 1)
    if is_early:
        init_compression(net, section)
    engine = start(section, net)
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
    train(engine, [x.repeat(2, 1)] * 3)
    ((name, scores),) = [each for each in engine.module.named_parameters() if each[0].endswith("row_scores")]
    everyone = engine.mesh["data"].gather_objects(scores.tolist())
    engine.destroy()
    assert all(everyone[rank] == everyone[rank % 2] for rank in range(len(everyone)))
    assert everyone[0] != everyone[1], name


@pytest.mark.ranks(2)
def test_masks_and_ranges_of_experts_are_refused():
    for section in (
        {"activation_quantization": given.technique(["experts"], {"bits": 8}, range_calibration="static")},
        {"sparse_pruning": given.technique(["experts"], {"dense_ratio": 0.5}, method="l1")},
    ):
        with pytest.raises(ConfigError, match=r"moe\S* differs between 2 data ranks, as experts do"):
            start(settings(section), Mixture())


@pytest.mark.ranks(1, 2)
def test_curvature_makes_periods_longer_until_the_last_bit_has_fallen():
    """Of the block with the largest eigenvalue by 5; of the other by 1 + floor(4 x)."""
    curved = {"enabled": True, "layer_name": "blocks", "max_iter": 4}
    engine = start(settings(bits(6, 4, 1), 1, bf16={"enabled": True}, eigenvalue=curved), model())
    eigenvalues, fallen = engine.eigenvalues, {}
    for step, batch in enumerate(batches(12), 1):
        with sdpa_kernel(SDPBackend.MATH):
            train(engine, [batch])
        if step == 1:
            factors = [1 + int(4 * value) for value in eigenvalues.values]
        for name, state in engine.compression.layers.items():
            fallen.setdefault((name, state.bits), step)
    assert max(factors) == 5
    for name in engine.compression.layers:
        assert fallen[name, 5] == 1 and fallen[name, 4] == 2 * factors[int(name.split(".")[1])]
    assert not eigenvalues.is_needed()
    engine.destroy()


@pytest.mark.ranks(1, 2)
def test_scores_that_no_optimizer_has_are_refused():
    """They would keep their first values."""
    net = model()
    early = torch.optim.Adam(net.parameters(), lr=1e-2)
    with pytest.raises(ConfigError, match=r"_scores would not be trained: .* call init_compression"):
        start(settings(ALL, optimizer=None), net, optimizer=early)
    late = torch.optim.Adam(net.parameters(), lr=1e-2)
    engine = start(settings(ALL, optimizer=None), net, optimizer=late)
    scores = weights(engine)
    train(engine, batches(2))
    assert all((weights(engine)[name] != scores[name]).any() for name in scores if name.endswith("_scores"))
    engine.destroy()


@pytest.mark.ranks(1, 2)
def test_an_engine_without_optimizer_compresses_nothing():
    """Such as that of a teacher, which scripts make with the config of the student."""
    (batch,) = batches(1)
    plain, engine = model(), start(settings(ALL, optimizer=None), model())
    assert engine.compression is None
    with torch.no_grad():
        same_bits(engine.eval()(*batch), plain.eval()(*batch))
    engine.destroy()
