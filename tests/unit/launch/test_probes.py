"""Probes of the doctor: processes that crash or hang, folders, and the judgement of what was seen."""

import importlib.util
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from mpispeed.launch import probes, probes_folder
from mpispeed.launch.findings import Finding, Verdict, from_dict, merge
from mpispeed.launch.probes import ask, call, run
from mpispeed.launch.probes_folder import check_folder, look_at
from mpispeed.launch.probes_machine import check_cores, check_shm, check_temp
from mpispeed.launch.probes_ranks import (
    Place,
    check_gpu_memory,
    find_place,
    format_cores,
    judge_binding,
    judge_clocks,
    judge_job,
    judge_pmi,
    judge_world,
)
from mpispeed.launch.probes_slurm import check_requeue, check_settings, check_slurm, check_time, parse, seconds_of
from mpispeed.mesh.probe import numa_of, parse_cores

# -- processes of their own ------------------------------------------------------------------------------------------


def test_answers_and_reasons():
    assert ask(["-c", "print('noise'); print('[1, 2]')"], seconds=30) == ([1, 2], "")
    assert ask(["-c", "raise SystemExit('no library')"], seconds=30) == (None, "no library")
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    assert ask(["-c", crash], seconds=30) == (None, "ended by SIGSEGV")
    assert ask(["-c", "raise SystemExit(3)"], seconds=30) == (None, "ended with exit code 3 and without a word")
    assert run(["/no/such/program"], seconds=1)[1] == "/no/such/program cannot be started: No such file or directory"


def test_a_process_that_hangs_is_ended_with_its_children(tmp_path, monkeypatch):
    code = (
        "import signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\ntime.sleep(600)"
    )
    monkeypatch.setattr(probes, "KILL_SECONDS", 0.5)
    file = tmp_path / "pid"
    for seconds in (2, 30):
        assert ask(["-c", code], seconds=seconds) == (None, f"no answer within {seconds} s")
        if file.exists() and file.read_text():
            break  # on a busy machine it may not have come that far the first time
    pid = int(file.read_text())
    for _ in range(1200):
        if not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child of the probe lives on")


