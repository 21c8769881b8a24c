"""Jobs on three ranks that are killed while they save: what was there stays, what comes is whole, the next job saves.

`make soak` runs the same with MPISPEED_SOAK_KILLS kills of each kind and MPISPEED_SOAK_SEED.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import tags
from mpispeed.ckpt.format.errors import TagNotFound
from mpispeed.ckpt.node_local.fetch import find_on_nodes
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.launch.mpirun import find_mpirun
from mpispeed.mesh import sim
from tests.helpers.system import CHECKOUT
from tests.jobs import killed_save_worker as worker

ROOT = Path(__file__).resolve().parents[2]
RANKS = 3
KILLS = int(os.environ.get("MPISPEED_SOAK_KILLS", "8"))
SEED = int(os.environ.get("MPISPEED_SOAK_SEED", "5"))
SAVES = 1000
"""More than a job gets to before it is killed."""
KEPT = 3
LIMIT_SECONDS = 300
_TOLD = re.compile(r"(process \d+ \d+|begin \d+|end \d+ [\d.]+)$")


class Job:
    """The worker on three ranks, as `mpirun` starts it."""

    def __init__(self, folder, first, count, kind):
        mpirun = find_mpirun().path
        script = ROOT / "tests" / "jobs" / "killed_save_worker.py"
        argv = [mpirun, "-n", str(RANKS), sys.executable, script, folder, first, count, kind]
        # ranks share two cores with each other and with whoever else is there
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([CHECKOUT, *filter(None, sys.path)]),
            "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
        }
        self.process = subprocess.Popen(
            list(map(str, argv)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env,
            start_new_session=True,
        )  # fmt: skip
        self.watch = threading.Timer(LIMIT_SECONDS, self.kill)
        self.watch.start()
        self.pids, self.seconds, self.begun, self.ended = {}, [], [], []

    def read_until(self, is_enough):
        """Take what ranks say until `is_enough()` or the end."""
        for line in self.process.stdout:
            # mpirun has its own words on how a job ends
            what, number, *more = line.split() if _TOLD.match(line) else ("", "")
            if what == "process":
                self.pids[int(number)] = int(more[0])
            elif what == "begin":
                self.begun.append(int(number))
            elif what == "end":
                self.ended.append(int(number))
                self.seconds.append(float(more[0]))
            if is_enough():
                return

    def finish(self):
        """Wait for all processes; a job that hangs is killed and fails the test."""
        self.read_until(lambda: False)
        code = self.process.wait(LIMIT_SECONDS)
        assert self.watch.is_alive(), f"the job still ran after {LIMIT_SECONDS} s"
        return code

    def end(self):
        """Let nothing run on."""
        self.watch.cancel()
        self.kill()
        self.process.wait(LIMIT_SECONDS)
        self.process.stdout.close()

    def kill(self):
        """All its processes, whatever they are at."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                if b"killed_save_worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)


def content_problem(folder, number, is_over, tag=None):
    """What differs between a tag and what was saved as `number`; "" when all of it is equal, bit for bit."""
    with open_checkpoint(folder, tag or worker.tag_of(number, is_over)) as checkpoint:
        if checkpoint.state()["client"] != {"number": number} or checkpoint.global_step != number:
            return "state"
        if checkpoint.rng("cpu") != [bytes([number % 256, rank]) for rank in range(RANKS)]:
            return "generators"
        for param in range(worker.PARAMS):
            for slot in worker.SLOTS:
                if not torch.equal(
                    checkpoint.read_whole(f"layer{param}.weight", slot), worker.value_of(number, param, slot)
                ):
                    return f"layer{param}.weight/{slot}"
    return ""


def number_in(folder, tag):
    """Which checkpoint a tag holds."""
    with open_checkpoint(folder, tag) as checkpoint:
        return checkpoint.global_step


def numbers_in(folder):
    """Which checkpoint each tag holds."""
    whole = (entry.tag for entry in tags.list_tags(folder) if entry.status in ("ok", "recoverable"))
    return {tag: number_in(folder, tag) for tag in whole}


