"""Which rank shows what when ranks fail, on simulated ranks; whole jobs are tested in tests/jobs."""

import runpy
import threading

import pytest

from mpispeed.base.errors import AgreementError, CommError, ConfigError
from mpispeed.base.traces import own_trace
from mpispeed.mesh import exits, sim
from mpispeed.mesh.ending import Ending


class Aborted(Exception):
    """Stands for the end of the process."""


def leave(errors, monkeypatch, size=3, nodes=1):
    """Let ranks fail with the given errors; returns each rank's exit code, negative if it aborted the job."""
    # Those that all fail come together, whenever; the others are waited for in vain.
    monkeypatch.setattr(exits, "GRACE_SECONDS", 60.0 if len(errors) == size else 0.2)
    monkeypatch.setattr(exits, "SHOWN_SECONDS", 0.05)
    left = {}

    def fn(world):
        def abort(code):
            raise Aborted(code)

        is_apart = nodes == 2 and world.rank == size - 1
        node = world.comm.split(int(is_apart), [size - 1] if is_apart else range(size - nodes + 1), ("node",))
        own = exits.Exits(world.comm.duplicate(), node, Ending(abort))
        world.comm.barrier()
        error = errors.get(world.rank)
        if error is not None:
            try:
                own.on_error(type(error), error, error.__traceback__)
            except SystemExit as stop:
                left[world.rank] = stop.code
            except Aborted as stop:
                left[world.rank] = -stop.args[0]
        world.comm.barrier()
        own.close()

    sim.run(size, fn)
    return left


def test_an_error_of_one_rank_aborts(monkeypatch, capsys):
    assert leave({1: ValueError("planted")}, monkeypatch) == {1: -1}
    shown = capsys.readouterr().err
    assert shown.count("ValueError: planted") == 1
    assert "rank 1" in shown


def test_errors_of_all_ranks_are_shown_once(monkeypatch, capsys):
    errors = {rank: ValueError(f"planted {rank}") for rank in range(3)}
    assert leave(errors, monkeypatch) == dict.fromkeys(range(3), -1)
    assert capsys.readouterr().err.count("ValueError: planted") == 1


def test_an_error_all_ranks_share_leaves_quietly(monkeypatch, capsys):
    errors = {rank: ConfigError("does not fit") for rank in range(3)}
    assert leave(errors, monkeypatch) == dict.fromkeys(range(3), 2)
    assert capsys.readouterr().err == "mpispeed: error: does not fit\n"


def test_a_shared_error_that_others_do_not_raise_aborts(monkeypatch, capsys):
    assert leave({0: AgreementError("no")}, monkeypatch) == {0: -2}
    assert capsys.readouterr().err == "mpispeed: error: no\n"


def test_our_errors_have_no_traceback_unless_asked(monkeypatch, capsys):
    assert leave({2: CommError("sizes")}, monkeypatch) == {2: -2}
    assert capsys.readouterr().err == "mpispeed: error: sizes (rank 2)\n"
    monkeypatch.setenv("MPISPEED_DEBUG", "1")
    leave({2: CommError("sizes")}, monkeypatch)
    assert "mpispeed.base.errors.CommError: sizes\n" in capsys.readouterr().err


def test_one_rank_alone_just_leaves(monkeypatch, capsys):
    assert leave({0: ConfigError("does not fit")}, monkeypatch, size=1) == {0: 2}
    assert leave({0: ValueError("planted")}, monkeypatch, size=1) == {0: 1}
    assert capsys.readouterr().err.count("planted") == 1


def test_threads_may_leave_by_system_exit():
    def fn(world):
        own = exits.Exits(world.comm.duplicate(), world.node, Ending(lambda _: pytest.fail("aborted")))
        own.on_thread_error(threading.ExceptHookArgs((SystemExit, SystemExit(), None, None)))
        own.close()

    sim.run(2, fn)


def test_what_all_ranks_raise_is_shown_by_the_node_of_rank_0_only(monkeypatch, capsys):
    """Each node has a lock of its own; the one of rank 0 speaks, and the other where rank 0 does not come."""
    errors = {rank: ConfigError("does not fit") for rank in range(3)}
    assert leave(errors, monkeypatch, nodes=2) == dict.fromkeys(range(3), 2)
    assert capsys.readouterr().err == "mpispeed: error: does not fit\n"
    assert leave({2: errors[2]}, monkeypatch, nodes=2) == {2: -2}
    assert capsys.readouterr().err == "mpispeed: error: does not fit\n"


@pytest.mark.parametrize(("said", "text"), [("", "mpispeed: interrupted (Ctrl-C)\n"), ("/x/said", "")])
def test_ctrl_c_is_one_line_or_that_of_the_command(monkeypatch, capsys, said, text):
    monkeypatch.setenv(exits.SAID, said)
    if not said:
        monkeypatch.delenv(exits.SAID)
    assert leave({1: KeyboardInterrupt()}, monkeypatch) == {1: -130}
    assert capsys.readouterr().err == text


def test_a_traceback_begins_in_the_script(tmp_path):
    (tmp_path / "train.py").write_text("def f():\n    raise ValueError\nf()\n")
    with pytest.raises(ValueError) as caught:
        runpy.run_path(str(tmp_path / "train.py"))
    starter = caught.tb.tb_next
    assert "runpy" in starter.tb_frame.f_code.co_filename
    assert own_trace(starter).tb_frame.f_code.co_filename == str(tmp_path / "train.py")
    assert own_trace(None) is None
