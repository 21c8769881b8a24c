"""Signals are noted and nothing else, older handlers run, children ignore them; files ask once."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from mpispeed.walltime import requests
from mpispeed.walltime.requests import Asked, SignalWatch, TouchFiles


@pytest.fixture
def watch():
    kept = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)}
    found = SignalWatch(["USR2", "TERM"])
    yield found
    found.restore()
    for number, handler in kept.items():
        signal.signal(number, handler)


def run_child(function):
    """The way a forked child ends: its exit code, or minus the signal."""
    pid = os.fork()
    if not pid:
        try:
            function()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_signal_is_noted_and_the_handler_that_was_there_runs(watch):
    calls = []
    signal.signal(signal.SIGUSR2, lambda number, frame: calls.append(number))
    before = signal.getsignal(signal.SIGTERM)
    assert watch.install()
    assert watch.number == 0
    signal.raise_signal(signal.SIGUSR2)
    assert (watch.number, calls) == (signal.SIGUSR2, [signal.SIGUSR2])
    signal.raise_signal(signal.SIGTERM)
    assert SignalWatch.name_of(watch.number) == "SIGTERM"
    watch.restore()
    assert signal.getsignal(signal.SIGTERM) == before
    signal.raise_signal(signal.SIGUSR2)
    assert (watch.number, len(calls)) == (signal.SIGTERM, 2)


def test_a_handler_that_came_later_stays(watch):
    watch.install()

    def later(number, frame):
        pass

    signal.signal(signal.SIGUSR2, later)
    watch.restore()
    assert signal.getsignal(signal.SIGUSR2) is later


def test_outside_of_the_main_thread_nothing_is_installed(watch):
    found = []
    thread = threading.Thread(target=lambda: found.append(watch.install()))
    thread.start()
    thread.join()
    assert found == [False]
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_loaders_ignore_signals_while_their_parent_heeds_them(watch):
    def signalled():
        watch._is_loader = True  # what torch's loaders do, by _shield_loaders
        for number in (signal.SIGUSR2, signal.SIGTERM):
            os.kill(os.getpid(), number)
            time.sleep(0.001)
        os._exit(watch.number + 5)

    watch.install()
    assert run_child(signalled) == 5
    assert watch.number == 0

    def ends_late():
        watch._let_children_go()  # what the parent does at its end
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    assert run_child(ends_late) == -signal.SIGTERM


def test_other_children_can_be_terminated(watch):
    """Pools of processes end their workers so, and wait for them."""
    watch.install()
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    os.kill(child.pid, signal.SIGUSR2)
    child.join(0.2)
    assert child.is_alive(), "what asks the run to save is none of its business"
    child.terminate()
    child.join(60)
    assert child.exitcode == -signal.SIGTERM


@pytest.mark.parametrize(("takes", "code"), [(True, 3), (False, 128 + signal.SIGTERM)])
def test_a_second_sigterm_does_not_cut_a_save_short(takes, code):
    """Preemption sends one at the start of the time of grace and one at its end."""
    text = (
        "import os, signal, time\n"
        "from mpispeed.walltime import second_sigterm as impatience, requests\n"
        "impatience.IMPATIENT_SECONDS = 0.2\n"
        "watch = requests.SignalWatch(['TERM'])\n"
        "watch.install()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        f"{'watch.take()' if takes else ''}\n"
        "time.sleep(0.4)\n"
        f"for _ in range({2 if takes else 200}):\n"  # the first may be read late, and the second then is too early
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(0.2)\n"
        "os._exit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", text], timeout=60, check=False).returncode == code


def test_grandchildren_do_not_outlive_a_sigterm(watch):
    """Nobody would take care of them."""

    def forks():
        def waits():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

        os._exit(-run_child(waits))

    watch.install()
    assert run_child(forks) == signal.SIGTERM


def test_files_ask_once_and_not_too_often(tmp_path):
    now = [100.0]
    files = TouchFiles(tmp_path, clock=lambda: now[0])
    assert files.look() is Asked.NOTHING
    (tmp_path / "SAVE").touch()
    assert files.look() is Asked.NOTHING, "looked a moment ago"
    now[0] += requests.LOOK_SECONDS
    assert files.look() is Asked.SAVE
    files.take(Asked.SAVE)
    assert not (tmp_path / "SAVE").exists()
    (tmp_path / "SAVE").touch()
    (tmp_path / "STOP").touch()
    now[0] += requests.LOOK_SECONDS
    assert files.look() is Asked.STOP
    files.take(Asked.STOP)
    assert (tmp_path / "STOP").exists(), "it stops the jobs that follow too"
    now[0] += requests.LOOK_SECONDS
    assert files.look() is Asked.SAVE


def test_a_file_that_cannot_be_removed_counts_again_when_it_is_touched_again(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(requests, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(requests.Path, "unlink", refuse)
    files = TouchFiles(tmp_path)
    (tmp_path / "SAVE").touch()
    assert files.look() is Asked.SAVE
    files.take(Asked.SAVE)
    assert files.look() is Asked.NOTHING
    os.utime(tmp_path / "SAVE", (1, 1))
    assert files.look() is Asked.SAVE


def test_a_folder_that_is_not_there_asks_for_nothing(tmp_path):
    assert TouchFiles(tmp_path / "none").look() is Asked.NOTHING
