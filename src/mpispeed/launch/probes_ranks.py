"""Probes of ranks and their MPI: they form one world, are bound well, and MPI works while they compute."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpispeed.base.errors import MpispeedError
from mpispeed.launch import srun
from mpispeed.launch.bind import local_place
from mpispeed.launch.command import plan_launch
from mpispeed.launch.findings import Finding, Verdict, from_dict, list_names, merge
from mpispeed.launch.mpirun import find_mpirun
from mpispeed.launch.probes import Answer, ask, call

AREA = "ranks"
SECONDS = 90.0
JOIN_SECONDS = 600.0
"""Time that ranks wait for the first one of each node, which looks at software, GPU and folder before it joins."""

LATE_CLOCK_SECONDS = 0.1
PROGRESS_PART = 0.5

_PROBE = ("-m", "mpispeed.mesh.probe")
_MPI = """
import json
from mpi4py import MPI
print(json.dumps(" ".join(MPI.Get_library_version().split("\\n")[0].strip(" \\0").split())))
"""
# Variables that a launcher sets for its ranks, and that a process alone must not see.
_OF_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL", "PALS_")
_SIZES = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))


@dataclass(frozen=True, slots=True)
class Place:
    """This process's place by the variables of its launcher; a size of 1 is a process alone."""

    rank: int
    size: int
    local_rank: int


