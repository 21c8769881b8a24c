"""Checkpoints of optimizers that keep their own state, loaded at other rank counts and placements."""

import json
import threading

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from mpispeed.ckpt.read.reader import Checkpoint
from mpispeed.cli.ckpt import ckpt
from mpispeed.mesh import sim
from tests.unit.engine.simulated import engine_on
from tests.zoo import same_bits
from tests.zoo.models import Net, samples
from tests.zoo.training import check_equal, config, train, train_plain, weights

CLASSES = {
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "adamw": (torch.optim.AdamW, {"amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {}),
}


def groups_of(model):
    params = list(model.parameters())
    return [{"params": [p for p in params if p.dim() > 1], "lr": 2e-2}, {"params": [p for p in params if p.dim() < 2]}]


@pytest.mark.parametrize("name", sorted(CLASSES))
@pytest.mark.parametrize("chain", [((2, 1), (3, 2), (1, 0)), ((1, 0), (4, 1), (2, 3)), ((3, 3), (2, 0), (4, 2))])
def test_foreign_state_at_other_rank_counts(name, chain, tmp_path):
    cls, params = CLASSES[name]
    data = samples(6)

    def job(world, stage, part, model):
        client = cls(groups_of(model), lr=1e-2, **params)
        engine = engine_on(world, config(stage, zero_allow_untested_optimizer=True), model, optimizer=client)
        if part:
            path, _ = engine.load_checkpoint(str(tmp_path))
            assert path is not None
        assert engine.global_steps == 2 * part
        train(engine, data[2 * part : 2 * part + 2])
        engine.save_checkpoint(str(tmp_path))
        result = weights(engine)
        engine.destroy()
        return result

    for part, (ranks, stage) in enumerate(chain):
        # Made here because ranks that are threads share torch's generator.
        models = [Net(seed=11 if part == 0 else 90 + part) for _ in range(ranks)]
        results = sim.run(ranks, lambda world, s=stage, p=part, m=models: job(world, s, p, m[world.rank]))
    plain = Net()
    train_plain(plain, data, cls(groups_of(plain), lr=1e-2, **params))
    for result in results:
        last = Net()
        last.load_state_dict(result, strict=True)
        check_equal(last, plain)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_hold_equal_weights_and_plain_results(ranks, stage):
    data, models = samples(4), [Net() for _ in range(ranks)]

    def job(world):
        section = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}}
        engine = engine_on(world, config(stage, **section, gradient_clipping=0.2), models[world.rank])
        train(engine, data)
        result = weights(engine)
        engine.destroy()
        return result

    results = sim.run(ranks, job)
    assert all(torch.equal(result[name], results[0][name]) for result in results for name in result)
    plain, ours = Net(), Net()
    train_plain(plain, data, torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1), clip=0.2)
    ours.load_state_dict(results[0])
    check_equal(ours, plain)


# -- parameters that rest cut ----------------------------------------------------------------------------------------

ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}, "gradient_clipping": 0.2}


class Partly(Net):
    """Has frozen, empty and 0-dim parameters beside those of `Net`, and a buffer."""

    def __init__(self, seed=11):
        super().__init__(seed)
        self.scale = nn.Parameter(torch.tensor(1 + seed / 100))
        self.nothing = nn.Parameter(torch.empty(0))
        self.base = nn.Parameter(torch.linspace(0, seed, 19 * 40).view(40, 19), requires_grad=False)
        self.register_buffer("seen", torch.arange(3.0) + seed)

    def forward(self, x, y):
        return super().forward(x, y) * self.scale + self.nothing.sum() + self.base.square().mean() + self.seen.sum() * 0


