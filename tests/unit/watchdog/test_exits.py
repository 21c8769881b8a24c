"""The first cause among deaths, and what is said of it."""

import inspect
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.watchdog.exit_codes import read_words
from mpispeed.watchdog.exits import Death, MemoryFacts, Strength, cause_of, describe_exit_code, explain

GIB = 1 << 30
TRACE = """Traceback (most recent call last):
  File "/data/u/train.py", line 12, in <module>
    main()
  File "/data/u/model.py", line 34, in forward
    raise ValueError("bad shape\\nof the input")
ValueError: bad shape
of the input
"""


def facts(kills=0, node_kills=0, **more):
    return MemoryFacts(1, group="/job_7", limit_bytes=4 * GIB, kills=kills, node_kills=node_kills,
                       total_bytes=64 * GIB, **more)  # fmt: skip


def test_nothing_here_loads_torch_or_mpi():
    code = "import sys, mpispeed.watchdog.exits; print([m for m in ('torch', 'mpi4py', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_rank_that_the_launcher_killed_is_a_consequence():
    deaths = [
        Death(0, "n1", 10, signal=9, seen_seconds=3.0),
        Death(1, "n1", 11, last_words=TRACE, exit_code=1, seen_seconds=3.2, last_lines=["all_reduce a", "barrier b"]),
        Death(2, "n2", 12, signal=15, seen_seconds=3.1),
        Death(3, "n2", 13, signal=15, seen_seconds=3.1),
    ]
    found = explain(deaths)
    assert (found.rank, found.kind, found.consequences) == (1, "error", (0, 2, 3))
    assert found.reason == ("rank 1 on n1 (pid 11) raised ValueError: bad shape of the input (at /data/u/model.py:34)")
    assert "ranks 0, 2-3 ended as a consequence" in found.text
    assert "    barrier b" in found.text
    assert found.text.count("Error") == 1


def test_the_earliest_of_two_that_fell_by_themselves():
    late = Death(0, signal=11, seen_seconds=9.0)  # a crash in the tear-down of a job that is ending
    early = Death(5, last_words="RuntimeError: first", seen_seconds=7.0)
    assert explain([late, early]).rank == 5
    assert explain([Death(0, signal=11, seen_seconds=1.0), Death(5, signal=9, seen_seconds=0.0)]).rank == 0


def test_of_ranks_that_were_all_killed_the_first_one():
    deaths = [Death(0, signal=9, seen_seconds=5.0), Death(1, signal=9, seen_seconds=4.0)]
    found = explain(deaths)
    assert (found.rank, found.kind) == (1, "killed")
    assert "scancel" in found.cure


def test_the_kernel_has_as_many_deaths_as_it_counted():
    seen = {"memory_before": facts(kills=2), "memory_after": facts(kills=3, group_peak_bytes=4 * GIB)}
    deaths = [
        Death(0, "n", signal=9, peak_bytes=GIB, seen_seconds=1.0, **seen),
        Death(1, "n", signal=9, peak_bytes=3 * GIB, seen_seconds=1.1, **seen),
    ]
    found = explain(deaths)
    assert (found.rank, found.kind, found.consequences) == (1, "memory_limit", (0,))
    assert "the limit of 4 GiB of /job_7 (the rank had 3 GiB or more, peak of the group 4 GiB)" in found.reason
    assert "ended as a consequence" in found.text


def test_whom_the_kernel_names_comes_before_who_was_larger():
    before, after = facts(kills=2), facts(kills=3)
    named = facts(kills=3, killed_bytes=5 * GIB, killed_in_group=True)
    deaths = [
        Death(0, "n", signal=9, peak_bytes=3 * GIB, seen_seconds=1.0, memory_before=before, memory_after=after),
        Death(1, "n", signal=9, peak_bytes=GIB, seen_seconds=1.1, memory_before=before, memory_after=named),
    ]
    found = explain(deaths)
    assert (found.rank, found.kind, found.consequences) == (1, "memory_limit", (0,))
    assert "the rank had 5 GiB or more" in found.reason
    of_node = MemoryFacts(1, killed_bytes=GIB, killed_in_group=False)
    uncounted = [Death(2, signal=9, memory_after=of_node), Death(3, signal=9)]
    assert (explain(uncounted).rank, explain(uncounted).kind) == (2, "node_memory")


def test_memory_of_the_node():
    death = Death(4, "n3", signal=9, memory_before=facts(), memory_after=facts(node_kills=1))
    found = explain([death])
    assert found.kind == "node_memory"
    assert "64 GiB" in found.reason


