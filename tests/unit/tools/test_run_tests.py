"""What `make test` is made of: pieces side by side within the cores, whole outputs, counts that miss nothing."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def load(path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


run_tests = load(ROOT / "tools" / "run_tests.py")
run_mpi = load(ROOT / "tests" / "run_mpi.py")

SPAN = """
import sys, time
print("first", sys.argv[1], flush=True)
with open(sys.argv[2], "a") as log: log.write(f"begin {sys.argv[1]}\\n")
time.sleep(float(sys.argv[3]))
with open(sys.argv[2], "a") as log: log.write(f"end {sys.argv[1]}\\n")
print("second", sys.argv[1])
print("1 passed in 0.1 s")
"""


def piece(name, code, *words, cores=1):
    return run_tests.Piece("part", name, ("-c", code, *map(str, words)), cores)


def run(pieces, cores, **more):
    shown = []
    return run_tests.run_all(pieces, cores, show=shown.append, **more), shown


def most_at_once(log, cores_of):
    busy = most = 0
    for line in log.read_text().splitlines():
        what, name = line.split()
        busy += cores_of[name] if what == "begin" else -cores_of[name]
        most = max(most, busy)
    return most


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_pieces_run_within_the_cores_and_do_not_mix(cores, tmp_path):
    log = tmp_path / "log"
    sizes = {"a": 1, "b": 1, "c": 2, "d": 4, "e": 1}
    pieces = [piece(name, SPAN, name, log, 0.3, cores=size) for name, size in sizes.items()]
    results, shown = run(pieces, cores)
    assert sorted(result.piece.name for result in results) == sorted(sizes)
    assert most_at_once(log, {name: min(size, cores) for name, size in sizes.items()}) <= cores
    for text in shown:
        (name,) = set(re.findall(r"(?:first|second) (\w)", text))
        assert text.startswith(f"=== {name}\nfirst {name}\nsecond {name}\n1 passed")
    assert run_tests.summary(results, 3.0).splitlines()[-1] == "5 passed, 0 failed"


FLAKY = """
from pathlib import Path
import pytest
@pytest.mark.parametrize("word", ["a - b"])
def test_fails_first(word):
    path = Path(__file__).with_name("seen")
    seen = path.exists()
    path.touch()
    assert seen
def test_passes():
    pass
"""


@pytest.mark.parametrize(
    ("part", "total"),
    [("jobs", "2 passed (1 when tried once more), 0 failed"), ("unit", "1 passed, 1 failed")],
)
def test_a_job_that_fails_is_tried_once_more_which_is_told(tmp_path, monkeypatch, part, total):
    (tmp_path / "test_flaky.py").write_text(FLAKY)
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    results, shown = run([run_tests.Piece(part, "flaky", (*run_tests.PYTEST, "test_flaky.py"))], 1)
    lines = run_tests.summary(results, 1.0, {}).splitlines()
    assert lines[-1] == total, shown
    told = [line for line in lines if line.startswith("once more")]
    healed = "once more  failed first, then passed: test_flaky.py::test_fails_first[a - b]"
    assert told == ([healed] if part == "jobs" else [])


def test_tests_that_fail_twice_or_in_numbers_stay_failed():
    job = run_tests.Piece("jobs", "a", ())
    text = "FAILED tests/jobs/test_x.py::test_y[a - b] - assert 1\nFAILED tests/jobs/test_x.py::test_z\n"
    first = run_tests.Result(job, {"passed": 1, "failed": 2, "skipped": 0})
    (again,) = run_tests.retries(first, text)
    assert again.words == (*run_tests.PYTEST, "tests/jobs/test_x.py::test_y[a - b]", "tests/jobs/test_x.py::test_z")
    run_tests.judge_again(first, run_tests.Result(again, {"passed": 1, "failed": 1, "skipped": 0}))
    assert first.counts == {"passed": 1, "failed": 2, "skipped": 0}
    assert run_tests.retries(run_tests.Result(job, {"passed": 1, "failed": 4, "skipped": 0}), text * 2) == []
    assert run_tests.retries(run_tests.Result(job, {"passed": 1, "failed": 1, "skipped": 0}), "Killed") == []


MEET = """
import sys, time
from pathlib import Path
Path(sys.argv[1]).touch()
while not Path(sys.argv[2]).exists():
    time.sleep(0.05)
print("1 passed")
"""


def test_pieces_that_fit_run_at_once_and_a_larger_one_is_passed_over(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    pieces = [piece("one", MEET, one, other), piece("large", MEET, one, one, cores=2), piece("other", MEET, other, one)]
    results, _ = run(pieces, 2, limit_seconds=60)
    assert [result.counts["passed"] for result in results] == [1, 1, 1]
    assert results[-1].piece.name == "large"


@pytest.mark.parametrize(
    ("code", "counts"),
    [
        ("print('3 passed, 2 failed, 1 error, 4 skipped in 2 s'); raise SystemExit(1)", (3, 3, 4)),
        ("print('7 passed, 1 warning in 2 s')", (7, 0, 0)),
        ("print('7 passed in 2 s'); raise SystemExit(3)", (7, 1, 0)),  # an end that its count does not explain
        ("raise SystemExit(1)", (0, 1, 0)),
        ("import os; os.abort()", (0, 1, 0)),
        ("print('no tests ran in 0.01 s')", (0, 1, 0)),
    ],
)
def test_counts_come_from_the_last_line_and_no_failure_is_lost(code, counts):
    (result,), _ = run([piece("one", code)], 1)
    assert tuple(result.counts.values()) == counts


WAITS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(sys.argv[1], "w").write(str(child.pid))
def waits():
    time.sleep(60)
waits()
"""


