"""Finished batches survive kills and damage: what is whole is found, and everything else is done again."""

import errno
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.base.errors import UsageError
from mpispeed.generation import finished as module
from mpispeed.generation.answers import EOS, REASONS, Answer, Answers, arrays_of, pack, unpack
from mpispeed.generation.finished import WorkError, Writer, scan
from mpispeed.generation.identity import Identity, OtherJob, claim, lock, read
from tests.unit.generation.work import answer, answers, finish, job

ANSWERS = st.builds(
    Answers,
    st.integers(0, 2**40),
    st.lists(
        st.builds(
            Answer,
            st.integers(0, 2**40),
            st.integers(0, 2**20),
            st.lists(st.integers(0, 2**31 - 1), max_size=9),
            st.integers(0, len(REASONS) - 1),
            st.text(max_size=9),
            st.text(max_size=9),
        ),
        max_size=5,
    ).map(tuple),
    st.floats(0, 1e9),
)


def plain(found):
    """As values that can be compared."""
    return replace(found, answers=tuple(replace(each, tokens=list(each.tokens)) for each in found.answers))


@settings(deadline=None, max_examples=60)
@given(found=ANSWERS)
def test_answers_come_back_from_their_bytes(found):
    assert plain(unpack(pack(found))) == plain(found)


@settings(deadline=None, max_examples=150)
@given(found=ANSWERS, place=st.integers(0, 10**6), byte=st.integers(1, 255))
def test_damaged_bytes_are_refused_or_read_as_answers(found, place, byte):
    """A checksum lets none through; if one did, nothing but a ValueError would come of it."""
    raw = bytearray(pack(found))
    raw[place % len(raw)] ^= byte
    try:
        arrays = arrays_of(raw)
    except ValueError:
        return
    assert arrays["offsets"][-1] == len(arrays["tokens"])


def test_finished_batches_are_found_whoever_wrote_them(tmp_path):
    _, batches, identity = job(tmp_path)
    folder = tmp_path / "work"
    assert claim(folder, identity) is False
    assert claim(folder, identity) is True
    assert read(folder) == identity
    finish(folder, identity, batches, [0, 3], group=0)
    finish(folder, identity, batches, [1], group=1)
    finish(folder, identity, batches, [4], start="second")
    found = scan(folder, identity, batches)
    assert found.done.tolist() == [True, True, False, True, True]
    assert found.left().tolist() == [2]
    assert found.notes == []
    assert sorted(found.in_file_order().tolist()) == [0, 1, 3, 4]
    for batch in (0, 1, 3, 4):
        assert plain(found.answers(batch)) == plain(answers(batches, batch))
    wanted = [answer(int(each)) for batch in (0, 1, 3, 4) for each in batches[batch]]
    assert found.tokens == sum(len(each.tokens) for each in wanted)
    assert found.reasons.tolist() == np.bincount([each.reason for each in wanted], minlength=len(REASONS)).tolist()
    assert found.seconds == 1.0


def test_every_cut_of_a_file_leaves_its_whole_records(tmp_path):
    """A kill at any instant: a prefix of the file is there."""
    _, batches, identity = job(tmp_path)
    path = finish(tmp_path / "work", identity, batches, [2, 0, 4])
    whole = path.read_bytes()
    places = scan(path.parent, identity)._places[[2, 0, 4]]
    first, ends = int(places[0][1]), [int(start + size) for _, start, size in places]
    assert ends[-1] == len(whole)
    for size in sorted({first, *range(0, len(whole), 37), *(end + step for end in ends for step in (-1, 0))}):
        path.write_bytes(whole[:size])
        found = scan(path.parent, identity, batches)
        assert found.done.sum() == sum(end <= size for end in ends), size
        is_between = size in ends or size == first
        assert len(found.notes) == (not is_between), (size, found.notes)


def test_each_flipped_bit_costs_a_batch_at_most_where_it_is(tmp_path):
    _, batches, identity = job(tmp_path)
    path = finish(tmp_path / "work", identity, batches, [2, 0, 4])
    whole = path.read_bytes()
    first = int(scan(path.parent, identity)._places[2][1])
    for place in range(0, len(whole), 53):
        raw = bytearray(whole)
        raw[place] ^= 1 << place % 8
        path.write_bytes(raw)
        found = scan(path.parent, identity, batches)
        assert found.notes, place
        assert found.done.sum() < 3
        for batch in np.nonzero(found.done)[0].tolist():
            assert plain(found.answers(batch)) == plain(answers(batches, batch))
        if place >= first + 1000:
            assert found.done[2]


def test_a_batch_that_is_there_twice_counts_once(tmp_path):
    _, batches, identity = job(tmp_path)
    folder = tmp_path / "work"
    finish(folder, identity, batches, [1, 2], start="a")
    finish(folder, identity, batches, [2, 3], start="b")
    found = scan(folder, identity, batches)
    assert found.done.tolist() == [False, True, True, True, False]
    assert len(found.notes) == 1
    assert "batch 2 is there twice" in found.notes[0]
    once = [answer(int(each)) for batch in (1, 2, 3) for each in batches[batch]]
    assert found.tokens == sum(len(each.tokens) for each in once)


