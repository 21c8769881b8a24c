"""`data_efficiency.data_sampling`: samples are those of one rank, at every stage and split, and after resuming."""

import csv
import json

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import mpispeed
from mpispeed.base.errors import CheckpointError, ConfigError, UsageError
from mpispeed.curriculum import DeepSpeedDataSampler
from mpispeed.pipe import PipelineModule
from tests.helpers.covering import on_ranks
from tests.helpers.index_files import metric, write_metric
from tests.zoo.models import WIDTH, Net, samples
from tests.zoo.training import ADAM, config, train_plain

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 2, 3, 4)]
LENGTH, BATCH = 50, 24


class Numbered(Dataset):
    """Samples that carry their own number."""

    def __init__(self, length=LENGTH):
        self.x, self.y = samples(1, length)[0]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return index, self.x[index], self.y[index]


def efficiency(folder, kind="one", **more):
    """The section: a metric that grows, or two that choose and one that does not."""
    ranked = write_metric(folder, "ranked", [(7 * index) % LENGTH for index in range(LENGTH)])
    coarse = write_metric(folder, "coarse", [index % 3 for index in range(LENGTH)])
    metrics = {"ranked": metric(ranked, [10, 30, 49], [2, 4])}
    if kind == "several":
        metrics["coarse"] = metric(coarse, [40, 100], [3], "percentile")
        metrics["length"] = metric({}, [8, 16], [1], clustering_type="single_cluster")
    learning = {"enabled": True, "data_cluster_path": str(folder / "clusters"), "curriculum_metrics": metrics}
    return {
        "enabled": True,
        "seed": 5,
        "data_sampling": {"enabled": True, "num_epochs": 4, "curriculum_learning": learning, **more},
    }


@pytest.fixture
def folder(mpi_tmp_path):
    """One that all ranks see."""
    return mpi_tmp_path


def section(folder, comm, *args, **more):
    """`efficiency`, whose files rank 0 writes. Collective over: all ranks."""
    return json.loads(comm.share(json.dumps(efficiency(folder, *args, **more)) if comm.rank == 0 else ""))


def expected_batches(wanted, count):
    """Samples of the first global batches, by the sampler of one rank."""
    sampler = DeepSpeedDataSampler(wanted, LENGTH, BATCH, 0, 1)
    return [batch for batch, _ in zip(sampler, range(count), strict=False)]


def start(stage, accumulation, wanted, data=None, **more):
    settings = config(stage, BATCH, accumulation, **ADAM, data_efficiency=wanted, **more)
    return mpispeed.initialize(model=Net(), config=settings, training_data=Numbered() if data is None else data)[0]


def run(engine, stream, steps, comm):
    """Samples of global batches, and their losses."""
    batches, losses = [], []
    for _ in range(steps):
        batch, total = [], torch.zeros((), dtype=torch.float64)
        for _ in range(engine.gradient_accumulation_steps()):
            index, x, y = next(stream)
            total += engine.backward(engine(x, y)).detach().double()
            engine.step()
            batch += [number for part in comm.gather_objects(index.tolist()) for number in part]
        comm.all_reduce(total)
        batches.append(batch)
        losses.append(float(total) / comm.size)
    return batches, losses


@pytest.mark.parametrize(("stage", "kind"), on_ranks([0, 1, 2, 3], ["one", "several"]))
def test_samples_and_losses_are_those_of_one_rank(stage, kind, folder, comm):
    wanted = section(folder, comm, kind)
    engine = start(stage, 2, wanted)
    found, losses = run(engine, iter(engine.training_dataloader), 6, comm)
    model, data = Net(), Numbered()
    expected = expected_batches(wanted, 6)
    # micro-steps of all ranks one after another are the batch
    assert found == expected
    plain = train_plain(
        model, [(data.x[batch], data.y[batch]) for batch in expected], torch.optim.Adam(model.parameters(), lr=1e-2)
    )
    assert losses == pytest.approx(plain.losses, rel=1e-5)
    admitted = {(7 * index) % LENGTH <= 10 for index in found[0] + found[1]}
    assert admitted == {True}
    assert any((7 * index) % LENGTH > 10 for index in found[2])
    engine.destroy()