def run_part(folder, ranks, stage, part, data, dtype, more):
    """Load what the part before saved, train its two steps on `ranks` simulated ranks, save; weights of each rank."""
    # Made here because ranks that are threads share torch's generator.
    models = [Partly(seed=11 if part == 0 else 90 + part) for _ in range(ranks)]
    section = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    if dtype == "fp16":
        section[dtype]["initial_scale_power"] = 6

    def job(world):
        engine = engine_on(world, config(stage, **ADAMW, **section, reduction="ordered", **more), models[world.rank])
        if part:
            assert engine.load_checkpoint(str(folder))[0] is not None
        assert engine.global_steps == 2 * part
        losses = train(engine, data[2 * part : 2 * part + 2])
        engine.save_checkpoint(str(folder))
        result = losses, weights(engine), engine.module.seen.clone()
        engine.destroy()
        return result

    return sim.run(ranks, job)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "chain",
    [
        ((1, 3), (3, 3), (2, 3)),
        ((2, 3), (4, 3), (2, 3)),
        ((4, 3), (2, 3), (1, 0)),
        ((1, 0), (4, 3), (3, 1)),
        ((3, 2), (2, 3), (4, 0)),
    ],
)
def test_cut_parameters_at_other_rank_counts_and_stages(chain, dtype, tmp_path):
    data = samples(6)
    for part, (ranks, stage) in enumerate(chain):
        results = run_part(tmp_path, ranks, stage, part, data, dtype, {})
        for _, tensors, seen in results:
            same_bits(results[0][1], tensors)
            assert seen.tolist() == [11, 12, 13]
    one = run_part(tmp_path / "one", 1, 0, 0, data, dtype, {})
    for part in (1, 2):
        one = run_part(tmp_path / "one", 1, 0, part, data, dtype, {})
    # fp32: order of summation; else two units of the last place of weights and activations
    bound = {"fp32": 1e-5, "bf16": 2**-6, "fp16": 2**-9}[dtype]
    for name, tensor in one[0][1].items():
        ours = results[0][1][name]
        torch.testing.assert_close(ours, tensor, rtol=bound, atol=bound, msg=lambda text, at=name: f"{at}: {text}")
    assert torch.equal(results[0][1]["base"], one[0][1]["base"])


@pytest.mark.parametrize(("ranks", "stage"), [(3, 3), (4, 3), (2, 1), (1, 0)])
def test_a_load_at_another_count_restores_every_bit(ranks, stage, tmp_path):
    """What 2 ranks saved at stage 3 is saved again, unchanged, by other ranks at another stage."""
    run_part(tmp_path / "first", 2, 3, 0, samples(2), "bf16", {})
    models = [Partly(seed=90) for _ in range(ranks)]

    def job(world):
        section = {"bf16": {"enabled": True}}
        engine = engine_on(world, config(stage, **ADAMW, **section), models[world.rank])
        engine.load_checkpoint(str(tmp_path / "first"))
        engine.save_checkpoint(str(tmp_path / "second"))
        engine.destroy()

    sim.run(ranks, job)
    contents = [(tmp_path / name / "global_step2" / "model.h5").read_bytes() for name in ("first", "second")]
    assert contents[0] == contents[1]


def test_every_rank_reads_only_its_own_part(tmp_path, monkeypatch):
    run_part(tmp_path, 2, 3, 0, samples(2), "fp32", {})
    models, read = [Partly(seed=90) for _ in range(4)], [0, 0, 0, 0]
    original = Checkpoint.read

    def job(world):
        engine = engine_on(world, config(3, **ADAMW), models[world.rank])
        here.rank = world.rank
        engine.load_checkpoint(str(tmp_path))
        table, params = engine.parts.table, engine.parts.params
        own = sum(c.numel for u in table.units for _, c in u.layout.overlaps(params.shards.span(u)))
        frozen = sum(c.numel for u in table.frozen for _, c in u.layout.overlaps(params.shards.rest_span(u)))
        engine.destroy()
        return 3 * own + frozen + 3  # master and two slots; the buffer is everybody's

    def counting(self, name, slot, start, out, verify=True):
        read[here.rank] += out.numel()
        original(self, name, slot, start, out, verify)

    here = threading.local()
    monkeypatch.setattr(Checkpoint, "read", counting)
    assert read == [0] * 4
    expected = sim.run(4, job)
    assert read == expected
    total = sum(p.numel() * (3 if p.requires_grad else 1) for p in models[0].parameters()) + 4 * 3
    assert sum(read) == total


def test_the_tools_read_what_cut_parameters_saved(tmp_path):
    run_part(tmp_path, 3, 3, 0, samples(2), "bf16", {})
    listed = json.loads(CliRunner().invoke(ckpt, ["ls", str(tmp_path), "--json"]).stdout)
    assert [(row["tag"], row["status"]) for row in listed] == [("global_step2", "ok")]
    shown = CliRunner().invoke(ckpt, ["show", str(tmp_path)])
    assert shown.exit_code == 0
    for name in ("base", "first.weight", "scale", "nothing", "seen"):
        assert name in shown.stdout
    assert "frozen" in shown.stdout
