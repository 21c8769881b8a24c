"""How processes ended that are children of somebody else."""

import os
import signal
import time

import pytest

from mpispeed.watchdog import process
from mpispeed.watchdog.process import ProcessWatch, Status, from_wait_status, start_ticks, wait_exit

LIMIT_SECONDS = 60.0

# The children only sleep and end, whatever threads there are.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


class Grandchild:
    """A process whose parent is a child of ours; it ends when told, and is collected when told."""

    def __init__(self, end):
        self.told, tell = os.pipe()
        self.ready, ready = os.pipe()
        collect, self.collect_now = os.pipe()
        self.go_now = tell
        self.parent = os.fork()
        if self.parent == 0:
            try:
                child = os.fork()
                if child == 0:
                    os.close(tell)
                    os.read(self.told, 1)
                    end()
                    os._exit(77)
                os.write(ready, str(child).encode())
                os.close(self.collect_now)
                os.read(collect, 1)
                os.waitpid(child, 0)
                os.write(ready, b"c")
                os.close(tell)
                time.sleep(LIMIT_SECONDS)
            finally:
                os._exit(0)
        self.pid = int(os.read(self.ready, 20))

    def end(self):
        os.write(self.go_now, b"g")

    def collect(self):
        os.write(self.collect_now, b"c")
        assert os.read(self.ready, 1) == b"c"

    def close(self):
        os.kill(self.parent, signal.SIGKILL)
        os.waitpid(self.parent, 0)


@pytest.fixture
def grandchild():
    made = []

    def make(end):
        made.append(Grandchild(end))
        return made[-1]

    yield make
    for each in made:
        each.close()


def kill_self(number):
    os.kill(os.getpid(), number)


ENDS = [
    (lambda: os._exit(0), Status(exit_code=0)),
    (lambda: os._exit(3), Status(exit_code=3)),
    (lambda: kill_self(signal.SIGKILL), Status(signal=9)),
    (lambda: kill_self(signal.SIGTERM), Status(signal=15)),
    (lambda: (signal.signal(signal.SIGSEGV, signal.SIG_DFL), kill_self(signal.SIGSEGV)), Status(signal=11)),
]


@pytest.mark.parametrize(("end", "wanted"), ENDS, ids=[str(wanted) for _, wanted in ENDS])
def test_the_status_of_a_zombie_is_read(grandchild, end, wanted):
    other = grandchild(end)
    watch = ProcessWatch(other.pid)
    assert watch.poll() is None
    other.end()
    assert watch.wait(LIMIT_SECONDS) == wanted
    other.collect()
    assert watch.poll() == wanted  # for ever


def kernel_keeps_status(make):
    other = make(lambda: os._exit(5))
    watch = ProcessWatch(other.pid)
    other.end()
    other.collect()
    return watch.poll() == Status(exit_code=5)


@pytest.mark.parametrize(("end", "wanted"), ENDS[1:3], ids=["code", "signal"])
def test_the_status_of_a_collected_process_is_known_or_said_to_be_unknown(grandchild, end, wanted):
    kept = kernel_keeps_status(grandchild)
    other = grandchild(end)
    watch = ProcessWatch(other.pid)
    other.end()
    other.collect()
    found = watch.wait(LIMIT_SECONDS)
    assert found == (wanted if kept else Status())
    assert found.is_known == kept


def test_without_a_handle_the_zombie_is_enough(grandchild, monkeypatch):
    def refuse(pid, flags=0):
        raise OSError

    monkeypatch.setattr(os, "pidfd_open", refuse)
    other = grandchild(lambda: os._exit(9))
    watch = ProcessWatch(other.pid)
    assert watch.fileno() is None
    assert watch.poll() is None
    other.end()
    limit = time.monotonic() + LIMIT_SECONDS
    while watch.poll() is None and time.monotonic() < limit:
        time.sleep(0.01)
    assert watch.poll() == Status(exit_code=9)


def test_a_kernel_without_the_question_leaves_the_zombie(grandchild, monkeypatch):
    def refuse(*_):
        raise OSError

    monkeypatch.setattr(process.fcntl, "ioctl", refuse)
    other = grandchild(lambda: os._exit(4))
    watch = ProcessWatch(other.pid)
    other.end()
    assert watch.wait(LIMIT_SECONDS) == Status(exit_code=4)


def test_a_number_that_went_to_another_process_is_an_end():
    ticks = start_ticks(os.getpid())
    assert ProcessWatch(os.getpid(), ticks).poll() is None
    assert ProcessWatch(os.getpid(), ticks - 1).poll() == Status()


def test_a_process_that_never_was():
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    assert start_ticks(gone) is None
    assert ProcessWatch(gone).poll() == Status()
    assert wait_exit(gone) == -1


def test_wait_exit_speaks_like_a_shell(grandchild):
    assert wait_exit(os.getpid()) is None
    other = grandchild(lambda: kill_self(signal.SIGKILL))
    ticks = start_ticks(other.pid)
    other.end()
    limit = time.monotonic() + LIMIT_SECONDS
    while wait_exit(other.pid, ticks) is None and time.monotonic() < limit:
        time.sleep(0.01)
    assert wait_exit(other.pid, ticks) == 137


def test_a_name_with_brackets_and_blanks_is_no_trouble(tmp_path):
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "stat").write_text("7 (a) b) Z 1 " + "0 " * 17 + "4242 " + "0 " * 29 + "256\n")
    assert start_ticks(7, tmp_path) == 4242


@pytest.mark.parametrize(("raw", "wanted", "text"), [
    (0, Status(exit_code=0), "exit code 0"), (256 * 7, Status(exit_code=7), "exit code 7"),
    (9, Status(signal=9), "signal 9 (SIGKILL)"), (11 | 128, Status(signal=11), "signal 11 (SIGSEGV)"),
    (50, Status(signal=50), "signal 50 (SIG50)"),
])  # fmt: skip
def test_statuses_of_wait(raw, wanted, text):
    assert from_wait_status(raw) == wanted
    assert str(wanted) == text
