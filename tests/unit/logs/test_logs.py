"""Logs of ranks: whole to the last line, in the order of time, and what ranks say alike once."""

import os
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.base.errors import UsageError
from mpispeed.cli.logs import logs as command
from mpispeed.logs import rank_logs
from mpispeed.logs.merge import Entry, collapse, find_logs, format_ranks, merge_logs, merged_lines, read_entries
from mpispeed.logs.relay import stamp as relay_stamp

BEGIN = "import sys, os, time\nfrom mpispeed.logs import rank_logs as logs\nlogs.begin()\n"


def start(folder, code, rank=0, stdin=None, **env):
    environment = {**os.environ, "MPISPEED_RUN_DIR": str(folder), "PMI_RANK": str(rank), **env}
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=stdin,
        env=environment,
    )  # fmt: skip


def texts(folder, rank=0):
    """(stream, text) of the lines of a log, without the head."""
    lines = (folder / f"rank-{rank}.log").read_text().splitlines()
    return [(line[27], line[29:]) for line in lines if line[27] != "-"]


def test_both_streams_arrive_where_they_would_and_in_the_log(tmp_path):
    process = start(tmp_path, "print('one'); print('two', file=sys.stderr); os.write(1, b'three')")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, b"one\nthree", b"two\n")
    assert sorted(texts(tmp_path)) == [("e", "two"), ("o", "one"), ("o", "three")]
    assert f"rank 0, pid {process.pid} on " in (tmp_path / "rank-0.log").read_text().splitlines()[0]


@pytest.mark.parametrize(
    "end", ["os.kill(os.getpid(), 9)", "os._exit(3)", "os.abort()", "import ctypes; ctypes.string_at(0)"]
)
def test_the_last_line_before_a_sudden_end(tmp_path, end):
    process = start(tmp_path, f"print('x' * 300000)\nprint('last words')\n{end}")
    out, _ = process.communicate(timeout=120)
    assert process.returncode not in (0, 1)
    assert out.endswith(b"last words\n")
    found = texts(tmp_path)
    assert ("o", "last words") in found
    assert sum(len(text) for _, text in found if text.startswith("x")) == 300000


def test_more_than_a_pipe_takes_while_nobody_reads(tmp_path):
    """Backpressure as without a log, and no deadlock: what is written waits for its reader."""
    process = start(tmp_path, "for n in range(40000): print('line', n)\nprint('end', file=sys.stderr)")
    time.sleep(0.5)
    out, err = process.communicate(timeout=120)
    assert out.splitlines()[-1] == b"line 39999"
    assert err == b"end\n"
    assert texts(tmp_path)[-1][1] in ("line 39999", "end")
    assert len(texts(tmp_path)) == 40001


def test_a_reader_that_has_gone_costs_nothing_but_its_copy(tmp_path):
    process = start(tmp_path, "sys.stdin.read()\nfor n in range(1000): print('line', n)", stdin=subprocess.PIPE)
    process.stdout.close()
    process.stderr.close()
    process.stdin.close()  # now it may begin
    assert process.wait(120) == 0
    limit = time.monotonic() + 60
    while texts(tmp_path)[-1:] != [("o", "line 999")] and time.monotonic() < limit:
        time.sleep(0.01)  # the relay may end after the rank
    assert [text for _, text in texts(tmp_path)] == [f"line {n}" for n in range(1000)]


def test_what_a_child_of_the_rank_writes_is_there_too(tmp_path):
    process = start(tmp_path, "import subprocess\nsubprocess.run(['echo', 'from a child'])")
    assert process.communicate(timeout=120)[0] == b"from a child\n"
    assert ("o", "from a child") in texts(tmp_path)


def test_signals_for_the_job_do_not_cut_the_log(tmp_path):
    handler = "lambda *_: (print('asked'), sys.exit(5))"
    code = f"import signal\nsignal.signal(signal.SIGTERM, {handler})\nprint('up')\ntime.sleep(30)"
    process = start(tmp_path, code)
    assert process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert (process.returncode, out) == (5, b"asked\n")
    assert ("o", "asked") in texts(tmp_path)


