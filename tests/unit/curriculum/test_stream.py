"""Samples by difficulty against a model of sets: clusters, passes, proportions, splits, and resuming anywhere."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.curriculum.difficulty_index import DifficultyIndex
from mpispeed.curriculum.index_file import MMapIndexedDataset
from mpispeed.curriculum.order import CurriculumOrder, Split
from mpispeed.curriculum.sampler import make_stream
from mpispeed.curriculum.stream import Place, SampleStream
from tests.helpers.index_files import metric, write_metric

Case = dict[str, Any]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A data set with up to three metrics that grow in a few steps."""
    samples = draw(st.integers(4, 30))
    metrics = []
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["value", "percentile", "single"]))
        count = draw(st.integers(2, 4))
        if kind == "percentile":
            levels = sorted(draw(st.sets(st.integers(1, 5), min_size=count, max_size=count)))
        else:
            levels = sorted(draw(st.sets(st.integers(0, 6), min_size=count, max_size=count)))
        lasts = sorted(draw(st.lists(st.integers(1, 8), min_size=count - 1, max_size=count - 1)))
        values = draw(st.lists(st.integers(0, 6), min_size=samples, max_size=samples))
        metrics.append((kind, levels, lasts, values))
    return {
        "samples": samples,
        "metrics": metrics,
        "batch": draw(st.sampled_from([1, 4, 12])),
        "seed": draw(st.integers(0, 99)),
    }


def stream_of(case: Case, folder: Path) -> SampleStream:
    found = {}
    for number, (kind, levels, lasts, values) in enumerate(case["metrics"]):
        name = f"m{number}"
        if kind == "single":
            found[name] = metric({}, levels, lasts, clustering_type="single_cluster")
        else:
            found[name] = metric(write_metric(folder, name, values), levels, lasts, kind)
    section = {"curriculum_metrics": found, "data_cluster_path": str(folder / "clusters")}
    return make_stream(section, case["samples"], case["seed"], warns=False)


def admitted(case: Case, step: int) -> set[int]:
    """The samples that all metrics admit at a step."""
    found = set(range(case["samples"]))
    for kind, levels, lasts, values in case["metrics"]:
        level = levels[sum(last < step for last in lasts)]
        order = sorted(range(case["samples"]), key=lambda sample, values=values: (values[sample], sample))
        if kind == "value":
            found &= {sample for sample in order if values[sample] <= level}
        elif kind == "percentile":
            most, count = levels[-1], case["samples"]
            end = count // most * level if count >= most else count * level // most
            found &= set(order if level == most else order[:end])
    return found


def clusters_of(case: Case, steps: int) -> list[set[int]]:
    """What the rules of clusters say for the first steps."""
    found: list[set[int]] = []
    for step in range(1, steps + 1):
        new = admitted(case, step) - set().union(*found)
        found += [new] if new else []
    return found


@settings(max_examples=60, deadline=None)
@given(cases())
def test_clusters_and_passes_are_those_of_the_rules(case: Case) -> None:
    steps = 10
    with TemporaryDirectory() as folder:
        stream, place = stream_of(case, Path(folder)), Place()
        if not admitted(case, 1):
            with pytest.raises(ConfigError, match=r"no sample is admitted by the first difficulties .*m0 \d"):
                stream.after(place, case["batch"])
            return
        taken: dict[int, list[int]] = {}
        for step in range(1, steps + 1):
            batch, place = stream.after(place, case["batch"])
            assert len(batch.clusters) == len(clusters_of(case, step))
            samples = stream.samples(batch, 0, case["batch"])
            for cluster, sample in zip(batch.numbers.tolist(), samples, strict=True):
                taken.setdefault(cluster, []).append(sample)
        model = clusters_of(case, steps)
        for number, (cluster, wanted) in enumerate(zip(place.clusters, model, strict=True)):
            everything = stream.clusters.take(cluster.before, cluster.after, np.arange(cluster.size))
            assert sorted(everything.tolist()) == sorted(wanted)
            found = taken.get(number, [])
            assert len(found) == place.positions[number]
            passes = [found[start : start + cluster.size] for start in range(0, len(found), cluster.size)]
            assert all(set(one) == wanted for one in passes[:-1])
            assert all(len(set(one)) == len(one) and set(one) <= wanted for one in passes)


