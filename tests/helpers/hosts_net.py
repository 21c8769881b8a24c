"""Hosts on one machine for tests: network namespaces on a switch, each with a name, IPC space and /dev/shm of its own.

    with joined_hosts(tmp_path, ["h1", "h2"]) as net:
        net.run("head", [sys.executable, "-m", "mpispeed.cli.main", "run", "--hostfile", ..., "--ssh", net.shell, ...])
        net.cut("h2")    # the cable is out; processes go on
        net.fail("h2")   # the power is off: its processes are dead, and it answers nobody

Every host and the one called "head" know each other by name; `net.shell` is called as ssh would be. The switch stands
in a namespace of its own: outside nothing is made but named namespaces, and those go at the end. Names carry the number
of this process, so that several tests can have hosts at a time; what a killed process left is removed by the next.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.system import cannot

HEAD = "head"
DEVICE = "link0"
SUBNET = "10.77.34"
NAMESPACES = Path("/run/netns")
PREFIX = "mpispeed-test-"
SWITCH = "switch"
TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "util-linux"}


@dataclass(frozen=True)
class HostsNet:
    """Hosts that are up, by name and address."""

    addresses: dict[str, str]
    folder: Path

    @property
    def shell(self) -> Path:
        """What is called in place of ssh: `shell [options] host command...`."""
        return self.folder / "shell"

    @property
    def disk(self) -> Path:
        """A folder in which each host has files of its own, which stay between two logins."""
        return self.folder / "disk"

    def command(self, name: str, words: Sequence[object]) -> list[str]:
        """The command line that runs a program on a host."""
        return [str(self.shell), name, f"cd {shlex.quote(str(Path.cwd()))}; exec {shlex.join(map(str, words))}"]

    def start(self, name: str, words: Sequence[object], **settings: object) -> subprocess.Popen[str]:
        """Start a program on a host, in a process group of its own."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
        return subprocess.Popen(self.command(name, words), start_new_session=True, **{**pipes, **settings})

    def run(self, name: str, words: Sequence[object], seconds: float = 400, **settings: object) -> tuple[int, str, str]:
        """Run a program on a host; returns its exit code and what it wrote. One that is late fails the test."""
        process = self.start(name, words, **settings)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"{shlex.join(map(str, words))} still ran after {seconds} s\n{out}\n{err}")
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, out, err

    def pids(self, name: str) -> list[int]:
        """Processes that run on a host."""
        return _pids(_namespace(name))

    def refuse(self, name: str) -> None:
        """Let nobody log in; what runs there goes on."""
        self._gone(name).touch()

    def cut(self, name: str) -> None:
        """Take the cable out: what is sent to or from the host is lost without a word, and nobody can log in."""
        self.refuse(name)
        _call("ip", "-n", _namespace(name), "link", "set", DEVICE, "down")

    def join(self, name: str) -> None:
        """Put the cable back, and let people log in."""
        _call("ip", "-n", _namespace(name), "link", "set", DEVICE, "up")
        self._gone(name).unlink(missing_ok=True)

    def fail(self, name: str) -> None:
        """Switch the host off: its processes are killed, and nobody can log in."""
        self.cut(name)
        _kill(_namespace(name))

    def _gone(self, name: str) -> Path:
        return self.folder / f"{name}.gone"


@contextlib.contextmanager
def joined_hosts(folder: Path, names: Sequence[str] = ("h1", "h2")) -> Iterator[HostsNet]:
    """Hosts of these names and "head" on one network; removed at the end. Skips where the kernel refuses them.

    `folder` is for their files; it has to outlive the hosts.
    """
    require_namespaces()
    _remove_leftovers()
    addresses = {HEAD: f"{SUBNET}.254"} | {name: f"{SUBNET}.{number}" for number, name in enumerate(names, 1)}
    folder.mkdir(parents=True, exist_ok=True)
    net = HostsNet(addresses, folder)
    _write_files(net)
    try:
        _make(addresses)
        yield net
    finally:
        for name in (*addresses, SWITCH):
            _kill(_namespace(name))
            subprocess.run(["ip", "netns", "del", _namespace(name)], capture_output=True, check=False)


def require_namespaces() -> None:
    """Skip where packages are missing or the kernel makes no namespaces for this user; with CI=true fail."""
    missing = sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})
    if missing:
        cannot(f"hosts on one machine need {', '.join(missing)}")
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--ipc", "--mount", "true"], capture_output=True, text=True, check=False
    )
    if os.geteuid() != 0 or tried.returncode:
        cannot(f"the kernel refuses namespaces here: {tried.stderr.strip() or 'not root'}")


def _namespace(name: str) -> str:
    return f"{PREFIX}{os.getpid()}-{name}"


def _make(addresses: dict[str, str]) -> None:
    switch = _namespace(SWITCH)
    _call("ip", "netns", "add", switch)
    _call("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
    _call("ip", "-n", switch, "link", "set", "bridge0", "up")
    for number, (name, address) in enumerate(addresses.items()):
        host, port = _namespace(name), f"port{number}"
        _call("ip", "netns", "add", host)
        _call("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", host)
        _call("ip", "-n", switch, "link", "set", port, "master", "bridge0", "up")
        _call("ip", "-n", host, "addr", "add", f"{address}/24", "dev", DEVICE)
        _call("ip", "-n", host, "link", "set", "lo", "up")
        _call("ip", "-n", host, "link", "set", DEVICE, "up")


def _write_files(net: HostsNet) -> None:
    """The hosts file that all of them see, and what stands for ssh."""
    known = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in net.addresses.items())]
    (net.folder / "hosts").write_text("\n".join(known) + "\n")
    places = "|".join(net.addresses)
    net.shell.write_text(f"""#!/bin/sh
while true; do case "$1" in -l|-p|-o|-i) shift 2;; -*) shift;; *) break;; esac; done
export name=$1; shift
case "$name" in {places}) ;; *) echo "no host $name" >&2; exit 255;; esac
if [ -e "{net.folder}/$name.gone" ]; then echo "no answer from $name" >&2; exit 255; fi
exec nsenter --net={NAMESPACES}/{_namespace("$name")} unshare --uts --ipc --mount --propagation private sh -c \\
  ". '{net.folder}/enter' && $*"
""")
    # UCX looks for devices in /sys, which shows those of the namespace it was mounted in; the cgroups there stay.
    cgroups = net.folder / "cgroups"
    cgroups.mkdir(exist_ok=True)
    net.disk.mkdir(exist_ok=True)
    (net.folder / "enter").write_text(f"""
mkdir -p '{net.disk}-of-'"$name" && mount --bind '{net.disk}-of-'"$name" '{net.disk}'
hostname "$name"; unset name
mount -t tmpfs tmpfs /dev/shm
mount --bind '{net.folder}/hosts' /etc/hosts
mount --rbind /sys/fs/cgroup '{cgroups}' && mount -t sysfs sysfs /sys && mount --rbind '{cgroups}' /sys/fs/cgroup
""")
    net.shell.chmod(0o700)


def _pids(namespace: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split()]


def _kill(namespace: str) -> None:
    """End everything in a namespace, also what is started meanwhile."""
    for _ in range(20):
        pids = _pids(namespace)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _remove_leftovers() -> None:
    """Hosts of processes that are gone."""
    for path in sorted(NAMESPACES.glob(f"{PREFIX}*")):
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        if not Path(f"/proc/{owner}").exists():
            _kill(path.name)
            subprocess.run(["ip", "netns", "del", path.name], capture_output=True, check=False)


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"{' '.join(words)} failed: {done.stderr.strip()}; the kernel's veth and bridge are needed")
