"""Checkpoints of optimizers that keep their own state, loaded at other rank counts and placements."""

import pytest
import torch

from mpispeed.mesh import sim
from tests.helpers.small import Net, check_equal, samples, settings, train, train_plain, weights
from tests.unit.engine.simulated import engine_on

CLASSES = {
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "adamw": (torch.optim.AdamW, {"amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {}),
}


def groups_of(model):
    params = list(model.parameters())
    return [{"params": [p for p in params if p.dim() > 1], "lr": 2e-2}, {"params": [p for p in params if p.dim() < 2]}]


@pytest.mark.parametrize("name", sorted(CLASSES))
@pytest.mark.parametrize("chain", [((2, 1), (3, 2), (1, 0)), ((1, 0), (4, 1), (2, 2)), ((3, 2), (2, 0), (4, 2))])
def test_foreign_state_at_other_rank_counts(name, chain, tmp_path):
    cls, params = CLASSES[name]
    data = samples(6)

    def job(world, stage, part, model):
        client = cls(groups_of(model), lr=1e-2, **params)
        engine = engine_on(world, settings(stage, zero_allow_untested_optimizer=True), model, optimizer=client)
        if part:
            path, _ = engine.load_checkpoint(str(tmp_path))
            assert path is not None
        assert engine.global_steps == 2 * part
        train(engine, data[2 * part : 2 * part + 2])
        engine.save_checkpoint(str(tmp_path))
        result = weights(engine.module)
        engine.destroy()
        return result

    for part, (ranks, stage) in enumerate(chain):
        # Made here because ranks that are threads share torch's generator.
        models = [Net(seed=11 if part == 0 else 90 + part) for _ in range(ranks)]
        results = sim.run(ranks, lambda world, s=stage, p=part, m=models: job(world, s, p, m[world.rank]))
    plain = Net()
    train_plain(plain, cls(groups_of(plain), lr=1e-2, **params), data)
    for result in results:
        last = Net()
        last.load_state_dict(result, strict=True)
        check_equal(last, plain)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_hold_equal_weights_and_plain_results(ranks, stage):
    data, models = samples(4), [Net() for _ in range(ranks)]

    def job(world):
        section = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}}
        engine = engine_on(world, settings(stage, **section, gradient_clipping=0.2), models[world.rank])
        train(engine, data)
        result = weights(engine.module)
        engine.destroy()
        return result

    results = sim.run(ranks, job)
    assert all(torch.equal(result[name], results[0][name]) for result in results for name in result)
    plain, ours = Net(), Net()
    train_plain(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1), data, clip=0.2)
    ours.load_state_dict(results[0])
    check_equal(ours, plain)
