"""Results are in the order of the prompts, and appear whole or not at all."""

import errno
import json
import shutil
import subprocess
from dataclasses import replace

import h5py
import numpy as np
import pytest

from mpispeed.generation import results
from mpispeed.generation.answers import REASONS
from mpispeed.generation.batches import cut
from mpispeed.generation.finished import WorkError, scan
from mpispeed.generation.identity import ANSWERED_FILE, OtherJob
from mpispeed.generation.result_files import ResultTables, read_identity
from mpispeed.generation.show import show
from tests.unit.generation.work import answer, finish, job


def write(tmp_path, made, numbers=None, **options):
    """Results of a job whose batches with these numbers are finished."""
    prompts, batches, identity = made
    folder = tmp_path / "work"
    finish(folder, identity, batches, range(len(batches)) if numbers is None else numbers)
    paths = {"hdf5_path": tmp_path / "out.h5", "json_path": tmp_path / "out.jsonl"}
    results.write(prompts, batches, scan(folder, identity, batches), identity, **paths, **options)
    return paths["hdf5_path"], paths["json_path"]


def check(tables, lines, made):
    """Compare results with what the requests' numbers say."""
    prompts, batches, identity = made
    with h5py.File(tables) as file:
        texts, errors, ids = (file[name].asstr()[:] for name in ("text", "error", "id"))
        offsets, tokens = file["offsets"][:], file["tokens"][:]
        for request in range(len(prompts)):
            wanted = answer(request)
            assert texts[request] == wanted.text
            assert errors[request] == wanted.error
            assert tokens[offsets[request] : offsets[request + 1]].tolist() == list(wanted.tokens)
            assert file["finish_reason"][request] == wanted.reason
            assert file["prompt_tokens"][request] == batches.lengths[request]
            assert ids[request] == prompts[request].id
        assert h5py.check_enum_dtype(file["finish_reason"].dtype) == {name: code for code, name in enumerate(REASONS)}
        assert file.attrs["complete"] == 1
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    for request, line in enumerate(found):
        wanted = answer(request)
        assert line["id"] == prompts[request].id
        assert (line["text"], line["finish_reason"]) == (wanted.text, REASONS[wanted.reason])
        assert (line["new_tokens"], line.get("error", "")) == (len(wanted.tokens), wanted.error)
    assert len(found) == len(prompts)
    assert read_identity(tables)[0] == identity


@pytest.mark.parametrize("memory_bytes", [1, 5_000, 1 << 28])
def test_answers_are_in_the_order_of_prompts_in_any_memory(tmp_path, memory_bytes):
    made = job(tmp_path, 23)
    check(*write(tmp_path, made, memory_bytes=memory_bytes), made)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.h5", "out.jsonl", "prompts.jsonl", "work"]


def test_the_bytes_do_not_tell_who_answered(tmp_path):
    made = job(tmp_path, 23)
    _, batches, identity = made
    first = [path.read_bytes() for path in write(tmp_path, made)]
    shutil.rmtree(tmp_path / "work")
    finish(tmp_path / "work", identity, batches, [5, 1], start="z", group=2)
    finish(tmp_path / "work", identity, batches, [3], start="y", group=1)
    second = write(tmp_path, made, [4, 0, 2])
    assert [path.read_bytes() for path in second] == first


def test_several_answers_to_a_prompt_stand_together(tmp_path):
    made = job(tmp_path, 4, samples=3)
    tables, lines = write(tmp_path, made, with_token_ids=True)
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(line["id"], line["index"], line["sample"]) for line in found] == [
        (f"q{prompt}", prompt, sample) for prompt in range(4) for sample in range(3)
    ]
    assert [line["token_ids"] for line in found] == [list(answer(request).tokens) for request in range(12)]
    with h5py.File(tables) as file:
        assert file["prompt"][:].tolist() == np.repeat(np.arange(4), 3).tolist()
        assert file["sample"][:].tolist() == [0, 1, 2] * 4