def test_files_of_no_use_are_set_aside_once(tmp_path):
    _, batches, identity = job(tmp_path)
    other = replace(identity, model="another model")
    folder = tmp_path / "work"
    finish(folder, identity, batches, [1])
    foreign = finish(folder, other, batches, [2], start="foreign")
    (folder / "junk.finished").write_bytes(b"junk")
    (folder / "link.finished").symlink_to(foreign)
    os.mkfifo(folder / "pipe.finished")
    found = scan(folder, identity, batches, sets_aside=True)
    assert found.done.tolist() == [False, True, False, False, False]
    problems = "\n".join(found.notes)
    for text in ("it belongs to another job (model)", "no file of finished batches", "no ordinary file"):
        assert text in problems
    assert len(found.notes) == 4
    again = scan(folder, identity, batches)
    assert again.notes == []
    assert again.done.tolist() == found.done.tolist()


def test_records_that_do_not_fit_the_batches_are_left_out(tmp_path):
    _, batches, identity = job(tmp_path)
    folder = tmp_path / "work"
    folder.mkdir()
    with Writer(folder, identity, start="s", group=0) as writer:
        writer.add(Answers(0, (answer(1),)))
        writer.add(Answers(99, (answer(1),)))
        writer.add(Answers(-1, (answer(1),)))
        writer.add(answers(batches, 1))
    found = scan(folder, identity, batches)
    assert found.done.tolist() == [False, True, False, False, False]
    assert ["other requests" in found.notes[0], "it is of batch 99" in found.notes[1]] == [True, True]
    assert "it is of batch -1" in found.notes[2]


def test_a_failed_write_is_written_over(tmp_path, monkeypatch):
    _, batches, identity = job(tmp_path)
    folder = tmp_path / "work"
    folder.mkdir()
    pwrite = os.pwrite

    def short(handle, data, offset):
        """A disk that gets full after 40 bytes of a record."""
        pwrite(handle, bytes(data[:40]), offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    with Writer(folder, identity, start="s", group=3) as writer:
        writer.add(answers(batches, 0))
        with monkeypatch.context() as patch:
            patch.setattr(module.os, "pwrite", short)
            with pytest.raises(WorkError, match=r"batch 1 cannot be put on disk: .*s-00003\.finished: No space left"):
                writer.add(answers(batches, 1))
        writer.add(answers(batches, 2))
        writer.add(answers(batches, 1))
    found = scan(folder, identity, batches)
    assert found.done.tolist() == [True, True, True, False, False]
    assert found.notes == []


def test_two_writers_of_one_name_are_refused(tmp_path):
    _, batches, identity = job(tmp_path)
    finish(tmp_path / "work", identity, batches, [0])
    with pytest.raises(WorkError, match="File exists"):
        finish(tmp_path / "work", identity, batches, [1])
    assert scan(tmp_path / "work", identity).done.tolist() == [True, False, False, False, False]
    with pytest.raises(UsageError, match=r"start is '\.\./up' and group 0"):
        Writer(tmp_path, identity, start="../up", group=0)


def test_a_batch_that_changed_after_the_scan_is_refused(tmp_path):
    _, batches, identity = job(tmp_path)
    path = finish(tmp_path / "work", identity, batches, [0])
    found = scan(path.parent, identity)
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 4
    path.write_bytes(raw)
    with pytest.raises(WorkError, match="was changed while it was read"):
        found.answers(0)
    path.unlink()
    with pytest.raises(WorkError, match="No such file"):
        found.answers(0)


def test_a_folder_of_another_job_is_refused_with_what_differs(tmp_path):
    _, _, identity = job(tmp_path)
    folder = tmp_path / "work"
    other = replace(identity, prompts="else", settings={"temperature": 0.7, "top_k": 5})
    claim(folder, other)
    assert claim(folder, identity) is False  # nothing was answered: a mistake in the settings was put right
    assert claim(folder, identity) is True
    (folder / "1-00000.finished").touch()
    with pytest.raises(OtherJob, match=r"differ: prompts, temperature \(0.5 there, 0.7 here\), top_k \(None there, 5"):
        claim(folder, other)
    assert claim(folder, replace(identity, notes={"version": "other"})) is True
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    with pytest.raises(OtherJob, match=r"has files but no job\.json"):
        claim(tmp_path / "full", identity)


def test_two_jobs_at_once_are_refused(tmp_path):
    _, _, identity = job(tmp_path)
    first = lock(tmp_path / "work")
    assert claim(tmp_path / "work", identity) is False
    with pytest.raises(OtherJob, match="another job is at work"):
        lock(tmp_path / "work")
    first.close()
    lock(tmp_path / "work").close()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    assert lock(tmp_path / "full") is None
    assert [each.name for each in (tmp_path / "full").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("[]", "not of the format"),
        ('{"format": "mpispeed-generate-1"}', "its entries are"),
        (None, "its digest is not that of its content"),
    ],
)
def test_a_damaged_identity_is_refused(tmp_path, text, match):
    _, _, identity = job(tmp_path)
    (tmp_path / "work").mkdir()
    path = tmp_path / "work" / "job.json"
    path.write_text(identity.as_json().replace("0.5", "0.6") if text is None else text)
    with pytest.raises(OtherJob, match=match):
        claim(path.parent, identity)
    assert Identity.from_json(identity.as_json()) == identity


def test_the_end_token_is_a_reason():
    assert REASONS[EOS] == "eos"