def test_a_late_piece_is_ended_with_its_children_and_shows_its_stacks(tmp_path):
    late = run_tests.Piece("part", "late", ("-X", "faulthandler", "-c", WAITS, str(tmp_path / "child")))
    (result,), shown = run([late], 1, limit_seconds=8, beat_seconds=2)
    assert result.counts["failed"] == 1
    assert "in waits" in shown[-1]
    assert re.search(r"FAILED: late still ran after \d+ s", shown[-1])
    assert re.fullmatch(r"\.\.\. \d+ s: 0 of 1 done, 0 failed; running: late \(\d+ s\)", shown[0])
    try:
        child = (Path("/proc") / (tmp_path / "child").read_text() / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return
    assert child.split()[2] == "Z"


def test_every_test_file_is_in_one_piece(tmp_path):
    pieces = run_tests.all_pieces(tmp_path)
    assert len({one.name for one in pieces}) == len(pieces)
    named = [ROOT / word for one in pieces for word in one.words if word.startswith((str(ROOT), "tests/"))]
    in_pieces = [file for path in named for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
    mpi = ROOT / "tests" / "mpi"
    groups = run_mpi.groups_of(mpi)
    in_pieces += [file for paths in groups.values() for path in paths for file in path.rglob("test_*.py")]
    found = sorted(file for file in in_pieces if file.name.startswith("test_"))
    assert found == sorted((ROOT / "tests").rglob("test_*.py"))
    starts = {(one.words[-1], int(one.words[2])) for one in pieces if one.part == "MPI"}
    assert starts == {(name, ranks) for name in groups for ranks in (1, 2, 3, 4)}


def record(folder, group, ranks, *, passed=(), skipped=(), broken=""):
    outcome = run_mpi.Outcome(group, ranks, passed=set(passed), skipped=set(skipped), broken=broken)
    (folder / f"{group}-{ranks}.json").write_text(outcome.record())


def test_a_test_that_ran_nowhere_and_a_size_without_tests_fail_the_whole(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_mpi, "groups_of", lambda folder: {"zero": [folder], "pipe": [folder]})
    for ranks in (1, 2, 3, 4):
        record(tmp_path, "zero", ranks, passed=["a"], skipped=["b"] if ranks == 1 else ["b", "c"])
        record(tmp_path, "pipe", ranks, passed=["c"] if ranks > 1 else [], skipped=["b"])
    record(tmp_path, "zero", 3, passed=["a", "b"])
    assert run_mpi.judge(tmp_path) == 1
    assert capsys.readouterr().out == "FAILED: no test of group pipe ran on 1 ranks\n0 passed, 1 failed\n"
    record(tmp_path, "zero", 3, passed=["a"], skipped=["b"])
    record(tmp_path, "pipe", 1, broken="no end after 600 s")  # told when it happened
    assert run_mpi.judge(tmp_path) == 1
    assert capsys.readouterr().out == "FAILED: ran at no number of ranks: b\n0 passed, 1 failed\n"
    record(tmp_path, "zero", 3, passed=["a", "b"])
    assert run_mpi.judge(tmp_path) == 0
    assert capsys.readouterr().out == "1 passed, 0 failed\n"


def took(**seconds):
    return [run_tests.Result(piece(name, ""), cpu_seconds=value) for name, value in seconds.items()]


def test_growth_is_by_the_speed_of_the_machine():
    kept = {"a": 100.0, "b": 50.0, "c": 20.0, "d": 10.0, "small": 0.5}
    assert run_tests.growth(took(a=200, b=100, c=40, d=20), kept) == []  # a machine of half the speed
    [line] = run_tests.growth(took(a=100, b=50, c=45, d=10, small=5), kept)
    assert line == "grown      c: 45 s on cores, 20 s when durations were kept"
    assert run_tests.growth(took(a=100, new=7), kept) == ["new        new: 7 s on cores"]
    assert run_tests.growth(took(a=100, new=7), {}) == []


def test_pieces_begin_in_the_order_of_what_they_took(monkeypatch, tmp_path):
    names = [piece.name for piece in run_tests.all_pieces(tmp_path) if piece.cores == 1]
    monkeypatch.setattr(run_tests, "kept_durations", lambda: {name: index for index, name in enumerate(names)})
    assert [piece.name for piece in run_tests.all_pieces(tmp_path) if piece.cores == 1] == names[::-1]


def test_what_pieces_and_files_took_is_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(run_tests, "DURATIONS", tmp_path / "durations.json")
    assert run_tests.kept_durations() == {}
    (tmp_path / "1.json").write_text('{"tests/unit/tools/test_run_tests.py": 2.04, "tests/mpi/x.py": 3, "gone.py": 1}')
    result = run_tests.Result(run_tests.Piece("rules", "rules", ()), cpu_seconds=7.03)
    run_tests.keep_durations([result, *took(another=5)], tmp_path)
    assert run_tests.kept_durations() == {"rules": 7.0}
    assert run_tests.kept_durations("files") == {"tests/unit/tools/test_run_tests.py": 2.0}