def find_place(environ: Mapping[str, str] = os.environ) -> Place:
    """Find this process's place by its launcher; the batch script of SLURM is no rank."""
    names = list(_SIZES)
    if not srun.is_inside_allocation(environ):
        names.append(("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
    for rank, size in names:
        if environ.get(rank, "").isdigit() and environ.get(size, "").isdigit():
            return Place(int(environ[rank]), int(environ[size]), local_place(environ)[0])
    return Place(0, 1, 0)


# -- alone -----------------------------------------------------------------------------------------------------------


def check_pair(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """The MPI in use, and the findings of two ranks started for this check."""
    if any(size in environ for _, size in _SIZES):  # a world of one inside of an mpirun starts another
        environ = _without_launcher(environ, _OF_LAUNCHERS)
    library, reason = ask(["-c", _MPI], seconds=SECONDS, environ=environ)
    if library is None:
        cure = 'pip install "mpispeed[mpich]", or load the site\'s MPI module'
        yield Finding(AREA, "MPI library", Verdict.FAIL, reason, cure)
        return
    try:
        if not srun.is_inside_allocation(environ):
            mpirun = find_mpirun(environ=environ)
            yield Finding(AREA, "mpirun", Verdict.OK, f"{mpirun.family.value} at {mpirun.path}")
        yield from _check_started_pair(environ)
    except MpispeedError as error:
        yield Finding(AREA, "MPI library", Verdict.OK, str(library))
        yield Finding(AREA, "mpirun", Verdict.FAIL, str(error), "load the site's MPI module")


def _check_started_pair(environ: Mapping[str, str]) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix="mpispeed-doctor-") as folder:
        answer = Path(folder) / "answer"
        launch = plan_launch([sys.executable, *_PROBE, "ranks", str(answer)], 2, environ=environ)
        code, out, err = call(launch.argv, seconds=SECONDS, environ={**environ, **launch.added})
        found = read_answer(answer, code, out, err)
    yield from judge_pair(found, launch.describe())


def read_answer(file: Path, code: int | None, out: str, err: str) -> Answer:
    """Read rank 0's answer from `file`, or the reason why there is none."""
    try:
        return json.loads(file.read_text()), ""
    except (OSError, ValueError):
        lines = [line.strip() for line in (err.strip() or out.strip()).splitlines() if line.strip()]
        return None, lines[-1] if lines else f"ended with exit code {code} and without an answer"


def judge_pair(found: Answer, command: str) -> Iterator[Finding]:
    """Findings of two ranks started for this check."""
    answer, reason = found
    if answer is None:
        yield Finding(AREA, "world of 2", Verdict.FAIL, reason, f"try by hand: {command}")
        return
    ranks = answer["ranks"]
    yield _judge_library(ranks)
    if len(ranks) == 2:
        yield Finding(AREA, "world of 2", Verdict.OK, "two ranks that were started see each other")
    else:
        cure = ranks[0]["problem"] or "set MPI4PY_MPIABI or MPI4PY_LIBMPI, or use the mpirun of that library"
        what = "each rank is alone: launcher and library are of different MPIs"
        yield Finding(AREA, "world of 2", Verdict.FAIL, what, cure)
        return
    yield from _judge_threads(ranks)
    yield from _judge_progress(answer["progress"], ranks)


# -- as ranks --------------------------------------------------------------------------------------------------------


def look_as_rank(
    place: Place, own: Sequence[Finding], folder: str, environ: Mapping[str, str] = os.environ
) -> list[Finding]:
    """Send this rank's findings to rank 0, in a process that joins MPI; there, return findings of the whole job.

    Collective over: all ranks of the job. Elsewhere the result is empty.
    """
    with tempfile.TemporaryDirectory(prefix="mpispeed-doctor-") as room:
        answer, findings = Path(room) / "answer", Path(room) / "findings"
        findings.write_text(json.dumps([finding.as_dict() for finding in own]))
        words = [sys.executable, *_PROBE, "ranks", str(answer), str(findings), folder]
        code, out, err = call(words, seconds=JOIN_SECONDS, is_rank=True)
        found = read_answer(answer, code, out, err)
    if place.rank:
        return []
    if found[0] is None:
        cure = (
            "launcher and library may be of different MPIs: MPI4PY_MPIABI chooses the library; `mpispeed doctor` "
            "without a launcher shows both"
        )
        return [*own, Finding(AREA, "world", Verdict.FAIL, f"{place.size} ranks did not meet: {found[1]}", cure)]
    return list(judge_job(found[0], place, environ))


def judge_job(answer: Mapping[str, Any], place: Place, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Findings of all nodes, and of the ranks together."""
    ranks = answer["ranks"]
    by_node: dict[str, list[Finding]] = {}
    for row in ranks:
        by_node.setdefault(row["host"], []).extend(map(from_dict, row["findings"]))
    # Which rank is the first of its node is not always told; then all have looked at it, and one is enough.
    by_node = {host: list({(f.area, f.name): f for f in found}.values()) for host, found in by_node.items()}
    yield from merge(by_node)
    yield _judge_library(ranks)
    yield judge_world(ranks, place, environ)
    if len(ranks) < place.size:
        return
    yield judge_pmi(ranks[0]["library"], environ)
    yield from _judge_threads(ranks)
    yield from judge_binding(ranks)
    yield judge_clocks(answer["clocks"])
    yield from _judge_progress(answer["progress"], ranks)
    if answer["unseen"] is not None:
        yield _judge_shared(answer["unseen"])
    if answer.get("ways") is not None:
        yield judge_ways(answer["ways"])


def _judge_library(ranks: Sequence[Mapping[str, Any]]) -> Finding:
    kinds = sorted({f"{row['library']}, MPI {row['standard']}" for row in ranks})
    if len(kinds) == 1:
        return Finding(AREA, "MPI library", Verdict.OK, kinds[0])
    cure = "load the same MPI module on all nodes, before the job starts"
    return Finding(AREA, "MPI library", Verdict.FAIL, f"nodes have different ones: {'; '.join(kinds)}", cure)


def judge_world(ranks: Sequence[Mapping[str, Any]], place: Place, environ: Mapping[str, str]) -> Finding:
    """Check that the world is the launcher's, and that the launcher uses the allocation."""
    if len(ranks) != place.size:
        what = f"the launcher started {place.size} ranks, MPI sees {len(ranks)}"
        return Finding(AREA, "world", Verdict.FAIL, what, ranks[0]["problem"])
    hosts = list(dict.fromkeys(row["host"] for row in ranks))
    text = f"{len(ranks)} ranks on {len(hosts)} node{'s' * (len(hosts) > 1)} ({list_names(hosts)})"
    nodes, tasks = environ.get("SLURM_JOB_NUM_NODES", ""), environ.get("SLURM_NTASKS", "")
    if nodes.isdigit() and int(nodes) > len(hosts):
        cure = f"srun --nodes={nodes}, or ask for fewer nodes"
        return Finding(AREA, "world", Verdict.WARN, f"{text}, of {nodes} nodes of the allocation", cure)
    if tasks.isdigit() and int(tasks) > len(ranks):
        cure = f"srun --ntasks={tasks}, or ask for fewer tasks"
        return Finding(AREA, "world", Verdict.WARN, f"{text}, of {tasks} tasks of the allocation", cure)
    return Finding(AREA, "world", Verdict.OK, f"{text}, as the launcher started them")


def judge_ways(found: Mapping[str, Any]) -> Finding:
    """The way of tensors of GPUs between ranks that a run would take."""
    if "problem" in found:
        cure = "runs keep these tensors in host memory where a way cannot be opened"
        return Finding(AREA, "tensors of GPUs", Verdict.WARN, f"no way could be chosen: {found['problem']}", cure)
    return Finding(AREA, "tensors of GPUs", Verdict.OK, "; ".join([found["choice"], *found["figures"]]))


def judge_pmi(library: str, environ: Mapping[str, str]) -> Finding:
    """The interface through which ranks found each other."""
    is_slurm = "SLURM_STEP_ID" in environ and not srun.is_inside_allocation(environ)
    starter = "srun" if is_slurm and "HYDI_CONTROL_FD" not in environ else "mpirun"
    if "PMIX_RANK" in environ:
        text = f"PMIx of {starter}"
    elif "PMI_FD" in environ or "PMI_PORT" in environ:
        text = f"{'PMI2' if starter == 'srun' else 'PMI'} of {starter}"
    else:
        text = f"not told by the variables of {starter}"
    return Finding(AREA, "PMI", Verdict.OK, f"{text}, for {library.split(',')[0]}")


def _judge_threads(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    levels = sorted({row["threads"] for row in ranks})
    if levels == ["multiple"]:
        yield Finding(AREA, "thread level", Verdict.OK, "MPI_THREAD_MULTIPLE")
        return
    cure = "gradients are not summed beside the backward pass without it; use a library with MPI_THREAD_MULTIPLE"
    yield Finding(AREA, "thread level", Verdict.WARN, f"only {', '.join(levels)}", cure)


def judge_binding(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Cores of the ranks, node by node; nodes that are alike are one line."""
    by_host: dict[str, list[Mapping[str, Any]]] = {}
    for row in ranks:
        by_host.setdefault(row["host"], []).append(row)
    yield from merge({host: [_judge_node(rows)] for host, rows in by_host.items()})


def _judge_node(rows: Sequence[Mapping[str, Any]]) -> Finding:
    cores = [frozenset(row["cores"]) for row in rows]
    said = [f"local rank {place}: {format_cores(row['cores'])}{_numa(row['numa'])}" for place, row in enumerate(rows)]
    text = list_names(said, most=4)
    every = frozenset().union(*cores)
    if len(rows) > len(every):
        cure = "ranks wait for each other's cores; start fewer ranks on a node, or ask for more cores"
        return Finding(AREA, "binding", Verdict.WARN, f"{len(rows)} ranks on {len(every)} cores", cure)
    shared = sum(len(own) for own in cores) > len(every)
    if shared and len(set(cores)) == 1:
        what = f"not bound: {len(rows)} ranks may run on the same {len(every)} cores{_numa(rows[0]['numa'])}"
        return Finding(AREA, "binding", Verdict.WARN, what, _BIND)
    if shared:
        return Finding(AREA, "binding", Verdict.WARN, f"ranks share cores; {text}", _BIND)
    if any(len(row["numa"]) > 1 for row in rows) and len(rows) > 1:
        cure = "give each rank the cores of one memory node: its own memory is nearer then"
        return Finding(AREA, "binding", Verdict.WARN, f"ranks span memory nodes; {text}", cure)
    return Finding(AREA, "binding", Verdict.OK, text)


_BIND = "`mpispeed run --bind cores`, `srun --cpu-bind=cores --cpus-per-task=N`, or the binding flag of mpirun"


def _numa(nodes: Sequence[int]) -> str:
    return f" (memory node {','.join(map(str, nodes))})" if nodes else ""


def format_cores(cores: Sequence[int]) -> str:
    """0-3,8: runs of numbers."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return "cores " + ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def judge_clocks(rows: Sequence[Mapping[str, Any]]) -> Finding:
    """Check that the clocks of nodes agree."""
    if not rows:
        return Finding(AREA, "clocks", Verdict.OK, "one node, one clock")
    worst = max(rows, key=lambda row: abs(row["offset_seconds"]))
    off, trip = worst["offset_seconds"], worst["trip_seconds"]
    text = f"at most {abs(off):.2g} s between nodes ({worst['host']}; estimated within {trip / 2:.2g} s)"
    if abs(off) - trip / 2 > LATE_CLOCK_SECONDS:
        cure = "merged logs and times of files are out of order; have chrony or ntpd run on the nodes"
        return Finding(AREA, "clocks", Verdict.WARN, text, cure)
    return Finding(AREA, "clocks", Verdict.OK, text)


def _judge_progress(found: Mapping[str, Any] | None, ranks: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    if found is None:
        return
    near = "on one node" if found["between"][0] == found["between"][1] else "between nodes"
    parts = {name: found[name] for name in ("irecv", "iallreduce")}
    text = ", ".join(f"{name.capitalize()} {100 * part:.0f} %" for name, part in parts.items())
    text = f"done while a rank computes, {near}: {text}"
    if min(parts.values()) >= PROGRESS_PART:
        yield Finding(AREA, "progress", Verdict.OK, text)
    elif all(row["threads"] == "multiple" for row in ranks):
        what = "the library makes little progress by itself; a thread of mpispeed does it instead"
        yield Finding(AREA, "progress", Verdict.INFO, f"{text}; {what}")
    else:
        cure = "without MPI_THREAD_MULTIPLE nothing overlaps; set zero_optimization.overlap_comm to false"
        yield Finding(AREA, "progress", Verdict.WARN, text, cure)


def _judge_shared(unseen: Sequence[str]) -> Finding:
    if not unseen:
        return Finding("folder", "shared by nodes", Verdict.OK, "all nodes see a new file of rank 0")
    what = f"not seen by {list_names(unseen)}"
    cure = "checkpoints need a folder of a file system that all nodes have; choose it with --folder"
    return Finding("folder", "shared by nodes", Verdict.WARN, what, cure)


# -- memory of GPUs --------------------------------------------------------------------------------------------------


def _without_launcher(environ: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith(prefixes)}


def check_gpu_memory(has_gpu: bool, environ: Mapping[str, str] = os.environ) -> Finding:
    """Check that MPI takes memory of a GPU directly, in a process that may crash."""
    if not has_gpu:
        return Finding(AREA, "MPI and GPU memory", Verdict.INFO, "no GPU")
    alone = _without_launcher(environ, (*_OF_LAUNCHERS, "SLURM_"))
    found, reason = ask([*_PROBE, "gpu"], seconds=SECONDS, environ=alone)
    if isinstance(found, dict) and found["is_right"]:
        return Finding(AREA, "MPI and GPU memory", Verdict.OK, "a message from and to memory of the GPU arrived")
    why = reason or "it brought other bytes"
    cure = "data go through host memory; for a GPU-aware MPI see the site's documentation"
    return Finding(AREA, "MPI and GPU memory", Verdict.INFO, f"MPI does not take memory of the GPU ({why})", cure)
