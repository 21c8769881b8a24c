"""How much of the communication of a step is hidden behind computation when the network is slow.

    python benchmarks/step/overlap.py --stage 2 --rate 1gbit --json benchmarks/results/overlap.json

Needs Linux, root (network namespaces), `ip` and `tc` of iproute2, an MPICH (the wheel is enough) and two cores. Start
it without mpirun. It makes two network namespaces joined by a pair of virtual devices whose sending side is limited
to `--rate`, starts one rank in each, with a host name, IPC space and /dev/shm of its own, so that MPI takes them
for two nodes and talks TCP, and removes them at its end. `--rate none` leaves the link unlimited. Nothing
outside of the namespaces is changed. A run that was killed leaves them behind; the next run removes them.

Measured, as seconds per step (medians over rounds, the slower rank counts):

- compute: the same job without anybody to talk to: two jobs of one rank, side by side so that they share the
  machine as the two ranks do, each on the batch of one rank. Where masters are cut, an update of one rank alone
  covers twice what each of two ranks updates, so half of its update is counted.
- communication: the collectives of one step, as the engine issued them (verb and size from its trace), alone,
  one after the other over the same link.
- step: the whole step, with `overlap_comm` off and on.
- node: the same two ranks on one node, through shared memory: what is left of the communication without a network.

    hidden = (compute + communication - step) / communication

1 is all of it, 0 none; below 0 the two disturb each other. With `overlap_comm` off it shows the error of the method.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peers
import torch

HOSTS = {"mpispeed-a": "10.77.31.1", "mpispeed-b": "10.77.31.2"}  # namespace -> address
DEVICE = "link0"
TRANSPORT = {  # TCP over the link for everything between the two ranks
    "UCX_TLS": "tcp,self,posix",
    "UCX_NET_DEVICES": DEVICE,
    "MPIR_CVAR_CH4_NETMOD": "ucx",
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
}
REPLAYED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")

# -- what ranks do -----------------------------------------------------------------------------------------------


class Recorder:
    """Notes every verb that enters a trace, in order."""

    def __init__(self, comm_trace: Any) -> None:
        self.calls: list[tuple[str, int]] = []
        comm_trace.subscribe(lambda record: self.calls.append((record.verb, record.sent_bytes)))


def replay(comm: Any, calls: list[tuple[str, int]]) -> Callable[[], None]:
    """A function that runs these collectives in fp32, one after the other; agreements become the smallest sums.

    Collective over: `comm`, when it is called.
    """
    sizes = [_elements(verb, sent, comm.size) for verb, sent in calls]
    whole = torch.zeros(max(sizes, default=1))
    shard = torch.zeros(max(sizes, default=1) // comm.size + 1)

    def run() -> None:
        for (verb, _), size in zip(calls, sizes, strict=True):
            if verb == "reduce_scatter":
                comm.reduce_scatter(shard[: size // comm.size], whole[:size])
            elif verb == "all_gather":
                comm.all_gather(whole[:size], shard[: size // comm.size])
            elif verb == "broadcast":
                comm.broadcast(whole[:size])
            else:
                comm.all_reduce(whole[:size])

    return run


def _elements(verb: str, sent_bytes: int, ranks: int) -> int:
    """Elements of the whole fp32 buffer, from the bytes a rank sends by the ring formula; a multiple of `ranks`."""
    if verb not in REPLAYED or ranks == 1:
        return ranks
    shares = {"all_reduce": 2 * (ranks - 1), "broadcast": ranks}.get(verb, ranks - 1)
    return max(ranks, round(sent_bytes / shares / 4) * ranks)


def run_worker(options: argparse.Namespace) -> None:
    """Time this job's steps and write them on rank 0. Collective over: all ranks."""
    world = peers.join()
    if options.nodes != world.node_count:
        msg = f"this job has to run on {options.nodes} nodes, MPI sees {world.node_count}"
        raise RuntimeError(msg)
    *shape, batch = peers.SIZES[options.size]
    batch = options.batch or batch
    torch.manual_seed(1)
    zero = {"stage": options.stage, "overlap_comm": options.overlap, **json.loads(options.zero)}
    model, per_rank = peers.GPT(*shape), batch // 2
    engine = peers.make_engine(model, per_rank * world.size, zero, clipping=1.0)
    ids = peers.token_ids(tuple(shape), per_rank, world.rank)
    phases: dict[str, list[float]] = {"passes": [], "update": []}

    def step() -> None:
        start = time.perf_counter()
        engine.backward(engine(ids))
        middle = time.perf_counter()
        engine.step()
        phases["passes"].append(middle - start)
        phases["update"].append(time.perf_counter() - middle)

    if torch.get_num_threads() != 1:
        msg = f"a rank computes with {torch.get_num_threads()} threads: the emulated nodes would share their cores"
        raise RuntimeError(msg)
    step()
    step()  # the second step is like all later ones
    recorder = Recorder(engine.mesh.comm_trace)
    step()
    calls = world.comm.share(recorder.calls)  # threads may note them in another order on another rank
    for times in phases.values():
        times.clear()
    contenders = {"step": step, "communication": replay(world.comm, calls)}
    figures: dict[str, Any] = peers.take_turns(contenders, world.comm.barrier, options.rounds, options.steps)
    figures |= {name: times[1:] for name, times in phases.items()}
    figures["calls"] = calls
    if world.rank == 0:
        options.json.write_text(json.dumps(figures))
    engine.destroy()