def test_a_second_start_goes_on_in_the_same_file(tmp_path):
    for _ in range(2):
        start(tmp_path, "print('hello')").communicate(timeout=120)
    assert texts(tmp_path) == [("o", "hello")] * 2


def test_a_note_is_for_the_log_only(tmp_path):
    process = start(tmp_path, "print('before')\nlogs.note('Traceback\\n  line\\n')\nprint('after')")
    assert process.communicate(timeout=120) == (b"before\nafter\n", b"")
    found = texts(tmp_path)
    assert sorted(found) == [("e", "  line"), ("e", "Traceback"), ("o", "after"), ("o", "before")]
    assert found.index(("e", "  line")) == found.index(("e", "Traceback")) + 1


def test_nothing_begins_without_a_folder_or_a_rank(tmp_path):
    assert rank_logs.begin(0, {}) is None
    assert rank_logs.begin(None, {"MPISPEED_RUN_DIR": str(tmp_path)}) is None
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_is_said_and_the_run_goes_on(tmp_path):
    (tmp_path / "file").write_text("")
    process = start(tmp_path / "file" / "run", "print('still here')")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, b"still here\n")
    assert b"rank 0 has no log" in err


def test_a_folder_that_cannot_be_is_said_once_for_each_node(tmp_path):
    (tmp_path / "file").write_text("")
    for local, count in (("0", 1), ("1", 0)):
        process = start(tmp_path / "file" / "run", "logs.begin(0)\nlogs.note('x')", MPI_LOCALRANKID=local)
        _, err = process.communicate(timeout=120)
        assert (process.returncode, err.count(b"has no log")) == (0, count)


def test_a_log_stays_where_it_is_when_the_script_goes_elsewhere(tmp_path):
    code = f"import os, sys\nos.chdir({str(tmp_path)!r})\n{BEGIN}os.chdir('/')\nlogs.note('noted')\nprint('said')"
    environment = {**os.environ, "MPISPEED_RUN_DIR": "run", "PMI_RANK": "0"}
    subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True, timeout=120)
    assert texts(tmp_path / "run") == [("e", "noted"), ("o", "said")]


def test_a_script_without_stdout_has_a_log_too(tmp_path):
    code = f"import os, sys\nsys.stdout.close()\n{BEGIN}print('still here', file=sys.stderr)"
    environment = {**os.environ, "MPISPEED_RUN_DIR": str(tmp_path), "PMI_RANK": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"still here\n")
    assert texts(tmp_path) == [("e", "still here")]


@pytest.mark.parametrize("name", ["PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"])
def test_ranks_of_launchers(name):
    assert rank_logs.launched_rank({name: "3"}) == 3
    assert rank_logs.launched_rank({name: "x"}) is None


# -- merging ---------------------------------------------------------------------------------------------------------


def stamp(seconds):
    return f"2026-03-01 10:00:{seconds:09.6f}"


def write(folder, rank, *lines):
    text = "".join(f"{stamp(seconds)} {stream} {line}\n" for seconds, stream, line in lines)
    (folder / f"rank-{rank}.log").write_text(text)


TRACE = ("Traceback (most recent call last):", '  File "a.py", line 3, in <module>', "ValueError: bad at 0x{0:x}")


def test_lines_come_in_the_order_of_time(tmp_path):
    write(tmp_path, 0, (1, "o", "a"), (3, "o", "c"))
    write(tmp_path, 11, (2, "e", "b"))
    assert merge_logs(tmp_path) == 2
    assert (tmp_path / "merged.log").read_text().splitlines() == [
        f"{stamp(1)} [0] a", f"{stamp(2)} [11] b", f"{stamp(3)} [0] c",
    ]  # fmt: skip
    assert list(find_logs(tmp_path)) == [0, 11]


