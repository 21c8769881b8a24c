"""The table against torch's HashStore, and the messages of simulated ranks: limits, time-outs, damaged headers."""

import threading
import time
from datetime import timedelta

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed as dist

from mpispeed.base.errors import CommError, ConfigError
from mpispeed.mesh import sim
from mpispeed.mesh.backends.solo import solo_comm
from mpispeed.process_group import store as stores
from mpispeed.process_group import store_server, store_table
from mpispeed.process_group.store import MpiStore, StoreTimeout
from mpispeed.process_group.store_table import Op, Request, Status, Table

NAMES = st.sampled_from(["", "a", "b", "ä"])
TEXTS = st.sampled_from(["", "0", "x", " +12y", "-3"])
LIMIT = timedelta(seconds=60)
SOON = timedelta(seconds=0.1)

CALLS = st.one_of(
    st.tuples(st.just("set"), NAMES, TEXTS),
    st.tuples(st.just("add"), NAMES, st.integers(-5, 5)),
    st.tuples(st.just("compare_set"), NAMES, TEXTS, TEXTS),
    st.tuples(st.just("append"), NAMES, TEXTS),
    st.tuples(st.just("delete_key"), NAMES),
    st.tuples(st.just("check"), st.lists(NAMES)),
    st.tuples(st.just("get"), NAMES),
    st.tuples(st.just("multi_get"), st.lists(NAMES)),
    st.tuples(st.just("wait"), st.lists(NAMES)),
    st.tuples(st.just("num_keys")),
    st.lists(st.tuples(NAMES, TEXTS)).map(lambda pairs: ("multi_set", [k for k, _ in pairs], [v for _, v in pairs])),
)


def result(store, name, *values):
    """What a call gives, or that it fails."""
    try:
        return getattr(store, name)(*values)
    except (RuntimeError, ValueError):
        return "failed"


@given(st.lists(CALLS, max_size=25))
@settings(max_examples=60)
def test_one_rank_answers_as_a_hash_store_does(calls):
    theirs, ours = dist.HashStore(), MpiStore(solo_comm())
    for store in (theirs, ours):
        store.set_timeout(timedelta(milliseconds=1))
    for call in calls:
        assert result(ours, *call) == result(theirs, *call), call
    ours.close()


class Asking:
    """A table and the answers it has given, by the order of the requests."""

    def __init__(self, ranks=range(4)):
        self.table, self.answers, self._count = Table(ranks), {}, 0

    def __call__(self, op, *parts, rank=0, number=0, now=0.0):
        mine, self._count = self._count, self._count + 1

        def done(status, answer):
            assert mine not in self.answers
            self.answers[mine] = (status, list(answer))

        self.table.ask(Request(rank, op, parts, number), done, now)
        return self.answers.get(mine)


def test_a_request_waits_until_all_its_keys_are_there_at_once():
    ask = Asking()
    assert ask(Op.GET, b"a", b"b") is None
    ask(Op.SET, b"a", b"1")
    ask(Op.DELETE, b"a")
    ask(Op.SET, b"b", b"2")
    assert 0 not in ask.answers
    ask(Op.ADD, b"a", number=3)
    assert ask.answers[0] == (Status.DONE, [b"3", b"2"])


def test_ranks_whose_time_runs_out_name_each_other():
    ask = Asking(ranks=(10, 11, 12, 13))
    ask(Op.GET, b"k", rank=1, number=1000)
    ask(Op.WAIT, b"there", b"k", rank=3, number=1000)
    ask(Op.WAIT, b"other", rank=2, number=0)
    ask(Op.SET, b"there", b"")
    ask.table.expire(0.5)
    assert list(ask.answers) == [3]
    ask.table.expire(1.5)
    assert ask.answers[0][0] == ask.answers[1][0] == Status.LATE
    text = ask.answers[0][1][0].decode()
    assert "rank 11 waited 1 s for 'k' in the store" in text
    assert "rank 13 waiting as well" in text
    assert "rank 11 waiting as well" in ask.answers[1][1][0].decode()
    ask.table.drop("closed", 2)
    assert ask.answers[2] == (Status.REFUSED, [b"closed"])


