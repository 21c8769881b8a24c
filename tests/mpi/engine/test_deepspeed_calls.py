"""Engine methods and attributes that DeepSpeed scripts and other libraries use beside the training step."""

import os
import subprocess
import sys

import pytest
import torch

from mpispeed.base.errors import UsageError
from mpispeed.zero import safe_get_full_grad, safe_get_full_optimizer_state, safe_update_full_grad_vectorized
from tests.zoo import same_bits
from tests.zoo.models import BATCH, Net, samples
from tests.zoo.training import ADAM, config, own_part, start, train, weights

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 2)]
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Numbers(torch.utils.data.Dataset):
    """Samples that are their own index."""

    def __len__(self):
        return BATCH

    def __getitem__(self, index):
        return torch.tensor(index)


class Stream(torch.utils.data.IterableDataset):
    """The same numbers without indices."""

    def __iter__(self):
        return iter(range(BATCH))


# -- backward ------------------------------------------------------------------------------------------------------


def groups_of(model):
    """Matrices, and vectors with another lr."""
    params = list(model.parameters())
    return [{"params": [p for p in params if p.dim() > 1]}, {"params": [p for p in params if p.dim() < 2], "lr": 3e-3}]


def with_groups(kind, stage):
    model, settings = Net(), config(stage, BATCH, 2, reduction="ordered")
    if kind == "client":
        return start(settings, model, optimizer=torch.optim.AdamW(groups_of(model), lr=1e-2))
    return start(settings | ADAM, model, model_parameters=groups_of(model))


def squares(tensors):
    return sum(float(tensor.double().square().sum()) for tensor in tensors)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("kind", ["json", "client"])
def test_averaged_gradients_are_those_of_the_update(kind, stage, comm):
    one, other = (with_groups(kind, stage) for _ in range(2))
    optimizer, batch = one.optimizer, samples(1)[0]
    found = optimizer.averaged_gradients
    assert dict(found) == {}
    for engine in (one, other):
        engine.backward(engine(*own_part(engine, batch)))
        engine.step()
    assert len(found) == (2 if stage == 2 else 0)  # stage 1 sums at the end only
    one.backward(one(*own_part(one, batch, 1)))
    assert list(found) == [0, 1]
    for index, group in enumerate(groups_of(one.module)):
        assert sum(comm.gather_objects(squares(found[index]))) == pytest.approx(
            squares(map(safe_get_full_grad, group["params"])), rel=1e-6
        )
        if comm.size == 1:
            assert [part.shape for part in found[index]] == [param.shape for param in group["params"]]
        for part in found[index]:
            part.mul_(2)
    with pytest.raises(KeyError):
        found[2]
    one.step()
    assert not found
    other.backward(other(*own_part(other, batch, 1)))
    safe_update_full_grad_vectorized([*other.module.parameters()], lambda grad, _: 2 * grad)
    other.step()
    same_bits(weights(one), weights(other))
    one.destroy()
    other.destroy()
    assert not hasattr(optimizer, "averaged_gradients") or kind == "json"
    assert not found


@pytest.mark.parametrize("stage", [0, 3])
def test_averaged_gradients_are_of_stages_1_and_2(stage):
    engine = start(config(stage, **ADAM))
    assert not hasattr(engine.optimizer, "averaged_gradients")
    engine.destroy()


@pytest.mark.deepspeed_row("a9")
@pytest.mark.parametrize("reduces", ["by hand", "in step"])
@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_stay_local_until_they_are_reduced(stage, reduces, comm):
    one, other = start(config(stage, **ADAM)), start(config(stage, **ADAM))
    for batch in samples(2):
        train(one, [batch])
        other.backward(other(*own_part(other, batch)), False, True, scale_wrt_gas=True)  # positions as in DeepSpeed
        assert not any(state.is_averaged for state in other.parts.optimization.grads._gradients) or comm.size == 1
        if reduces == "by hand":
            other.allreduce_gradients(bucket_size=500_000_000)
        other.step()
    same_bits(weights(other), weights(one))
    one.destroy()
    other.destroy()


