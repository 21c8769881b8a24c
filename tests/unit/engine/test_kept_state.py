"""States of a client's optimizer that are no full-sized tensors come back, at any stage and number of ranks."""

import pytest
import torch

from mpispeed.mesh import sim
from mpispeed.optim.torch_rule import TorchRule
from tests.helpers.counting import Counting, found_states, groups_of
from tests.unit.engine.simulated import engine_on
from tests.zoo import same_bits
from tests.zoo.models import Net, samples
from tests.zoo.training import check_equal, config, train, train_plain, weights


def run(ranks, job):
    """`job` with its own model on each rank; made here because ranks that are threads share torch's generator."""
    models = [Net() for _ in range(ranks)]
    return sim.run(ranks, lambda world: job(world, models[world.rank]))


def start(world, stage, model, optimizer):
    more = {"zero_allow_untested_optimizer": True, "reduction": "ordered"}
    return engine_on(world, config(stage, **more), model, optimizer=optimizer)


@pytest.mark.deepspeed_row("a4")
@pytest.mark.parametrize(
    ("before", "after"),
    [((1, 0), (2, 1)), ((2, 1), (2, 1)), ((2, 2), (3, 3)), ((3, 3), (1, 0)), ((4, 3), (2, 0)), ((2, 0), (4, 2))],
)
def test_numbers_and_tensors_of_one_element_come_back(before, after, tmp_path):
    data = samples(4)

    def first(world, model):
        client = Counting(groups_of(model))
        engine = start(world, before[1], model, client)
        train(engine, data[:2])
        engine.save_checkpoint(str(tmp_path))
        states = found_states(client)
        engine.destroy()
        return states

    def second(world, model):
        client = Counting(groups_of(model))
        engine = start(world, after[1], model, client)
        engine.load_checkpoint(str(tmp_path))
        states = found_states(client)
        train(engine, data[2:])
        result = weights(engine)
        engine.destroy()
        return states, result

    saved = [{state for rank in rows for state in rank} for rows in zip(*run(before[0], first), strict=True)]
    results = run(after[0], second)
    loaded = [
        {state for rank in rows for state in rank} for rows in zip(*(states for states, _ in results), strict=True)
    ]
    assert loaded == saved  # a group has one parameter, and all its cuts have the same
    assert [len(states) for states in saved].count(0) == 1
    plain, ours = Net(), Net()
    train_plain(plain, data, Counting(groups_of(plain)))
    ours.load_state_dict(results[0][1])
    check_equal(ours, plain)


class Apart(torch.optim.Optimizer):
    """Keeps a number that depends on the values it sees, and a full-sized state for matrices only."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            if param.grad is None:  # of a rank that has no part of any
                continue
            state = self.state[param]
            state["seen"] = state.get("seen", 0.0) + float(param.grad.abs().sum())
            if param.dim() > 1:
                state["mean"] = state.get("mean", torch.zeros_like(param)).lerp(param.grad, 0.5)
            param.sub_(state.get("mean", param.grad), alpha=0.1 / (1 + state["seen"]))


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_parameter_and_each_cut_has_its_own(stage, ranks, tmp_path):
    data = samples(4)

    def job(world, model):
        client = Apart(model.parameters())
        engine = start(world, stage, model, client)
        train(engine, data[:2])
        engine.save_checkpoint(str(tmp_path))
        train(engine, data[2:])
        straight = weights(engine)
        engine.load_checkpoint(str(tmp_path))
        train(engine, data[2:])
        same_bits(weights(engine), straight)
        found = len(found_states(client)[0])
        engine.destroy()
        return found

    assert any(run(ranks, job))


@pytest.mark.parametrize("name", ["RMSprop", "Lion"])
def test_state_of_another_optimizer_is_not_taken(name, tmp_path, caplog):
    """Torch's optimizers take a state with strange names for a complete one and fail at the next step."""
    data = samples(3)

    def job(world, model):
        section = {"optimizer": {"type": name, "params": {"lr": 1e-2}}, "zero_allow_untested_optimizer": True}
        engine = engine_on(world, config(1, **section), model)
        train(engine, data[:1])
        engine.save_checkpoint(str(tmp_path))
        engine.destroy()
        fresh, other = torch.optim.Adadelta(model.parameters()), Net()
        engine = start(world, 1, model, fresh)
        engine.load_checkpoint(str(tmp_path))
        other.load_state_dict(weights(engine))
        train(engine, data[1:])
        kept = {key: fresh.param_groups[0][key] for key in ("lr", "rho", "eps", "weight_decay")}
        train_plain(other, data[1:], torch.optim.Adadelta(other.parameters(), **kept))
        check_equal(engine.module, other)
        engine.destroy()

    run(2, job)
    assert f"state of the optimizer {name}, which Adadelta cannot take over: it starts afresh" in caplog.text


def test_a_torch_adam_goes_on_where_that_of_the_json_stopped(tmp_path):
    data = samples(4)

    def job(world, model):
        section = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}}
        engine = engine_on(world, config(1, **section), model)
        train(engine, data[:2])
        engine.save_checkpoint(str(tmp_path))
        engine.destroy()
        engine = start(world, 1, model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))
        engine.load_checkpoint(str(tmp_path))
        train(engine, data[2:])
        result = weights(engine)
        engine.destroy()
        return result

    plain, ours = Net(), Net()
    train_plain(plain, data, torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1))
    ours.load_state_dict(run(2, job)[0])
    check_equal(ours, plain)


@pytest.mark.parametrize(("name", "more"), [("NAdam", {}), ("SGD", {"momentum": 0.9}), ("Rprop", {})])
def test_runs_in_files_and_in_memory_go_on_on_other_numbers_of_ranks(name, more, tmp_path):
    """Counts and products of groups are in the checkpoint, also from ranks that have nothing of a group."""
    data, disk = samples(6), {"device": "nvme", "nvme_path": str(tmp_path / "disk")}
    runs = [(3, 2, True), (2, 3, False), (1, 1, True)]

    def job(world, model, number):
        _, stage, is_in_files = runs[number]
        client = getattr(torch.optim, name)(groups_of(model), lr=1e-2, **more)
        zero = {"offload_optimizer": disk} if is_in_files else {}
        settings = config(stage, zero_allow_untested_optimizer=True, reduction="ordered", zero=zero)
        engine = engine_on(world, settings, model, optimizer=client)
        assert isinstance(engine.parts.optimization.rule, TorchRule) == is_in_files
        if number:
            engine.load_checkpoint(str(tmp_path / f"{number - 1}"))
        train(engine, data[2 * number : 2 * number + 2])
        engine.save_checkpoint(str(tmp_path / f"{number}"))
        result = weights(engine)
        engine.destroy()
        return result

    for number, (ranks, *_) in enumerate(runs):
        found = run(ranks, lambda world, model, at=number: job(world, model, at))[0]
    plain, ours = Net(), Net()
    train_plain(plain, data, getattr(torch.optim, name)(groups_of(plain), lr=1e-2, **more))
    ours.load_state_dict(found)
    check_equal(ours, plain)
