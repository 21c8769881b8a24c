"""Whole searches over a synthetic job: rows, files, failures, memory, and searches that go on."""

import json
import stat

import pytest

from mpispeed.base.errors import UsageError
from mpispeed.config.autotuning import Autotuning
from mpispeed.tuning.forecast import Forecast, Survey
from mpispeed.tuning.memory_filter import Memory
from mpispeed.tuning.protocol import Outcome
from mpispeed.tuning.results import Folders, Row, best_of, draw, summary
from mpispeed.tuning.space import Space
from mpispeed.tuning.tuner import Tuner, mapped, mapped_value, mappings_of
from tests.helpers.tuning import ADAM, Machine, SyntheticJob

RAW = {"optimizer": ADAM, "train_micro_batch_size_per_gpu": [1, 4, 16]}
GIB = 1 << 30


def search(folder, job=None, raw=RAW, words=(), memory_bytes=None, **tuning):
    section = Autotuning(results_dir=str(folder / "results"), exps_dir=str(folder / "exps"), **tuning)
    job = job or SyntheticJob(Machine(1))
    folders = Folders(folder / "results", folder / "exps")
    told = []
    tuner = Tuner(
        Space(raw, section, job.ranks), section, job, folders, ranks=job.ranks, words=words,
        memory_bytes=memory_bytes, say=told.append,
    )  # fmt: skip
    return tuner.run(), job, told


def rows(found, status):
    return [row for row in found.rows if row.status == status]


def test_a_search_leaves_deepspeeds_files(tmp_path):
    found, job, told = search(tmp_path)
    results, best = tmp_path / "results", found.best
    assert job.is_closed
    assert [row for row in told if isinstance(row, Row)] == list(found.rows)
    assert [text for text in told if isinstance(text, str)] == [
        "12 candidates; the script runs until it has its model, to predict them"
    ]
    assert {path.stem for path in (tmp_path / "exps").iterdir()} == set(job.trials)
    for name in job.trials:
        folder = results / name
        assert {path.name for path in folder.iterdir()} >= {"cmd.txt", "ds_config.json", "exp.json", "metrics.json"}
        metrics = json.loads((folder / "metrics.json").read_text())
        assert {"latency", "throughput", "fwd", "bwd", "step"} <= set(metrics)
        assert json.loads((folder / "exp.json").read_text())["status"] == "ok"
    assert max(found.rows, key=lambda row: row.metric or 0).name == best.name
    lines = (results / "summary.txt").read_text().splitlines()
    assert lines[0].split("|")[1].strip() == "tuning_space"
    total = next(line for line in lines if line.startswith("| global"))
    assert total.split("|")[2].strip() == str(len(job.trials))
    assert best.name in total
    assert json.loads((results / "trials.json").read_text())[0]["name"] == found.rows[0].name
    facts = json.loads((results / "profile_model_info" / "model_info.json").read_text())
    assert facts["num_params"] == facts["trainable_num_params"] > 7e6


@pytest.mark.parametrize("metric", ["latency", "throughput", "flops"])
def test_the_metric_says_what_is_best(tmp_path, metric):
    path = tmp_path / "best.json"
    found, job, _ = search(
        tmp_path, metric=metric, metric_path=str(path), tuner_type="gridsearch", tuner_early_stopping=0
    )
    assert len(job.trials) == 12
    key = {"flops": "FLOPS_per_gpu"}.get(metric, metric)
    values = [row.metrics[key] for row in found.rows]
    best = json.loads(path.read_text())
    assert best[key] == (min(values) if metric == "latency" else max(values))
    assert {task.metric for task in job.tasks} == {metric}


def test_steps_arguments_and_limits_reach_the_job(tmp_path):
    _, job, _ = search(
        tmp_path, words=["--batch", "7", "--deepspeed"], start_profile_step=2, end_profile_step=9, tuner_num_trials=2,
        trial_timeout=77.0,
        arg_mappings={" train_micro_batch_size_per_gpu ": " --batch", "zero_optimization.stage": "--stage"},
    )  # fmt: skip
    first = next(task for task in job.tasks if task.kind == "trial")
    assert (first.first_step, first.last_step) == (2, 9)
    assert set(job.limits_seconds) == {77.0}
    assert list(first.arguments) == ["--batch", "1", "--deepspeed", "--stage", "0"]
    assert len(job.trials) == 2