def test_results_of_an_unfinished_job_say_so(tmp_path):
    made = job(tmp_path, 20)
    _, batches, _ = made
    tables, lines = write(tmp_path, made, [0, 2])
    there = sorted(int(each) for number in (0, 2) for each in batches[number])
    assert [json.loads(line)["id"] for line in lines.read_text().splitlines()] == [f"q{each}" for each in there]
    assert read_identity(tables)[1] == {"complete": 0, "requests": 20, "answered": len(there)}
    shown, counted = show(tables), show(tmp_path / "work") if claimed(tmp_path, made) else None
    for found in (shown, counted):
        assert (found.requests, found.done, found.left) == (20, len(there), 20 - len(there))
        assert found.failed == sum(answer(each).error != "" for each in there)
        assert found.tokens == sum(len(answer(each).tokens) for each in there)
        assert found.settings == {"temperature": 0.5}
        assert found.reasons["pending"] == 20 - len(there)
    assert counted.batches == (2, len(batches))
    assert f"requests   20: {len(there)} done, {20 - len(there)} left" in "\n".join(shown.lines())
    assert show(lines).reasons == {name: count for name, count in shown.reasons.items() if name != "pending"}


def claimed(tmp_path, made):
    """Give the work folder the file that says whose it is."""
    (tmp_path / "work" / "job.json").write_text(made[2].as_json())
    return True


def test_prompts_that_were_too_long_have_a_result(tmp_path):
    prompts, _, identity = job(tmp_path, 14)
    batches = cut(
        [len(prompt.content.split()) for prompt in prompts], 5, batch_size=4, max_positions=6, too_long="skip"
    )
    identity = replace(identity, batches=batches.digest, count=len(batches), left_out=len(batches.left_out))
    made = prompts, batches, identity
    assert batches.left_out.tolist() == [6, 13]
    tables, lines = write(tmp_path, made)
    line = json.loads(lines.read_text().splitlines()[6])
    assert line["finish_reason"] == "too_long"
    assert line["error"] == "the prompt has 6 tokens and leaves no room for an answer"
    claimed(tmp_path, made)
    assert read_identity(tables)[1]["complete"] == 1
    assert show(tables).failed == show(tmp_path / "work").failed == 3
    assert show(tables).left == show(tmp_path / "work").left == 0


def test_a_job_that_can_answer_nothing_has_results(tmp_path):
    prompts, _, identity = job(tmp_path, 7)
    batches = cut([9] * 7, 5, batch_size=4, max_positions=6, too_long="skip")
    identity = replace(identity, batches=batches.digest, count=0, left_out=7)
    tables, lines = write(tmp_path, (prompts, batches, identity))
    assert show(tables).reasons == show(lines).reasons == {"too_long": 7}
    assert show(tables).tokens == 0


def test_the_work_folder_of_a_finished_job_leads_to_its_results(tmp_path):
    made = job(tmp_path, 12)
    tables, lines = write(tmp_path, made)
    claimed(tmp_path, made)
    (tmp_path / "work" / ANSWERED_FILE).write_text(json.dumps({"results": [str(tables), str(lines)]}))
    assert show(tmp_path / "work") == show(tables)
    tables.unlink()
    assert show(tmp_path / "work") == show(lines)
    lines.unlink()
    with pytest.raises(OtherJob, match=r"were answered, and .* is not there any more"):
        show(tmp_path / "work")
    (tmp_path / "work" / ANSWERED_FILE).write_text('{"results": 5}')
    with pytest.raises(OtherJob, match="does not name the results"):
        show(tmp_path / "work")


def test_long_settings_fit_into_the_file(tmp_path):
    prompts, batches, identity = job(tmp_path, 3)
    identity = replace(identity, settings={"chat_template": "ü" * 200_000})
    tables, _ = write(tmp_path, (prompts, batches, identity))
    assert read_identity(tables)[0] == identity


