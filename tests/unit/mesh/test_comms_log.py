"""The comms logger: formulas, averages, tables, and what is recorded."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch

from mpispeed.mesh.collectives.group import CommTrace, Record
from mpispeed.mesh.comms_log import CommsLog, bandwidths, format_size, known_verbs, trimmed_mean
from mpispeed.mesh.sim import run

N = 4
SECONDS = 0.002
BYTES = 1_000_000  # 4 Gbit/s in 2 ms


@pytest.mark.parametrize(
    ("verb", "algbw", "busbw"),
    [
        ("all_to_all", 4.0, 3.0),
        ("all_gather", 16.0, 12.0),
        ("reduce_scatter", 4.0, 3.0),  # what goes in is the whole already
        ("all_reduce", 8.0, 6.0),
        ("send", 4.0, 4.0),
        ("recv", 4.0, 4.0),
        ("isend", 4.0, 4.0),
        ("broadcast", 4.0, 4.0),
        ("reduce", 4.0, 4.0),
        ("compressed_all_reduce", 4.0, 4.0),
        ("verb of the future", 4.0, 4.0),
    ],
)
def test_formulas_on_4_ranks(verb, algbw, busbw):
    assert bandwidths(verb, BYTES, SECONDS, N) == pytest.approx((algbw, busbw), rel=1e-12)


def test_formulas_at_their_ends():
    assert bandwidths("barrier", 0, SECONDS, N) == (0.0, 0.0)
    assert bandwidths("isend", BYTES, 0.0, N) == (0.0, 0.0)
    assert bandwidths("all_reduce", BYTES, SECONDS, 1) == (8.0, 0.0)


def test_trimmed_means():
    assert trimmed_mean([]) == 0
    assert trimmed_mean([7.0]) == 7.0
    assert trimmed_mean([1.0, 2.0, 90.0, 1.0]) == 23.5  # a tenth of four is none
    assert trimmed_mean([1000.0, *[2.0] * 8, 0.0]) == 2.0
    assert trimmed_mean([*range(20)]) == pytest.approx(9.5)
    assert trimmed_mean([*[1.0] * 18, 50.0, 60.0]) == 1.0


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0B"), (1, "1.0 B"), (1536, "1.5 KB"), (1 << 20, "1.0 MB"), (5 << 40, "5.0 TB"), (123456, "120.56 KB")],
)
def test_sizes(size, text):
    assert format_size(size) == text


def log_of(**settings):
    comm_trace, comms = CommTrace(), CommsLog()
    comms.configure({"enabled": True, **settings})
    comms.attach(comm_trace)
    return comm_trace, comms


def record(verb="all_reduce", size=BYTES, seconds=SECONDS, site="", ranks=N):
    return Record(verb, ("data",), ranks, size, 0, seconds, site)


def test_table_on_4_ranks():
    comm_trace, comms = log_of()
    for seconds in (0.002, 0.004, 0.006):
        comm_trace.enter(record(size=1 << 20, seconds=seconds))
    comm_trace.enter(record(size=1 << 10, seconds=0.001))
    comm_trace.enter(record("all_gather", 4 << 20, 0.001))
    comm_trace.enter(record("barrier", 0, 0.001))
    head, *lines = comms.table().splitlines()
    assert [head[i : i + 20].strip() for i in range(0, 160, 20)] == [
        "Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)",
        "busbw_avg (Gbps)", "Ranks",
    ]  # fmt: skip
    rate = 2 * 8e-9 * (1 << 20) / 3 * (1 / 0.002 + 1 / 0.004 + 1 / 0.006)
    small, gather = 2 * 8e-9 * 1024 / 0.001, 8e-9 * (4 << 20) / 0.001
    assert [line.split() for line in lines] == [
        ["all_gather"],  # the size of what a rank puts in
        ["1.0", "MB", "1", "1.00", "1.00", f"{gather:.2f}", f"{gather * 3 / 4:.2f}", "4"],
        ["all_reduce"],
        ["1.0", "KB", "1", "1.00", "1.00", f"{small:.2f}", f"{small * 3 / 4:.2f}", "4"],
        ["1.0", "MB", "3", "12.00", "4.00", f"{rate:.2f}", f"{rate * 3 / 4:.2f}", "4"],
        ["barrier"],
        ["0B", "1", "1.00", "1.00", "0.00", "0.00", "4"],
    ]


def verbs_of(comms):
    return [key.name for key in comms.rows()]


def test_what_is_recorded():
    comm_trace, comms = log_of(prof_all=False, prof_ops=["all_gather_into_tensor"])
    for verb in ("all_gather", "all_reduce", "barrier"):
        comm_trace.enter(record(verb))
    assert verbs_of(comms) == ["all_gather"]
    comms.profile(["all_reduce"], is_on=True)
    comms.profile(["all_gather"], is_on=False)
    for verb in ("all_gather", "all_reduce"):
        comm_trace.enter(record(verb))
    assert [(key.name, row.count) for key, row in comms.rows().items()] == [("all_gather", 1), ("all_reduce", 1)]
    comms.configure(prof_all=True)
    comm_trace.enter(record("barrier"))
    assert verbs_of(comms) == ["all_gather", "all_reduce", "barrier"]
    comms.configure(enabled=False)
    comm_trace.enter(record("reduce"))
    comms.configure(enabled=True)
    comms.detach()
    comm_trace.enter(record("send"))
    assert verbs_of(comms) == ["all_gather", "all_reduce", "barrier"]
    comms.clear()
    assert comms.rows() == {}


def test_a_section_that_is_off_records_nothing():
    comm_trace, comms = log_of(enabled=False)
    comm_trace.enter(record())
    assert comms.rows() == {}
    assert not comms.is_attached


def test_messages_that_are_only_posted_take_no_time():
    comm_trace, comms = log_of()
    comm_trace.enter(record("send", seconds=0.0))
    comm_trace.enter(record("send", seconds=0.001))
    assert verbs_of(comms) == ["isend", "send"]
    assert "inf" not in comms.table()


def test_verbose_lines(caplog):
    comm_trace, _ = log_of(verbose=True)
    with caplog.at_level(logging.INFO):
        comm_trace.enter(record(size=1 << 20))
    rate = 2 * 8e-9 * (1 << 20) / SECONDS
    assert caplog.messages == [
        f"comm op: all_reduce | time (ms): 2.00 | msg size: 1.0 MB | algbw (Gbps): {rate:.2f} | "
        f"busbw (Gbps): {rate * 3 / 4:.2f}"
    ]


def test_debug_tells_callers_apart():
    comm_trace, comms = log_of(debug=True)
    assert comm_trace.wants_sites
    for site in ("train.py:3 in main", "train.py:9 in main"):
        comm_trace.enter(record(site=site))
    assert verbs_of(comms) == [f"all_reduce | [Caller Func: train.py:{line} in main]" for line in (3, 9)]
    assert math.isclose(float(comms.table().splitlines()[2].split()[5]), 8.0)


def test_names_that_are_no_verbs_are_told(caplog):
    assert known_verbs(["all_redcue", "all_to_all_single"]) == {"all_redcue", "all_to_all"}
    assert 'no verb is called so; did you mean "all_reduce"?' in caplog.text


def test_stragglers_are_found_call_by_call():
    """Rank 1 comes late twice, rank 2 once; a verb that one rank has called more often is left out."""
    late = {0: (0.030, 0.030, 0.020), 1: (0.010, 0.010, 0.020), 2: (0.030, 0.030, 0.005)}

    def body(world):
        comm_trace, comms = log_of()
        for seconds in late[world.rank]:
            comm_trace.enter(record(ranks=world.size, seconds=seconds))
        for _ in range(1 + (world.rank == 2)):
            comm_trace.enter(record("barrier", 0, ranks=world.size))
        comm_trace.enter(record("broadcast", ranks=2))
        return comms.straggler_table(world.comm)

    tables = run(3, body)
    head, *lines = tables[0].splitlines()
    assert head.split("  ")[-1].strip() == "Latest rank"
    assert [line.split() for line in lines] == [
        ["all_reduce"], ["976.56", "KB", "3", "25.00", "55.00", "8.33", "18.33", "1"],
    ]  # fmt: skip
    assert tables[1].splitlines()[2].split()[4] == "15.00"


def test_sections_of_configs_and_dicts():
    from mpispeed.compat import comm_log

    values = {"enabled": True, "prof_all": False, "prof_ops": ["send"], "verbose": False, "debug": True}
    assert comm_log._comms_section({"comms_logger": values}) == values
    assert comm_log._comms_section(SimpleNamespace(comms_logger=SimpleNamespace(**values))) == values
    assert comm_log._comms_section(None) == {}
    with pytest.raises(RuntimeError, match="unknown key 'prof_op'"):
        comm_log._comms_section({"comms_logger": {"prof_op": []}})


def test_records_of_real_verbs():
    def body(world):
        comms = CommsLog()
        comms.configure({"enabled": True})
        comms.attach(world.comm_trace)
        x = torch.ones(8)
        world.comm.all_reduce(x)
        world.comm.all_gather(torch.empty(24), x)
        world.comm.reduce_scatter(torch.empty(8), torch.ones(24))
        comms.detach()
        return {(key.verb, key.size_bytes, key.ranks): row.count for key, row in comms.rows().items()}

    for found in run(3, body):
        assert found == {("all_reduce", 32, 3): 1, ("all_gather", 32, 3): 1, ("reduce_scatter", 96, 3): 1}