@pytest.mark.parametrize("kind", ["gridsearch", "random", "model_based"])
def test_each_tuner_finds_a_good_candidate(tmp_path, kind):
    found, job, _ = search(tmp_path, tuner_type=kind, tuner_early_stopping=0 if kind != "model_based" else 5)
    if kind == "model_based":
        assert len(job.trials) < 12
        assert all(row.predicted_seconds > 0 for row in found.rows[1:] if row.status == "ok")
    else:
        assert sorted(job.trials) == sorted(f"z{z}_gas1_tmbspg{m}" for z in range(4) for m in (1, 4, 16))
        assert (job.trials == sorted(job.trials, key=lambda name: name[1])) == (kind == "gridsearch")
    assert found.best.micro_batch == 16


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_any_number_of_ranks_is_searched(tmp_path, ranks):
    found, job, _ = search(tmp_path, job=SyntheticJob(Machine(1), ranks), fast=False)
    assert found.best is not None
    assert {row.train_batch for row in found.rows if row.micro_batch == 4} == {4 * ranks}
    assert len(job.trials) == len(set(job.trials)) == sum(row.status == "ok" for row in found.rows)


def test_powers_of_two_are_followed_by_sizes_around_the_best(tmp_path):
    found, job, _ = search(
        tmp_path, raw={"optimizer": ADAM, "zero_optimization": {"stage": 1}}, max_train_micro_batch_size_per_gpu=16,
        job=SyntheticJob(Machine(2, noise=0.0)),
    )  # fmt: skip
    tried = {row.micro_batch for row in found.rows}
    assert tried & {1, 2, 4, 8, 16}
    assert len(found.ended) == 2
    assert sum(task.kind == "survey" for task in job.tasks) == 2


def test_a_full_search_goes_on_with_buckets_and_overlap(tmp_path):
    job = SyntheticJob(Machine(4, noise=0.0))
    found, _, _ = search(tmp_path, raw={**RAW, "zero_optimization": {"stage": [1, 2]}}, fast=False, job=job)
    last = [row for row in found.rows if "_oc" in row.name]
    assert last
    assert len(found.ended) == 2
    best = max((row for row in found.rows if row.metric and "_oc" not in row.name), key=lambda row: row.metric)
    assert max(row.metric or 0 for row in found.rows) >= best.metric
    twins = [row for row in rows(found, "skipped") if "the same as" in row.reason]
    assert twins, "buckets larger than the model send the same"


def test_failures_are_rows_with_their_reasons(tmp_path):
    ends = {
        "z0_gas1_tmbspg1": ("error", "the script raised ValueError: no"),
        "z0_gas1_tmbspg4": ("hang", "rank 1 waited"),
        "z1_gas1_tmbspg1": ("killed", "rank 0 was ended by SIGKILL"),
    }
    found, job, _ = search(
        tmp_path, job=SyntheticJob(Machine(1), ends=ends), tuner_type="gridsearch", tuner_early_stopping=0
    )
    assert {row.name: (row.status, row.reason) for row in found.rows if row.status != "ok"} == ends
    assert len(job.trials) == 12
    assert found.best is not None
    kept = json.loads((tmp_path / "results" / "z0_gas1_tmbspg4" / "exp.json").read_text())
    assert (kept["status"], kept["reason"]) == ends["z0_gas1_tmbspg4"]


def test_what_needs_as_much_as_a_trial_without_memory_is_left_out(tmp_path):
    ends = {"z0_gas1_tmbspg4": ("memory", "killed for memory")}
    found, job, _ = search(
        tmp_path, job=SyntheticJob(Machine(1), ends=ends), raw={**RAW, "zero_optimization": {"stage": [0, 2]}},
        tuner_type="gridsearch", tuner_early_stopping=0,
    )  # fmt: skip
    assert job.trials == [
        "z0_gas1_tmbspg1",
        "z0_gas1_tmbspg4",
        "z2_gas1_tmbspg1",
        "z2_gas1_tmbspg4",
        "z2_gas1_tmbspg16",
    ]
    (row,) = rows(found, "skipped")
    assert row.name == "z0_gas1_tmbspg16"
    assert "z0_gas1_tmbspg4" in row.reason