def kill_once(folder, first, kind, pick):
    """Start a job, kill a random rank at a random moment of a random save; returns (job, what was done)."""
    job = Job(folder, first, SAVES, kind)
    try:
        calm = pick.randint(1, 4)
        job.read_until(lambda: len(job.begun) > calm and len(job.pids) == RANKS)
        assert len(job.begun) > calm, "the job ended by itself"
        typical = sorted(job.seconds)[len(job.seconds) // 2]
        victim, wait = pick.randrange(RANKS), pick.random() * typical * 1.2
        time.sleep(wait)
        os.kill(job.pids[victim], signal.SIGKILL)
        code = job.finish()
    finally:
        job.end()
    assert code != 0, "a job that lost a rank ended as if nothing had happened"
    return (
        job,
        f"rank {victim} {wait:.4f} s into save {job.begun[calm]} (typical {typical:.4f} s), last {job.begun[-1]}",
    )


def check_after(folder, job, is_over, held):
    """Everything but the save under way is as it was; that one is absent or whole. Returns its state.

    `held` is what tags held when the job began.
    """
    under_way = job.begun[-1] if job.begun[-1] not in job.ended else None
    last = job.ended[-1]
    entries = tags.list_tags(folder)
    assert all(entry.status in ("ok", "partial", "recoverable") for entry in entries), entries
    whole = {entry.tag for entry in entries if entry.status in ("ok", "recoverable")}
    latest = tags.read_latest(folder)
    found = number_in(folder, None)
    assert latest in whole
    assert found in {last, under_way}, f"latest holds {found}"
    assert content_problem(folder, found, is_over, latest) == ""
    assert content_problem(folder, last, is_over) == "", f"save {last} was complete and is not any more"
    state = "none under way"
    if under_way is not None:
        tag = worker.tag_of(under_way, is_over)
        before = {**held, **{worker.tag_of(number, is_over): number for number in job.ended}}.get(tag)
        try:
            number = number_in(folder, tag)
        except CheckpointError:
            number = None
            assert before is None, f"{tag} was there before and is gone"
        else:
            assert number in {under_way, before}
            assert content_problem(folder, number, is_over) == ""
        state = "absent" if number is None else "whole" if number == under_way else "as before"
    work = [path.name for path in folder.iterdir() if ".tmp-" in path.name and path.is_dir()]
    listed = [entry.path.name for entry in entries if entry.status == "partial"]
    assert set(work) <= set(listed)
    return f"{state}, {len(work)} work folders"


def clear_old(folder):
    """Room for the next round: all but the newest tags, and what killed jobs left."""
    for entry in tags.list_tags(folder):
        if entry.status == "partial":
            shutil.rmtree(entry.path)
    tags.retain(folder, KEPT)


@pytest.mark.parametrize("is_over", [False, True], ids=["new tags", "overwrite"])
def test_kills_at_random_moments(tmp_path, is_over):
    pick = random.Random(SEED + is_over)
    kills = KILLS if "MPISPEED_SOAK_KILLS" in os.environ else KILLS // 2
    sys.stdout.write(f"seed {SEED}, {kills} kills\n")
    first, outcomes = 0, []
    for kill in range(kills):
        held = numbers_in(tmp_path)
        job, what = kill_once(tmp_path, first, "overwrite" if is_over else "new", pick)
        sys.stdout.write(f"kill {kill}: {what}: ")
        state = check_after(tmp_path, job, is_over, held)
        sys.stdout.write(state + "\n")
        outcomes.append(state)
        # the first saves of the next job must succeed on top of what this one left; `kill_once` waits for them
        assert job.ended[0] == first
        first = job.begun[-1] + worker.NAMES
        first += (job.begun[-1] - first) % worker.NAMES if is_over else 0
        if kill % 4 == 3:
            clear_old(tmp_path)
    last = Job(tmp_path, first, 1, "overwrite" if is_over else "new")
    try:
        assert last.finish() == 0
    finally:
        last.end()
    assert content_problem(tmp_path, first, is_over) == ""
    assert tags.read_latest(tmp_path) == worker.tag_of(first, is_over)
    assert any("whole" in state or "absent" in state or "before" in state for state in outcomes), "no kill hit a save"


def found_on_nodes(nodes, tag):
    """What a job with the same nodes finds; None where they have nothing."""

    def find(world):
        try:
            return find_on_nodes(world.comm, nodes[world.rank], tag)
        except TagNotFound:
            return None

    return sim.run(len(nodes), find)


def check_nodes(nodes, job):
    """Each node has the last complete save; the one under way is on none or, after a load, whole on all."""
    last = job.ended[-1]
    under_way = job.begun[-1] if job.begun[-1] not in job.ended else None
    for node in nodes:
        assert {entry.status for entry in tags.list_tags(node)} <= {"ok", "partial"}
        assert content_problem(node, last, is_over=False) == ""
    had = [under_way is not None and (node / worker.tag_of(under_way, is_over=False)).exists() for node in nodes]
    newest = found_on_nodes(nodes, None)
    assert len({opened.manifest.uuid for opened in newest}) == 1
    assert newest[0].manifest.global_step in {last, under_way}
    if under_way is None:
        return "none under way"
    found = found_on_nodes(nodes, worker.tag_of(under_way, is_over=False))
    if not any(had):
        assert found == [None] * len(nodes)
        return "absent"
    for opened, node in zip(found, nodes, strict=True):
        assert opened.path.parent == node
        assert content_problem(node, under_way, is_over=False) == ""
    return f"whole, at first on {sum(had)} of {len(nodes)} nodes"


def test_kills_where_every_node_has_its_own_disk(tmp_path):
    pick = random.Random(SEED + 2)
    kills = KILLS if "MPISPEED_SOAK_KILLS" in os.environ else KILLS // 4
    nodes = [worker.folder_of(tmp_path, rank, "nodes") for rank in range(RANKS)]
    first = 0
    for kill in range(kills):
        job, what = kill_once(tmp_path, first, "nodes", pick)
        sys.stdout.write(f"kill {kill}: {what}: ")
        sys.stdout.write(check_nodes(nodes, job) + "\n")
        assert job.ended[0] == first
        first = job.begun[-1] + 1
        for node in nodes:
            clear_old(node)
        if kill % 2 == 1:
            shutil.rmtree(nodes[pick.randrange(RANKS)])
            assert all(opened is not None for opened in found_on_nodes(nodes, None))
    last = Job(tmp_path, first, 1, "nodes")
    try:
        assert last.finish() == 0
    finally:
        last.end()
    for node in nodes:
        assert content_problem(node, first, is_over=False) == ""
