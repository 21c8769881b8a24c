"""A build that fails at once leaves nothing that is in the way of the next."""

import pytest

from mpispeed.mesh.backends.solo import solo_comm
from mpispeed.mesh.sim import run
from mpispeed.tokens_build import job as jobs
from mpispeed.tokens_build.errors import BuildError
from mpispeed.tokens_build.inputs import Reading
from mpispeed.tokens_build.job import Request, build
from mpispeed.tokens_build.work_folder import folder_of
from tests.unit.tokens.building import alone, corpus


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_mistake_at_the_first_part_leaves_nothing_to_remove(tmp_path, ranks):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ab"}\n')
    output = tmp_path / "s.h5"

    def wrong(world):
        with pytest.raises(BuildError, match="it has no 'txet'"):
            build(world.comm, Request(output, [path], "byte", reading=Reading(field="txet"), part_bytes=1 << 20))

    run(ranks, wrong)
    assert not folder_of(output).exists()
    assert build(solo_comm(), Request(output, [path], "byte")).tokens == 3


def test_only_parts_that_are_there_are_looked_for(tmp_path, monkeypatch):
    path, _ = corpus(tmp_path)
    request, looked, written = Request(tmp_path / "s.h5", [path], "byte", part_bytes=1500), [], []
    is_whole, write = jobs._is_whole, jobs._write_part

    def breaking(place, number, *others):
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        written.append(number)
        return write(place, number, *others)

    monkeypatch.setattr(jobs, "_is_whole", lambda *words: looked.append(words[2]) or is_whole(*words))
    monkeypatch.setattr(jobs, "_write_part", breaking)
    with pytest.raises(BuildError, match="No space"):
        alone(request)
    assert looked == []
    monkeypatch.setattr(jobs, "_write_part", write)
    assert run(2, lambda world: build(world.comm, request))[0].kept == 3
    assert sorted(looked) == written


def test_a_link_in_the_folder_of_parts_is_not_written_through(tmp_path):
    path, _ = corpus(tmp_path)
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    folder_of(tmp_path / "s.h5").mkdir()
    (folder_of(tmp_path / "s.h5") / "job.json.tmp").symlink_to(precious)
    with pytest.raises(BuildError, match=r"the folder of parts .* cannot be used"):
        alone(Request(tmp_path / "s.h5", [path], "byte"))
    assert precious.read_text() == "as it was"
