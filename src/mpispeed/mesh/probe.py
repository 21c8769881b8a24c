"""Probe of the ranks for `mpispeed doctor`: size of the world, cores, clocks, progress, memory of GPUs.

    python -m mpispeed.mesh.probe ranks ANSWER [FINDINGS [FOLDER]]
    python -m mpispeed.mesh.probe gpu

The first is started on every rank, writes what rank 0 collected to the file ANSWER, as JSON, and tries what it tries
with MPI alone, without the verbs of this package: it has to work where these do not. FINDINGS is a file with what this
rank's node has found already. The second stands alone and is allowed to crash: that is an answer too.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import ConfigError, MpispeedError
from mpispeed.mesh import launcher

if TYPE_CHECKING:
    from mpi4py import MPI

MESSAGE_BYTES = 8 << 20
TRIALS = 5
PINGS = 20
LEAST_SECONDS = 0.03
SLOW_SECONDS = 0.5
SEEN_SECONDS = 5.0
WAYS_SECONDS = 60.0

UNFINISHED = {"problem": "the ranks ended, or were ended, while they tried"}
"""Stands in the answer until ways have been tried, in case that a driver ends the process."""


def main(words: list[str]) -> None:
    """Run the command named on the command line."""
    if words[0] == "gpu":
        sys.stdout.write(json.dumps(try_gpu()) + "\n")
        return
    found = look_around(*words[2:])
    if found is not None:
        Path(words[1]).write_text(json.dumps(found | ({"ways": UNFINISHED} if _sees_gpus(found["ranks"]) else {})))
    ways = _try_ways(found)
    if found is not None and ways is not None:
        Path(words[1]).write_text(json.dumps(found | {"ways": ways}))


def look_around(findings: str = "", folder: str = "") -> dict[str, Any] | None:
    """Findings of all ranks, on rank 0; None elsewhere. Collective over: all ranks of the job."""
    from mpi4py import MPI  # joins

    world = MPI.COMM_WORLD
    own = _own_facts(MPI)
    own["findings"] = json.loads(Path(findings).read_text()) if findings else []
    ranks = world.gather(own)
    hosts = world.allgather(own["host"])
    leaders = sorted({hosts.index(host) for host in hosts})
    answers = world.bcast(_answers_everywhere(ranks) if ranks is not None else None)
    found = {
        "ranks": ranks,
        "clocks": _compare_clocks(MPI, leaders, hosts),
        "progress": _try_progress(MPI, hosts),
        "unseen": _find_unseen(MPI, folder, leaders, hosts) if folder and answers and len(leaders) > 1 else None,
    }
    return found if world.Get_rank() == 0 else None


def _answers_everywhere(ranks: list[dict[str, Any]]) -> bool:
    """True if the folder was usable on every node: a file system that hangs would hang all ranks here."""
    rows = [row for facts in ranks for row in facts["findings"] if (row["area"], row["name"]) == ("folder", "folder")]
    return all(row["verdict"] in ("ok", "info") for row in rows)


def _sees_gpus(ranks: list[dict[str, Any]]) -> bool:
    """True if torch sees a GPU on some node; its first rank has looked."""
    rows = [row for facts in ranks for row in facts["findings"] if (row["area"], row["name"]) == ("software", "GPU")]
    return any(row["verdict"] == "ok" for row in rows)


def _own_facts(mpi: Any) -> dict[str, Any]:
    levels = {mpi.THREAD_SINGLE: "single", mpi.THREAD_FUNNELED: "funneled", mpi.THREAD_SERIALIZED: "serialized",
              mpi.THREAD_MULTIPLE: "multiple"}  # fmt: skip
    library = mpi.Get_library_version()
    problem = ""
    try:
        launcher.check(mpi.COMM_WORLD.Get_size(), library)
    except ConfigError as error:
        problem = str(error)
    return {
        "rank": mpi.COMM_WORLD.Get_rank(), "size": mpi.COMM_WORLD.Get_size(), "host": socket.gethostname(),
        "library": " ".join(library.split("\n")[0].strip(" \0").split()),
        "standard": ".".join(map(str, mpi.Get_version())),
        "threads": levels[mpi.Query_thread()], "problem": problem, "cores": sorted(launcher.cores()),
        "numa": numa_of(launcher.cores()), "total_cores": os.cpu_count() or 1,
        "omp_threads": os.environ.get("OMP_NUM_THREADS", ""),
    }  # fmt: skip


def numa_of(cores: frozenset[int], root: Path = Path("/sys/devices/system/node")) -> list[int]:
    """Numbers of the memory nodes that have these cores; empty where the system does not tell."""
    found = []
    for file in root.glob("node*/cpulist"):
        try:
            own = parse_cores(file.read_text())
        except (OSError, ValueError):
            continue
        if not own.isdisjoint(cores):
            found.append(int(file.parent.name.removeprefix("node")))
    return sorted(found)


def parse_cores(text: str) -> frozenset[int]:
    """Numbers of a list such as 0-3,8."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