@pytest.mark.deepspeed_row("a9")
@STAGES
def test_gradients_that_are_averaged_already_may_be_reduced_by_hand(stage):
    one, other = start(config(stage, **ADAM)), start(config(stage, **ADAM))
    for batch in samples(2):
        train(one, [batch])
        other.backward(other(*own_part(other, batch)))
        other.allreduce_gradients()
        other.step()
    same_bits(weights(other), weights(one))
    one.destroy()
    other.destroy()


@pytest.mark.parametrize("stage", [2, 3])
def test_sharded_gradients_cannot_stay_local(stage):
    engine = start(config(stage, **ADAM))
    loss = engine(*own_part(engine, samples(1)[0]))
    with pytest.raises(UsageError, match=r"allreduce_gradients=False\) is incompatible .* partitioned"):
        engine.backward(loss, allreduce_gradients=False)
    engine.backward(loss, release_loss=True, retain_graph=False)
    engine.step()
    engine.destroy()


# -- optimizer.step() ------------------------------------------------------------------------------------------------


@STAGES
@pytest.mark.parametrize("optimizer", ["config", "client", "inner"])
def test_the_optimizer_makes_steps(stage, optimizer, comm):
    """The snippet of DeepSpeed's page on debugging, with accumulation that the script does itself."""
    settings = config(stage, **({} if optimizer == "client" else ADAM), gradient_accumulation_steps=1 + (comm.size < 3))
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2}}
    settings["scheduler"] = schedule

    def make():
        model = Net()
        own = torch.optim.Adam(model.parameters(), lr=1e-2) if optimizer == "client" else None
        return start(settings, model, optimizer=own)

    one, other = make(), make()
    for batch in samples(3):
        train(one, [batch])
        for micro in range(other.gradient_accumulation_steps()):
            other.backward(other(*own_part(other, batch, micro)))
        for param in other.module.parameters():
            assert safe_get_full_grad(param).shape == param.shape
        held = other.optimizer if optimizer != "inner" else other.optimizer.optimizer
        assert held.step() is None
        assert other.was_step_applied()
        for param, twin in zip(other.module.parameters(), one.module.parameters(), strict=True):
            torch.testing.assert_close(
                safe_get_full_optimizer_state(param, "exp_avg"),
                safe_get_full_optimizer_state(twin, "exp_avg"),
            )
    same_bits(weights(other), weights(one))
    assert other.get_lr() == one.get_lr()
    assert (other.global_steps, other.global_samples) == (one.global_steps, one.global_samples)
    with pytest.raises(UsageError, match="without any backward pass"):
        other.optimizer.step()
    with pytest.raises(UsageError, match="closure"):
        other.optimizer.step(lambda: 1.0)
    one.destroy()
    other.destroy()


@STAGES
@pytest.mark.parametrize("name", ["Adam", "RMSprop"])
def test_the_optimizer_of_the_config_shows_its_states(stage, name, comm):
    section = {"optimizer": {"type": name, "params": {"lr": 1e-2}}, "zero_allow_untested_optimizer": True}
    engine = start(config(stage, **section))
    inner, key = engine.optimizer.optimizer, {"Adam": "exp_avg_sq", "RMSprop": "square_avg"}[name]
    assert inner is engine.basic_optimizer
    assert inner.param_groups is engine.optimizer.param_groups
    assert len(inner.state) == 0
    train(engine, samples(2))
    assert list(inner.state) == list(engine.module.parameters())
    for param, state in inner.state.items():
        assert int(state["step"]) == 2
        full = safe_get_full_optimizer_state(param, key)
        if stage == 0:
            assert torch.equal(state[key], full)
        own = state.get(key, torch.zeros(0))  # a rank may have nothing of a parameter
        total = torch.tensor([float(own.sum()), own.numel()], dtype=torch.float64)
        comm.all_reduce(total)
        copies = comm.size if stage == 0 else 1
        assert total.tolist() == pytest.approx([copies * float(full.sum()), copies * full.numel()], rel=1e-5)
    assert sorted(inner.state_dict()["state"]) == list(range(6))
    engine.destroy()


# -- compilation -----------------------------------------------------------------------------------------------------