# -- the network and the jobs ------------------------------------------------------------------------------------


@contextlib.contextmanager
def two_nodes(rate: str) -> Iterator[None]:
    """Two network namespaces joined by a link that sends at most `rate`."""
    for name in HOSTS:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)  # of a run that was killed
    first, second = HOSTS
    try:
        for name in HOSTS:
            _call("ip", "netns", "add", name)
        _call("ip", "link", "add", DEVICE, "netns", first, "type", "veth", "peer", "name", DEVICE, "netns", second)
        for name, address in HOSTS.items():
            _call("ip", "-n", name, "addr", "add", f"{address}/24", "dev", DEVICE)
            _call("ip", "-n", name, "link", "set", "lo", "up")
            _call("ip", "-n", name, "link", "set", DEVICE, "up")
            if rate != "none":
                limit = ("tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
                _call("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", *limit)
        yield
    finally:
        for name in HOSTS:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(
            f"overlap: {' '.join(words)} failed: {done.stderr.strip()}; root and the kernel's veth and tbf are needed"
        )


def _inside(namespace: str, command: str) -> list[str]:
    """A command line that runs a shell command as if on another node."""
    prepare = f"hostname {namespace} && mount -t tmpfs tmpfs /dev/shm"
    apart = ["unshare", "--uts", "--ipc", "--mount", "--propagation", "private"]
    return ["ip", "netns", "exec", namespace, *apart, "sh", "-c", f"{prepare} && {command}"]


def _remote_shell(folder: Path) -> Path:
    """What mpirun calls in place of ssh: `shell [options] address command...`."""
    cases = "\n".join(
        f'  {address}) shift; exec {" ".join(_inside(name, "")[:-1])} "{_inside(name, "")[-1]} $*" ;;'
        for name, address in HOSTS.items()
    )
    path = folder / "shell"
    path.write_text(f"""#!/bin/sh
while true; do case "$1" in -l|-p|-o|-i) shift 2;; -*) shift;; *) break;; esac; done
case "$1" in
{cases}
esac
exit 64
""")
    path.chmod(0o700)
    return path


def link_job(folder: Path, words: list[str]) -> list[str]:
    """The command line of a job with one rank on each node."""
    first, second = HOSTS.values()
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    variables = [word for name, value in TRANSPORT.items() for word in ("-genv", name, value)]
    start = [
        str(mpirun), "-localhost", first, "-launcher", "ssh", "-launcher-exec", str(_remote_shell(folder)),
        "-hosts", f"{first},{second}", "-ppn", "1", "-n", "2", *variables,
    ]  # fmt: skip
    program = [sys.executable, "-m", "mpi4py", "-m", "mpispeed.launch.rank", *words]
    return _inside(next(iter(HOSTS)), "exec " + shlex.join([*start, *program]))


def node_job(ranks: int, words: list[str]) -> list[str]:
    """The command line of a job on this node."""
    return [sys.executable, "-m", "mpispeed.cli.main", "run", "-n", str(ranks), *words]


def run_jobs(options: argparse.Namespace, folder: Path, kind: str, is_overlapped: bool) -> list[dict[str, Any]]:
    """Run one job, or two of one rank side by side for "compute"; returns what each measured."""
    nodes, ranks, count = {"link": (2, 2, 1), "node": (1, 2, 1), "compute": (1, 1, 2)}[kind]
    paths = [folder / f"{kind}-{is_overlapped}-{index}.json" for index in range(count)]
    jobs = []
    for path in paths:
        words = [
            __file__, "--worker", "--stage", str(options.stage), "--size", options.size, "--zero", options.zero,
            "--rounds", str(options.rounds), "--steps", str(options.steps), "--nodes", str(nodes), "--json", str(path),
            "--batch", str(options.batch),
            *(["--overlap"] if is_overlapped else []),
        ]  # fmt: skip
        jobs.append(subprocess.Popen(link_job(folder, words) if kind == "link" else node_job(ranks, words)))
    try:
        codes = [job.wait(timeout=options.timeout) for job in jobs]
    finally:
        for job in jobs:
            if job.poll() is None:
                job.terminate()
    if any(codes):
        sys.exit(f"overlap: the job '{kind}' ended with {codes}")
    return [json.loads(path.read_text()) for path in paths]


def report(options: argparse.Namespace, measured: dict[str, list[dict[str, Any]]]) -> None:
    """Print and write what was hidden."""
    median = statistics.median
    update_share = 2 if options.stage >= 1 else 1
    compute = max(median(job["passes"]) + median(job["update"]) / update_share for job in measured["compute"])
    calls = measured["link, overlap off"][0]["calls"]
    sent = sum(size for _, size in calls)
    batch = options.batch or peers.SIZES[options.size][-1]
    print(f"{options.size}, stage {options.stage}, {batch} samples a step, link {options.rate}")
    print(f"{len(calls)} verbs, {sent / 1e6:.1f} MB a step")
    print(f"compute {compute:.3f} s")
    figures: dict[str, Any] = {"compute": compute, "sent_bytes": sent, "verbs": len(calls)}
    for name, (job,) in ((name, jobs) for name, jobs in measured.items() if name != "compute"):
        step, communication = median(job["step"]), median(job["communication"])
        hidden = (compute + communication - step) / communication
        print(f"{name:18s} step {step:.3f} s   communication {communication:.3f} s   hidden {hidden:.2f}")
        figures[name] = {
            "step": job["step"], "communication": job["communication"], "hidden": hidden,
            "passes": median(job["passes"]), "update": median(job["update"]),
        }  # fmt: skip
    names = ("size", "stage", "rate", "rounds", "steps", "zero", "batch")
    settings = {name: getattr(options, name) for name in names}
    peers.write_record(options.json, "step/overlap", settings, figures)


def main() -> None:
    """Run all jobs, or what a rank does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(peers.SIZES), default="82m")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="limit of the link in each direction, as tc writes it, or none")
    parser.add_argument("--zero", default="{}", help="more of zero_optimization, as JSON")
    parser.add_argument("--batch", type=int, default=0, help="samples per step; 0: that of the size")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="steps in each round")
    parser.add_argument("--timeout", type=float, default=900, help="seconds after which a job is given up")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--worker", action="store_true", help="used for the jobs")
    parser.add_argument("--nodes", type=int, default=1, help="used for the jobs")
    parser.add_argument("--overlap", action="store_true", help="used for the jobs")
    options = parser.parse_args()
    if options.worker:
        run_worker(options)
        return
    with tempfile.TemporaryDirectory() as name, two_nodes(options.rate):
        folder = Path(name)
        measured = {
            "compute": run_jobs(options, folder, "compute", False),
            "node, overlap off": run_jobs(options, folder, "node", False),
            "link, overlap off": run_jobs(options, folder, "link", False),
            "link, overlap on": run_jobs(options, folder, "link", True),
        }
    report(options, measured)


if __name__ == "__main__":
    main()
