"""A real SLURM with two nodes on this machine, for tests: munged, slurmctld and two slurmd of its own.

Everything lies in one folder below the temporary one: configuration, key and socket of munge, state, logs. A SLURM of
the machine, /etc/slurm and /etc/munge are neither read nor changed, and only processes of this cluster are ended.

Mode "netns" (root, with `ip`): each node is a network namespace with its own host name, IPC space and /dev/shm, so
that MPI takes them for two hosts and talks TCP between them; the controller and the clients live in a third one.
Mode "plain" (any user): both nodes are this host, on two ports; MPI takes them for one host.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from mpispeed.walltime.job_states import is_over
from tests.helpers.system import CHECKOUT, cannot

ROOT = Path(__file__).resolve().parents[2]
NODES = ("n1", "n2")
CORES, GPUS, MEMORY_MIB = 8, 2, 4096  # of a node, as SLURM is told; jobs of tests mostly wait
PREFIX = "mpispeed-slurm-"
MARK = "MPISPEED_SLURM_CLUSTER"  # in the environment of everything that belongs to a cluster
SUBNET = "10.77.33"
PROGRAMS = {
    "munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client",
    "scontrol": "slurm-client", "srun": "slurm-client",
}  # fmt: skip
SYSTEM_FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin"
FOREIGN = re.compile(r"(SLURM|SBATCH|PMI|PMIX|OMPI|PRTE|MPI|HYDI|HYDRA)_")
LATE_SECONDS = 400
"""A job that is not over by then is stuck: what takes seconds on an idle machine takes minutes beside other tests."""

REQUEUE_SECONDS = 15
"""What a requeued job waits before it may start again: the life of a credential, 120 by default."""

TRANSPORT = {"MPIR_CVAR_CH4_NETMOD": "ofi"}
"""MPICH over OFI, whose addresses are short. Those of UCX go to pmi2 in lines that are longer than 1024 characters now
and then, and SLURM 22.05 reads such a line as two: "mpi/pmi2: value not properly terminated in client request".
"""

CONFIGURATION = """\
ClusterName=mpispeed
SlurmctldHost={controller}
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={requeue_seconds}
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
SwitchType=switch/none
GresTypes=gpu
ReturnToService=2
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldDebug=info
SlurmdDebug=info
FirstJobId={first_job}
MinJobAge=1800
KillWait=5
MessageTimeout=60
TCPTimeout=30
BatchStartTimeout=120
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
TmpFS={folder}/tmp-%n
Epilog={epilog}
NodeName=DEFAULT CPUs={cores} RealMemory={memory} Gres=gpu:{gpus} State=UNKNOWN
{nodes}
PartitionName=DEFAULT Nodes={names} PreemptMode=OFF
PartitionName=main Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
PartitionName=short MaxTime=00:10:00 State=UP OverSubscribe=NO
PartitionName=low PreemptMode=CANCEL GraceTime=200 State=UP
PartitionName=high PriorityTier=10 State=UP
"""


class ClusterError(Exception):
    """The cluster cannot do what a test needs."""


def missing_programs() -> list[str]:
    """Names of the Debian packages that are needed and not installed."""
    return sorted({package for program, package in PROGRAMS.items() if _find(program) is None})


def refuse_or_skip(packages: Sequence[str]) -> None:
    """Skip a test for want of these Debian packages; in CI, which has to have them, fail it."""
    cannot(f"a test with a real SLURM needs the Debian packages: apt-get install {' '.join(packages)}")


def best_mode() -> str:
    """What `MPISPEED_SLURM_MODE` asks for, else "netns" where namespaces can be made."""
    asked = os.environ.get("MPISPEED_SLURM_MODE")
    if asked:
        return asked
    can = os.geteuid() == 0 and _find("ip") and _try("unshare", "--net", "--uts", "--ipc", "--mount", "true")
    return "netns" if can else "plain"


class SlurmCluster:
    """A cluster of two nodes; `with SlurmCluster() as slurm:` starts and ends it.

    `environment` is what clients and jobs get; `command` is how a client is started from this process.
    """

    def __init__(self, mode: str | None = None) -> None:
        self.mode = mode or best_mode()
        if self.mode not in ("plain", "netns"):
            message = f"a cluster is plain or netns, not {self.mode!r} (MPISPEED_SLURM_MODE)"
            raise ClusterError(message)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self.folder.chmod(0o755)
        self.jobs = self.folder / "jobs"
        self.spaces = {name: f"{self.folder.name}-{name}" for name in ("head", *NODES)}
        self.environment = self._environment()
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmCluster:
        end_strays()
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- for tests ---------------------------------------------------------------------------------------------------

    def run(
        self, *words: object, check: bool = True, limit_seconds: float = LATE_SECONDS, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a client such as `scontrol show nodes`; one that fails raises with what it wrote, unless told not to."""
        done = subprocess.run(
            self.command(words), env={**self.environment, **env}, cwd=self.jobs, capture_output=True, text=True,
            timeout=limit_seconds, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if check and done.returncode:
            message = f"{' '.join(map(str, words))} ended with {done.returncode}\n{done.stdout}{done.stderr}"
            raise ClusterError(message)
        return done

    def command(self, words: Sequence[object]) -> list[str]:
        """How this process starts `words` as a client of the cluster (with `environment`)."""
        enter = [f"--net=/run/netns/{self.spaces['head']}"] if self.mode == "netns" else []
        return [*(["nsenter", *enter, "--"] if enter else []), *map(str, words)]

    def submit(self, script: str, *arguments: str, env: Mapping[str, str] | None = None, **options: object) -> str:
        """Give a batch script (its text) to sbatch; returns the number of the job.

        `options` become flags: ntasks_per_node=2 is --ntasks-per-node=2, requeue=True is --requeue. The output goes
        where `output` looks for it, unless output=None leaves that to the script.
        """
        name = "%A_%a" if options.get("array") else "%j"
        options = {"output": self.jobs / f"{name}.out", "open_mode": "append", **options}
        flags = [
            f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}")
            for key, value in options.items()
            if value is not None
        ]
        file = self.jobs / f"script-{time.monotonic_ns()}.sbatch"
        file.write_text(script if script.startswith("#!") else f"#!/bin/bash\n{script}\n")
        return self.run("sbatch", "--parsable", *flags, file, *arguments, **(env or {})).stdout.strip().split(";")[0]

    def states(self, job: str) -> dict[str, str]:
        """State of each task of an array by its number such as 7_0, or of the one job."""
        lines = self.run("squeue", "--noheader", "--array", "--states=all", f"--jobs={job}", "--format=%i %T").stdout
        return dict(line.split() for line in lines.splitlines() if line.strip())

    def wait(self, job: str, until: Callable[[str], bool] | None = None, seconds: float = LATE_SECONDS) -> str:
        """Wait until all tasks of a job have ended (or `until(state)` holds) and return its state.

        An array whose tasks ended differently gives their states, joined by commas. A job that is late is cancelled
        and raises with its output.
        """
        holds = until or is_over
        deadline = time.monotonic() + seconds
        while True:
            found = set(self.states(job).values())
            if found and all(map(holds, found)):
                return ",".join(sorted(found))
            if time.monotonic() > deadline:
                about = self.run("scontrol", "show", "job", job, check=False).stdout
                self.run("scancel", job, check=False)
                message = f"job {job} was {sorted(found)} after {seconds:.0f} s\n{about}\n{self.output(job)}"
                raise ClusterError(message)
            time.sleep(0.3)

    def output(self, job: str) -> str:
        """What a job (7), all tasks of an array (7), or one of them (7_0) wrote so far; "" before its start."""
        files = sorted([*self.jobs.glob(f"{job}.out"), *self.jobs.glob(f"{job}_*.out")])
        return "".join(file.read_text(errors="replace") for file in files)

    def drain(self, node: str, *, ends_jobs: bool = False) -> None:
        """Let no job start on a node any more; with `ends_jobs` it goes down, and its jobs are requeued or ended."""
        # Drained as well: a node that is only down comes back when its slurmd reports the next time.
        for state in ("drain", *(["down"] if ends_jobs else [])):
            self.run("scontrol", "update", f"nodename={node}", f"state={state}", "reason=test")

    def resume(self, node: str) -> None:
        """Undo `drain`."""
        self.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)

    def daemon_pid(self, node: str) -> int:
        """The number of the slurmd of a node; what it can see is below /proc/NUMBER/root."""
        return next(pid for pid in processes_of(self.folder) if _command(pid) == ["slurmd", "-D", "-N", node])

    def until(self, what: str, holds: Callable[[], bool], seconds: float = LATE_SECONDS) -> None:
        """Wait until something holds of this cluster; raises if it does not come to that."""
        self._until(what, holds, seconds)

    # -- start and end -----------------------------------------------------------------------------------------------

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
        path = f"{Path(sys.executable).parent}:{kept.get('PATH', os.defpath)}:{SYSTEM_FOLDERS}"
        return {
            **TRANSPORT, **kept, "PATH": path, "SLURM_CONF": str(self.folder / "slurm.conf"), MARK: str(self.folder),
            "OMP_NUM_THREADS": "1", "PYTHONPATH": CHECKOUT,
        }  # fmt: skip

    def _start(self) -> None:
        if missing := missing_programs():
            message = f"no {', '.join(missing)} is installed"
            raise ClusterError(message)
        for name in ("jobs", "state", *(f"{kind}-{node}" for kind in ("spool", "tmp") for node in NODES)):
            (self.folder / name).mkdir()
        if self.mode == "netns":
            self._make_network()
        self._write_configuration()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        sock = self.folder / "munge.socket"
        own = [f"--{kind}-file={self.folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        # Forced: it would refuse to run as root, and below a folder that others may write to.
        self._daemon("munged", "munged", "--force", "--foreground", f"--socket={sock}", *own)
        self._until("munge", lambda: _try("munge", f"--socket={sock}", "--no-input"))
        self._daemon("slurmctld", *self.command(["slurmctld", "-D", "-c"]))
        for node in NODES:
            self._daemon(f"slurmd-{node}", *self._on_node(node, ["slurmd", "-D", "-N", node]))
        self._until("two idle nodes", self._is_ready)

    def _is_ready(self) -> bool:
        states = self.run("sinfo", "--noheader", "--partition=main", "--Node", "--format=%T", check=False).stdout
        return states.split() == ["idle"] * len(NODES)

    def _write_configuration(self) -> None:
        host = socket.gethostname().split(".")[0]
        if self.mode == "netns":
            ports, head = [6817, 6818, 6818], f"{SUBNET}.254"
            nodes = [f"NodeName={node} NodeAddr={SUBNET}.{n} Port=6818" for n, node in enumerate(NODES, 1)]
        else:
            ports, head = list(_free_ports(1 + len(NODES))), "127.0.0.1"
            nodes = [
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
                for node, port in zip(NODES, ports[1:], strict=True)
            ]
        text = CONFIGURATION.format(
            controller=f"{host}({head})", port=ports[0], folder=self.folder, nodes="\n".join(nodes),
            user=os.environ.get("USER", "root") if os.geteuid() else "root", names=",".join(NODES), cores=CORES,
            memory=MEMORY_MIB, gpus=GPUS, requeue_seconds=REQUEUE_SECONDS,
            # MPICH names its files in /dev/shm by the job, and a job of another cluster may have left some there.
            epilog=ROOT / "slurm" / "epilog.sh",
            first_job=1 + time.time_ns() // 10_000_000 % 60_000_000,
        )  # fmt: skip
        (self.folder / "slurm.conf").write_text(text)
        # Any device file will do: SLURM only counts them and numbers them in CUDA_VISIBLE_DEVICES.
        (self.folder / "gres.conf").write_text(f"Name=gpu File=/dev/tty[0-{GPUS - 1}]\n")

    def _make_network(self) -> None:
        """Three namespaces on a bridge that stands in the one of the controller; outside of them nothing is made."""
        head = self.spaces["head"]
        for space in self.spaces.values():
            _call("ip", "netns", "add", space)
            _call("ip", "-n", space, "link", "set", "lo", "up")
        _call("ip", "-n", head, "link", "add", "bridge0", "type", "bridge")
        _call("ip", "-n", head, "addr", "add", f"{SUBNET}.254/24", "dev", "bridge0")
        _call("ip", "-n", head, "link", "set", "bridge0", "up")
        for number, node in enumerate(NODES, 1):
            space = self.spaces[node]
            _call("ip", "-n", head, "link", "add", f"port{number}", "type", "veth", "peer", "name", "link0", "netns",
                  space)  # fmt: skip
            _call("ip", "-n", head, "link", "set", f"port{number}", "master", "bridge0", "up")
            _call("ip", "-n", space, "addr", "add", f"{SUBNET}.{number}/24", "dev", "link0")
            _call("ip", "-n", space, "link", "set", "link0", "up")
        hosts = "".join(f"{SUBNET}.{number} {node}\n" for number, node in enumerate(NODES, 1))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}{SUBNET}.254 {socket.gethostname()}\n")

    def _on_node(self, node: str, words: Sequence[str]) -> list[str]:
        """How a daemon of a node is started: in netns mode as on a host of its own.

        Not by `ip netns exec`, which mounts another /sys, where slurmd then finds no cgroups.
        """
        if self.mode == "plain":
            return list(words)
        # UCX looks for network devices in /sys, which shows those of the namespace that mounted it.
        kept = self.folder / f"cgroup-{node}"
        steps = (
            f"hostname {node}",
            "mount -t tmpfs -o size=4g tmpfs /dev/shm",
            f"mount --bind {self.folder}/hosts /etc/hosts",
            f"mkdir {kept}",
            f"mount --rbind /sys/fs/cgroup {kept}",
            "mount -t sysfs sysfs /sys",
            f"mount --rbind {kept} /sys/fs/cgroup",
            f"umount --lazy {kept}",
            'exec "$@"',
        )
        return [
            "nsenter", f"--net=/run/netns/{self.spaces[node]}", "--", "unshare", "--uts", "--ipc", "--mount",
            "--propagation", "private", "bash", "-c", " && ".join(steps), "bash", *words,
        ]  # fmt: skip

    def _daemon(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    words, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                    start_new_session=True, preexec_fn=_die_with_parent,
                )
            )  # fmt: skip

    def _until(self, what: str, holds: Callable[[], bool], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self._daemons):
                message = f"no {what} after the start of a SLURM in {self.folder}\n{self.logs()}"
                raise ClusterError(message)
            time.sleep(0.1)

    def logs(self) -> str:
        """The last lines of each daemon."""
        found = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {file.name}\n" + "\n".join(file.read_text().splitlines()[-30:]) for file in found)

    def stop(self) -> None:
        """Cancel what runs, end the daemons and whatever they have left, and remove the folder."""
        if len(self._daemons) > 1:
            self.run("scancel", f"--user={os.geteuid()}", check=False)
            with contextlib.suppress(ClusterError):
                self._until("idle nodes", lambda: not self.run("squeue", "--noheader", check=False).stdout, 10)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        _remove(self.folder)


