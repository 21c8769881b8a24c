"""What is written in a recorder is what a watchdog reads."""

import os
import threading
import time

import pytest
import torch

from mpispeed.base import recorder_file as form
from mpispeed.base.recorder_words import OTHER, Kind, Order, State
from mpispeed.mesh import recorder as recorders
from mpispeed.mesh.backends.solo import SoloTransport, solo_comm
from mpispeed.mesh.collectives.group import CommTrace, Group
from mpispeed.mesh.comm import Comm
from mpispeed.mesh.recorder import CallSequence, FlightRecorder
from mpispeed.watchdog.recorder_reader import RecorderView


@pytest.fixture
def pair(tmp_path):
    """A recorder and a view of it."""
    recorder = recorders.open_recorder(tmp_path / "rank-3", 3, 8, 1)
    yield recorder, RecorderView(tmp_path / "rank-3")
    recorders.close_recorder()


CHANNEL_RANKS = (0, 1, 3)


def begin(recorder, channel, verb="all_reduce", kind=Kind.COLLECTIVE, **more):
    return recorder.begin(channel, kind, verb, dtype="float32", op="sum", count=8, **more)


def test_header_and_groups(pair):
    recorder, view = pair
    begin(recorder, CallSequence.root("data", CHANNEL_RANKS))
    view.news()
    assert (view.rank, view.state, int(view.field("world"))) == (3, State.RUNNING, 8)
    (group,) = view.groups.values()
    assert (group.name, group.ranks) == ("data", CHANNEL_RANKS)


def test_rows_are_read_once_and_ends_are_seen(pair):
    recorder, view = pair
    channel = CallSequence.root("data", CHANNEL_RANKS)
    rows = [begin(recorder, channel) for _ in range(3)]
    recorder.end(rows[1])
    news = view.news()
    assert [(o.seq, o.is_over) for o in news] == [(1, False), (2, True), (3, False)]
    assert view.news() == []
    assert [o.row for o in view.under_way()] == [rows[0], rows[2]]
    assert news[0].text("data") == "all_reduce (sum) of 8 float32 over data"
    assert news[0].size_bytes == 32
    assert news[0].site.startswith("tests/unit/watchdog/test_view.py:") or "test_view.py:" in news[0].site


def test_the_ring_goes_round_and_keeps_what_is_under_way(pair):
    recorder, view = pair
    channel = CallSequence.root("data", CHANNEL_RANKS)
    held = begin(recorder, channel, "barrier")
    for _ in range(2 * form.ROWS + 7):
        recorder.end(begin(recorder, channel))
    assert [(o.row, o.verb) for o in view.under_way()] == [(held, "barrier")]
    assert len(view.news()) == form.ROWS
    assert view.last(1)[0].seq == 2 * form.ROWS + 8


def test_signatures_are_those_of_the_operation_and_not_of_the_place(pair):
    recorder, view = pair
    data, other = CallSequence.root("data", (0, 1)), CallSequence.root("other", (0, 1))
    begin(recorder, data), begin(recorder, other, site="elsewhere.py:1")
    recorder.begin(data, Kind.COLLECTIVE, "all_reduce", dtype="float32", op="sum", count=9)
    recorder.begin(data, Kind.COLLECTIVE, "all_reduce", dtype="int32", op="sum", count=8)
    recorder.begin(data, Kind.COLLECTIVE, "all_reduce", dtype="float32", op="max", count=8)
    recorder.begin(data, Kind.COLLECTIVE, "broadcast", dtype="float32", count=8, peer=0)
    recorder.begin(data, Kind.COLLECTIVE, "broadcast", dtype="float32", count=8, peer=1)
    sigs = [operation.sig for operation in view.news()]
    assert sigs[0] == sigs[1]
    assert len(set(sigs[1:])) == 6


def test_groups_made_in_the_same_order_have_the_same_key_and_others_another():
    first, second = (CallSequence.root("world", (0, 1)) for _ in range(2))
    assert first.child(0, "a", (0,)).key == second.child(0, "a", (0,)).key
    keys = {first.key, first.child(0, "a", (0,)).key, first.child(1, "a", (1,)).key, first.child(-1, "b", (0, 1)).key}
    assert len(keys) == 4


def test_messages_are_counted_by_peer_and_tag(pair):
    recorder, view = pair
    channel = CallSequence.root("pipe", (0, 1, 2))
    for peer, tag in ((1, 0), (1, 0), (1, 5), (2, 0)):
        recorder.begin(channel, Kind.SEND, "send", count=4, dtype="float32", peer=peer, tag=tag)
    assert [o.seq for o in view.news()] == [1, 2, 1, 1]


def test_waits_in_short_turns_count_from_the_first(pair):
    recorder, view = pair
    row = begin(recorder, CallSequence.root("lane", (0, 1)), kind=Kind.GATE)
    recorder.waits_for(row)
    waited, since = view.wait()
    recorder.waits_for(recorders.NO_ROW)
    assert view.wait() is None
    time.sleep(0.01)
    recorder.waits_for(row)
    assert view.wait() == (waited, since)
    assert waited == row
    assert view.blocked_since() == since


def test_a_future_that_was_asked_for_may_be_waited_for_until_its_operation_ends(pair):
    recorder, view = pair
    row = begin(recorder, CallSequence.root("lane", (0, 1)), kind=Kind.GATE)
    recorder.may_wait_for(row)
    waited, since = view.future()
    assert (waited, view.wait(), view.blocked_since()) == (row, None, since)
    recorder.end(row)
    assert view.blocked_since() == 0.0