def test_files_of_the_folder_do_not_replace_modules(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit(77)")
    monkeypatch.chdir(tmp_path)
    assert ask(["-m", "mpispeed.launch.probes_folder", "."], seconds=60)[1] == ""


# -- folders ---------------------------------------------------------------------------------------------------------


def test_a_good_folder_is_good_and_stays_empty(tmp_path):
    found = {finding.name: finding for finding in check_folder(str(tmp_path))}
    for name in ("flock locks", "fcntl locks", "rename", "mmap"):
        assert found[name].verdict is Verdict.OK, found[name]
    assert "write" in found["speed"].detail
    assert list(tmp_path.iterdir()) == []


def test_memory_is_no_place_for_checkpoints():
    found = {finding.name: finding for finding in check_folder("/dev/shm")}
    assert found["file system"].verdict is Verdict.WARN
    assert "tmpfs" in found["file system"].detail


def test_a_folder_that_is_not_there():
    assert [finding.verdict for finding in check_folder("/no/such/folder")] == [Verdict.FAIL]
    assert [finding.verdict for finding in check_folder("/no/such/folder", is_asked=False)] == [Verdict.WARN]


def test_bad_file_systems_are_found(tmp_path, monkeypatch):
    """What each trial is for: locks that everybody gets, renames with a gap, writes that nobody sees."""
    monkeypatch.setattr(probes_folder.fcntl, "flock", lambda *_: None)
    real = Path.replace

    def with_a_gap(self, target):
        Path(target).unlink()
        time.sleep(0.05)
        return real(self, target)

    monkeypatch.setattr(Path, "replace", with_a_gap)
    monkeypatch.setattr(probes_folder, "RENAMES", 5)
    monkeypatch.setattr(probes_folder, "SLOW_SYNC_SECONDS", -1.0)
    found = {finding.name: finding for finding in look_at(tmp_path)}
    assert found["flock locks"].detail == "another process got the same lock"
    assert "a reader found no file" in found["rename"].detail
    assert found["fsync"].verdict is Verdict.WARN
    assert found["fcntl locks"].verdict is Verdict.OK
    assert all(found[name].cure for name in ("flock locks", "rename", "fsync"))


# -- machines --------------------------------------------------------------------------------------------------------


def test_little_room_and_too_many_threads_are_warned_about(tmp_path, monkeypatch):
    assert check_shm(tmp_path / "none").verdict is Verdict.WARN
    assert check_temp(tmp_path / "none").verdict is Verdict.FAIL
    monkeypatch.setenv("OMP_NUM_THREADS", "9999")
    assert "unset OMP_NUM_THREADS" in check_cores().cure
    small = os.statvfs_result((4096, 4096, 100, 100, 100, 10, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    assert "--shm-size" in check_shm(tmp_path).cure
    assert "TMPDIR" in check_temp(tmp_path).cure


def test_numbers_of_cores(tmp_path):
    assert parse_cores("0-2,8\n") == {0, 1, 2, 8}
    assert format_cores([8, 2, 0, 1]) == "cores 0-2,8"
    for node, text in enumerate(("0-3", "4-7", "", "x")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(text)
    assert numa_of(frozenset({3, 4}), tmp_path) == [0, 1]
    assert numa_of(frozenset({1}), tmp_path) == [0]


# -- ranks -----------------------------------------------------------------------------------------------------------


def rank(cores, host="n1", numa=(0,), **more):
    return {
        "host": host, "cores": list(cores), "numa": list(numa), "threads": "multiple",
        "library": "MPICH Version: 5.0.2", "standard": "5.0", "problem": "", "findings": [], **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "verdict", "words"),
    [
        ([rank([0, 1]), rank([2, 3])], Verdict.OK, "local rank 1: cores 2-3 (memory node 0)"),
        ([rank([0, 1]), rank([0, 1])], Verdict.WARN, "not bound: 2 ranks may run on the same 2 cores"),
        ([rank([0, 1]), rank([1, 2])], Verdict.WARN, "ranks share cores"),
        ([rank([0]), rank([0])], Verdict.WARN, "2 ranks on 1 cores"),
        ([rank([0, 1], numa=(0, 1)), rank([2, 3])], Verdict.WARN, "ranks span memory nodes"),
        ([rank([0, 1]), rank([0, 1], host="n2")], Verdict.OK, "local rank 0: cores 0-1"),
    ],
)
def test_binding(rows, verdict, words):
    (found,) = judge_binding(rows)
    assert found.verdict is verdict
    assert words in found.detail
    assert bool(found.cure) == (verdict is Verdict.WARN)


def test_world_and_allocation():
    two = [rank([0]), rank([0], host="n2")]
    place = Place(0, 2, 0)
    assert judge_world(two, place, {}).verdict is Verdict.OK
    assert "of 4 nodes of the allocation" in judge_world(two, place, {"SLURM_JOB_NUM_NODES": "4"}).detail
    assert "srun --ntasks=8" in judge_world(two, place, {"SLURM_NTASKS": "8"}).cure
    alone = [rank([0], problem="Start with srun --mpi=pmi2.")]
    found = judge_world(alone, place, {})
    assert (found.verdict, found.cure) == (Verdict.FAIL, "Start with srun --mpi=pmi2.")
    answer = {"ranks": alone, "clocks": [], "progress": None, "unseen": None}
    assert [finding.name for finding in judge_job(answer, place, {})] == ["MPI library", "world"]


def test_places_by_launcher():
    assert find_place({}) == Place(0, 1, 0)
    assert find_place({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}) == Place(
        3, 4, 1
    )
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_LOCALID": "0", "PATH": "/usr/bin"}  # fmt: skip
    assert find_place(step) == Place(1, 2, 0)


def test_clocks():
    assert judge_clocks([]).verdict is Verdict.OK
    rows = [{"host": "n2", "offset_seconds": -0.01, "trip_seconds": 1e-4}]
    assert judge_clocks(rows).verdict is Verdict.OK
    rows.append({"host": "n3", "offset_seconds": 2.5, "trip_seconds": 1e-4})
    found = judge_clocks(rows)
    assert found.verdict is Verdict.WARN
    assert "2.5 s between nodes (n3" in found.detail
    assert judge_clocks([{"host": "n3", "offset_seconds": 2.5, "trip_seconds": 6.0}]).verdict is Verdict.OK


def test_memory_of_a_gpu_is_tried_in_a_process_that_may_fail():
    assert check_gpu_memory(False).detail == "no GPU"
    if importlib.util.find_spec("torch") and not Path("/dev/nvidia0").exists():
        found = check_gpu_memory(True)  # torch raises there, as MPI may crash
        assert found.verdict is Verdict.INFO
        assert found.detail.startswith("MPI does not take memory of the GPU (")


def test_pmi():
    assert judge_pmi("Open MPI v4.1.4, package", {"PMIX_RANK": "0"}).detail == "PMIx of mpirun, for Open MPI v4.1.4"
    assert judge_pmi("MPICH", {"PMI_FD": "9", "SLURM_STEP_ID": "0"}).detail == "PMI2 of srun, for MPICH"


def test_nodes_are_merged():
    same, other = Finding("a", "x", Verdict.OK, "1"), Finding("a", "x", Verdict.WARN, "2", "do it")
    assert merge({"n1": [same], "n2": [same]}) == [same]
    found = merge({"n1": [same], "n2": [other], "n3": [other]})
    assert [(f.detail, f.place) for f in found] == [("1", "n1"), ("2", "n2, n3")]
    many = {f"n{i}": [Finding("a", "x", Verdict.OK, f"{i} GiB"), Finding("a", "y", Verdict.OK, "z")] for i in range(9)}
    assert [f.detail for f in merge(many)] == ["0 GiB (on n0; 8 others are good too)", "z"]
    many["n5"][0] = other
    assert len(merge(many)) == 10  # a warning is not hidden among many
    assert from_dict(other.as_dict()) == other


def test_nodes_with_other_libraries_fail():
    answer = {
        "ranks": [rank([0]), rank([0], host="n2", library="Open MPI v5.0.11")], "clocks": [], "unseen": ["n2"],
        "progress": {"irecv": 0.9, "iallreduce": 0.8, "between": ["n1", "n2"]},
    }  # fmt: skip
    found = {finding.name: finding for finding in judge_job(answer, Place(0, 2, 0), {})}
    assert found["MPI library"].verdict is Verdict.FAIL
    assert found["shared by nodes"].detail == "not seen by n2"
    assert found["progress"].verdict is Verdict.OK
    assert "between nodes: Irecv 90 %, Iallreduce 80 %" in found["progress"].detail


# -- SLURM -----------------------------------------------------------------------------------------------------------

JOB = "JobId=7 JobName=x\n   Requeue=1 Restarts=2 BatchFlag=1\n   RunTime=00:01:30 TimeLimit=00:05:00 TimeMin=N/A\n"


def test_times_of_slurm():
    assert seconds_of("1-02:03:04") == 93784
    assert seconds_of("02:03") == 123
    assert seconds_of("UNLIMITED") is None
    assert (check_time(parse(JOB)).verdict, check_time(parse(JOB)).detail) == (Verdict.WARN, "0:03:30 of 00:05:00")
    assert check_time({"TimeLimit": "1-00:00:00", "RunTime": "00:00:01"}).verdict is Verdict.OK
    assert check_time({"TimeLimit": "UNLIMITED", "RunTime": "00:00:01"}).verdict is Verdict.INFO
    assert check_requeue(parse(JOB)).detail == "allowed; restarts so far 2"
    assert check_requeue({"Requeue": "0"}).cure


def test_settings_of_a_site():
    settings = parse("Configuration data\nKillOnBadExit           = 0\nMpiDefault              = none\n")
    found = {finding.name: finding for finding in check_settings(settings, {})}
    assert "--kill-on-bad-exit=1" in found["KillOnBadExit"].cure
    assert "srun --mpi=pmi2" in found["MpiDefault"].cure
    found = {f.name: f for f in check_settings(settings, {"SLURM_MPI_TYPE": "pmix", "SLURM_KILL_BAD_EXIT": "1"})}
    assert [finding.verdict for finding in found.values()] == [Verdict.OK, Verdict.OK]


def test_a_controller_that_does_not_answer(tmp_path):
    fake = tmp_path / "scontrol"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    code, _, _ = call([str(fake)], seconds=5)
    assert code == 1
    found = list(check_slurm({"SLURM_JOB_ID": "7", "PATH": str(tmp_path)}))
    assert [finding.name for finding in found] == ["SLURM", "controller"]


def test_a_signal_has_its_name():
    done = subprocess.run(["sh", "-c", "kill -9 $$"], check=False)
    assert done.returncode == -signal.SIGKILL
    assert run(["sh", "-c", "kill -9 $$"], seconds=5) == (None, "ended by SIGKILL")