# -- what is left ----------------------------------------------------------------------------------------------------


def end_strays() -> None:
    """End and remove clusters whose test process is gone, killed for example."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        owner = folder.name.removeprefix(PREFIX).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _remove(folder)


def _remove(folder: Path) -> None:
    """End the processes of a cluster, and remove its namespaces and its folder."""
    for pid in processes_of(folder):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    for space in Path("/run/netns").glob(f"{folder.name}-*"):
        _try("ip", "netns", "del", space.name)
    shutil.rmtree(folder, ignore_errors=True)


def processes_of(folder: Path) -> Iterator[int]:
    """Processes that carry the mark of a cluster in their environment; never this one."""
    mark = f"{MARK}={folder}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def _command(pid: int) -> list[str]:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    return [Path(words[0]).name, *words[1:]] if words else []


def _die_with_parent() -> None:
    """In a child: be told to end when the test process is killed."""
    ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)


def _free_ports(count: int) -> Iterator[int]:
    """Ports nobody listens on, below those that the system hands out for connections."""
    first, found = 20000 + os.getpid() % 10000, 0
    for port in range(first, first + 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            yield port
            found += 1
        if found == count:
            return


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:{SYSTEM_FOLDERS}")


def _call(*words: str) -> None:
    done = subprocess.run([_find(words[0]) or words[0], *words[1:]], capture_output=True, text=True, check=False)
    if done.returncode:
        message = f"{' '.join(words)} ended with {done.returncode}: {done.stderr.strip()}"
        raise ClusterError(message)


def _try(*words: str) -> bool:
    found = _find(words[0])
    return bool(found) and subprocess.run([found, *words[1:]], capture_output=True, check=False).returncode == 0
