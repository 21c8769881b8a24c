"""Hosts on one machine, joined by a slow network: network namespaces on a bridge, each with a limit on what it sends.

    python benchmarks/network/hosts.py --rate 100mbit benchmarks/network/exchange.py --mib 16
    python benchmarks/network/hosts.py --clean

The first line starts a script under the MPICH beside this Python, one rank on each of two hosts, and removes the hosts
at its end, also after an error, Ctrl-C or a time-out. Needs Linux, root, `ip` and `tc` of iproute2, and the kernel's
veth, bridge and tbf. Each host has a host name, an IPC space and a /dev/shm of its own, so that MPI takes it for a node
and talks TCP over the link. The bridge stands in a namespace of its own and mpirun runs on the first host: outside of
the namespaces no device is made, no address used and no port opened. A run that was killed leaves them behind; the
next run, or `--clean`, ends what runs there and removes them. Only one run at a time can have hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

PREFIX = "mpispeed-net-"  # of all namespaces; nothing else is ever removed
SWITCH = f"{PREFIX}switch"
DEVICE = "link0"
SUBNET = "10.77.32"
MOST_HOSTS = 8
BURST = "16kb"  # goes for free after a pause, so that more would count for small messages
NAMESPACES, LOCK = Path("/run/netns"), Path("/run/mpispeed-net.lock")
COUNTER = Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes")
TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "mount": "util-linux", "hostname": "hostname"}
TRANSPORT = {  # TCP over the link for everything between two hosts
    "UCX_TLS": "tcp,self,posix",
    "UCX_NET_DEVICES": DEVICE,
    "MPIR_CVAR_CH4_NETMOD": "ucx",
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
}
ENDINGS = (signal.SIGTERM, signal.SIGHUP)
PATIENCE_SECONDS = 10


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Hosts that are up, by name and address; `shell` is called as ssh would be."""

    addresses: dict[str, str]
    shell: Path

    def limit(self, rate: str) -> None:
        """Let each host send at most `rate`, as tc writes it; "none" is no limit."""
        for name in self.addresses:
            if rate == "none":
                _try("tc", "-n", name, "qdisc", "del", "dev", DEVICE, "root")
            else:
                shape = ("tbf", "rate", rate, "burst", BURST, "latency", "100ms")
                _call("tc", "-n", name, "qdisc", "replace", "dev", DEVICE, "root", *shape)

    def command(self, program: Sequence[str], ranks_per_host: int = 1) -> list[str]:
        """The command line of a job on all hosts: a Python script and its arguments."""
        places = list(self.addresses.values())
        mpirun = Path(sys.executable).parent / "mpirun"
        if not mpirun.exists():
            sys.exit(f"hosts: no mpirun beside {sys.executable}; install the extra [mpich]")
        variables = [word for name, value in TRANSPORT.items() for word in ("-genv", name, value)]
        start = [
            str(mpirun), "-localhost", places[0], "-launcher", "ssh", "-launcher-exec", str(self.shell),
            "-hosts", ",".join(places), "-ppn", str(ranks_per_host), "-n", str(ranks_per_host * len(places)),
            *variables, sys.executable, "-m", "mpi4py", "-m", "mpispeed.launch.rank", *program,
        ]  # fmt: skip
        return [str(self.shell), places[0], f"exec {shlex.join(start)}"]

    def run(self, program: Sequence[str], ranks_per_host: int = 1, timeout_seconds: float = 600) -> int:
        """Run a job; returns its exit status, 124 after a time-out."""
        job = subprocess.Popen(self.command(program, ranks_per_host), stdin=subprocess.DEVNULL)
        try:
            return job.wait(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            print(f"hosts: ended after {timeout_seconds:g} seconds: {shlex.join(program)}", file=sys.stderr)
            return 124
        finally:
            if job.poll() is None:
                job.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(timeout=PATIENCE_SECONDS)
                job.kill()


@contextlib.contextmanager
def joined_hosts(count: int = 2, rate: str = "none") -> Iterator[Hosts]:
    """Hosts joined by a network in which each sends at most `rate`; removed at the end."""
    if not 2 <= count <= MOST_HOSTS:
        sys.exit(f"hosts: {count} hosts; choose 2 to {MOST_HOSTS}")
    with _only_one(), tempfile.TemporaryDirectory() as folder, _ending_as_errors():
        _remove()
        addresses = {f"{PREFIX}{number}": f"{SUBNET}.{number}" for number in range(1, count + 1)}
        hosts = Hosts(addresses, _write_shell(Path(folder), addresses))
        try:
            _make(addresses)
            hosts.limit(rate)
            yield hosts
        finally:
            for number in (signal.SIGINT, *ENDINGS):
                signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C would leave the rest behind
            _remove()


def sent_bytes() -> int:
    """What this host has sent since it was made, by the counter of its device; 0 outside of the hosts.

    It counts frames with their headers where a limit is set; without one, the large packets that the kernel hands over.
    """
    return int(COUNTER.read_text()) if COUNTER.exists() else 0


def _make(addresses: dict[str, str]) -> None:
    _call("ip", "netns", "add", SWITCH)
    _call("ip", "-n", SWITCH, "link", "add", "bridge0", "type", "bridge")
    _call("ip", "-n", SWITCH, "link", "set", "bridge0", "up")
    for number, (name, address) in enumerate(addresses.items(), 1):
        port = f"port{number}"
        _call("ip", "netns", "add", name)
        _call("ip", "-n", SWITCH, "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", name)
        _call("ip", "-n", SWITCH, "link", "set", port, "master", "bridge0", "up")
        _call("ip", "-n", name, "addr", "add", f"{address}/24", "dev", DEVICE)
        _call("ip", "-n", name, "link", "set", "lo", "up")
        _call("ip", "-n", name, "link", "set", DEVICE, "up")


def _remove() -> None:
    """End what runs in namespaces of this prefix and remove them; nothing where there are none."""
    for path in sorted(NAMESPACES.glob(f"{PREFIX}*")):
        found = subprocess.run(["ip", "netns", "pids", path.name], capture_output=True, text=True, check=False)
        for word in found.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(word), signal.SIGKILL)
        _try("ip", "netns", "del", path.name)


