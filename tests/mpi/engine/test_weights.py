"""State dicts of engines: brought together where parameters rest cut, taken back by any engine."""

import logging
import weakref

import pytest
import torch
from torch import nn

from mpispeed.base.errors import CheckpointError, UsageError
from mpispeed.sharding.param_shards import ParamShards
from tests.helpers.covering import on_ranks
from tests.zoo import same_bits
from tests.zoo.models import Branches, TinyLM, samples
from tests.zoo.training import ADAM, config, start, train, weights

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 3)]
STAGES_AND_DTYPES = pytest.mark.parametrize(("stage", "dtype"), on_ranks([0, 1, 2, 3], ["fp32", "bf16"], ranks=(1, 3)))
TOKENS = torch.arange(36).view(4, 9) % 61


class Odd(nn.Module):
    """Tied, frozen, empty and 0-dim parameters, buffers of both kinds, and state that is no tensor."""

    def __init__(self, seed=11):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(5, 19)
            self.frozen = nn.Linear(19, 19)
            self.partly = nn.Linear(19, 19)
            self.last = nn.Linear(19, 2)
            self.scale = nn.Parameter(torch.rand(()))
            self.nothing = nn.Parameter(torch.empty(0, 3))
            self.fixed = nn.Parameter(torch.rand(()), requires_grad=False)
            self.register_buffer("seen", torch.rand(3))
            self.register_buffer("count", torch.tensor(seed))
            self.register_buffer("passing", torch.full((2,), float(seed)), persistent=False)
        self.again = self.first
        self.frozen.requires_grad_(False)
        self.partly.bias.requires_grad_(False)
        self.note = f"seed {seed}"

    def forward(self, x, y):
        out = torch.tanh(self.first(x.to(self.first.weight.dtype)) * self.scale)
        out = self.partly(self.frozen(out)) + self.fixed + self.nothing.sum()
        return nn.functional.mse_loss(self.last(out).float(), y)

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


def odd_engine(stage, seed=11, dtype="fp32", **zero_keys):
    return start(config(stage, dtype=dtype, zero=zero_keys, **ADAM), Odd(seed))


def is_taker(engine, stage):
    return stage < 3 or engine.global_rank == 0