def test_h5dump_reads_them(tmp_path):
    tables, _ = write(tmp_path, job(tmp_path, 12))
    tool = shutil.which("h5dump")
    if tool is None:
        with h5py.File(tables) as file:  # the same library, where the tool is not installed
            assert file["text"].asstr()[1] == answer(1).text
        return
    found = subprocess.run([tool, str(tables)], capture_output=True, text=True, check=True).stdout
    assert all(f'"q{number}"' in found for number in range(12))
    assert "ntwort 1 " in found
    assert "H5T_ENUM" in found
    assert 'ATTRIBUTE "complete"' in found


def test_a_full_disk_leaves_the_old_results_and_no_others(tmp_path, monkeypatch):
    made = job(tmp_path, 12)
    paths = write(tmp_path, made)
    before = [path.read_bytes() for path in paths]
    shutil.rmtree(tmp_path / "work")

    def full(self, rows):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ResultTables, "put", full)
    with pytest.raises(WorkError, match=r"out\.h5 cannot be written: No space left on device; nothing that is"):
        write(tmp_path, made)
    assert [path.read_bytes() for path in paths] == before
    assert not list(tmp_path.glob(".*"))


def test_too_little_room_is_said_before(tmp_path, monkeypatch):
    made = job(tmp_path, 12)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(results.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(WorkError, match="has 1000 B free, and the results need about"):
        write(tmp_path, made)
    assert not list(tmp_path.glob("*out*"))


def test_what_a_kill_left_is_removed(tmp_path):
    made = job(tmp_path, 12)
    rest = tmp_path / f".out.h5.tmp-{made[2].digest[-16:]}"
    rest.write_bytes(b"half")
    other = tmp_path / ".out.h5.tmp-other"
    other.write_bytes(b"half")
    check(*write(tmp_path, made), made)
    assert not rest.exists()
    assert other.exists()


def test_results_of_others_are_not_written_over(tmp_path):
    made = job(tmp_path, 12)
    _, _, identity = made
    other = replace(identity, settings={"temperature": 0.6})
    results.refuse_taken(tmp_path / "out.h5", identity, is_resumed=False)
    tables, lines = write(tmp_path, made)
    results.refuse_taken(tables, identity, is_resumed=False)
    results.refuse_taken(lines, identity, is_resumed=True)
    with pytest.raises(OtherJob, match=r"these differ: temperature \(0.5 there, 0.6 here\); give this job another"):
        results.refuse_taken(tables, other, is_resumed=True)
    with pytest.raises(OtherJob, match=r"out\.jsonl is there already"):
        results.refuse_taken(lines, identity, is_resumed=False)
    with h5py.File(tmp_path / "mine.h5", "w") as file:
        file["x"] = 1
    with pytest.raises(OtherJob, match="is no file of results"):
        results.refuse_taken(tmp_path / "mine.h5", identity, is_resumed=True)


def spoil(path, name, **options):
    """Put another dataset in the place of one."""
    with h5py.File(path, "r+") as file:
        del file[name]
        if options:
            file.create_dataset(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("offsets", {}, "there is no 'offsets'"),
        ("offsets", {"data": np.zeros(13, np.int64), "chunks": True}, "chunked, filtered, virtual"),
        ("finish_reason", {"shape": (2**40,), "dtype": "u1"}, r"in another file|elsewhere or missing"),
        ("finish_reason", {"data": np.full(12, 77, np.uint8)}, "has the code 77"),
        ("prompt_tokens", {"data": np.zeros(11, np.int32)}, "has 11 elements of type int32; expected 12"),
        ("prompt_tokens", {"data": np.zeros(12, np.float32)}, "of type float32"),
    ],
)
def test_damaged_results_are_refused(tmp_path, name, options, match):
    tables, _ = write(tmp_path, job(tmp_path, 12))
    spoil(tables, name, **options)
    with pytest.raises(OtherJob, match=match):
        show(tables)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"finish_reason": "eos"}\n', "line 1 is no answer"),
        ('{"finish_reason": "x", "new_tokens": 1, "prompt_tokens": 1}\n', "has the finish_reason 'x'"),
        ("[" * 100_000, "line 1 is no answer"),
        ("\0\0", "line 1 is no answer"),
    ],
)
def test_lines_that_are_no_answers_are_refused(tmp_path, text, match):
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(OtherJob, match=match):
        show(path)