def _write_shell(folder: Path, addresses: dict[str, str]) -> Path:
    """What mpirun calls in place of ssh: `shell [options] address command...`."""
    cases = "\n".join(f"  {address}) name={name} ;;" for name, address in addresses.items())
    path = folder / "shell"
    path.write_text(f"""#!/bin/sh
while true; do case "$1" in -l|-p|-o|-i) shift 2;; -*) shift;; *) break;; esac; done
case "$1" in
{cases}
  *) echo "no host $1" >&2; exit 64 ;;
esac
shift
exec ip netns exec $name unshare --uts --ipc --mount --propagation private \\
  sh -c "hostname $name && mount -t tmpfs tmpfs /dev/shm && $*"
""")
    path.chmod(0o700)
    return path


@contextlib.contextmanager
def _only_one() -> Iterator[None]:
    """Check what is needed, and hold the lock: without it a clean-up would end another run."""
    if os.name != "posix" or os.geteuid() != 0:
        sys.exit("hosts: network namespaces need root; run this as root, in a container perhaps")
    missing = [f"{tool} ({package})" for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        sys.exit(f"hosts: not found: {', '.join(missing)}; install them")
    with LOCK.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit("hosts: another run has hosts on this machine; wait for its end")
        yield


@contextlib.contextmanager
def _ending_as_errors() -> Iterator[None]:
    """Signals that would end this process raise SystemExit, so that the hosts are removed."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDINGS)}
    for number in ENDINGS:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"hosts: {' '.join(words)} failed: {done.stderr.strip()}; the kernel's veth, bridge, tbf are needed")


def _try(*words: str) -> None:
    subprocess.run(words, capture_output=True, check=False)


def main() -> None:
    """Run a script on hosts that are made for it, or remove leftovers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rate", default="none", help="limit of what a host sends, as tc writes it, or none")
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which the job is ended")
    parser.add_argument("--clean", action="store_true", help="remove what a killed run has left")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="script and its arguments")
    options = parser.parse_args()
    if options.clean:
        with _only_one():
            _remove()
        return
    if not options.program:
        parser.error("name a script, or --clean")
    with joined_hosts(options.hosts, options.rate) as hosts:
        status = hosts.run(options.program, options.ranks_per_host, options.timeout)
    sys.exit(status)


if __name__ == "__main__":
    main()
