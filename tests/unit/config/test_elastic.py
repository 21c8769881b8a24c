"""The section `elasticity`: documented results, errors, and what follows from them for a run."""

import json
import logging
import random
import time

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import mpispeed
from mpispeed.base.errors import ConfigError
from mpispeed.cli.elastic import elastic as command
from mpispeed.config import explain, load
from mpispeed.config.elastic_batch import (
    SCHEDULED,
    check_schedule,
    elastic_counts,
    elastic_triple,
    find_run_warnings,
    read_section,
)
from mpispeed.config.elastic_solve import Choice, Demand, pick_micro, solve, solve_nodes
from mpispeed.elasticity import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
)
from mpispeed.plan.plan import make_plan

TARGET = "0.16.5"
DOCUMENTED = {"max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "min_gpus": 1, "max_gpus": 10000}
TESTED = {"max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17], "min_gpus": 32, "max_gpus": 1500}
COUNTS_DOCUMENTED = [
    1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15, 20, 21, 24, 28, 30, 35, 40, 42, 56, 60, 70, 84, 105, 120, 140, 168, 210,
    280, 420, 840,
]  # fmt: skip
COUNTS_TESTED = [
    32, 34, 36, 48, 51, 64, 68, 72, 96, 102, 136, 144, 153, 192, 204, 272, 288, 306, 408, 576, 612, 816, 1224,
]  # fmt: skip


def settings(section, version=0.1, **more):
    return {"elasticity": {"enabled": True, "version": version} | section | more}


@pytest.mark.parametrize(
    ("section", "batch", "counts"), [(DOCUMENTED, 1680, COUNTS_DOCUMENTED), (TESTED, 9792, COUNTS_TESTED)]
)
def test_version_1(section, batch, counts):
    assert compute_elastic_config(settings(section), TARGET) == (batch, counts)
    assert elastic_counts(settings(section)["elasticity"]) == counts


def test_each_count_cuts_the_batch_into_allowed_micro_batches():
    batch, counts = compute_elastic_config(settings(TESTED), TARGET)
    for count in counts:
        assert batch % count == 0
        assert any(batch // count % micro == 0 for micro in TESTED["micro_batch_sizes"])


@pytest.mark.parametrize("world", [1, 4, 7, 8])
def test_version_2_on_a_documented_number_of_ranks(world, monkeypatch):
    assert compute_elastic_config(settings(DOCUMENTED, 0.2), TARGET, world) == (1680, COUNTS_DOCUMENTED, 6)
    monkeypatch.setenv("WORLD_SIZE", str(world))
    assert compute_elastic_config(settings(DOCUMENTED, 0.2), TARGET) == (1680, COUNTS_DOCUMENTED)
    found = compute_elastic_config(settings(DOCUMENTED, 0.2), TARGET, return_microbatch=True)
    assert found == (1680, COUNTS_DOCUMENTED, 6)


def test_version_2_on_another_number_of_ranks():
    assert compute_elastic_config(settings(DOCUMENTED, 0.2), TARGET, 64) == (1920, [64], 6)


def test_version_2_with_models_that_ranks_share(monkeypatch):
    section = settings(TESTED, 0.2, model_parallel_size=4, num_gpus_per_node=8)
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert compute_elastic_config(section, TARGET) == (9996, [4])
    # DeepSpeed divides by all ranks here, and comes to a micro-batch that does not fit.
    assert compute_elastic_config(section, TARGET, return_microbatch=True) == (9996, [4], 17)
    assert compute_elastic_config(section, TARGET, 16) == (9996, [4], 17)


def test_the_first_listed_micro_batch_where_larger_is_not_preferred(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "7")
    section = settings(DOCUMENTED, 0.2, prefer_larger_batch=False)
    assert compute_elastic_config(section, TARGET, return_microbatch=True)[2] == 2
    assert compute_elastic_config(section, TARGET, 7)[2] == 6


def test_world_sizes():
    assert compute_elastic_config(settings(TESTED), TARGET, 64)[2] == 17
    with pytest.raises(ElasticityIncompatibleWorldSize, match=r"128 ranks .* start 102 or 136 ranks"):
        compute_elastic_config(settings(TESTED), TARGET, 128)


def test_a_batch_beyond_the_limit_is_kept_and_told(caplog):
    section = {"max_train_batch_size": 32, "micro_batch_sizes": [1, 2, 3, 7], "min_gpus": 1, "max_gpus": 1500}
    with caplog.at_level(logging.WARNING):
        found = compute_elastic_config(settings(section), TARGET, 7)
    assert found == (42, [1, 2, 3, 6, 7, 14, 21, 42], 3)
    assert "42 samples is more than max_train_batch_size 32" in caplog.text


@pytest.mark.parametrize(
    "broken",
    [
        {"enabled": False}, {"version": "0.3"}, {"version": 0.15}, {"max_train_batch_size": None},
        {"micro_batch_sizes": None}, {"micro_batch_sizes": [1, 4, -1, 2, -10]}, {"micro_batch_sizes": ["1", "2"]},
        {"micro_batch_sizes": [2.5, 4.0]}, {"micro_batch_sizes": 4}, {"micro_batch_sizes": []},
        {"micro_batch_sizes": [20000]}, {"min_gpus": -1}, {"max_gpus": -1}, {"model_parallel_size": 4},
        {"version": 0.2, "model_parallel_size": 16, "num_gpus_per_node": 8}, {"typo": 1},
    ],
)  # fmt: skip
def test_broken_sections(broken, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    section = {k: v for k, v in (settings(TESTED)["elasticity"] | broken).items() if v is not None}
    with pytest.raises(ElasticityConfigError) as caught:
        compute_elastic_config({"elasticity": section}, TARGET)
    assert isinstance(caught.value, ValueError)
    assert "elasticity" in str(caught.value)


def test_broken_calls(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for wrong in ({}, {"elasticity": {}}):
        with pytest.raises(ElasticityConfigError):
            compute_elastic_config(wrong, TARGET)
    with pytest.raises(ValueError, match="expected the configuration as a dict, found str"):
        compute_elastic_config("ds.json", TARGET)
    with pytest.raises(ElasticityError, match=r"0\.2\.9.*0\.3\.8"):
        compute_elastic_config(settings(TESTED), "0.2.9")
    compute_elastic_config(settings(TESTED), mpispeed.__version__)
    with pytest.raises(ElasticityConfigError, match="WORLD_SIZE"):
        compute_elastic_config(settings(DOCUMENTED, 0.2), TARGET)
    monkeypatch.setenv("WORLD_SIZE", "four")
    with pytest.raises(ElasticityConfigError, match="'four'"):
        compute_elastic_config(settings(DOCUMENTED, 0.2), TARGET)
    with pytest.raises(ElasticityConfigError, match="pass world_size"):
        compute_elastic_config(settings(DOCUMENTED), TARGET, return_microbatch=True)


NODES = {"max_train_batch_size": 512, "micro_batch_sizes": [2, 4], "num_gpus_per_node": 8, "model_parallel_size": 2}


def test_no_batch_is_an_error():
    with pytest.raises(ElasticityError, match="no number of ranks from min_gpus 7 to max_gpus 7"):
        solve(Demand(8, (2,), least=7, most=7))
    with pytest.raises(ElasticityError, match="9 is more than 8, the part"):
        solve_nodes(Demand(64, (9,), per_node=8))
    with pytest.raises(ElasticityIncompatibleWorldSize, match="no whole number of nodes"):
        compute_elastic_config(settings(NODES, 0.2), TARGET, 12)
    with pytest.raises(ElasticityIncompatibleWorldSize, match="max_train_batch_size is 2000"):
        compute_elastic_config(settings(DOCUMENTED, 0.2), TARGET, 1999)
    with pytest.raises(ElasticityError, match="none of micro_batch_sizes 2, 4 divides"):
        pick_micro(9, 3, [2, 4])


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 5000), st.integers(1, 50),
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]),
)  # fmt: skip
def test_every_count_of_every_choice_works(micros, limit, least, sharing, models):
    demand = Demand(limit, tuple(micros), least=least, most=500, sharing=sharing, per_node=sharing * models)
    for choice_of in (solve, solve_nodes):
        try:
            choice = choice_of(demand)
        except ElasticityError:
            continue
        assert list(choice.counts) == sorted(set(choice.counts)) != []
        for data in choice.counts:
            micro = pick_micro(choice.batch, data, micros)
            assert micro in micros
            assert choice.batch % (micro * data) == 0


# -- in a run --------------------------------------------------------------------------------------------------------


def plan_of(section, ranks, axes=None, **config):
    return make_plan(load(settings(section, 0.2) | config).config, ranks, torch.float32, axes=axes)


def test_the_plan_takes_its_batch_from_the_section():
    assert plan_of(DOCUMENTED, 8).batch.triple == (1680, 6, 35)
    assert plan_of(DOCUMENTED, 7).batch.triple == (1680, 6, 40)
    assert plan_of(DOCUMENTED, 64).batch.triple == (1920, 6, 5)
    assert plan_of(NODES, 8, {"pipe": 1, "data": 4, "model": 2}).batch.ranks == 4
    with pytest.raises(ElasticityConfigError, match=r"model_parallel_size is 1, and 2 of 8 ranks .* set it to 2"):
        plan_of(DOCUMENTED, 8, {"pipe": 2, "data": 4, "model": 1})
    own = {"train_batch_size": 7, "gradient_accumulation_steps": 3}
    with pytest.raises(ConfigError, match="elasticity chooses the batch sizes"):
        plan_of(DOCUMENTED, 8, **own)
    assert plan_of(DOCUMENTED | {"ignore_non_elastic_batch_info": True}, 8, **own).batch.triple == (1680, 6, 35)


def test_explain_says_where_the_batch_comes_from():
    rows = {row.path: row for row in explain(load(settings(DOCUMENTED, 0.2)), 7)}
    assert rows["train_batch_size"].value == 1680
    assert rows["gradient_accumulation_steps"][1:] == (40, "derived: elasticity, on 7 ranks")


@pytest.mark.deepspeed_row("a17")
def test_the_scheduler_has_to_know_the_same_section():
    section = load(settings(DOCUMENTED)).config.elasticity
    known = settings(DOCUMENTED)["elasticity"]
    assert check_schedule(section, {SCHEDULED: json.dumps(known)}) == []
    assert check_schedule(section, {SCHEDULED: json.dumps(known | {"max_gpus": 5})}) == []
    for key, value in (("max_train_batch_size", 1999), ("micro_batch_sizes", [2, 4]), ("version", 0.2)):
        with pytest.raises(ElasticityConfigError, match=rf"elasticity\.{key} is .* the scheduler chose"):
            check_schedule(section, {SCHEDULED: json.dumps(known | {key: value})})
    with pytest.raises(ElasticityConfigError, match="no JSON"):
        check_schedule(section, {SCHEDULED: "{"})
    assert SCHEDULED in check_schedule(section, {})[0]
    assert check_schedule(section, {"MPISPEED_ELASTIC": "1"}) == []


def test_another_batch_than_the_usual_one_is_told():
    section = load(settings(DOCUMENTED, 0.2)).config.elasticity
    assert find_run_warnings(section, 8) == []
    assert "a batch of 1680 samples; on them it is 1920" in find_run_warnings(section, 64)[0]


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(settings(DOCUMENTED, 0.2)))
    return str(path)