def test_limits_are_told_and_leave_the_table_as_it_was(monkeypatch):
    monkeypatch.setattr(store_table, "KEY_BYTES", 8)
    monkeypatch.setattr(store_table, "VALUE_BYTES", 16)
    monkeypatch.setattr(store_table, "TABLE_BYTES", 50)
    store = MpiStore(solo_comm())
    with pytest.raises(CommError, match="a key has 9 bytes; the store takes at most 8"):
        store.check(["k", "k" * 9])
    with pytest.raises(CommError, match="the value of key 'b' has 17 bytes; the store takes at most 16"):
        store.multi_set(["a", "b"], ["1", b"v" * 17])
    store.append("k", "v" * 16)
    with pytest.raises(CommError, match="the value of key 'k' would have 17 bytes; the limit is 16"):
        store.append("k", "v")
    store.set("l", b"v" * 16)
    with pytest.raises(CommError, match="the store would hold 51 bytes; rank 0 keeps at most 50: delete keys"):
        store.set("m", b"v" * 16)
    with pytest.raises(CommError, match="have over 50"):
        store.multi_get(["k"] * 4)
    store.set("l", b"v" * 8)
    store.set("m", b"v" * 16)
    assert store.num_keys() == 3
    with pytest.raises(CommError, match="does not fit 64 bits"):
        store.add("n", 1 << 63)
    with pytest.raises(CommError, match="no number to which that"):
        store.add("k", 1)
    with pytest.raises(CommError, match="2 keys and 1 values"):
        store.multi_set(["a", "b"], ["1"])
    store.close()


def test_a_rank_alone_waits_for_its_other_threads():
    store = MpiStore(solo_comm(), timedelta(0))  # no end, as in torch
    threading.Timer(0.05, store.set, ("key", "x")).start()
    assert store.get("key") == b"x"
    with pytest.raises(dist.DistStoreError, match=r"rank 0 waited 0.01 s for 'a/never'"):
        dist.PrefixStore("a", store).wait(["never"], timedelta(seconds=0.01))
    store.close()
    with pytest.raises(CommError, match="closed"):
        store.num_keys()


def test_simulated_ranks_meet_in_the_store():
    def main(world):
        store = MpiStore(world.comm, LIMIT)
        for turn in range(10):
            store.add("sum", 1)
            store.set(f"{world.rank}/{turn}", str(turn))
        assert store.multi_get([f"{rank}/9" for rank in range(world.size)]) == [b"9"] * world.size
        prefixed = dist.PrefixStore("in", store)
        prefixed.set("own", str(world.rank))
        assert prefixed.has_extended_api()
        prefixed.append(f"log{world.rank}", "ab")
        assert prefixed.multi_get([f"log{world.rank}"]) == [b"ab"]
        assert prefixed.compare_set(f"c{world.rank}", "no", "x") == b"no"
        assert prefixed.delete_key(f"log{world.rank}")
        total = store.get("sum")
        store.close()
        return total

    assert sim.run(3, main) == [b"30"] * 3


def test_a_time_out_names_key_and_rank_over_messages():
    def main(world):
        store = MpiStore(world.comm, LIMIT)
        text, limit = "", time.monotonic() + 60
        if world.rank == 0:
            store.get("a key")
        while world.rank == 1 and "rank 0 waiting as well" not in text and time.monotonic() < limit:
            store.set_timeout(timedelta(seconds=0.2))
            with pytest.raises(StoreTimeout, match=r"rank 1 waited 0\.2 s for 'a key'") as caught:
                store.get("a key")
            text = str(caught.value)  # rank 0 may come later
        store.set("a key", "")
        store.set_timeout(timedelta(seconds=0.2))
        with pytest.raises(StoreTimeout, match=rf"rank {world.rank} waited 0\.2 s for 'another'"):
            store.get("another")
        store.close()
        return text

    assert "rank 0 waiting as well" in sim.run(2, main)[1]


