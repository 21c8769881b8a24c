"""Spans of traced steps: of all ranks and lanes, by one clock, nested, complete; and none outside of these steps."""

import json
import time
from collections import Counter

import numpy as np
import pytest

from mpispeed.base.errors import ConfigError
from mpispeed.base.events import Event
from mpispeed.engine.observe.spans import FILES, MAIN, WAIT
from mpispeed.mesh.clocks import measure_offset
from mpispeed.record.runs import open_run
from tests.zoo.models import samples
from tests.zoo.training import ADAM, config, start, train

pytestmark = [pytest.mark.mpi(min_size=1)]
BATCH, MICRO_STEPS, FIRST, LAST = 24, 2, 2, 3
SUMS = ("all_reduce", "reduce_scatter")


def traced(stage, **more):
    section = {"enabled": True, "start_step": FIRST, "end_step": LAST, **more}
    return config(stage, BATCH, MICRO_STEPS, trace=section, **ADAM)


def is_nested(spans):
    """True if of any two spans one is inside of the other, or they are apart."""
    open_ends = []
    for begin, end in sorted(zip(spans["begin"].tolist(), (-spans["end"]).tolist(), strict=True)):
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        if open_ends and -end > open_ends[-1]:
            return False
        open_ends.append(-end)
    return True


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_spans_of_all_ranks(stage, mpi_tmp_path, comm):
    path = mpi_tmp_path / "trace.json"
    engine = start(traced(stage, path=str(path)))
    parts, told, calls = engine.mpispeed.parts, [], Counter()
    engine.bus.subscribe(Event.SPANS, told.append)
    train(engine, samples(FIRST - 1, BATCH))
    trace = parts.mesh.world.comm_trace
    end = trace.subscribe(lambda record: calls.update([f"{record.verb} {','.join(record.axes)}"]))
    engine.bus.subscribe(Event.STEP_END, lambda _: engine.global_steps == LAST and end())
    train(engine, samples(LAST - FIRST + 2, BATCH))
    assert (parts.clock.entering, parts.clock.now) == (None, time.perf_counter)
    assert parts.optimization.grads._stopwatch is None
    engine.destroy()
    everywhere = comm.gather_objects(calls)
    assert len(told) == (comm.rank == 0)
    if comm.rank:
        return
    spans, names = told[0]["spans"], told[0]["names"]
    assert set(spans["rank"].tolist()) == set(range(comm.size))
    assert set(spans["step"].tolist()) == set(range(FIRST, LAST + 1))
    assert abs(time.time() - spans["end"].max()) < 3600  # seconds since 1970
    assert (spans["end"] >= spans["begin"]).all()
    for rank in range(comm.size):
        own = spans[spans["rank"] == rank]
        of_main = own[own["lane"] == names.index(MAIN)]
        assert is_nested(of_main[of_main["end"] > of_main["begin"]])
        found = Counter(names[number] for number in own["name"].tolist())
        steps = LAST - FIRST + 1
        for name, count in (
            ("step", 1),
            ("update", 1),
            ("rule", 1),
            ("forward", MICRO_STEPS),
            ("backward", MICRO_STEPS),
        ):
            assert found[name] == count * steps
        assert {name: found[name] for name in everywhere[rank]} == dict(everywhere[rank])
        assert (found[WAIT] > 0) == (comm.size > 1)
    check_sums(spans, names, comm.size)
    events = json.loads(path.read_text())["traceEvents"]
    shown = [event for event in events if event["ph"] != "M"]
    assert len(shown) == len(spans)
    assert {event["pid"] for event in shown} == set(range(comm.size))
    assert min(event["ts"] for event in shown) == 0
    assert sum(event["args"].get("bytes", 0) for event in shown) == spans["bytes"].sum()


def check_sums(spans, names, size):
    """No rank ends a sum before every rank has begun it, by the one clock of the trace."""
    for number, name in enumerate(names):
        if name.split(" ")[0] not in SUMS:
            continue
        ranks = [spans[(spans["rank"] == rank) & (spans["name"] == number)] for rank in range(size)]
        ordered = [np.sort(own, order="begin") for own in ranks]
        assert len({len(own) for own in ordered}) == 1
        begins, ends = (np.stack([own[column] for own in ordered]) for column in ("begin", "end"))
        assert (begins.max(0) <= ends.min(0)).all()