def test_command_lists_the_numbers_of_ranks(file):
    done = CliRunner().invoke(command, ["-c", file])
    assert done.exit_code == 0, done.output
    assert "train_batch_size  1680\n" in done.output
    assert f"{' '.join(map(str, COUNTS_DOCUMENTED))} (32 numbers)" in done.output
    assert [line.split() for line in done.output.splitlines()][-1] == ["840", "2", "1"]


def test_command_on_a_number_of_ranks(file):
    done = CliRunner().invoke(command, ["-c", file, "-w", "64", "--json"])
    answer = json.loads(done.stdout)
    assert answer["here"] == {"ranks": 64, "batch": 1920, "micro_batch": 6, "steps": 5}
    assert answer["on"][4] == {"ranks": 5, "micro_batch": 6, "steps": 56}
    assert "on them it is 1920" in done.stderr
    with pytest.raises(ElasticityIncompatibleWorldSize):
        CliRunner().invoke(command, ["-c", file, "-w", "1999"], catch_exceptions=False)


def test_many_sizes_and_ranks_take_no_time():
    most = {
        "enabled": True,
        "max_train_batch_size": 10**9,
        "max_gpus": 100_000,
        "micro_batch_sizes": [*range(1969, 2001)],
    }
    start = time.process_time()
    counts = elastic_counts(most)
    section = read_section({"elasticity": most})
    counts = counts[::20]
    rows = [elastic_triple(section, count, count) for count in counts]
    assert time.process_time() - start < 8
    assert all(micro * steps * count == batch for count, (batch, micro, steps) in zip(counts, rows, strict=True))
    with pytest.raises(ElasticityConfigError, match=r"micro_batch_sizes: .* at most 32 items.*found \[1, 2"):
        elastic_counts({**most, "micro_batch_sizes": list(range(1, 3001))})
    with pytest.raises(ElasticityConfigError, match="max_gpus: must be at most 100000"):
        elastic_counts({**most, "max_gpus": 10**18})