@STAGES_AND_DTYPES
def test_rank_0_gets_a_state_dict_that_plain_torch_loads(stage, dtype):
    engine = odd_engine(stage, dtype=dtype)
    train(engine, samples(2))
    state, small = engine.module_state_dict(), engine.module_state_dict(exclude_frozen_parameters=True)
    expected = weights(engine)
    if is_taker(engine, stage):
        assert list(state) == list(Odd().state_dict())
        plain = Odd(seed=9).to(engine.get_data_types()[0])
        plain.load_state_dict(state)
        same_bits(weights(plain), expected)
        assert plain.note == "seed 11"
        assert torch.equal(plain.seen, engine.module.seen)
        assert int(plain.count) == 11
        assert set(state) - set(small) == {"fixed", "frozen.weight", "frozen.bias", "partly.bias"}
        assert state["again.weight"].data_ptr() == state["first.weight"].data_ptr()
    else:
        assert state == {}
        assert small == {}
    before = {name: tensor.clone() for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    assert engine._zero3_consolidated_16bit_state_dict().keys() == state.keys()
    train(engine, samples(1))  # gathering left everything in order
    if stage == 3 and engine.world_size > 1:  # copies, not views
        same_bits({name: state[name] for name in before}, before)
    engine.destroy()


def test_no_more_than_one_unit_is_whole_while_a_state_dict_is_gathered(comm, monkeypatch):
    engine = start(config(3, **ADAM), TinyLM(depth=4))
    original, gathered = ParamShards.collected, []

    def collected(self, unit):
        assert all(reference() is None for reference in gathered)
        full = original(self, unit)
        gathered.append(weakref.ref(full))
        return full

    monkeypatch.setattr(ParamShards, "collected", collected)
    engine.module_state_dict()
    assert len(gathered) == (len(engine.parts.table.units) if comm.size > 1 else 0)
    if comm.size > 1:  # and nothing stays whole
        assert engine.parts.params.prefetcher.tally.live_elements == 0
    engine.destroy()


@STAGES_AND_DTYPES
def test_the_values_of_rank_0_are_taken_with_full_precision(stage, dtype):
    source = Odd(seed=5)
    engine = odd_engine(stage, dtype=dtype)
    train(engine, samples(2))
    engine.load_module_state_dict(source.state_dict() if engine.global_rank == 0 else {})
    compute = engine.get_data_types()[0]
    same_bits(weights(engine), {n: p.detach().to(compute) for n, p in source.named_parameters()})
    assert torch.equal(engine.module.seen, source.seen.to(compute))
    assert (int(engine.module.count), engine.module.note) == (5, "seed 5")
    assert engine.module.passing[0] == 11  # not persistent
    wanted = dict(source.named_parameters())
    for unit in engine.parts.table.units:  # masters are not rounded to the compute dtype
        span, master = engine.parts.params.shards.span(unit), engine.parts.params.shards.master(unit)
        for entry, common in unit.layout.overlaps(span):
            theirs = wanted[entry.name].detach().reshape(-1)[common.shifted(-entry.offset).slice]
            assert torch.equal(master[common.shifted(-span.start).slice], theirs)
    states, units = engine.parts.optimization.states, engine.parts.table.units
    is_kept = any(bool(tensor.any()) for unit in units for tensor in states.of(unit).values())
    assert any(engine.mesh["data"].gather_objects(is_kept))  # a rank may hold nothing but padding
    before = weights(engine)
    train(engine, samples(1))
    after = weights(engine)
    assert {name for name in before if torch.equal(before[name], after[name])} >= {"frozen.weight", "partly.bias"}
    assert not torch.equal(before["partly.weight"], after["partly.weight"])
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_names_and_shapes_that_do_not_fit(stage):
    engine = odd_engine(stage)
    before = weights(engine)
    state = Odd(seed=5).state_dict()
    state["other"] = state.pop("last.bias")
    for rank_0_only in (True, False):
        mine = state if engine.global_rank == 0 or not rank_0_only else {}
        with pytest.raises(CheckpointError, match=r"lacks last\.bias.*has unknown other.*strict=False") as caught:
            engine.load_module_state_dict(mine)
        assert isinstance(caught.value, RuntimeError)
    same_bits(weights(engine), before)
    engine.load_module_state_dict(state, strict=False)
    after = weights(engine)
    assert torch.equal(after["last.bias"], before["last.bias"])
    assert torch.equal(after["last.weight"], state["last.weight"])
    state["last.weight"] = torch.zeros(2, 18)
    with pytest.raises(CheckpointError, match=r"last\.weight has shape \(2, 19\) in the model and \(2, 18\)"):
        engine.load_module_state_dict(state, strict=False)
    state["last.weight"] = [[1.0]]
    with pytest.raises(CheckpointError, match=r"last\.weight is a list"):
        engine.load_module_state_dict(state, strict=False)
    # of tied parameters one name is enough
    state = {name: value for name, value in Odd(seed=6).state_dict().items() if not name.startswith("again")}
    engine.load_module_state_dict(state)
    assert torch.equal(weights(engine)["first.weight"], state["first.weight"])
    engine.destroy()


def masters(engine):
    """Copies of this rank's parts of the masters, by parameter."""
    params, found = engine.parts.params, {}
    for unit in engine.parts.table.units:
        span = params.shards.span(unit)
        for entry, common in unit.layout.overlaps(span):
            found[entry.name] = params.shards.master(unit)[common.shifted(-span.start).slice].clone()
    return found


@STAGES_AND_DTYPES
def test_a_function_of_the_caller_sees_the_whole_model(stage, dtype):
    engine = odd_engine(stage, dtype=dtype)
    train(engine, samples(1))
    source = Odd(seed=5)

    def load(*, src, dst):
        shapes = {name: tensor.shape for name, tensor in dst.state_dict().items() if isinstance(tensor, torch.Tensor)}
        assert shapes["first.weight"] == (19, 5)
        with torch.no_grad():
            dst.first.weight.copy_(src["first.weight"])
            dst.scale.data = src["scale"].clone()
            dst.frozen.weight.mul_(2)

    expected = weights(engine)
    compute = engine.get_data_types()[0]
    expected |= {name: source.state_dict()[name].to(compute) for name in ("first.weight", "scale")}
    expected["frozen.weight"] = expected["frozen.weight"] * 2
    engine.load_module_state_dict(source.state_dict(), custom_load_fn=load)
    same_bits(weights(engine), expected)
    engine.parts.params.refresh()  # masters have the same values
    same_bits(weights(engine), expected)
    train(engine, samples(1))
    kept = masters(engine)
    engine.load_module_state_dict({}, custom_load_fn=lambda src, dst: dst.scale.data.fill_(3))
    for name, master in masters(engine).items():  # what it does not write keeps its precision
        assert torch.equal(master, kept[name] if name != "scale" else torch.full_like(master, 3))
    with pytest.raises(CheckpointError, match="new parameter objects"):
        engine.load_module_state_dict(
            source.state_dict(), custom_load_fn=lambda src, dst: dst.load_state_dict(src, assign=True)
        )
    engine.destroy()


def test_16_bit_weights_are_written_only_when_gathering_is_allowed(mpi_tmp_path, caplog):
    engine = odd_engine(3)
    with caplog.at_level(logging.WARNING, "mpispeed"):
        assert engine.save_16bit_model(str(mpi_tmp_path / "out")) is False
    told = [
        record.message for record in caplog.records if "stage3_gather_16bit_weights_on_model_save" in record.message
    ]
    assert len(told) == (engine.global_rank == 0)
    assert not (mpi_tmp_path / "out").exists()
    engine.destroy()


@pytest.mark.mpi(min_size=2)
def test_state_dict_of_the_module_names_the_ways_out():
    engine = odd_engine(3)
    with pytest.raises(UsageError, match=r"module_state_dict\(\)") as caught:
        engine.module.state_dict()
    assert "GatheredParameters" in str(caught.value)
    assert "'scale' is cut over" in str(caught.value)
    train(engine, samples(1))  # and nothing is broken
    engine.destroy()
    assert list(engine.module.state_dict()) == list(Odd().state_dict())


# -- checkpoints of such a model -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "dtype"), on_ranks([(0, 3), (3, 0), (3, 3), (2, 3)], ["fp32", "bf16"], ranks=(1, 3)), ids=str
)
def test_odd_parameters_go_from_stage_to_stage(stages, dtype, mpi_tmp_path):
    saved, loaded = stages
    first, second = odd_engine(saved, dtype=dtype), odd_engine(loaded, seed=9, dtype=dtype)
    for engine in (first, second):
        train(engine, samples(2))
    first.module.seen += 1
    first.save_checkpoint(str(mpi_tmp_path))
    second.load_checkpoint(str(mpi_tmp_path))
    same_bits(weights(second), weights(first))
    assert torch.equal(second.module.seen, first.module.seen)
    assert int(second.module.count) == 11
    data = samples(3, seed=8)
    for ours, theirs in zip(train(second, data), train(first, data), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5 if dtype == "fp32" else 2**-7)
    first.destroy()
    second.destroy()


