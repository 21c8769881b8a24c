"""Memory limits, peaks and kills by the kernel, in trees of files like the kernel's and in the kernel's own."""

import os
import signal
import subprocess
import sys
import time

import pytest

from mpispeed.watchdog.exits import Death, explain
from mpispeed.watchdog.memory import Groups, kernel_kill, memory_facts
from tests.helpers.memory_group import limited_group

GIB = 1 << 30


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(tmp_path):
    """A tree of /proc for process 42, and where control groups are mounted."""
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    write(proc / "42/status", "Name:\tpython\nVmHWM:\t 2097152 kB\nVmRSS:\t 1048576 kB\n")
    write(proc / "42/limits", "Limit Soft Limit Hard Limit Units\nMax address space  8589934592  unlimited bytes\n")
    write(proc / "meminfo", "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 4194304 kB\n")
    write(proc / "vmstat", "pgfault 12\noom_kill 3\n")
    return proc, groups


def mount(proc, where, kind, options, root="/"):
    path = proc / "self/mountinfo"
    before = path.read_text() if path.exists() else ""
    write(path, f"{before}30 20 0:30 {root} {where} rw,relatime shared:1 - {kind} {kind} rw{options}\n")


def test_nested_groups_of_slurm_in_version_2(machine):
    proc, groups = machine
    mount(proc, groups, "cgroup2", "")
    write(proc / "42/cgroup", "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n")
    job = groups / "system.slice/slurmstepd.scope/job_7"
    for folder, limit in ((job, str(4 * GIB)), (job / "step_0", str(3 * GIB)), (job / "step_0/user", "max"),
                          (job / "step_0/user/task_0", "max")):  # fmt: skip
        write(folder / "memory.max", f"{limit}\n")
        write(folder / "memory.current", f"{GIB}\n")
        write(folder / "memory.peak", f"{2 * GIB}\n")
        write(folder / "memory.events", "low 0\nhigh 0\nmax 12\noom 4\noom_kill 2\noom_group_kill 0\n")
    write(job / "memory.events", "oom 90\noom_kill 80\n")  # of other steps too
    facts = memory_facts(42, proc=proc)
    assert facts.limit_bytes == 3 * GIB
    assert facts.group == "/system.slice/slurmstepd.scope/job_7/step_0"
    assert (facts.usage_bytes, facts.group_peak_bytes, facts.kills, facts.node_kills) == (GIB, 2 * GIB, 2, 3)
    assert facts.limit_hits == 4
    assert (facts.resident_bytes, facts.peak_bytes, facts.address_limit_bytes) == (GIB, 2 * GIB, 8 * GIB)
    assert (facts.total_bytes, facts.available_bytes) == (8 * GIB, 4 * GIB)
    assert "limit 3 GiB of /system.slice/slurmstepd.scope/job_7/step_0" in facts.describe()


def test_version_1_beside_an_empty_version_2(machine):
    proc, groups = machine
    mount(proc, groups / "memory", "cgroup", ",memory")
    mount(proc, groups / "unified", "cgroup2", "")
    (groups / "unified").mkdir(parents=True)
    write(proc / "42/cgroup", "4:memory:/slurm/uid_0/job_7/step_0\n3:cpu,cpuacct:/\n0::/\n")
    step = groups / "memory/slurm/uid_0/job_7/step_0"
    for folder, limit in ((step, 9223372036854771712), (step.parent, 2 * GIB), (groups / "memory", 1 << 63)):
        write(folder / "memory.limit_in_bytes", f"{limit}\n")
        write(folder / "memory.usage_in_bytes", "4096\n")
        write(folder / "memory.max_usage_in_bytes", "8192\n")
    write(step / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    facts = memory_facts(42, proc=proc)
    assert (facts.limit_bytes, facts.group) == (2 * GIB, "/slurm/uid_0/job_7")
    assert (facts.usage_bytes, facts.group_peak_bytes, facts.kills) == (4096, 8192, 1)


def test_a_container_that_sees_its_own_group_as_the_top(machine):
    proc, groups = machine
    mount(proc, groups, "cgroup2", "", root="/docker/abc")
    write(proc / "42/cgroup", "0::/docker/abc\n")
    write(groups / "memory.max", f"{GIB}\n")
    write(groups / "memory.current", "1\n")
    facts = memory_facts(42, proc=proc)
    assert (facts.limit_bytes, facts.group, facts.group_peak_bytes) == (GIB, "/", None)


def test_what_cannot_be_known_is_none(tmp_path):
    facts = memory_facts(42, proc=tmp_path, shm=tmp_path / "none")
    assert [value for key, value in facts.as_dict().items() if key not in ("pid", "group")] == [None] * 14
    assert facts.describe() == "nothing is known of its memory"


def test_the_kernels_log_names_whom_it_killed(tmp_path):
    now_us = int(1e6 * time.clock_gettime(time.CLOCK_BOOTTIME))
    held = "total-vm:9kB, anon-rss:64kB, file-rss:7kB, shmem-rss:1kB"
    said = f"Memory cgroup out of memory: Killed process {{}} (python) {held}"
    log = tmp_path / "kmsg"
    log.write_text(f"3,1,{now_us},-;{said.format(42)}\n")
    assert kernel_kill(42, log) == (65 << 10, True)
    assert kernel_kill(4, log) is None
    log.write_text(f"3,1,{now_us - 10**10},-;{said.format(42)}\n")
    assert kernel_kill(42, log) is None  # some other process had that number
    assert kernel_kill(42, tmp_path / "none") is None


def test_this_process():
    facts = memory_facts(os.getpid())
    assert facts.resident_bytes <= facts.peak_bytes < facts.total_bytes
    assert facts.node_kills is not None


HUNGRY = "import sys\nsys.stdin.read(1)\nheld = []\nwhile True: held.append(bytearray(b'x' * (1 << 22)))\n"


def test_a_process_that_the_kernel_kills_at_its_limit_is_told_from_one_that_is_killed():
    deaths = []
    with limited_group(64 << 20) as (folder, reason):
        if folder is None:
            pytest.skip(reason)
        for rank in (0, 1):
            child = subprocess.Popen([sys.executable, "-c", HUNGRY], stdin=subprocess.PIPE)
            (folder / "cgroup.procs").write_text(str(child.pid))
            groups = Groups.of(child.pid)
            before = groups.facts(child.pid)
            if rank == 0:
                child.send_signal(signal.SIGKILL)
                child.communicate()
            else:
                child.communicate(b"g")
            after = groups.facts(child.pid)
            assert child.returncode == -9
            deaths.append(Death(rank, pid=child.pid, signal=9, memory_before=before, memory_after=after))
    killed, starved = explain(deaths[:1]), explain(deaths[1:])
    assert (killed.kind, starved.kind) == ("killed", "memory_limit")
    assert "64 MiB" in starved.reason
    assert f"/mpispeed-test-{os.getpid()}" in starved.reason
    assert "--mem" in starved.cure
    assert explain(deaths).rank == 1