@pytest.mark.parametrize("per_node", [8, 100_000, 10**9])
def test_less_than_a_node_of_ranks_takes_no_time_either(per_node):
    """It is no limit, as in DeepSpeed, and the factors of a batch were searched up to the batch itself."""
    demand = Demand(9 * 10**18, (1, 2147483647, 2147483629), most=4, per_node=per_node)
    start = time.process_time()
    try:
        assert solve_nodes(demand).counts[-1] <= max(per_node, 100_000)
    except ElasticityError as error:
        assert "no number of ranks" in str(error)
    assert time.process_time() - start < 2
    assert solve_nodes(Demand(64, (2, 4), most=4, per_node=8)) == Choice(64, (8, 16, 32))


@pytest.mark.parametrize("seed", range(8))
def test_all_numbers_of_ranks_are_found(seed):
    rng = random.Random(seed)
    sizes = tuple(sorted({rng.randint(1, 60) for _ in range(rng.randint(1, 5))}))
    demand = Demand(rng.randint(60, 4000), sizes, least=rng.randint(1, 3), most=rng.randint(50, 700))
    choice = solve(demand)
    assert list(choice.counts) == [
        n for n in range(demand.least, demand.most + 1) if any(choice.batch % (n * size) == 0 for size in sizes)
    ]