# -- between ranks ---------------------------------------------------------------------------------------------------


def _rest(comm: MPI.Comm) -> None:
    """A barrier whose ranks sleep, so that they do not disturb those that measure. Collective over: `comm`."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.005)


def _compare_clocks(mpi: Any, leaders: list[int], hosts: list[str]) -> list[dict[str, Any]]:
    """Offsets between the clocks of other nodes and that of rank 0, by the fastest of some round trips.

    Collective over: all ranks. Units: seconds; the true offset is at most half a round trip away.
    """
    world, rows = mpi.COMM_WORLD, []
    rank = world.Get_rank()
    for other in leaders:
        if other == 0:
            continue
        if rank == 0:
            rows.append({"host": hosts[other], **_ping(world, other)})
        elif rank == other:
            for _ in range(PINGS):
                world.recv(source=0)
                world.send(time.time(), dest=0)
    _rest(world)
    return rows


def _ping(world: MPI.Comm, other: int) -> dict[str, float]:
    best = (float("inf"), 0.0)
    for _ in range(PINGS):
        begin, clock = time.perf_counter(), time.time()
        world.send(None, dest=other)
        theirs = world.recv(source=other)
        trip = time.perf_counter() - begin
        best = min(best, (trip, theirs - (clock + trip / 2)))
    return {"offset_seconds": best[1], "trip_seconds": best[0]}


def _try_progress(mpi: Any, hosts: list[str]) -> dict[str, Any] | None:
    """Progress of a started operation while its ranks compute, between two ranks; of two nodes if there are.

    Collective over: all ranks.
    """
    world = mpi.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    if size == 1:
        return None
    other = next((place for place in range(size) if hosts[place] != hosts[0]), 1)
    is_one = rank in (0, other)
    pair = world.Split(0 if is_one else 1, rank)
    found: dict[str, Any] | None = None
    if is_one:
        found = {"between": [hosts[0], hosts[other]], **_measure_progress(mpi, pair)}
    pair.Free()
    _rest(world)
    return found


def _measure_progress(mpi: Any, pair: MPI.Comm) -> dict[str, float]:
    """Parts of `Irecv` and `Iallreduce` that are done before the wait: 0 none, 1 all. Collective over: `pair`."""
    mine, theirs = bytearray(MESSAGE_BYTES), bytearray(MESSAGE_BYTES)
    peer = 1 - pair.Get_rank()
    parts: dict[str, Callable[[], list[Any]]] = {
        "irecv": lambda: [pair.Irecv(theirs, peer), pair.Isend(mine, peer)],
        "iallreduce": lambda: [pair.Iallreduce([mine, mpi.INT], [theirs, mpi.INT])],
    }
    found = {}
    for name, start in parts.items():
        alone = _time_alone(mpi, pair, start, 1)
        trials = TRIALS if alone < SLOW_SECONDS else 1
        alone, later = min(alone, _time_alone(mpi, pair, start, trials)), []
        for _ in range(trials):
            pair.Barrier()
            requests = start()
            _compute(max(LEAST_SECONDS, 3 * alone))
            begin = time.perf_counter()
            mpi.Request.Waitall(requests)
            later.append(time.perf_counter() - begin)
        left = float(pair.allreduce(statistics.median(later), mpi.MAX))
        found[name] = max(0.0, 1.0 - left / alone)
        found[f"{name}_seconds"] = alone
    return found


def _time_alone(mpi: Any, pair: MPI.Comm, start: Callable[[], list[Any]], trials: int) -> float:
    """Seconds of an operation that is waited for at once, the same on both ranks. Collective over: `pair`."""
    found = []
    for _ in range(trials):
        pair.Barrier()
        begin = time.perf_counter()
        mpi.Request.Waitall(start())
        found.append(time.perf_counter() - begin)
    return float(pair.allreduce(statistics.median(found), mpi.MAX))


def _compute(seconds: float) -> None:
    """Keep a core busy without a call of MPI."""
    end, number = time.perf_counter() + seconds, 1.0
    while time.perf_counter() < end:
        number = number * 1.0000001 + 1e-9


def _find_unseen(mpi: Any, folder: str, leaders: list[int], hosts: list[str]) -> list[str] | None:
    """Nodes that do not see a file that rank 0 has just made in `folder`; None if it cannot make one.

    Collective over: all ranks.
    """
    world = mpi.COMM_WORLD
    mark = Path(folder) / f".mpispeed-doctor-{os.getpid()}-{time.time_ns()}"
    if world.Get_rank() == 0:
        try:
            mark.write_text("seen")
        except OSError:
            mark = Path()
    mark = world.bcast(mark)
    if not mark.name:
        return None
    is_seen = True
    if world.Get_rank() in leaders:
        end = time.monotonic() + SEEN_SECONDS
        while not (is_seen := mark.exists()) and time.monotonic() < end:
            time.sleep(0.05)
    seen = world.allgather(is_seen)
    if world.Get_rank() == 0:
        mark.unlink(missing_ok=True)
    return [hosts[place] for place in leaders if not seen[place]]


# -- tensors of GPUs between ranks ------------------------------------------------------------------------------------


def _try_ways(found: dict[str, Any] | None) -> dict[str, Any] | None:
    """What `measure_ways` finds, if any node has a GPU. Collective over: all ranks of the job."""
    from mpi4py import MPI

    has_gpus = MPI.COMM_WORLD.bcast(None if found is None else _sees_gpus(found["ranks"]))
    return measure_ways("cuda") if has_gpus else None


def measure_ways(kind: str) -> dict[str, Any]:
    """What a run would choose for tensors of devices of a kind, and from what, by this package's own verbs.

    Collective over: all ranks of the job.
    """
    import torch

    from mpispeed.mesh import device_paths
    from mpispeed.mesh.backends import nccl
    from mpispeed.mesh.world import start

    nccl.OPEN_SECONDS = WAYS_SECONDS
    world = start()
    try:
        with world.comm.together(MpispeedError):
            module = torch.get_device_module(kind)
            device = torch.device(kind, world.local_rank % module.device_count())
            module.set_device(device)
        choice = device_paths.choose(world, device)
    except MpispeedError as error:  # on all ranks
        return {"problem": str(error)}
    return {"choice": str(choice), "figures": [str(trial) for trial in choice.figures]}


# -- memory of a GPU -------------------------------------------------------------------------------------------------


def try_gpu() -> dict[str, Any]:
    """Hand memory of a GPU to MPI: a message of this process to itself. A library that cannot crashes."""
    import torch
    from mpi4py import MPI

    size = 1 << 20
    source = torch.arange(size, dtype=torch.int32, device="cuda")
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    buffers = [MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes) for tensor in (source, target)]
    MPI.COMM_SELF.Sendrecv([buffers[0], MPI.BYTE], 0, 0, [buffers[1], MPI.BYTE], 0, 0)
    torch.cuda.synchronize()
    return {
        "is_right": bool(torch.equal(source, target)),
        "library": " ".join(MPI.Get_library_version().split("\n")[0].split()),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