def test_calls_that_wait_are_refused_when_their_rank_closes():
    def main(world):
        store, texts = MpiStore(world.comm, LIMIT), []

        def waiting():
            try:
                store.get("never")
            except CommError as error:
                texts.append(str(error).partition(";")[0])

        thread = threading.Thread(target=waiting)
        thread.start()
        time.sleep(0.05)
        store.close()
        thread.join()
        return texts

    assert sim.run(2, main) == [["GET of store (2 ranks): the store is closed"]] * 2


def test_a_thread_that_waits_when_the_program_ends_ends_silently():
    """An error of a thread ends the job, and this is none."""

    def main(world):
        store = MpiStore(world.comm, LIMIT)
        caught = []

        def waiting():
            with pytest.raises(SystemExit) as error:
                store.get("never")
            caught.append(error.value.code)

        thread = threading.Thread(target=waiting)
        thread.start()
        time.sleep(0.05)
        store._leave_at_exit()
        thread.join()
        return caught

    assert sim.run(2, main) == [[None]] * 2


def test_damaged_headers_are_answered_and_the_store_goes_on():
    healthy = [Op.SET, 7, 2, 18, 0]
    damages = {0: (0, 99), 1: (store_server.SLOTS, -1), 2: (-1, 1 << 40), 3: (-1, 15, 1 << 62)}
    assert store_server.flaw(healthy) == ""
    assert "0 ms" not in store_server.flaw([Op.GET, 0, 1, 9, 0])
    assert "a time of -1 ms" in store_server.flaw([Op.GET, 0, 1, 9, -1])
    wrong = [[*healthy[:place], value, *healthy[place + 1 :]] for place, found in damages.items() for value in found]
    assert all(map(store_server.flaw, wrong))

    def main(world):
        store = MpiStore(world.comm, LIMIT)
        if world.rank == 1:
            comm, answer = store._comm, store_server.empty_words(store_server.ANSWER_WORDS)
            for header in wrong:
                got = comm.transport.post_recv(answer, 0, store_server.ANSWER_TAG + header[1])
                comm.transport.post_send(store_server.words(*header), 0, store_server.HEADER_TAG)
                if 0 <= header[1] < store_server.SLOTS:
                    store._await(got, Request(1, Op.SET, ()), 5.0)
                    body = store_server.empty_body(answer.tolist()[2])
                    store._await(
                        comm.transport.post_recv(body, 0, store_server.ANSWER_TAG + header[1]),
                        Request(1, Op.SET, ()),
                        5,
                    )
                    assert "damaged" in store_server.unpack(body, 1)[0].decode()
            store.set("still", "there")
        found = store.get("still")
        store.close()
        return found

    assert sim.run(2, main) == [b"there"] * 2


@pytest.mark.parametrize("lengths", [[9, 0], [-1, 2], [1 << 62, 1 << 62], [0, 0]])
def test_parts_that_do_not_add_up_are_refused(lengths):
    body = torch.tensor(lengths).view(torch.uint8)
    body = torch.cat([body, torch.zeros(1, dtype=torch.uint8)])
    with pytest.raises(CommError, match="do not add up"):
        store_server.unpack(body, 2)


def test_a_library_without_threads_is_refused():
    def main(world):
        with pytest.raises(ConfigError, match="MPI_THREAD_MULTIPLE"):
            MpiStore(world.comm, LIMIT, has_threads=False)

    sim.run(2, main)
    MpiStore(solo_comm(), has_threads=False).close()


def test_a_rank_that_gets_no_answer_says_so(monkeypatch):
    monkeypatch.setattr(stores, "ANSWER_SECONDS", 0.1)

    def main(world):
        if world.rank == 0:
            monkeypatch.setattr(store_server.Server, "_run", lambda self: None)
        store = MpiStore(world.comm, SOON)
        if world.rank == 1:
            with pytest.raises(StoreTimeout, match="ADD of rank 1 for 'k': rank 0, which keeps the store, did not"):
                store.add("k", 1)
        store.close(0.1)

    sim.run(2, main)