@pytest.mark.deepspeed_row("a13")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stage", [0, 2])  # at 3 `Net` reads a dtype of a cut weight, which the compiler cannot follow
def test_compile(stage):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    engine, plain = start(config(stage, **ADAM)), start(config(stage, **ADAM))
    assert engine.is_compiled is False
    with pytest.raises(UsageError, match="schedule"):
        engine.compile(schedule=[(0, [])])
    engine.compile(backend=backend, compile_kwargs={"dynamic": False})
    assert engine.is_compiled is True
    data = samples(2)
    assert train(engine, data) == pytest.approx(train(plain, data), rel=1e-5)
    assert graphs
    engine.destroy()
    plain.destroy()


# -- loaders -----------------------------------------------------------------------------------------------------------


def test_loaders_that_data_ranks_share(comm):
    engine = start(config(0, **ADAM))
    loader = engine.deepspeed_io(Numbers(), batch_size=2, collate_fn=torch.stack)
    seen = torch.cat(list(loader))
    everyone = comm.gather_objects(seen.tolist())
    assert sorted(number for own in everyone for number in own) == list(range(BATCH))
    assert len(next(iter(engine.deepspeed_io(Numbers())))) == engine.train_micro_batch_size_per_gpu()
    assert engine.is_map_style_dataset(Numbers())
    assert engine.is_iterable_style_dataset(Stream())
    stream = torch.cat([torch.as_tensor(batch) for batch in engine.deepspeed_io(Stream(), batch_size=2)])
    assert stream.tolist()[:2] == [2 * comm.rank, 2 * comm.rank + 1]
    engine.destroy()


@pytest.mark.parametrize("route", ["eval", "predict"])
def test_loaders_that_read_everything(route):
    engine = start(config(0, **ADAM))
    for dataset in (Numbers(), Stream()):
        assert torch.cat(list(engine.deepspeed_io(dataset, 4, route))).tolist() == list(range(BATCH))
    sampled = engine.deepspeed_io(Numbers(), batch_size=1, data_sampler=[3, 1], num_local_io_workers=0)
    assert torch.cat(list(sampled)).tolist() == [3, 1]
    with pytest.raises(UsageError, match="data_sampler"):
        engine.deepspeed_io(Stream(), data_sampler=[3, 1])
    with pytest.raises(UsageError, match="'train', 'eval', 'predict'"):
        engine.deepspeed_io(Numbers(), route="test")
    with pytest.raises(UsageError, match="a int is no data set"):
        engine.deepspeed_io(3)
    engine.destroy()


def test_batches_pass_through_a_function():
    engine = start(config(0, **ADAM), training_data=Numbers())
    engine.set_data_post_process_func(lambda batch, state: (batch * 0, state["position"]))
    batch, position = next(iter(engine.training_dataloader))
    assert not batch.any()
    assert position == BATCH
    other = start(config(0, **ADAM), Net())
    with pytest.raises(UsageError, match="training_data"):
        other.set_data_post_process_func(print)
    engine.destroy()
    other.destroy()


# -- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_script_beside_latest_recovers_weights(mpi_tmp_path, comm):
    engine = start(config(2, **ADAM))
    train(engine, samples(1))
    script, expected = mpi_tmp_path / "zero_to_fp32.py", weights(engine)
    engine.save_checkpoint(str(mpi_tmp_path), tag="one")
    if comm.rank == 0:
        assert len(script.read_text().splitlines()) == 5
        arguments = [sys.executable, str(script), str(mpi_tmp_path), str(mpi_tmp_path / "out.pt"), "--tag", "one"]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=without_mpi())
        assert done.returncode == 0, done.stderr
        same_bits(torch.load(mpi_tmp_path / "out.pt"), expected)
        script.write_text("raise SystemExit('this must not run')")
    comm.barrier()
    engine.save_checkpoint(str(mpi_tmp_path), tag="two")  # a file that is there is left alone, and never run
    engine.load_checkpoint(str(mpi_tmp_path))
    assert "must not run" in script.read_text()
    same_bits(weights(engine), expected)
    engine.destroy()


def without_mpi():
    """The environment of a process that is no rank."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PMI_"))}