def test_what_does_not_fit_is_discarded_before_and_after_activations_are_known(tmp_path):
    """States of stage 0 are 117 MB, of stage 2 less; a sample takes 30 MB."""
    job = SyntheticJob(Machine(1), limits={"memory.max": 2 * 200 * 10**6}, sample_bytes=30 * 10**6)
    found, _, _ = search(tmp_path, job=job, raw={**RAW, "zero_optimization": {"stage": [0, 2]}})
    gone = {row.name: row.reason for row in rows(found, "skipped")}
    assert {"z0_gas1_tmbspg4", "z0_gas1_tmbspg16", "z2_gas1_tmbspg16"} <= set(gone)
    assert all("memory.max" in reason for reason in gone.values())
    assert all(row.need_bytes <= 200 * 10**6 for row in rows(found, "ok"))
    none, job, _ = search(tmp_path / "none", memory_bytes=10**6)
    assert none.best is None
    assert job.trials == []
    assert len(rows(none, "skipped")) == 12


def test_a_search_goes_on_with_what_is_finished(tmp_path):
    first, job, _ = search(tmp_path)
    again, other, _ = search(tmp_path)
    assert other.trials == []
    assert {row.status for row in again.rows} == {"reused"}
    assert again.best.name == first.best.name
    _, other, _ = search(tmp_path, words=["--other"])
    assert other.trials == job.trials, "other words are another experiment"
    _, other, _ = search(tmp_path, words=["--other"], end_profile_step=9)
    assert other.trials == job.trials, "and so are other steps"
    _, other, _ = search(tmp_path, words=["--other"], overwrite=True)
    assert other.trials == job.trials


def test_a_search_that_is_interrupted_leaves_its_rows(tmp_path):
    class Interrupted(SyntheticJob):
        def run(self, task, limit_seconds=None):
            if len(self.trials) == 2:
                raise KeyboardInterrupt
            return super().run(task, limit_seconds)

    job = Interrupted(Machine(1))
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, job=job)
    assert job.is_closed
    assert len(json.loads((tmp_path / "results" / "trials.json").read_text())) == 2
    _, other, _ = search(tmp_path)
    assert not set(job.trials) & set(other.trials)


def test_overwriting_removes_only_what_searches_have_written(tmp_path):
    search(tmp_path)
    results = tmp_path / "results"
    kept = [results / "mine.txt", tmp_path / "exps" / "mine.json", results / "own" / "data", results / "jobs" / "mine"]
    kept.append(results / "run" / "ds_config.json")  # a name that folders of users have, too
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    search(tmp_path, overwrite=True, tuner_num_trials=1)
    assert all(path.exists() for path in kept)
    assert len(list((tmp_path / "exps").iterdir())) == 2


def test_a_script_that_does_not_start_is_told(tmp_path):
    job = SyntheticJob(Machine(1), ends={"survey": ("error", "the script raised ImportError: x")})
    with pytest.raises(UsageError, match="ImportError: x"):
        search(tmp_path, job=job)
    assert job.is_closed


def test_a_search_that_cannot_go_on_ends_with_what_it_has(tmp_path):
    class Lost(SyntheticJob):
        def run(self, task, limit_seconds=None):
            if task.kind == "survey" and self.trials:
                return Outcome("survey", "hang", "rank 1 waited")
            return super().run(task, limit_seconds)

    job = Lost(Machine(1))
    found, _, _ = search(tmp_path, job=job, raw={"optimizer": ADAM}, max_train_micro_batch_size_per_gpu=4)
    assert found.best is not None
    assert len(found.ended) == 2
    assert "the search ended early" in found.ended[1] and "rank 1 waited" in found.ended[1]
    assert len(json.loads((tmp_path / "results" / "trials.json").read_text())) == len(found.rows)


def test_keys_among_the_words_are_not_written(tmp_path):
    _, job, _ = search(tmp_path, words=["--name", "a b", "--api_key", "distinctive"], tuner_num_trials=1)
    (name,) = job.trials
    assert (tmp_path / "results" / name / "cmd.txt").read_text() == "--name 'a b' --api_key '(set)'\n"
    assert not any(b"distinctive" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_candidates_that_cannot_be_are_rows(tmp_path):
    raw = {**RAW, "zero_optimization": {"stage": [1], "zero_hpz_partition_size": [1, 3]}}
    found, _, _ = search(tmp_path, raw=raw)
    reasons = [row.reason for row in rows(found, "skipped")]
    assert len(reasons) == 3
    assert all("zero_hpz_partition_size" in reason for reason in reasons)


def test_folders_that_cannot_be_used_are_named(tmp_path):
    (tmp_path / "results").write_text("")
    with pytest.raises(UsageError, match="results_dir"):
        search(tmp_path)


def test_two_searches_do_not_share_results(tmp_path):
    one, other = (Folders(tmp_path / "results", tmp_path / name) for name in ("a", "b"))
    with one.claimed():
        with pytest.raises(UsageError, match="another search uses"), other.claimed():
            pass
        with Folders(tmp_path / "elsewhere", tmp_path / "a").claimed():
            pass
    with other.claimed():
        assert not other.of_jobs().exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="name another folder"), Folders(tmp_path / "file", tmp_path / "a").claimed():
        pass


