"""Engines of `init_inference`: the documented cases inside of a pipeline, what comes through, errors on all ranks."""

import json

import pytest
import torch
from torch import nn

import mpispeed
from mpispeed.base.errors import ConfigError, TopologyError, UsageError
from mpispeed.mesh import Topology
from tests.helpers import hub_models, prompts

pytestmark = pytest.mark.mpi(min_size=1)

PROMPTS = ["w5 w9 w11", "w7", "w30 w31 w32 w33 w34"]
GREEDY = {"max_new_tokens": 6, "do_sample": False, "batch_size": 3}


def texts(pipe):
    return [answer["generated_text"] for [answer] in pipe(PROMPTS, **GREEDY)]


def plain_texts(dtype=torch.float32):
    pipe = prompts.generator()
    pipe.model.to(dtype)
    return texts(pipe)


def engine_of(model=None, **settings):
    settings = {"dtype": torch.float32, **settings}
    return mpispeed.init_inference(hub_models.build("gpt2") if model is None else model, **settings)


@pytest.mark.ranks(1, 2)
def test_no_settings(comm):
    pipe = prompts.generator()
    pipe.model = mpispeed.init_inference(pipe.model)
    assert pipe.model.dtype == torch.float16
    assert texts(pipe) == plain_texts(torch.float16)
    pipe.model.destroy()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("case", ["config", "file", "keywords", "both"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_settings_in_any_way(comm, case, is_fused, tmp_path):
    sizes = {"tp_size": comm.size}
    config = {"dtype": "fp32", "kernel_inject": is_fused, "tensor_parallel": sizes, "enable_cuda_graph": False}
    keywords = {"tp": sizes, "dtype": torch.float, "replace_with_kernel_inject": is_fused}
    path = tmp_path / "inference.json"  # one folder for each rank: only rank 0 reads
    if comm.rank == 0:
        path.write_text(json.dumps(config))
    given = {
        "config": ((config,), {}),
        "file": ((str(path),), {}),
        "keywords": ((), keywords),
        "both": (({"dtype": torch.float32, "kernel_inject": is_fused},), keywords),
    }
    args, kwargs = given[case]
    pipe = prompts.generator()
    pipe.model = mpispeed.init_inference(pipe.model, *args, **kwargs)
    found = texts(pipe)
    assert found == plain_texts()
    assert len(set(found)) == 3
    assert sum(p.numel() for p in pipe.model.parameters()) < hub_models.build("gpt2").num_parameters() or comm.size == 1
    pipe.model.destroy()


def test_half_precision_is_near(comm):
    batch = hub_models.batch()
    expected = hub_models.build("gpt2").eval().half()(batch["input_ids"]).logits.float()
    engine = engine_of(dtype="half", tensor_parallel={"tp_size": comm.size})
    found = engine(batch["input_ids"]).logits.float()
    # Products of 24 and sums over ranks are rounded to 11 bits in another order.
    assert (found - expected).abs().max() <= 2**-8 * expected.abs().max()
    assert comm.gather_objects(found.sum().item()) == [found.sum().item()] * comm.size
    engine.destroy()


def test_ranks_draw_the_same_tokens(comm):
    torch.manual_seed(comm.rank)
    engine = engine_of(tensor_parallel={"tp_size": comm.size})
    tokens = engine.generate(hub_models.batch()["input_ids"], do_sample=True, max_new_tokens=8, pad_token_id=0)
    assert comm.gather_objects(tokens.tolist()) == [tokens.tolist()] * comm.size
    engine.destroy()


def test_what_the_model_has_comes_through(comm):
    model = hub_models.build("gpt2")
    engine = engine_of(model)
    assert engine.module is model
    assert not model.training
    assert not engine.training
    assert engine.config is model.config
    assert engine.device == torch.device("cpu")
    assert engine.main_input_name == "input_ids"
    assert engine.can_generate()
    settings = model.generation_config.__class__(max_new_tokens=3)
    engine.generation_config = settings
    assert model.generation_config is settings
    with pytest.raises(AttributeError, match="no_such"):
        engine.no_such  # noqa: B018
    engine.destroy()
    plain = engine_of(nn.Linear(3, 2))
    assert not hasattr(plain, "generate")
    assert plain.config is None
    assert plain(torch.ones(3)).dtype == torch.float32
    plain.destroy()
    told = engine_of(nn.Linear(3, 2), args={"width": 3})
    assert told.config == {"width": 3}
    told.destroy()


def test_times_of_forward_passes(comm):
    engine = engine_of(tensor_parallel={"tp_size": comm.size})
    with pytest.raises(UsageError, match="profile_model_time"):
        engine.model_times()
    engine.profile_model_time()
    engine.generate(hub_models.batch()["input_ids"], do_sample=False, max_new_tokens=4, min_new_tokens=4)
    times = engine.model_times()
    assert len(times) == 4
    assert all(0 < each < 60_000 for each in times)
    assert engine.model_times() == []
    engine.destroy()


def test_limits_of_generation(comm):
    engine = engine_of(max_tokens=14, min_tokens=3)
    tokens = hub_models.batch()["input_ids"]
    with pytest.raises(RuntimeError, match=r"12 tokens and at least 3 new ones .* make 15, but max_out_tokens is 14"):
        engine.generate(tokens)
    with pytest.raises(NotImplementedError, match="num_beams=2"):
        engine.generate(tokens[:, :4], num_beams=2)
    engine.generate(tokens[:, :11], max_new_tokens=1, pad_token_id=0)
    engine.destroy()
    with pytest.raises(UsageError, match=r"after engine\.destroy"):
        engine(tokens)


def test_a_table_of_positions_is_a_limit(comm):
    engine = engine_of()
    with pytest.raises(UsageError, match="prompts of 36 tokens, but the model has a table of 32 positions"):
        engine.generate(hub_models.batch()["input_ids"].repeat(1, 3), max_new_tokens=1)
    engine.destroy()


@pytest.mark.ranks(2, 4)
def test_clocks_do_not_stop_sliced_models(comm):
    engine = engine_of(tensor_parallel={"tp_size": 2})
    with pytest.raises(UsageError, match="max_time=5"):
        engine.generate(hub_models.batch()["input_ids"], max_time=5)
    engine.destroy()


# -- groups ------------------------------------------------------------------------------------------------------------


class Mpu:
    """Groups where every second rank of four shares layers."""

    def __init__(self, rank):
        self.rank, self.grid = rank, Topology({"model": 2, "data": 2})

    def get_model_parallel_group(self):
        return list(self.grid.peers(self.rank, "model"))

    def get_model_parallel_rank(self):
        return self.grid.index(self.rank, "model")

    def get_model_parallel_world_size(self):
        return 2

    def get_data_parallel_group(self):
        return list(self.grid.peers(self.rank, "data"))

    def get_data_parallel_rank(self):
        return self.grid.index(self.rank, "data")

    def get_data_parallel_world_size(self):
        return 2


@pytest.mark.ranks(4)
@pytest.mark.parametrize("given", ["tp_size", "tp_group", "mpu"])
def test_groups_of_ranks(comm, given):
    near, far = [comm.rank // 2 * 2, comm.rank // 2 * 2 + 1], [comm.rank % 2, comm.rank % 2 + 2]
    value = {"tp_size": 2, "tp_group": far, "mpu": Mpu(comm.rank)}[given]
    engine = engine_of(tensor_parallel={given: value})
    assert list(engine.mesh["model"].ranks) == (near if given == "tp_size" else far)
    expected = hub_models.build("gpt2").eval()(hub_models.batch()["input_ids"]).logits
    assert (engine(hub_models.batch()["input_ids"]).logits - expected).abs().max() <= 1e-5
    engine.destroy()


@pytest.mark.ranks(3, 4)
def test_groups_that_fit_no_grid(comm):
    odd = [0, 1] if comm.rank < 2 else list(range(2, comm.size))
    with pytest.raises(ConfigError, match="have to be of one size" if comm.size == 3 else "tp_size is 4"):
        engine_of(tensor_parallel={"tp_group": odd, "tp_size": 4 if comm.size == 4 else 1})


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3, 4)
def test_sizes_have_to_divide_the_ranks(comm):
    with pytest.raises(TopologyError, match=rf"tp_size 5 does not divide the {comm.size} ranks") as caught:
        engine_of(tensor_parallel={"tp_size": 5})
    assert caught.value.is_collective
    engine = engine_of()  # the next one is not disturbed
    assert engine.mesh["data"].size == comm.size
    engine.destroy()


@pytest.mark.ranks(2, 4)
def test_settings_that_differ_between_ranks(comm):
    size = 2 if comm.rank == 1 else 1
    with pytest.raises(ConfigError, match=r"tensor_parallel.tp_size is 2 on rank 1 and 1 on rank 0"):
        engine_of(tensor_parallel={"tp_size": size})


def test_mistakes_of_one_rank_are_told_on_all(comm):
    last = comm.size - 1
    with pytest.raises(ConfigError, match="max_out_tokens"):
        engine_of(max_tokens=0 if comm.rank == last else 5)
    with pytest.raises(ConfigError, match="no such configuration file"):
        mpispeed.init_inference(hub_models.build("gpt2"), "nothing/here.json")
    with pytest.raises(ConfigError, match="found int"):
        mpispeed.init_inference(hub_models.build("gpt2"), 3)
    with pytest.raises(ConfigError, match="is a str; pass a torch"):
        mpispeed.init_inference("gpt2" if comm.rank == last else hub_models.build("gpt2"))
    with torch.device("meta"):
        empty = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match="weight of the model is on torch's meta device"):
        engine_of(empty)
    engine = engine_of()
    with pytest.raises(ConfigError, match="InferenceEngine already"):
        engine_of(engine)
    engine.destroy()