def test_words_are_cut_in_the_middle(pair):
    recorder, view = pair
    recorder.last_words("begin " + "x" * 100_000 + " end", is_shown=True)
    assert view.words().startswith("begin xx")
    assert view.words().endswith("xx end")
    assert int(view.field("has_shown")) == 1


def test_orders_and_questions_reach_the_rank(pair):
    recorder, view = pair
    view.order(Order.END, 7)
    assert (recorder.header["order"][0], recorder.header["order_code"][0]) == (Order.END, 7)
    view.ask_for_stack()
    assert recorder.header["asked"][0] != recorder.header["answered"][0]
    assert view.stack() == ""


def test_texts_beyond_the_room_are_left_out_and_nothing_breaks(pair):
    recorder, view = pair
    channel = CallSequence.root("data", (0, 1))
    for number in range(3000):
        recorder.end(begin(recorder, channel, site=f"{'x' * 100}{number}.py:1"))
    assert view.news()[-1].site == ""


def test_rows_of_several_threads_do_not_mix(pair):
    recorder, view = pair
    seen, stop = [], threading.Event()

    def write(name):
        channel = CallSequence.root(name, (0, 1))
        for number in range(3000):
            recorder.end(recorder.begin(channel, Kind.COLLECTIVE, name, count=number, site=name))

    def read():
        while not stop.is_set():
            seen.extend(view.news())
        seen.extend(view.news())  # a busy machine may give this thread its first turn after the last write

    reader = threading.Thread(target=read)
    reader.start()
    writers = [threading.Thread(target=write, args=(name,)) for name in ("one", "two", "three")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    stop.set()
    reader.join()
    assert seen
    assert all(o.verb == o.site and o.seq == o.count + 1 for o in seen)


def test_more_under_way_than_there_is_room_for_stops_no_rank(pair):
    recorder, view = pair
    channel = CallSequence.root("data", (0, 1))
    rows = [begin(recorder, channel) for _ in range(form.ROWS + 500)]
    assert rows.count(recorders.NO_ROW) == form.ROWS + 500 - recorders.MOST_BUSY
    assert int(view.field("is_open")) == 1
    for row in rows:
        recorder.end(row)
    assert begin(recorder, channel) != recorders.NO_ROW
    assert view.news()[-1].seq == form.ROWS + 501  # what had no row was counted


def test_threads_of_the_user_leave_everything_open(pair):
    recorder, view = pair
    thread = threading.Thread(target=begin, args=(recorder, CallSequence.root("own", (0, 1))))
    thread.start()
    thread.join()
    assert view.news()[0].thread == OTHER
    assert int(view.field("is_open")) == 1
    assert view.blocked_since() == 0.0


def test_a_child_of_a_fork_writes_nothing(pair):
    recorder, view = pair
    child = os.fork()
    if not child:
        os._exit(int(recorders.current() is not None))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert recorders.current() is recorder
    assert view.news() == []


def test_groups_are_told_when_there_is_no_room_for_places(pair):
    recorder, view = pair
    for number in range(3000):
        recorder.intern(f"{'x' * 100}{number}")
    begin(recorder, CallSequence.root("late", (0, 1)))
    assert view.news()[0].verb == "all_reduce"
    assert [group.name for group in view.groups.values()] == ["late"]


def test_groups_of_one_name_and_other_ranks_are_others():
    assert CallSequence.root("node", (0, 1)).key != CallSequence.root("node", (2, 3)).key


def recorded():
    """A group of one rank that the recorder knows."""
    sequence = CallSequence.root("data", (0,))
    return Comm(Group(SoloTransport(), (0,), ("data",), "ordered", CommTrace(), sequence=sequence))


def test_what_came_before_the_ledger_is_counted(tmp_path):
    comm = recorded()
    comm.all_reduce(torch.ones(4))
    recorders.open_recorder(tmp_path / "rank-0", 0, 1, 0)
    try:
        comm.all_reduce(torch.ones(4))
        assert [o.seq for o in RecorderView(tmp_path / "rank-0").news()] == [2]
    finally:
        recorders.close_recorder()


def test_a_verb_writes_one_row_and_the_journal_one_record(pair):
    _, view = pair
    comm = recorded()
    records = []
    comm.comm_trace.subscribe(records.append)
    comm.all_reduce(torch.ones(4))
    (operation,) = view.news()
    assert (operation.verb, operation.count, operation.is_over) == ("all_reduce", 4, True)
    assert "test_a_verb_writes_one_row" in operation.site
    (record,) = records
    assert (record.verb, record.axes, record.size, record.message_bytes) == ("all_reduce", ("data",), 1, 16)
    assert record.site == operation.site


def test_a_group_without_a_channel_is_not_in_the_ledger(pair):
    _, view = pair
    solo_comm(0, ("data",)).all_reduce(torch.ones(4))
    assert view.news() == []


def test_something_else_is_no_ledger(tmp_path):
    (tmp_path / "rank-0").write_bytes(bytes(form.FILE_BYTES))
    with pytest.raises(ValueError, match="no flight recorder"):
        RecorderView(tmp_path / "rank-0")


def test_a_ledger_is_not_written_over(tmp_path):
    FlightRecorder(tmp_path / "rank-0", 0, 1, 0)
    with pytest.raises(FileExistsError):
        FlightRecorder(tmp_path / "rank-0", 0, 1, 0)