def test_a_traceback_that_ranks_have_alike_stands_there_once(tmp_path):
    for rank in range(4):
        trace = [(2 + rank / 10, "e", line.format(4096 + rank)) for line in TRACE]
        write(tmp_path, rank, (1, "o", f"loss {rank}"), *trace[:2], (2.5, "o", "between"), trace[2])
    lines = list(merged_lines(find_logs(tmp_path)))
    assert [line[27:] for line in lines if "loss" in line] == [f"[{rank}] loss {rank}" for rank in range(4)]
    assert sum("Traceback" in line for line in lines) == 1
    at = next(place for place, line in enumerate(lines) if "Traceback" in line)
    assert [line[27:] for line in lines[at : at + 3]] == [f"[0-3] {line.format(4096)}" for line in TRACE]
    assert [line[27:] for line in lines if "between" in line] == ["[0-3] between"]


def test_what_one_rank_says_twice_stands_there_twice(tmp_path):
    write(tmp_path, 0, (1, "o", "again"), (1.1, "o", "again"))
    write(tmp_path, 1, (1.2, "o", "again"))
    assert [line[27:] for line in merged_lines(find_logs(tmp_path))] == ["[0] again", "[0-1] again"]


def test_what_is_said_much_later_is_no_consequence(tmp_path):
    write(tmp_path, 0, (1, "e", "out of memory"))
    write(tmp_path, 1, (31, "e", "out of memory"))
    assert len(list(merged_lines(find_logs(tmp_path)))) == 2


def test_the_numbers_of_others_are_no_own_numbers(tmp_path):
    write(tmp_path, 0, (1, "o", "[0] rank 0 is up"), (2, "e", "waiting for rank 3"))
    write(tmp_path, 2, (1, "o", "[2] rank 2 is up"), (2, "e", "waiting for rank 1"))
    found = [line[27:] for line in merged_lines(find_logs(tmp_path))]
    assert found == ["[0,2] [0] rank 0 is up", "[0] waiting for rank 3", "[2] waiting for rank 1"]


def test_months_end_between_ranks():
    times = ["2026-02-28 23:59:59.900000", "2026-03-01 00:00:00.100000", "2026-04-01 00:00:00.200000"]
    entries = [Entry(time, "e", ["again"], [rank]) for rank, time in enumerate(times)]
    assert [entry.ranks for entry in collapse(entries)] == [[0, 1], [2]]


def test_times_are_those_of_no_zone(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert relay_stamp(86400.25) == b"1970-01-02 00:00:00.250000"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_half_a_merged_file_is_not_left(tmp_path):
    write(tmp_path, 0, (1, "o", "a"))
    (tmp_path / "rank-1.log").mkdir()
    with pytest.raises(IsADirectoryError):
        merge_logs(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.log", "rank-1.log"]


def test_lines_that_a_full_disk_has_cut_are_left_out(tmp_path):
    write(tmp_path, 0, (1, "o", "a"))
    with (tmp_path / "rank-0.log").open("a") as file:
        file.write("2026-03-01 10\nrest of something\n" + f"{stamp(2)} o b\n")
    assert [entry.lines for entry in read_entries(tmp_path / "rank-0.log", 0)] == [["a"], ["b"]]


def test_the_command(tmp_path):
    done = CliRunner().invoke(command, ["merge", str(tmp_path)])
    assert isinstance(done.exception, UsageError)
    assert "rank-*.log" in str(done.exception)
    write(tmp_path, 0, (1, "o", "a"))
    assert CliRunner().invoke(command, ["merge", str(tmp_path)]).output == f"1 logs in {tmp_path / 'merged.log'}\n"
    assert CliRunner().invoke(command, ["merge", "--show", str(tmp_path)]).output == f"{stamp(1)} [0] a\n"


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_in_few_characters(ranks):
    found = set()
    for part in format_ranks(ranks).split(","):
        low, _, high = part.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    assert found == ranks


said = st.tuples(st.integers(0, 50), st.integers(0, 3), st.sampled_from(["a", "b", "c 0x1", "c 0x2"]))


@given(st.lists(said, max_size=40))
def test_nothing_is_lost_and_time_does_not_run_backwards(lines):
    entries = [Entry(stamp(seconds), "o", [text], [rank]) for seconds, rank, text in sorted(lines)]
    kept = list(collapse(entries))
    assert [entry.time for entry in kept] == sorted(entry.time for entry in kept)
    assert sum(len(entry.ranks) for entry in kept) == len(lines)
    assert all(len(set(entry.ranks)) == len(entry.ranks) for entry in kept)