@pytest.mark.parametrize("pending", [0, 1])
def test_a_run_goes_on_in_the_middle_of_everything(pending, folder, comm, mpi_tmp_path):
    """Saved in a level of difficulty, in a pass over a cluster, maybe in a global batch; resumed with another split."""
    wanted = section(folder, comm, "several")
    whole = start(1, 2, wanted)
    expected, losses = run(whole, iter(whole.training_dataloader), 6, comm)
    first = start(1, 2, wanted, data_loader={"prefetch": 5})  # what was read ahead does not count
    stream = iter(first.training_dataloader)
    run(first, stream, 3, comm)
    for _ in range(pending):
        _, x, y = next(stream)
        first.backward(first(x, y))
        first.step()
    first.save_checkpoint(str(mpi_tmp_path / "saved"))
    second = start(2, 6 if comm.size != 3 else 4, wanted, data_loader={"workers": pending})
    second.load_checkpoint(str(mpi_tmp_path / "saved"))
    assert second.training_dataloader.position == 3 * BATCH
    found, again = run(second, iter(second.training_dataloader), 3, comm)
    assert found == expected[3:]
    assert again == pytest.approx(losses[3:], rel=1e-5)
    third = start(0, 2, wanted)
    third.load_checkpoint(str(mpi_tmp_path / "saved"), load_data_state=False)
    assert run(third, iter(third.training_dataloader), 1, comm)[0] == expected[:1]
    ordinary = start(0, 2, {"enabled": False})
    with pytest.raises(CheckpointError, match="loader"):
        ordinary.load_checkpoint(str(mpi_tmp_path / "saved"))
    for engine in (whole, first, second, third, ordinary):
        engine.destroy()


def test_functions_of_scripts_and_monitors_see_the_difficulties(folder, comm, mpi_tmp_path):
    wanted = section(folder, comm, "several")
    ranked = wanted["data_sampling"]["curriculum_learning"]["curriculum_metrics"]["ranked"]
    ranked |= {"schedule_type": "custom", "schedule_config": {}}
    monitor = {"enabled": True, "output_path": str(mpi_tmp_path), "job_name": "run"}
    engine = start(0, 2, wanted, csv_monitor=monitor)
    seen = []

    def cut(batch, state):
        seen.append((state["curriculum_step"], state["consumed_samples"], state["current_difficulties"]))
        index, x, y = batch
        return index, x * (state["current_difficulties"]["length"] > 8), y

    engine.set_data_post_process_func(cut)
    stream = iter(engine.training_dataloader)
    with pytest.raises(UsageError, match="set_custom_curriculum_learning_schedule"):
        next(stream)
    engine.set_custom_curriculum_learning_schedule({"ranked": lambda step: 10 * step})
    stream = iter(engine.training_dataloader)
    found, _ = run(engine, stream, 3, comm)
    levels = [{"ranked": 10, "coarse": 40, "length": 8}, {"ranked": 20, "coarse": 40, "length": 16}]
    assert seen[:4] == [(1, 12, levels[0]), (1, 24, levels[0]), (2, 36, levels[1]), (2, 48, levels[1])]
    assert all((7 * index) % LENGTH <= 10 * step for step, batch in enumerate(found, 1) for index in batch)
    assert engine.curriculum_learning_enabled()
    engine.destroy()
    if comm.rank == 0:
        (path,) = mpi_tmp_path.rglob("*curriculum_ranked*.csv")
        rows = list(csv.reader(path.read_text().splitlines()))[1:]
        assert [[int(float(value)) for value in row] for row in rows] == [[24, 10], [48, 20], [72, 30]]


def test_epochs_seed_and_workers_without_a_curriculum(comm):
    def read(**changes):
        wanted = {"enabled": True, **changes, "data_sampling": {"enabled": True, "num_epochs": 2, "num_workers": 1}}
        engine = start(0, 1, wanted)
        loader = engine.training_dataloader
        passes = [[comm.gather_objects(index.tolist()) for index, *_ in loader] for _ in range(3)]
        assert loader.workers == 1
        engine.destroy()
        return [[number for micro in one for part in micro for number in part] for one in passes]

    one, two, none = read(seed=3)
    assert none == []
    assert len(one) == len(two) == 72
    assert sorted(set(one)) == sorted(set(two)) == list(range(LENGTH))
    assert one != two
    assert read(seed=3)[0] == one
    assert read(seed=4)[0] != one