@pytest.mark.parametrize("is_excluded", [False, True])
def test_frozen_parameters_can_be_left_out_where_they_are_cut(is_excluded, mpi_tmp_path):
    first = odd_engine(3)
    first.save_checkpoint(str(mpi_tmp_path), exclude_frozen_parameters=is_excluded)
    second = odd_engine(3, seed=9)
    own = weights(second)
    if is_excluded:
        with pytest.raises(CheckpointError, match=r"lacks parameters of the model: fixed, frozen\.bias"):
            second.load_checkpoint(str(mpi_tmp_path))
    second.load_checkpoint(str(mpi_tmp_path), load_module_strict=not is_excluded)
    expected = weights(first)
    if is_excluded:
        expected |= {name: own[name] for name in ("fixed", "frozen.weight", "frozen.bias", "partly.bias")}
    same_bits(weights(second), expected)
    first.destroy()
    second.destroy()


@STAGES_AND_DTYPES
def test_save_load_save_writes_the_same_bytes(stage, dtype, mpi_tmp_path):
    engine = odd_engine(stage, dtype=dtype)
    train(engine, samples(2))
    engine.save_checkpoint(str(mpi_tmp_path / "a"))
    losses = train(engine, samples(2, seed=8))
    after = weights(engine)
    engine.load_checkpoint(str(mpi_tmp_path / "a"))
    engine.save_checkpoint(str(mpi_tmp_path / "b"))
    contents = [(mpi_tmp_path / name / "global_step2" / "model.h5").read_bytes() for name in "ab"]
    assert contents[0] == contents[1]
    # what was whole when the load came is not used any more
    assert train(engine, samples(2, seed=8)) == losses
    same_bits(weights(engine), after)
    engine.destroy()


@pytest.mark.ranks(1, 2, 3, 4)
def test_every_stage_writes_the_same_bytes(mpi_tmp_path):
    for stage in (0, 1, 2, 3):
        engine = start(
            config(stage, **ADAM, reduction="ordered")
            | {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}},
            Odd(),
        )
        train(engine, samples(2))
        engine.save_checkpoint(str(mpi_tmp_path / f"s{stage}"), tag="same")
        engine.destroy()
    contents = [(mpi_tmp_path / f"s{stage}" / "same" / "model.h5").read_bytes() for stage in (0, 1, 2, 3)]
    assert contents[1:] == contents[:1] * 3


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_that_travel_as_codes_are_gathered_exactly(dtype, mpi_tmp_path):
    coded = {"zero_quantized_weights": True, "zero_quantized_in_node": True}
    engine = odd_engine(3, dtype=dtype, **coded, stage3_gather_16bit_weights_on_model_save=True)
    train(engine, samples(2))
    state = engine.module_state_dict()
    assert engine.save_16bit_model(str(mpi_tmp_path))
    engine.save_checkpoint(str(mpi_tmp_path / "all"))
    plain = odd_engine(0, dtype=dtype)
    plain.load_checkpoint(str(mpi_tmp_path / "all"))
    exact = weights(plain.module)
    written = torch.load(mpi_tmp_path / "pytorch_model.bin", weights_only=True)
    if engine.global_rank == 0:
        same_bits({name: state[name] for name in exact}, exact)
    same_bits({name: written[name] for name in exact}, exact)
    plain.destroy()
    engine.destroy()