@settings(max_examples=40, deadline=None)
@given(cases(), st.data())
def test_samples_do_not_depend_on_the_split_nor_on_where_a_run_was_resumed(case: Case, data: st.DataObject) -> None:
    case["batch"], total, splits = 12, 72, [(12, 1), (3, 2), (2, 3), (1, 4), (2, 2)]
    if not admitted(case, 1):
        return
    with TemporaryDirectory() as folder:
        fresh: Callable[[], SampleStream] = lambda: stream_of(case, Path(folder))  # noqa: E731

        def orders(micro: int, size: int) -> list[CurriculumOrder]:
            parts = [Split(12, micro, rank, size) for rank in range(size)]
            return [CurriculumOrder(fresh(), part, total=total, drop_last=True) for part in parts]

        def read(orders: list[CurriculumOrder], offset: int, count: int | None = None) -> list[int]:
            """All samples from a place on, in the order of the stream."""
            found: list[int] = []
            for step, parts in enumerate(zip(*(order.batches(0, offset) for order in orders), strict=True)):
                if step == count:
                    break
                found += [sample for part in parts for sample in part]
            return found

        whole = read(orders(12, 1), 0)
        assert len(whole) == total
        saving, going_on = (orders(*data.draw(st.sampled_from(splits))) for _ in range(2))
        steps = data.draw(st.integers(0, total // saving[0].split.block))
        begun = read(saving, 0, steps)
        assert begun == whole[: len(begun)]
        states = [json.dumps(order.state_dict(len(begun))) for order in saving]
        assert len(set(states)) == 1
        for order in going_on:
            state = json.loads(states[0]) | {"position": len(begun)}
            order.check_state(state)
            order.load_state_dict(state)
        rest = read(going_on, len(begun))
        assert rest[: total - len(begun)] == whole[len(begun) :]
        assert going_on[0].difficulties(total) == saving[0].difficulties(total)


def test_clusters_are_drawn_in_proportion_to_their_sizes(tmp_path: Path) -> None:
    values = [0] * 100 + [1] * 300 + [2] * 600
    section = {"curriculum_metrics": {"m": metric(write_metric(tmp_path, "m", values), [0, 1, 2], [1, 2])}}
    stream, place = make_stream(section, 1000, 5, warns=False), Place()
    for _ in range(3):
        batch, place = stream.after(place, 100_000)
    counts = Counter(batch.numbers.tolist())
    # 5 standard deviations of a binomial count
    for cluster, part in enumerate((0.1, 0.3, 0.6)):
        assert abs(counts[cluster] - 100_000 * part) < 5 * (100_000 * part * (1 - part)) ** 0.5


def test_a_fall_of_difficulty_takes_nothing_back_and_admits_nothing_twice(tmp_path: Path) -> None:
    paths = write_metric(tmp_path, "m", [0, 1, 2, 3])
    section = {"curriculum_metrics": {"m": metric(paths, [0, 9], [], schedule_type="custom", schedule_config={})}}
    stream, place = make_stream(section, 4, 0, warns=False), Place()
    with pytest.raises(UsageError, match="needs a function of the step"):
        stream.after(place, 2)
    stream.metrics[0].schedule.set_custom_get_difficulty({1: 1, 2: 3, 3: 0, 4: 2, 5: 3}.__getitem__)
    sizes = []
    for _ in range(5):
        batch, place = stream.after(place, 2)
        sizes.append([cluster.size for cluster in batch.clusters])
    assert sizes == [[2], *[[2, 2]] * 4]
    assert batch.difficulties == {"m": 3}


def test_a_metric_that_has_reached_its_maximum_stays_there(tmp_path: Path) -> None:
    paths = write_metric(tmp_path, "m", [0, 1, 2, 3])
    section = {"curriculum_metrics": {"m": metric(paths, [0, 3], [], schedule_type="custom", schedule_config={})}}
    stream, place, asked = make_stream(section, 4, 0, warns=False), Place(), []
    stream.metrics[0].schedule.set_custom_get_difficulty(lambda step: asked.append(step) or min(step, 3))
    for _ in range(6):
        place = stream.after(place, 2)[1]
    assert asked == [1, 2, 3]


def test_other_seeds_give_other_samples(tmp_path: Path) -> None:
    paths = write_metric(tmp_path, "m", list(range(100)))
    section = {"curriculum_metrics": {"m": metric(paths, [50, 99], [3])}}
    found = []
    for seed in (1, 2):
        stream = make_stream(section, 100, seed, warns=False)
        batch, _ = stream.after(Place(), 20)
        found.append(stream.samples(batch, 0, 20))
    assert found[0] != found[1]


def test_the_end_of_a_run(tmp_path: Path) -> None:
    paths = write_metric(tmp_path, "m", list(range(10)))
    section = {"curriculum_metrics": {"m": metric(paths, [4, 9], [1])}}
    for drop_last, batches in ((True, 3), (False, 4)):
        stream = make_stream(section, 10, 0, warns=False)
        order = CurriculumOrder(stream, Split(6, 3, 0, 1), total=20, drop_last=drop_last)
        assert order.length == 6 * batches
        assert [order.count(0, offset) for offset in (0, 6, 18, 24)] == [
            2 * batches,
            2 * batches - 2,
            2 * batches - 6,
            0,
        ]
        assert order.count(1, 0) == 0
        assert len(list(order.batches(0, 0))) == 2 * batches


def test_places_that_are_not_kept_any_more_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpispeed.curriculum.order._MOST_PLACES", 2)
    paths = write_metric(tmp_path, "m", list(range(10)))
    section = {"curriculum_metrics": {"m": metric(paths, [4, 7, 9], [2, 4])}}
    orders = [CurriculumOrder(make_stream(section, 10, 0), Split(4, 2, 0, 1), total=100, drop_last=True) for _ in "ab"]
    early = list(orders[0].batches(0, 0))
    assert orders[0].state_dict(4) == orders[1].state_dict(4)
    assert orders[0].state_dict(22) == orders[1].state_dict(22)
    assert list(orders[0].batches(0, 6)) == early[3:]


def test_states_read_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of batches get one with every batch."""
    section = {"curriculum_metrics": {"m": metric(write_metric(tmp_path, "m", list(range(10))), [4, 9], [1])}}
    order = CurriculumOrder(make_stream(section, 10, 0, warns=False), Split(2, 2, 0, 1), total=100, drop_last=True)
    batches = iter(order.batches(0, 0))
    next(batches)
    monkeypatch.setattr(MMapIndexedDataset, "read_values", lambda *_: pytest.fail("values are read"))
    monkeypatch.setattr(DifficultyIndex, "digest", lambda _: pytest.fail("files are read"))
    assert order.state_dict(2)["current_difficulties"] == {"m": 4}


def test_states_of_others_are_refused(tmp_path: Path) -> None:
    one = {"m": metric(write_metric(tmp_path, "m", list(range(10))), [4, 9], [1])}
    other = {"m": metric(write_metric(tmp_path, "other", list(range(9, -1, -1))), [4, 9], [1])}
    more = one | {"n": other["m"] | {"clustering_type": "single_cluster"}}

    def order(metrics: dict[str, Any], samples: int = 10) -> CurriculumOrder:
        stream = make_stream({"curriculum_metrics": metrics}, samples, 0, warns=False)
        return CurriculumOrder(stream, Split(2, 2, 0, 1), total=100, drop_last=True)

    state = order(one).state_dict(4) | {"position": 4}
    order(one).check_state(state)
    for changed, text in (
        (order(other), "other index files"),
        (order(more), "metrics m, and the config has m, n"),
        (order({}), "metrics m, and the config has none"),
    ):
        with pytest.raises(ConfigError, match=text):
            changed.check_state(state)
    with pytest.raises(ConfigError, match="without data_efficiency"):
        order(one).check_state({"position": 4, "epoch": 0, "length": 10})
    for key, value in (("ends", [[9], [3]]), ("positions", [1]), ("sizes", [0, 5]), ("step", -1), ("step", "3")):
        with pytest.raises(ConfigError, match="saved place in the curriculum"):
            order(one).check_state(state | {"place": state["place"] | {key: value}})