def test_loaders_of_deepspeed_io_are_by_difficulty_on_the_route_of_training(folder, comm):
    wanted = section(folder, comm)
    engine = start(0, 1, wanted)
    loader = engine.deepspeed_io(Numbered())
    micros = [index.tolist() for (index, *_), _ in zip(loader, range(2), strict=False)]
    found = [number for parts in zip(*comm.gather_objects(micros), strict=True) for part in parts for number in part]
    assert found == [number for batch in expected_batches(wanted, 2) for number in batch]
    assert len(list(engine.deepspeed_io(Numbered(), route="eval", batch_size=10))) == 5
    engine.destroy()


def refused(comm, wanted, data=None):
    with pytest.raises(ConfigError) as told:
        start(0, 1, wanted, data)
    assert len(set(comm.gather_objects(str(told.value)))) == 1
    return str(told.value)


class Stream(IterableDataset):
    def __iter__(self):
        yield from Numbered()


class Gone(Numbered):
    def __len__(self):
        msg = "the last node has no such file"
        raise OSError(msg)


def test_what_cannot_be_sampled_is_told_on_all_ranks_alike(folder, comm, monkeypatch):
    wanted = section(folder, comm)
    assert "ranked_index_to_sample has 50 samples, and the data set 40" in refused(comm, wanted, Numbered(40))
    assert "Stream has none" in refused(comm, wanted, Stream())
    told = refused(comm, wanted, Gone() if comm.rank == comm.size - 1 else Numbered())
    assert "OSError: the last node has no such file" in told
    # files of nodes by the same names: the last rank's are others
    names = {key: f"ranked_{key.removesuffix('_path')}" for key in ("index_to_sample_path", "index_to_metric_path")}
    wanted["data_sampling"]["curriculum_learning"]["curriculum_metrics"]["ranked"] |= names
    own = folder / f"of-rank-{comm.rank}" if comm.rank == comm.size - 1 else folder
    own.mkdir(exist_ok=True)
    monkeypatch.chdir(own)
    told = refused(comm, wanted)
    key = "curriculum_metrics.ranked.index_to_sample_path"
    assert f"{key}: ranked_index_to_sample.idx cannot be read: No such file" in told
    if comm.size > 1:
        if comm.rank == comm.size - 1:
            write_metric(own, "ranked", list(range(LENGTH)))
        assert f"others on rank {comm.size - 1} than on rank 0" in refused(comm, wanted)


def pairs_of(batch):
    index, x, y = zip(*batch, strict=True)
    return (torch.tensor(index), torch.stack(x)), torch.stack(y)


class First(nn.Linear):
    """Leaves the numbers of samples to who looks at batches."""

    def forward(self, pair):
        return super().forward(pair[1])


@pytest.mark.parametrize(
    "stages", [pytest.param(2, marks=pytest.mark.ranks(2, 4)), pytest.param(3, marks=pytest.mark.ranks(3))]
)
def test_pipelines_take_the_same_samples_on_their_ends(stages, folder, comm):
    wanted = section(folder, comm, "several")

    def make():
        torch.manual_seed(3)
        return [First(WIDTH, 4), nn.Tanh(), nn.Linear(4, 2)]

    made = PipelineModule(make(), num_stages=stages, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    settings = config(1, BATCH, 3, **ADAM, data_efficiency=wanted)
    engine = mpispeed.initialize(model=made, config=settings, training_data=Numbered(), collate_fn=pairs_of)[0]
    seen, states = [], []
    engine.set_data_post_process_func(lambda batch, state: (states.append(state["curriculum_step"]), batch)[1])
    engine.set_batch_fn(lambda pair: (seen.append(pair[0][0].tolist()), pair)[1])
    losses = [float(engine.train_batch()) for _ in range(6)]
    data, expected = Numbered(), expected_batches(wanted, 6)
    model = nn.Sequential(*make())
    optimizer, plain = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for batch in expected:
        loss = nn.functional.mse_loss(model((None, data.x[batch])), data.y[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.append(float(loss.detach()))
    assert losses == pytest.approx(plain, rel=1e-5)
    place = engine.mesh.index("data") if seen else None
    everyone = [(where, rank) for where, rank in comm.gather_objects((place, seen)) if where is not None]
    for micro in range(18):
        parts = {}
        for where, rank in everyone:
            assert parts.setdefault(where, rank[micro]) == rank[micro]
        block = BATCH // 3
        assert [n for _, part in sorted(parts.items()) for n in part] == expected[micro // 3][micro % 3 * block :][
            :block
        ]
    if seen:
        assert states == [step for step in range(1, 7) for _ in range(3)]
    engine.destroy()