@pytest.mark.mpi(min_size=2)
def test_frozen_weights_that_rest_as_codes_are_saved_and_loaded(mpi_tmp_path):
    keys = {"zero_quantized_nontrainable_weights": True}
    first, second = odd_engine(3, dtype="bf16", **keys), odd_engine(3, seed=9, dtype="bf16", **keys)
    for engine in (first, second):
        train(engine, samples(1))
    first.save_checkpoint(str(mpi_tmp_path))
    second.load_checkpoint(str(mpi_tmp_path))
    plain = odd_engine(0, seed=9, dtype="bf16")
    plain.load_checkpoint(str(mpi_tmp_path))
    # what was saved are the rounded values, and rounding them again moves none by more than one step of 127
    saved, ours, theirs = weights(plain.module), weights(second), weights(first)
    for name, tensor in saved.items():
        bound = float(tensor.float().abs().max()) / 127 if tensor.numel() else 0.0
        for other in (ours[name], theirs[name]):
            torch.testing.assert_close(other, tensor, rtol=0.0, atol=bound if "frozen" in name else 0.0)
    for engine in (first, second, plain):
        engine.destroy()


# -- keys that only have an effect where parameters rest cut ----------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("is_wanted", [True, False])
def test_another_order_of_use_is_told_once_by_rank_0_when_wanted(is_wanted, caplog):
    engine = start(config(3, zero={"log_trace_cache_warnings": is_wanted}, **ADAM), Branches())
    with caplog.at_level(logging.WARNING, "mpispeed"):
        for order in ([0, 1, 2, 3], [0, 1, 2, 3], [3, 1, 0, 2], [3, 1, 0, 2], [3, 1, 0, 2]):
            engine.module.order = order
            train(engine, samples(1))
    told = [record for record in caplog.records if "in another order" in record.message]
    assert len(told) == (is_wanted and engine.global_rank == 0)
    engine.destroy()


@pytest.mark.mpi(min_size=2)
def test_a_module_below_the_granularity_threshold_is_fetched_as_one():
    found = []
    for threshold in (0, 30, 0):
        limits = {"stage3_module_granularity_threshold": threshold, "stage3_max_live_parameters": 0}
        engine = start(config(3, zero=limits, **ADAM), Branches())
        tally = engine.parts.params.prefetcher.tally
        largest = max(unit.layout.padded for unit in engine.parts.table.units)
        train(engine, samples(1))
        found.append(tally.peak_elements // largest)
        engine.destroy()
    assert found == [1, 4, 1]  # units that are whole at once


@pytest.mark.parametrize("step", ["_copy_unit", "_copy", "_refuse_misfit", "ParamShards.put_master", "_trace_of"])
def test_an_error_that_nobody_foresaw_on_one_rank_is_raised_on_all(step, comm, monkeypatch):
    engine = start(config(3, **ADAM))
    given = engine.module_state_dict()

    def fail(*args, **kwargs):
        raise LookupError("planted")

    def load_all(src, dst):
        if comm.rank in (0, comm.size - 1):
            monkeypatch.setattr(f"mpispeed.engine.state.weights.{step}", fail)

    calls = {"_copy_unit": engine.module_state_dict, "_copy": engine.module_state_dict}
    call = calls.get(step, lambda: engine.load_module_state_dict(given))
    if step == "_trace_of":
        call = lambda: engine.load_module_state_dict({}, custom_load_fn=load_all)  # noqa: E731
    elif step.startswith("ParamShards"):
        if comm.rank == comm.size - 1:
            monkeypatch.setattr(ParamShards, "put_master", fail)
    elif comm.rank == 0:
        monkeypatch.setattr(f"mpispeed.engine.state.weights.{step}", fail)
    with pytest.raises(CheckpointError, match="LookupError: planted"):
        call()
    monkeypatch.undo()
    engine.module_state_dict()
    engine.destroy()