def test_facts_of_the_file_win(tmp_path):
    path = tmp_path / "model.json"
    search(tmp_path, model_info={"hidden_size": 99}, model_info_path=str(path), tuner_num_trials=1)
    facts = json.loads(path.read_text())
    assert facts["hidden_size"] == 99
    assert facts["num_layers"] == 4


# -- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, {}, {"a": "--a"}, {" a ": " --a ", "b": "--b "}])
def test_mappings_are_kept_without_blanks(given):
    found = mappings_of(Autotuning(arg_mappings=given))
    assert found == {key.strip(): flag.strip() for key, flag in (given or {}).items()}


def test_mapped_options_get_values_and_auto_is_left_alone():
    mappings = {"a": "--a", "b.c": "--c", "d": "--d", "e": "--e"}
    config = {"a": 3, "b": {"c": True}, "d": "auto"}
    assert mapped(["x", "--a", "1", "--d", "5"], mappings, config) == ["x", "--a", "3", "--d", "5", "--c", "true"]
    assert mapped(["--a=1"], {"a": "--a"}, config) == ["--a=3"]
    assert mapped_value(["--n", "8"], {"k": "--n"}, "k") == 8
    assert mapped_value(["--n=9"], {"k": "--n"}, "k") == 9
    assert mapped_value(["--n"], {"k": "--n"}, "k") is None
    assert mapped_value(["--n", "8"], {}, "k") is None


# -- tables -----------------------------------------------------------------------------------------------------------


def test_latency_is_best_when_least():
    made = [Row(f"z{n}", n, 1, 1, 2, "ok", seconds=s, metric=s) for n, s in enumerate((3.0, 1.0, 2.0))]
    assert best_of(made, "latency").name == "z1"
    assert best_of(made, "throughput").name == "z0"
    assert best_of([], "latency") is None
    text = summary([*made, Row("z9", 3, 1, 1, 2, "skipped", "no")], "latency", 5.0)
    assert "discarded without a trial: 1" in text
    assert "z9" not in text


def test_a_picture_is_drawn_where_matplotlib_is(tmp_path):
    made = [
        Row(f"z{n}", n, 1, 1, 2, "ok", seconds=s, predicted_seconds=s * 1.1, metric=2 / s)
        for n, s in enumerate((3.0, 1.0))
    ]
    for metric in ("latency", "throughput"):
        draw(tmp_path / "search.png", made, metric)
        assert (tmp_path / "search.png").read_bytes().startswith(b"\x89PNG")


def test_the_best_settings_are_for_their_owner_only(tmp_path):
    folders = Folders(tmp_path / "r", tmp_path / "e")
    folders.prepare(overwrite=False)
    folders.write_optimal({"wandb": {"api_key": "x"}}, "mpispeed run")
    for name in ("ds_config_optimal.json", "cmd_optimal.txt"):
        assert stat.S_IMODE((tmp_path / "r" / name).stat().st_mode) & 0o077 == 0
    assert (tmp_path / "r" / "cmd_optimal.txt").read_text() == "mpispeed run\n"


def test_activations_grow_with_the_micro_batch():
    survey = Survey([], {}, 2, 2, {"MemAvailable": GIB})
    memory = Memory(survey)
    small, large = (Forecast(held={"device": 100}, micro_batch=size) for size in (2, 8))
    assert memory.need({}, large) == 100
    memory.measured({"zero_optimization.stage": 1}, 2, 1000.0)
    assert memory.need({}, large) == 100 + 4000
    memory.measured({}, 4, 1600.0)
    assert memory.need({}, large) == 100 + 2800
    assert memory.need({}, small) == 100 + 1000
    assert memory.need({"tensor_parallel.autotp_size": 2}, large) == 100, "slices keep other activations"
    assert memory.need({"sequence_parallel_size": 2}, large) == 100, "parts of sequences do, too"
    assert memory.refusal({}, large) == ""
    assert "on the accelerator" in Memory(Survey([], {}, 2, 2, {}, "cuda", 50)).refusal({}, large)
