"""What MPI tests share: one world per process, verdicts joined over all ranks, a hard time limit per test.

Without --with-mpi nothing here imports MPI, and the marked tests are skipped by pytest-mpi.
"""

import faulthandler
import logging
import os
import signal
from pathlib import Path

import pytest

SIZES = (1, 2, 3, 4)
TEST_SECONDS = float(os.environ.get("MPISPEED_TEST_SECONDS", "120"))
STACK_SECONDS = 2.0
OUTCOMES = ("passed", "skipped", "failed")
STACKS = pytest.StashKey()


def _open_stacks_file():
    """A file that pytest does not capture: the runner names one per rank; by hand it is the terminal."""
    path = os.environ.get("MPISPEED_TEST_STACKS")
    return Path(path).open("w") if path else os.fdopen(os.dup(2), "w")


def _is_mpi_run(config):
    return config.getoption("--with-mpi") or config.getoption("--only-mpi")


def pytest_configure(config):
    if _is_mpi_run(config):
        # The first engine would do this in the middle of a test, whose caplog then hears nothing of it.
        logging.getLogger("mpispeed").propagate = False
        config.stash[STACKS] = _open_stacks_file()
        faulthandler.register(signal.SIGUSR1, file=config.stash[STACKS], all_threads=True)


def pytest_unconfigure(config):
    # A rank that leaves with a failure aborts the job: not before the others have written their reports.
    if _is_mpi_run(config):
        from mpi4py import MPI

        MPI.COMM_WORLD.Barrier()


def pytest_collection_modifyitems(config, items):
    """The closest marker `ranks` counts; the runner sees to it that each test runs somewhere."""
    from_world = None
    for item in items:
        mark = item.get_closest_marker("ranks")
        if mark is None:
            continue
        if not mark.args or not set(mark.args) <= set(SIZES):
            msg = f"{item.nodeid}: ranks{mark.args} names other numbers of ranks than those of {SIZES}"
            raise pytest.UsageError(msg)
        if _is_mpi_run(config):
            from_world = _world_size() if from_world is None else from_world
            if from_world not in mark.args:
                item.add_marker(pytest.mark.skip(reason=f"runs on {', '.join(map(str, mark.args))} ranks"))


def _world_size():
    from mpi4py import MPI

    return MPI.COMM_WORLD.size


@pytest.fixture(scope="session")
def world():
    """The world of this job, joined once per process."""
    from mpispeed.mesh import start

    return start()


@pytest.fixture
def comm(world):
    """All ranks."""
    return world.comm


def _is_joined(item):
    return _is_mpi_run(item.config) and item.get_closest_marker("mpi") is not None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    if not _is_joined(item):
        return (yield)
    from mpi4py import MPI

    # A rank that is stuck in a collective cannot be called back from C: it is ended, and with it the group.
    # The alarm comes later than the stacks, so that the first rank to go leaves the others time to write theirs.
    faulthandler.dump_traceback_later(TEST_SECONDS, file=item.config.stash[STACKS])
    signal.setitimer(signal.ITIMER_REAL, TEST_SECONDS + STACK_SECONDS)
    try:
        MPI.COMM_WORLD.Barrier()
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if _is_joined(item):
        _join(report)
    return report


def _join(report):
    """Give all ranks the same outcome of a phase, so that they also run the same phases."""
    from mpi4py import MPI

    outcomes = MPI.COMM_WORLD.allgather(OUTCOMES.index(report.outcome))
    if len(set(outcomes)) == 1:
        return
    told = ", ".join(f"rank {rank} {OUTCOMES[outcome]}" for rank, outcome in enumerate(outcomes))
    if report.outcome != "failed":
        report.outcome = "failed"
        report.longrepr = f"{report.when}: the ranks disagree: {told}"
    else:
        report.sections.append(("verdict", told))