@pytest.mark.parametrize(("before", "after", "kind"), [
    ({"limit_hits": 1}, {"limit_hits": 1}, "node_memory"),  # version 2 counts kills of the node in the group too
    ({"limit_hits": 1}, {"limit_hits": 2}, "memory_limit"),
    ({"limit_hits": 1}, {"limit_hits": 2, "group_peak_bytes": 2 * GIB}, "node_memory"),
    ({}, {"group_peak_bytes": 2 * GIB}, "node_memory"),
    ({}, {"group_peak_bytes": 4 * GIB}, "memory_limit"),
    ({}, {"limit_bytes": None}, "node_memory"),
])  # fmt: skip
def test_a_kill_in_a_group_that_had_memory_left_is_the_nodes(before, after, kind):
    seen = {"memory_before": facts(**before), "memory_after": replace(facts(kills=1), **after)}
    found = explain([Death(0, "n", signal=9, **seen), Death(1, "n", signal=9, memory_after=facts())])
    assert (found.rank, found.kind) == (0, kind)


def test_old_kills_do_not_count():
    death = Death(4, signal=9, memory_before=facts(kills=7, node_kills=7), memory_after=facts(kills=7, node_kills=7))
    assert explain([death]).kind == "killed"
    assert explain([Death(4, signal=9, memory_after=facts(kills=7))]).kind == "killed"


def test_a_peak_at_the_limit_speaks_where_kills_are_not_counted():
    after = MemoryFacts(1, limit_bytes=4 * GIB, group_peak_bytes=4 * GIB - 5)
    found = explain([Death(0, signal=9, memory_after=after)])
    assert found.kind == "memory_limit"
    assert "probably" in found.reason


def test_a_lost_node_comes_before_ranks_that_lost_their_peer():
    lost = Death(0, "n1", last_words="mpi4py.MPI.Exception: MPIX_ERR_PROC_FAILED: Process failure", exit_code=1)
    killed = Death(1, "n1", signal=9)
    found = explain([lost, killed], ["n2"])
    assert (found.rank, found.kind, found.consequences) == (None, "lost_node", (0, 1))
    assert "n2" in found.text
    assert explain([lost, killed]).kind == "lost_peer"


def test_an_error_of_its_own_comes_before_a_lost_node():
    found = explain([Death(0, "n1", last_words="ValueError: x", exit_code=1)], ["n2"])
    assert (found.rank, found.kind) == (0, "error")


def test_ranks_with_one_error_are_one_line():
    deaths = [Death(rank, last_words="RuntimeError: same", exit_code=1) for rank in range(4)]
    found = explain(deaths)
    assert "ranks 1-3 ended in the same way" in found.text
    assert found.text.count("RuntimeError") == 1


def test_good_order():
    left = Death(0, exit_code=0, had_left=True)
    assert cause_of(left) is None
    assert explain([left]).kind == "finished"
    early = explain([Death(2, exit_code=0)])
    assert early.kind == "left"
    assert "all ranks together" in early.cure


def test_without_a_status_it_says_so():
    assert explain([Death(2)]).kind == "unknown"
    assert explain([Death(2), Death(3, signal=9)]).rank == 3


@pytest.mark.parametrize(("words", "kind", "part"), [
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "device_memory", "micro-batch"),
    ("MemoryError", "memory", "--mem"),
    ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", "memory", "--mem"),
    ("OSError: [Errno 28] No space left on device: '/scratch/x'", "disk_full", "quota"),
    ("OSError: [Errno 27] File too large", "file_size", "ulimit -f"),
    ("ModuleNotFoundError: No module named 'x'", "import", "environment"),
    ("RuntimeError: CUDA error: an illegal memory access", "device", "nvidia-smi"),
    ("RuntimeError: CUDA error: out of memory", "device_memory", "micro-batch"),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", "device_memory", "plan"),
    ("RuntimeError: CUDA error: device-side assert triggered", "device_assert", "CUDA_LAUNCH_BLOCKING=1"),
    ("RuntimeError: unable to write to file </torch_12_3>: No space left on device (28)", "shared_memory", "/dev/shm"),
    ("RuntimeError: unable to open shared memory object </torch_1> in read-write mode: Too many open files (24)",
     "open_files", "ulimit -n"),
    ("OutOfResources: out of resource: shared memory, Required: 9, Hardware limit: 8", "error", "log"),
    ("mpi4py.MPI.Exception: Other MPI error, Connection reset by peer", "lost_peer", "network"),
    ("mpi4py.MPI.Exception: MPIX_ERR_PROC_FAILED: Process failure", "lost_peer", "network"),
    ("ConnectionResetError: [Errno 104] Connection reset by peer", "error", "log"),
    ("KeyboardInterrupt", "interrupted", "again"),
    ("something odd", "error", "log"),
])  # fmt: skip
def test_what_helps_against_errors(words, kind, part):
    found = explain([Death(0, last_words=words)])
    assert found.kind == kind
    assert part in found.cure