def test_the_run_record_has_the_spans(mpi_tmp_path, comm):
    engine, told = start({**traced(1), "run_record": {"enabled": True, "path": str(mpi_tmp_path / "run.h5")}}), []
    engine.bus.subscribe(Event.SPANS, told.append)
    train(engine, samples(LAST, BATCH))
    engine.destroy()
    if comm.rank:
        return
    run, spans, names = open_run([mpi_tmp_path / "run.h5"]), told[0]["spans"], told[0]["names"]
    found = run.spans()
    for column in ("rank", "step", "begin", "end", "bytes"):
        assert (found[column] == spans[column]).all()
    for column in ("lane", "name"):
        assert [run.names[number] for number in found[column]] == [names[number] for number in spans[column]]
    assert [note["spans"] for note in run.notes() if note["kind"] == "trace"] == [len(spans)]


@pytest.mark.parametrize(("start_step", "end_step"), [(1, 1), (1, 2)])
def test_the_first_step_can_be_traced(start_step, end_step):
    engine, told = start(traced(1, start_step=start_step, end_step=end_step)), []
    engine.bus.subscribe(Event.SPANS, told.append)
    train(engine, samples(3, BATCH))
    engine.destroy()
    if engine.global_rank == 0:
        assert set(told[0]["spans"]["step"].tolist()) == set(range(start_step, end_step + 1))


def test_a_bounded_number_of_spans_is_kept(comm):
    engine, told = start(traced(1, max_spans=7)), []
    engine.bus.subscribe(Event.SPANS, told.append)
    train(engine, samples(LAST, BATCH))
    engine.destroy()
    if comm.rank == 0:
        assert Counter(told[0]["spans"]["rank"].tolist()) == dict.fromkeys(range(comm.size), 7)


def test_a_folder_that_is_not_there_is_an_error_on_all_ranks(mpi_tmp_path):
    with pytest.raises(ConfigError, match="there is no folder"):
        start(traced(0, path=str(mpi_tmp_path / "none" / "trace.json")))


def test_a_run_that_cannot_begin_tells_of_no_trace(mpi_tmp_path, caplog):
    report = mpi_tmp_path / "file" / "report.txt"
    report.parent.write_text("no folder")
    with pytest.raises(ConfigError, match="output_file"):
        start(traced(0) | {"flops_profiler": {"enabled": True, "output_file": str(report)}})
    assert "no trace" not in caplog.text


def test_transfers_of_swap_files_have_lanes(mpi_tmp_path, comm):
    settings = traced(3)
    settings["zero_optimization"] |= {"offload_optimizer": {"device": "nvme", "nvme_path": str(mpi_tmp_path)}}
    engine, told = start(settings), []
    engine.bus.subscribe(Event.SPANS, told.append)
    train(engine, samples(LAST, BATCH))
    engine.destroy()
    if comm.rank:
        return
    spans, names = told[0]["spans"], told[0]["names"]
    lanes = [number for number, name in enumerate(names) if name.startswith(FILES)]
    for rank in range(comm.size):
        own = spans[(spans["rank"] == rank) & np.isin(spans["lane"], lanes)]
        for name in ("read", "write"):
            moved = own[own["name"] == names.index(name)]
            assert set(moved["step"].tolist()) == {FIRST, LAST}
            assert (moved["bytes"] > 0).all()
        for lane in lanes:
            times = np.sort(own[own["lane"] == lane], order="begin")
            assert (times["begin"][1:] >= times["end"][:-1]).all()


def test_offsets_of_clocks_are_within_their_errors(comm):
    """Clocks that are wrong by known amounts; every other rank shares the clock of the rank before it."""
    node = comm.rank // 2
    found = measure_offset(comm, lambda: time.perf_counter() + 1000.0 * node, lambda: f"node {node}")
    assert abs(found.seconds + 1000.0 * node) <= found.error + 1e-9
    assert (found.error > 0) == (node > 0)
    assert measure_offset(comm) == (0.0, 0.0)  # ranks of one node read one clock
