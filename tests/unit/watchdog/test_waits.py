"""Who waits for ever: hand-made states with known answers, and random jobs played out."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.base.recorder_words import Kind
from mpispeed.watchdog.wait_graph import Doing, RankState, judge

WORLD, PAIR, LANE = 1, 2, 3
MEMBERS = {WORLD: (0, 1, 2), PAIR: (0, 1), LANE: (0, 1, 2)}


def members(key):
    return MEMBERS[key]


def doing(comm, seq, *, kind=Kind.COLLECTIVE, peer=-1, tag=0, thread=0, posted=False, age=10.0):
    return Doing(comm, int(kind), seq, peer, tag, thread, posted, age, f"{kind.name} {seq}", "train.py:1")


def ranks(*states):
    return {state.rank: state for state in states}


def test_a_rank_that_computes_is_late_and_nobody_is_stuck():
    states = ranks(
        RankState(0, blocking=[doing(WORLD, 5)], entered={WORLD: 5}),
        RankState(1, entered={WORLD: 4}),
        RankState(2, blocking=[doing(WORLD, 5)], entered={WORLD: 5}),
    )
    found = judge(states, members)
    assert (found.stuck, found.late, found.waiting) == ((), (1,), (0, 2))
    assert found.waits_on == {0: (1,), 2: (1,)}


def test_a_rank_that_has_left_makes_the_others_stuck():
    states = ranks(
        RankState(0, blocking=[doing(WORLD, 5)], entered={WORLD: 5}),
        RankState(1, gone="has left the program", entered={WORLD: 4}),
        RankState(2, entered={WORLD: 4}),
    )
    found = judge(states, members)
    assert found.stuck == (0,)
    assert found.has_gone


def test_a_wait_that_is_not_seen_makes_others_late_and_proves_no_cycle():
    future = replace(doing(LANE, 1, kind=Kind.GATE, thread=1, posted=True), is_seen=False)
    lanes = {1: [future]}
    asked = RankState(0, blocking=[future], lanes=lanes, submitted={LANE: 1}, gates={LANE: 1})
    found = judge(ranks(asked, RankState(1), RankState(2)), members)
    assert (found.stuck, found.late, found.waiting) == ((), (1, 2), (0,))
    others = [RankState(rank, blocking=[doing(WORLD, 1)], entered={WORLD: 1}) for rank in (1, 2)]
    assert judge(ranks(asked, *others), members).stuck == ()
    sure = RankState(0, blocking=[replace(future, is_seen=True)], lanes=lanes, submitted={LANE: 1}, gates={LANE: 1})
    assert judge(ranks(sure, *others), members).stuck == (0, 1, 2)


def test_two_groups_entered_in_opposite_order_are_a_cycle():
    states = ranks(
        RankState(0, blocking=[doing(WORLD, 1)], entered={WORLD: 1}),
        RankState(1, blocking=[doing(PAIR, 1)], entered={PAIR: 1}),
        RankState(2, blocking=[doing(WORLD, 1)], entered={WORLD: 1}),
    )
    found = judge(states, members)
    assert found.stuck == (0, 1, 2)
    assert not found.has_gone


def test_an_operation_that_all_are_in_is_slow_and_not_stuck():
    states = ranks(*(RankState(r, blocking=[doing(WORLD, 3, age=40)], entered={WORLD: 3}) for r in range(3)))
    found = judge(states, members)
    assert (found.stuck, found.late, found.slow, found.slow_seconds) == ((), (), (0, 1, 2), 40)


@pytest.mark.parametrize(("posted", "stuck"), [({}, (0, 1)), ({(WORLD, 0, 0): 1}, ())])
def test_a_receive_waits_for_a_send_that_may_be_posted_already(posted, stuck):
    states = ranks(
        RankState(0, blocking=[doing(WORLD, 1, kind=Kind.RECV, peer=1)]),
        RankState(1, blocking=[doing(PAIR, 1)], entered={PAIR: 1}, sends=posted),
        RankState(2),
    )
    assert judge(states, members).stuck == stuck


def test_a_send_without_a_receive_is_stuck_with_the_rank_that_waits_for_it():
    states = ranks(
        RankState(0, blocking=[doing(WORLD, 1, kind=Kind.SEND, peer=1)]),
        RankState(1, blocking=[doing(PAIR, 1)], entered={PAIR: 1}),
        RankState(2),
    )
    found = judge(states, members)
    assert found.stuck == (0, 1)
    assert found.waits_on == {0: (1,), 1: (0,)}


def gate(seq, *, posted=True, thread=1):
    return doing(LANE, seq, kind=Kind.GATE, thread=thread, posted=posted)


def test_a_lane_goes_on_beside_a_main_thread_that_computes():
    """Rank 0 waits for its second started operation; rank 1 has started the first only and computes."""
    states = ranks(
        RankState(0, blocking=[gate(2, posted=False)], lanes={1: [gate(1), gate(2, posted=False)]},
                  submitted={LANE: 2}, gates={LANE: 1}),
        RankState(1, submitted={LANE: 0}, gates={LANE: 0}),
        RankState(2, lanes={1: [gate(1)]}, submitted={LANE: 1}, gates={LANE: 1}),
    )  # fmt: skip
    found = judge(states, members)
    assert (found.stuck, found.late) == ((), (1,))


def test_a_lane_that_waits_for_what_a_blocked_main_thread_never_starts_is_stuck():
    states = ranks(
        RankState(0, blocking=[gate(1)], lanes={1: [gate(1)]}, submitted={LANE: 1}, gates={LANE: 1}),
        RankState(1, blocking=[doing(WORLD, 1)], entered={WORLD: 1}),
        RankState(2, blocking=[gate(1)], lanes={1: [gate(1)]}, submitted={LANE: 1}, gates={LANE: 1}),
    )
    found = judge(states, members)
    assert found.stuck == (0, 1, 2)
    assert found.waits_on[0] == (1,)


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_rank_that_has_left_still_ends_what_its_lanes_were_given(is_dead):
    states = ranks(
        RankState(0, blocking=[gate(2)], lanes={1: [gate(2)]}, submitted={LANE: 2}, gates={LANE: 2}),
        RankState(1, gone="has left the program", lanes={1: [gate(1), gate(2, posted=False)]}, submitted={LANE: 2},
                  gates={LANE: 1}, is_dead=is_dead),
        RankState(2, lanes={1: [gate(2)]}, submitted={LANE: 2}, gates={LANE: 2}),
    )  # fmt: skip
    assert judge(states, members).stuck == ((0,) if is_dead else ())


def test_a_gate_that_is_not_posted_waits_for_its_own_rank_and_counts_as_moving():
    """A started operation may wait for a file of its own rank before it goes to its gate."""
    states = ranks(
        RankState(0, blocking=[gate(1, posted=False)], lanes={1: [gate(1, posted=False)]}, submitted={LANE: 1}),
        RankState(1, blocking=[gate(1)], lanes={1: [gate(1)]}, submitted={LANE: 1}, gates={LANE: 1}),
        RankState(2, blocking=[gate(1)], lanes={1: [gate(1)]}, submitted={LANE: 1}, gates={LANE: 1}),
    )
    assert judge(states, members).stuck == ()


def test_short_waits_are_nobodys_fault_yet():
    states = ranks(
        RankState(0, blocking=[doing(WORLD, 1, age=0.1)], entered={WORLD: 1}), RankState(1), RankState(2)
    )  # fmt: skip
    assert judge(states, members, least_seconds=2.0).waiting == ()


def test_nothing_is_claimed_of_groups_whose_members_are_not_known():
    states = ranks(RankState(0, blocking=[doing(9, 1, age=99)], entered={9: 1}), RankState(1), RankState(2))
    found = judge(states, lambda key: None)
    assert (found.stuck, found.late, found.slow) == ((), (), ())


def test_a_rank_with_threads_of_its_own_is_never_stuck():
    states = ranks(
        RankState(0, blocking=[doing(WORLD, 1)], entered={WORLD: 1}),
        RankState(1, blocking=[doing(PAIR, 1)], entered={PAIR: 1}, is_open=True),
        RankState(2, blocking=[doing(WORLD, 1)], entered={WORLD: 1}),
    )
    assert judge(states, members).stuck == ()


def test_a_late_rank_that_works_on_is_late_only_since_its_last_operation():
    states = ranks(
        RankState(0, blocking=[doing(WORLD, 5, age=900)], entered={WORLD: 5}),
        RankState(1, entered={WORLD: 4}, idle_seconds=3.0),
        RankState(2, entered={WORLD: 4}, idle_seconds=0.1),
    )
    assert judge(states, members).waiting_seconds == 3.0


@pytest.mark.parametrize("late", [1, 1000])
def test_thousands_of_ranks_are_judged_in_time(late):
    states = {
        r: RankState(r, entered={WORLD: 4})
        if r < late
        else RankState(r, blocking=[doing(WORLD, 5)], entered={WORLD: 5})
        for r in range(2000)
    }
    found = judge(states, lambda key: range(2000))
    assert (len(found.late), len(found.waiting), found.stuck) == (late, 2000 - late, ())


def test_states_survive_the_side_channel():
    state = RankState(
        4, "", [doing(WORLD, 5)], {1: [gate(2)]}, {WORLD: 5}, {LANE: 3}, {LANE: 2}, {(WORLD, 1, 7): 3}, {}, "a.py:3"
    )
    assert RankState.from_json(json.loads(json.dumps(state.to_json()))) == state


# -- random programs, played until nobody moves ------------------------------------------------------------------


def play(programs, chooser):
    """Run programs of ("c", comm) and ("s"|"r", peer) until nobody can move; returns how far each one came.

    Sends wait for their receives here.
    """
    at = dict.fromkeys(programs, 0)
    entered = {rank: {} for rank in programs}
    inside = dict.fromkeys(programs, False)
    sends, recvs = {rank: {} for rank in programs}, {rank: {} for rank in programs}
    numbers = {}

    def come(rank):
        what, where = programs[rank][at[rank]]
        if what == "c":
            numbers[rank] = entered[rank][where] = entered[rank].get(where, 0) + 1
        else:
            counts = sends if what == "s" else recvs
            numbers[rank] = counts[rank][WORLD, where, 0] = counts[rank].get((WORLD, where, 0), 0) + 1
        inside[rank] = True

    def can_leave(rank):
        what, where = programs[rank][at[rank]]
        if what == "c":
            return all(entered[other].get(where, 0) >= numbers[rank] for other in MEMBERS[where])
        other = recvs if what == "s" else sends
        return other[where].get((WORLD, rank, 0), 0) >= numbers[rank]

    while True:
        moves = [r for r in programs if at[r] < len(programs[r]) and (not inside[r] or can_leave(r))]
        if not moves:
            return at, entered, sends, recvs, numbers
        rank = chooser.choice(moves)
        if inside[rank]:
            inside[rank] = False
            at[rank] += 1
        else:
            come(rank)


def steps_of(rank):
    others = [other for other in range(3) if other != rank]
    groups = [key for key in (WORLD, PAIR) if rank in MEMBERS[key]]
    collective = st.sampled_from(groups).map(lambda key: ("c", key))
    message = st.tuples(st.sampled_from("sr"), st.sampled_from(others))
    return st.lists(st.one_of(collective, message), max_size=5)


@given(st.tuples(*(steps_of(rank) for rank in range(3))), st.integers(0, 1000), st.booleans())
def test_who_never_moves_again_is_stuck_and_nobody_else(programs, seed, ends):
    """After a play nobody moves: who is in an operation is stuck if the others have left, or are stuck themselves."""
    programs = dict(enumerate(programs))
    at, entered, sends, recvs, numbers = play(programs, random.Random(seed))
    states = {}
    for rank, program in programs.items():
        is_over = at[rank] == len(program)
        blocking = []
        if not is_over:
            what, where = program[at[rank]]
            kind = {"c": Kind.COLLECTIVE, "s": Kind.SEND, "r": Kind.RECV}[what]
            peer = -1 if what == "c" else where
            blocking = [doing(where if what == "c" else WORLD, numbers[rank], kind=kind, peer=peer)]
        gone = "has left" if is_over and ends else ""
        states[rank] = RankState(rank, gone, blocking, {}, entered[rank], {}, {}, sends[rank], recvs[rank])
    found = judge(states, members)
    blocked = {rank for rank in programs if at[rank] < len(programs[rank])}
    if ends:
        assert set(found.stuck) == blocked
    else:  # those that are over may still come: only who waits for none of them, by any way, is stuck
        free = {rank for rank in programs if rank not in blocked}
        reaches = {rank for rank in blocked if _reaches(rank, found.waits_on, free)}
        assert set(found.stuck) <= blocked
        assert blocked - reaches <= set(found.stuck)


def _reaches(rank, waits_on, free):
    seen, todo = set(), [rank]
    while todo:
        now = todo.pop()
        if now in free:
            return True
        if now not in seen:
            seen.add(now)
            todo.extend(waits_on.get(now, ()))
    return False