@pytest.mark.parametrize(("file", "kind"), [
    (inspect.getfile(Death), "lost_peer"), ("src/mpi4py/MPI.src/Comm.pyx", "lost_peer"),
    ("/data/u/train.py", "error"), ("/usr/lib/python3/http/client.py", "error"),
])  # fmt: skip
def test_a_connection_that_a_script_lost_is_its_own(file, kind):
    words = f'Traceback (most recent call last):\n  File "{file}", line 3, in f\nConnectionResetError: [Errno 104] x\n'
    assert explain([Death(0, last_words=words)]).kind == kind


def test_an_exit_code_is_no_python_error():
    found = explain([Death(0, last_words="exit code 3"), Death(1, last_words="exit code 2")])
    assert (found.kind, found.reason) == ("exit", "rank 0 left with exit code 3")
    assert explain([Death(1, last_words="exit code 2\n")]).kind == "refused"
    assert explain([Death(0, last_words="ValueError: exit code 3")]).kind == "error"


@pytest.mark.parametrize(("number", "kind"), [
    (7, "shared_memory"), (11, "fault"), (4, "fault"), (6, "abort"), (24, "cpu_time"), (25, "file_size"),
    (9, "killed"), (15, "terminated"), (2, "interrupted"), (1, "hangup"),
])  # fmt: skip
def test_signals_have_meanings_however_they_are_told(number, kind):
    assert explain([Death(0, signal=number)]).kind == kind
    assert explain([Death(0, exit_code=128 + number)]).kind == kind
    assert kind != "killed" or cause_of(Death(0, signal=number)).strength == Strength.ENDED_BY_OTHERS


def test_exit_codes_in_one_sentence():
    assert describe_exit_code(0) == ""
    assert "exit code 3" in describe_exit_code(3)
    assert "SIGKILL" in describe_exit_code(137)
    assert "SIGSEGV" in describe_exit_code(-11)
    assert "SIGKILL" in describe_exit_code(9, is_hydra=True)
    assert "exit code 9" in describe_exit_code(9)
    assert "not found" in describe_exit_code(127)
    assert "MPI" in describe_exit_code(142)  # no SIGALRM: what is left of a large code of MPICH


def test_words_of_an_error_group_are_of_its_last_line():
    words = read_words("x\nKeyError: 'a'\n\nDuring handling, another exception occurred:\n\n" + TRACE)
    assert words.line == "ValueError: bad shape of the input (at /data/u/model.py:34)"
    assert len(read_words("ValueError: " + "y" * 5000).line) == 400


deaths = st.builds(
    Death,
    rank=st.integers(0, 9),
    host=st.sampled_from(["a", "b"]),
    exit_code=st.none() | st.integers(0, 255),
    signal=st.none() | st.integers(1, 64),
    last_words=st.none() | st.text(max_size=30) | st.just(TRACE),
    had_left=st.booleans(),
    seen_seconds=st.none() | st.floats(0, 1e6),
    peak_bytes=st.none() | st.integers(0, 1 << 40),
    memory_before=st.none() | st.builds(facts, st.integers(0, 3), st.integers(0, 3)),
    memory_after=st.none() | st.builds(facts, st.integers(0, 3), st.integers(0, 3)),
)


@given(st.lists(deaths, max_size=6, unique_by=lambda death: death.rank), st.lists(st.sampled_from("ab"), max_size=1))
def test_every_set_of_deaths_has_one_explanation(dead, lost):
    found = explain(dead, lost)
    assert found.text.startswith("mpispeed: ")
    assert found.rank not in found.consequences
    dying = [death.rank for death in dead if cause_of(death) is not None]
    assert set(found.consequences) | {found.rank} - {None} == set(dying)
    assert (found.kind == "finished") == (not dying and not lost)
    assert explain(reversed(dead), lost).rank == found.rank


@given(st.integers(-64, 255), st.booleans())
def test_every_exit_code_has_a_sentence(code, is_hydra):
    assert bool(describe_exit_code(code, is_hydra=is_hydra)) == (code != 0)
