"""The sequence axis under an engine: samples are counted over batch, states are sharded over batch x sequence.

The model looks at each token alone, so that no attention is needed.
"""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import mpispeed
from mpispeed.base.errors import ConfigError, TopologyError
from mpispeed.compat import groups, sequence_groups
from mpispeed.pipe import PipelineModule
from tests.helpers.covering import on_ranks
from tests.zoo import same_bits
from tests.zoo.training import config, start, train_plain

pytestmark = pytest.mark.mpi(min_size=1)
BATCH, LENGTH, WIDTH, STEPS = 12, 7, 6, 4
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}, "gradient_clipping": 0.3}


class TokenWise(nn.Module):
    """The sum of the tokens' losses over `count` tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH), nn.LayerNorm(WIDTH))

    def forward(self, x, y, count=None):
        return nn.functional.mse_loss(self.layers(x), y, reduction="sum") / (y.numel() if count is None else count)


def token_data(batches=STEPS):
    torch.manual_seed(11)
    return TensorDataset(*torch.randn(2, batches * BATCH, LENGTH, WIDTH).unbind())


def settings(sequence, stage=0, accumulation=1, **more):
    cut = {"sequence_parallel": {"cuts_batches": False}} if sequence > 1 else {}
    given = {"sequence_parallel_size": sequence, "dataloader_shuffle": False, **cut, **ADAM, **more}
    return config(stage, BATCH, accumulation, **given)


def run(engine, steps, taken=None):
    """Losses of whole sequences, as the mean over all data ranks; `taken` gets the first numbers of the samples."""
    mesh, losses = engine.mpispeed.parts.mesh, []
    sequence, batches = mesh["sequence"], iter(engine.training_dataloader)
    for _ in range(steps):
        total = torch.zeros(1, dtype=torch.float64)
        for _ in range(engine.gradient_accumulation_steps()):
            x, y = next(batches)
            assert len(x) == engine.train_micro_batch_size_per_gpu()
            if taken is not None:
                taken.append(x[:, 0, 0])
            count = y.numel() / sequence.size
            own = [each.tensor_split(sequence.size, dim=1)[sequence.rank] for each in (x, y)]
            total += float(engine.backward(engine(*own, count)).detach())
            engine.step()
        mesh["data"].all_reduce(total, "avg")
        losses.append(float(total))
    return losses


def weights(engine):
    return {name: mpispeed.zero.safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}


def plain(steps=STEPS):
    model = TokenWise()
    x, y = token_data().tensors
    data = list(zip(x[: steps * BATCH].split(BATCH), y[: steps * BATCH].split(BATCH), strict=True))
    return model, train_plain(model, data, torch.optim.AdamW(model.parameters(), lr=1e-2), clip=0.3)


def like_one_process(engine, losses, steps=STEPS):
    """Sums in another order: 1e-5."""
    model, expected = plain(steps)
    torch.testing.assert_close(losses, expected.losses[-len(losses) :], rtol=1e-5, atol=0)
    for name, found in weights(engine).items():
        torch.testing.assert_close(found, model.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)


def sequence_of(comm, share):
    """Ranks of a sequence: all, one, or half of the ranks where they are even."""
    return {"all": comm.size, "half": comm.size // 2 if comm.size % 2 == 0 else comm.size, "one": 1}[share]


@pytest.mark.parametrize(("stage", "share", "accumulation"), on_ranks([0, 1, 2, 3], ["all", "half"], [1, 3]))
def test_training_equals_one_process(comm, stage, share, accumulation):
    engine = start(settings(sequence_of(comm, share), stage, accumulation), TokenWise(), training_data=token_data())
    like_one_process(engine, run(engine, STEPS))
    assert engine.global_samples == STEPS * BATCH
    engine.destroy()


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("stage", "zero"), [(3, {"mics_shard_size": 2}), (3, {"zero_hpz_partition_size": 2}), (1, {})], ids=str
)
def test_other_groups_of_the_data_axis_nest_with_it(stage, zero):
    engine = start(settings(4, stage, zero=zero, sequence_parallel={"cuts_batches": False, "ring_size": 2}),
                   TokenWise(), training_data=token_data())  # fmt: skip
    like_one_process(engine, run(engine, STEPS))
    engine.destroy()


@pytest.mark.ranks(4)
def test_slices_and_sequences(comm):
    more = {"tensor_parallel": {"autotp_size": 2}}
    model = TokenWise()
    model.layers[0], model.layers[2] = copy.deepcopy(model.layers[0]), copy.deepcopy(model.layers[2])
    engine = start(settings(2, 1, **more), model, training_data=token_data())
    mesh = engine.mpispeed.parts.mesh
    assert [mesh[name].size for name in ("data", "batch", "sequence", "model")] == [2, 1, 2, 2]
    assert list(mesh["sequence"].ranks) == [comm.rank % 2, comm.rank % 2 + 2]
    torch.testing.assert_close(run(engine, STEPS), plain()[1].losses, rtol=1e-5, atol=0)
    engine.destroy()


@pytest.mark.parametrize("share", ["all", "half"])
def test_ranks_of_a_sequence_get_the_same_samples(comm, share):
    size, taken = sequence_of(comm, share), []
    engine = start(settings(size, 1), TokenWise(), training_data=token_data())
    assert engine.train_micro_batch_size_per_gpu() == BATCH // (comm.size // size)
    run(engine, STEPS, taken)
    mesh, own = engine.mpispeed.parts.mesh, torch.cat(taken)
    for other in mesh["sequence"].gather_objects(own):
        same_bits(other, own)
    everyone = torch.cat(mesh["batch"].gather_objects(own)).sort().values
    same_bits(everyone, token_data().tensors[0][:, 0, 0].sort().values)
    evaluation = next(iter(engine.deepspeed_io(token_data(1), batch_size=2)))[0]
    assert all(torch.equal(other, evaluation) for other in mesh["sequence"].gather_objects(evaluation))
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_goes_on_with_sequences_cut_otherwise(comm, stage, mpi_tmp_path):
    sizes = [size for size in (comm.size, comm.size // 2, 1) if size and comm.size % size == 0]
    losses, folder = [], str(mpi_tmp_path)
    for number, size in enumerate(sizes):
        engine = start(settings(size, stage), TokenWise(), training_data=token_data())
        if number:
            assert engine.load_checkpoint(folder)[0] is not None
            assert (engine.global_steps, engine.global_samples) == (number, number * BATCH)
        losses += run(engine, 1)
        engine.save_checkpoint(folder)
        if number == len(sizes) - 1:
            like_one_process(engine, losses, len(sizes))
        engine.destroy()


@pytest.mark.ranks(4)
def test_groups_by_name(comm):
    engine = start(settings(2, 1), TokenWise())
    half, place = divmod(comm.rank, 2)
    assert (engine.dp_world_size, engine.seq_dp_world_size, engine.sequence_parallel_size) == (2, 4, 2)
    assert list(engine.data_parallel_group.ranks) == [place, place + 2]
    assert list(engine.seq_data_parallel_group.ranks) == [0, 1, 2, 3]
    assert list(engine.get_sequence_parallel_group().ranks) == [2 * half, 2 * half + 1]
    assert (groups.get_data_parallel_world_size(), groups.get_data_parallel_rank()) == (2, half)
    assert (groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank()) == (2, place)
    shared = sequence_groups._get_sequence_parallel_group()
    assert mpispeed.comm.get_all_ranks_from_group(shared) == [2 * half, 2 * half + 1]
    assert groups._get_sequence_data_parallel_world_size() == 4
    assert groups._get_sequence_data_parallel_rank() == comm.rank
    engine.destroy()


@pytest.mark.ranks(4)
def test_a_pair_of_sizes_may_be_given_instead_of_keys():
    given = settings(2)
    del given["sequence_parallel_size"]
    engine = start(given, TokenWise(), mesh_param=(2, 2))
    assert (engine.dp_world_size, engine.sequence_parallel_size) == (2, 2)
    engine.destroy()
    for pair, text, error in (
        ((2, 1), "makes 2 ranks, and 4 have the same part", TopologyError),
        ("22", "expected a pair of whole numbers", ConfigError),
        ((1, 4), "sequence_parallel_size says 2 and mesh_param says 4", ConfigError),
    ):
        with pytest.raises(error, match=text):
            start(settings(2), TokenWise(), mesh_param=pair)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("stage", [0, 1])
def test_pipelines(comm, stage):
    """Stages of two ranks; what is left shares sequences."""
    size = comm.size // 2
    torch.manual_seed(5)
    whole = TokenWise()
    model = PipelineModule(
        list(copy.deepcopy(whole).layers),
        num_stages=2,
        loss_fn=lambda out, y: nn.functional.mse_loss(out, y, reduction="sum") * size / (BATCH // 2 * LENGTH * WIDTH),
    )
    engine = start(settings(size, stage, 2), model)
    assert (model.grid.get_data_parallel_world_size(), model.grid.data_parallel_size) == (1, 1)
    assert model.grid.get_data_parallel_rank() == model.grid.data_parallel_id == 0
    assert model.grid.dp_group == list(engine.data_parallel_group.ranks) == [comm.rank]
    x, y = token_data().tensors
    sequence, losses = engine.mpispeed.parts.mesh["sequence"], []
    parts = zip(*(each.tensor_split(size, dim=1)[sequence.rank].split(BATCH // 2) for each in (x, y)), strict=True)
    losses = [float(engine.train_batch(parts)) for _ in range(STEPS)]
    torch.testing.assert_close(losses, plain()[1].losses, rtol=1e-5, atol=0)
    engine.destroy()
    assert model.grid.get_data_parallel_world_size() == model.grid.data_parallel_size == size


class CutByLoader:
    """Places of ranks that all share each sequence; their loader cuts it."""

    cuts_batches = False

    def __init__(self, comm):
        self.get_sequence_parallel_rank, self.get_sequence_parallel_world_size = lambda: comm.rank, lambda: comm.size
        self.get_sequence_parallel_group = lambda: list(range(comm.size))


@pytest.mark.ranks(2)
def test_lengths_that_grow_and_tokens_that_are_dropped(comm):
    growth = {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 4, "max_difficulty": 6,
              "schedule_type": "fixed_discrete",
              "schedule_config": {"difficulty": [4, 6], "max_step": [1]}}  # fmt: skip
    with pytest.raises(ConfigError, match="shortens whole sequences, of which 2 ranks have parts"):
        start(settings(2, 1, curriculum_learning=growth), TokenWise())
    with pytest.raises(ConfigError, match=r"or its loader has cut, as .* or the mpu says"):
        start(config(1, BATCH, curriculum_learning=growth), TokenWise(), mpu=CutByLoader(comm))
    model, seen = TokenWise(), []
    model.layers.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    given = settings(2, 1, curriculum_learning=growth, sequence_parallel={"ring_size": 1})
    engine = start(given, model, training_data=token_data())
    for x, y in itertools.islice(engine.training_dataloader, 2):
        engine.backward(engine(x, y))
        engine.step()
    lengths = torch.tensor(seen)
    engine.mpispeed.parts.mesh["sequence"].all_reduce(lengths)
    assert lengths.tolist() == [4, 6]  # of 7
    engine.destroy()
    ltd = {"enabled": True, "total_layer_num": 2, "random_ltd_layer_num": 1, "random_ltd_layer_id": [0],
           "model_type": "decoder", "hidden_state_order": "batch_seq_dim", "random_ltd_schedule": {
               "min_value": 2, "max_value": 4, "schedule_type": "fixed_linear",
               "schedule_config": {"require_steps": 2, "seq_per_step": 1}}}  # fmt: skip
    routed = {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": ltd}}}
    with pytest.raises(ConfigError, match="chooses tokens of whole samples, and 2 ranks share each sequence"):
        start(settings(2, 1, **routed), TokenWise())


@pytest.mark.ranks(4)
def test_elastic_runs_count_ranks_that_share_samples(comm):
    section = {"enabled": True, "max_train_batch_size": BATCH, "micro_batch_sizes": [2, 6], "version": 0.2}
    given = settings(2, 1)
    del given["train_batch_size"], given["gradient_accumulation_steps"]
    with pytest.raises(ConfigError, match="model_parallel_size is 1, and 2 of 4 ranks share each sample"):
        start(given | {"elasticity": section}, TokenWise())
    section |= {"model_parallel_size": 2, "num_gpus_per_node": 2}
    engine = start(given | {"elasticity": section}, TokenWise())
    assert engine.get_batch_info() == (BATCH, 6, 1)
    engine.destroy()


@pytest.mark.ranks(3)
def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(TopologyError, match="sequence_parallel_size 2 does not divide the 3 ranks"):
        start(settings(2), TokenWise())
