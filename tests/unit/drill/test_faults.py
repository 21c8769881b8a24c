"""Faults as text: what is read, and what is refused with the reason."""

import math
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.base.errors import ConfigError
from mpispeed.drill.faults import ALL, KINDS, PLACES, check_ranks, parse_faults


def one(text):
    (fault,) = parse_faults(text)
    return fault


def test_the_example_of_the_manual():
    first, second = parse_faults("kill:rank=1@step=5; stall:rank=2,seconds=1:30,place=forward@seconds=10;")
    assert (first.kind, first.rank, first.trigger, first.at, first.place) == ("kill", 1, "step", 5, "update")
    assert first.options == {"signal": signal.SIGKILL}
    assert (second.rank, second.trigger, second.at, second.place) == (2, "seconds", 10.0, "forward")
    assert second.options == {"seconds": 90.0}


def test_what_is_left_out_has_defaults():
    assert one("stall@step=1").options == {"seconds": math.inf}
    assert one("full_disk@save=2").rank == 0
    assert one("corrupt@save=1").options == {"file": "model", "how": "flip"}
    assert one("slow:rank=all,factor=2@step=3").rank == ALL
    assert one("nan@step=2").place == "forward"


@pytest.mark.parametrize(("text", "number"), [("TERM", 15), ("sigsegv", 11), ("9", 9)])
def test_signals_by_name_and_number(text, number):
    assert one(f"kill:signal={text}@step=1").options["signal"] == number


def test_ranks_that_take_part():
    assert [one("kill:rank=1@step=1").concerns(rank) for rank in range(3)] == [False, True, False]
    assert all(one("kill:rank=all@step=1").concerns(rank) for rank in range(3))
    assert all(one("missing:rank=1@step=1").concerns(rank) for rank in range(3))


@pytest.mark.parametrize(("text", "parts"), [
    ("kil:rank=1@step=5", ("'kil'", "did you mean 'kill'", "stall")),
    ("kill:rank=1", ("does not say when", "kill@step=2")),
    ("kill:rank=1@epoch=5", ("cannot happen at 'epoch'", "@step=", "@save=")),
    ("corrupt@step=5", ("cannot happen at 'step'", "@save=")),
    ("kill@step=0", ("step='0'", "not in 1 to")),
    ("kill@step=2.5", ("step='2.5'",)),
    ("kill:rank=-2@step=1", ("rank='-2'",)),
    ("kill:rank@step=1", ("the option 'rank' has no value", "rank=VALUE")),
    ("kill:rank=1,rank=2@step=1", ("given twice",)),
    ("kill:code=3@step=1", ("kill has no option 'code'", "signal")),
    ("stall:second=3@step=1", ("did you mean 'seconds'",)),
    ("kill:signal=BILL@step=1", ("signal='BILL'", "no signal")),
    ("nan:what=loss@step=1", ("not one of gradient, parameter",)),
    ("kill:place=middle@step=1", ("'middle'", "forward, backward, update")),
    ("slow:factor=0.5@step=1", ("at least 1",)),
    ("exit:code=256@step=1", ("0 to 255",)),
    (" ; ", ("names no fault",)),
])  # fmt: skip
def test_refusals_name_the_part_and_the_cure(text, parts):
    with pytest.raises(ConfigError) as caught:
        parse_faults(text, "--inject")
    message = str(caught.value)
    assert message.startswith("--inject: the fault")
    assert text.strip(" ;") in message
    for part in parts:
        assert part in message


def test_ranks_that_there_are_not():
    check_ranks(parse_faults("kill:rank=1@step=1"), 2)
    with pytest.raises(ConfigError, match="there is no rank 2 among 2"):
        check_ranks(parse_faults("kill:rank=2@step=1"), 2)
    with pytest.raises(ConfigError, match="nobody to communicate with"):
        check_ranks(parse_faults("order@step=1"), 1)


options = st.fixed_dictionaries(
    {}, optional={"rank": st.integers(0, 99).map(str) | st.just("all"), "place": st.sampled_from(PLACES)}
)


@given(st.sampled_from(sorted(KINDS)), options, st.integers(1, 10**6), st.data(), st.sampled_from(["", " "]))
def test_what_is_written_is_read(name, given_options, at, data, blank):
    trigger = data.draw(st.sampled_from(KINDS[name].triggers))
    words = ",".join(f"{blank}{key}{blank}={value}" for key, value in given_options.items())
    fault = one(f"{name}{':' if words else ''}{words}{blank}@{trigger}={at}")
    assert (fault.kind, fault.trigger, fault.at) == (name, trigger, at)
    assert fault.rank == (ALL if given_options.get("rank") == "all" else int(given_options.get("rank", 0)))
    assert fault.place == given_options.get("place", KINDS[name].place)


@given(st.text(alphabet="kilstepnar:@=,;0123456789.- all", max_size=40))
def test_any_text_is_read_or_refused(text):
    try:
        faults = parse_faults(text)
    except ConfigError as error:
        assert "write " in str(error)
    else:
        assert all(fault.kind in KINDS and fault.at > -1 for fault in faults)
