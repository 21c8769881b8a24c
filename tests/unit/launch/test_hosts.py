"""Host files, filters and choices of hosts, by the documented examples and by properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.base.errors import ConfigError
from mpispeed.launch import hosts
from mpispeed.launch.hosts import Choice, Host, expand_slurm_names, fill, filter_hosts, parse_filter, parse_hostfile

FOUR = {name: (0, 1, 2, 3) for name in ("worker-0", "worker-1")}
NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)
HOSTS = st.dictionaries(NAMES, st.integers(1, 9), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("worker-0 slots=2\nworker-1 slots=1\n", {"worker-0": (0, 1), "worker-1": (0,)}),
        (
            "# first\n\n   10.0.0.1   slots=1   # a note\n\t# more\nh slots=2 max_slots=4",
            {"10.0.0.1": (0,), "h": (0, 1)},
        ),
        ("b slots=1\na slots=1", {"b": (0,), "a": (0,)}),
    ],
)
def test_host_file(text, found):
    assert parse_hostfile(text, "f") == found
    assert list(parse_hostfile(text, "f")) == list(found)  # the order decides where ranks go


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a slots=1\nb slots=1\na slots=2", "line 3: a was named before"),
        ("this is bad slots=1", "line 1: 'this is bad slots=1'"),
        ("a slots=1\nmissingslots", "line 2: 'missingslots'"),
        ("a slots=0", "line 1"),
        ("a slots=-1", "line 1"),
        ("a slots=two", "line 1"),
        ("a slots=1\n\n# x\nb slots", "line 4"),
        ("", "names no host"),
        ("# only a comment\n", "names no host"),
    ],
)
def test_wrong_host_files_are_refused_with_their_line(text, line):
    with pytest.raises(ValueError, match=f"hosts.txt.*{line}"):
        parse_hostfile(text, "hosts.txt")


def test_a_host_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.such cannot be read"):
        hosts.read_hostfile(tmp_path / "no.such")


@given(HOSTS)
def test_what_was_written_is_read(written):
    text = "".join(f"{name} slots={count}\n" for name, count in written.items())
    assert parse_hostfile(text, "f") == {name: tuple(range(count)) for name, count in written.items()}


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "worker-0:1", {"worker-0": (0, 2, 3), "worker-1": (0, 1, 2, 3)}),
        ("worker-0:1,1", "", {"worker-0": (1,)}),
        ("worker-0:1@worker-0:0,1", "", {"worker-0": (0, 1)}),
        ("worker-0", "", {"worker-0": (0, 1, 2, 3)}),
        ("worker-0:1@worker-0", "", {"worker-0": (0, 1, 2, 3)}),
        ("", "worker-0:0,1,2,3@worker-1", {}),
        ("worker-1:1@worker-0:2", "", {"worker-0": (2,), "worker-1": (1,)}),
        ("", "worker-1:0@worker-0:3,0", {"worker-0": (1, 2), "worker-1": (1, 2, 3)}),
        ("", "worker-0", {"worker-1": (0, 1, 2, 3)}),
        ("", "", FOUR),
    ],
)
def test_filters(include, exclude, left):
    found = filter_hosts(FOUR, include, exclude)
    assert found == left
    assert list(found) == [name for name in FOUR if name in left]


@pytest.mark.parametrize(
    "text",
    ["jeff", "worker-0:4", "worker-1@worker-0:1@5", "worker-0:", "@", "worker-0:a", "worker-0:1:2", "worker-0:-1"],
)
@pytest.mark.parametrize("option", ["include", "exclude"])
def test_wrong_filters_are_refused(option, text):
    with pytest.raises(ValueError, match=f"--{option}"):
        filter_hosts(FOUR, **{option: text})


def test_both_filters_are_refused():
    with pytest.raises(ValueError, match="exclude each other"):
        filter_hosts(FOUR, include="worker-0", exclude="worker-1")


@given(HOSTS, st.data())
def test_an_include_and_its_exclude_are_the_whole(written, data):
    whole = {name: tuple(range(count)) for name, count in written.items()}
    pairs = [(name, slot) for name, slots in whole.items() for slot in slots]
    chosen = data.draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=12))
    text = "@".join(f"{name}:{slot}" for name, slot in chosen)
    kept, rest = filter_hosts(whole, include=text), filter_hosts(whole, exclude=text)
    assert {(name, slot) for name, slots in kept.items() for slot in slots} == set(chosen)
    for name, slots in whole.items():
        assert tuple(sorted((*kept.get(name, ()), *rest.get(name, ())))) == slots


@given(st.text(alphabet="ab01:,@ -", max_size=20))
def test_a_filter_is_understood_or_refused(text):
    try:
        parsed = parse_filter(text, "--include")
    except ConfigError as error:
        assert repr(text) in str(error)
    else:
        assert all(slots is None or list(slots) == sorted(set(slots)) for slots in parsed.values())


def test_counts_choose_hosts_and_replace_slots():
    assert Choice(num_nodes=1).of(FOUR, "f") == (Host("worker-0", (0, 1, 2, 3)),)
    assert Choice(num_gpus=6).of({"a": (0,)}, "f") == (Host("a", (0, 1, 2, 3, 4, 5)),)
    assert Choice(include="a:5@b").of({"a": (0,), "b": (0, 1)}, "f") == (Host("a", (5,)), Host("b", (0, 1)))


@pytest.mark.parametrize("count", ["num_nodes", "num_gpus"])
@pytest.mark.parametrize("option", ["include", "exclude"])
def test_counts_and_filters_are_refused_together(option, count):
    with pytest.raises(ValueError, match=f"--{count} 1 cannot be combined with --{option} worker-0"):
        Choice(**{option: "worker-0", count: 1}).of(FOUR, "f")


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (Choice(num_nodes=3), "--num_nodes is 3, but f has only 2 hosts: worker-0, worker-1"),
        (Choice(num_nodes=0), "--num_nodes is 0"),
        (Choice(num_gpus=-1), "--num_gpus is -1"),
        (Choice(exclude="worker-0@worker-1"), "leaves no slot"),
        (Choice("a", "b"), "exclude each other"),
    ],
)
def test_wrong_choices_are_refused(choice, words):
    with pytest.raises(ValueError, match=words):
        choice.of(FOUR, "f")


def test_without_a_host_file_slots_of_this_machine_are_chosen():
    assert hosts.choose_here(Choice(), 2) == ()
    assert hosts.choose_here(Choice(num_gpus=2), None) == (Host("localhost", (0, 1)),)
    assert hosts.choose_here(Choice(include="localhost:2,3"), None)[0].devices == "2,3"
    for choice in (Choice(num_nodes=2), Choice(include="elsewhere.example:0"), Choice(exclude="localhost:0")):
        with pytest.raises(ValueError, match=r"host file|--hostfile"):
            hosts.choose_here(choice, None)


@pytest.mark.parametrize(("slots", "devices"), [((0, 1), None), ((1,), "1"), ((0, 2), "0,2"), ((2, 3), "2,3")])
def test_devices_are_named_where_rank_k_does_not_have_device_k(slots, devices):
    assert Host("h", slots).devices == devices


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_ranks_fill_hosts_in_order(counts, data):
    there = [Host(f"h{number}", tuple(range(count))) for number, count in enumerate(counts)]
    ranks = data.draw(st.integers(1, sum(counts)))
    filled = fill(there, ranks, "f")
    assert hosts.count_ranks(filled) == ranks
    assert [host.name for host in filled] == [host.name for host in there[: len(filled)]]
    assert all(one.slots == whole.slots for one, whole in zip(filled[:-1], there, strict=False))
    with pytest.raises(ConfigError, match=f"{sum(counts) + 1} ranks"):
        fill(there, sum(counts) + 1, "f")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-3,7],login", ["n1", "n2", "n3", "n7", "login"]),
        ("gpu[008-011]", ["gpu008", "gpu009", "gpu010", "gpu011"]),
        ("a-[1,3],b-2", ["a-1", "a-3", "b-2"]),
    ],
)
def test_names_of_slurm(text, names):
    assert expand_slurm_names(text) == names


def test_slots_of_an_allocation():
    environ = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    assert hosts.slurm_slots(environ) == {"n1": (0, 1), "n2": (0, 1), "n3": (0,)}
    assert hosts.slurm_slots({"SLURM_JOB_NODELIST": "n[1-2]"}) == {"n1": (0,), "n2": (0,)}
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST"):
        hosts.slurm_slots({"SLURM_JOB_NODELIST": "n[1"})
    backwards = [Host("x", (0,)), Host("n2", (0,)), Host("n1", (0,))]
    assert [host.name for host in hosts.in_slurm_order(backwards, environ)] == ["n1", "n2", "x"]
