import logging

import pytest

from mpispeed.base.errors import CheckpointError, ConfigError
from mpispeed.ckpt.format import schema, tags
from mpispeed.ckpt.format.errors import CorruptCheckpoint, NoCheckpoint, TagMismatch, TagNotFound
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.ckpt.write.save import SaveOptions
from tests.unit.ckpt.sample import outcomes, save_by, saved, tensors_of

SMALL = {("w", "master"): tensors_of()["layers.0.weight", "master"]}


def opened_tag(folder, tag=None):
    with open_checkpoint(folder, tag) as checkpoint:
        return checkpoint.tag


@pytest.fixture
def folder(tmp_path):
    for step in (5, 10, 15):
        saved(tmp_path, f"step{step}", tensors=SMALL, state={"engine": {"global_steps": step}})
    return tmp_path


def test_latest_is_the_default(folder):
    assert opened_tag(folder) == "step15"
    assert opened_tag(folder, "step10") == "step10"


def test_latest_moves_only_when_asked_to(folder):
    saved(folder, "side", tensors=SMALL, options=SaveOptions(save_latest=False))
    assert opened_tag(folder) == "step15"


def test_nothing_there_is_its_own_error(tmp_path):
    with pytest.raises(NoCheckpoint, match='no file "latest"'):
        open_checkpoint(tmp_path)
    with pytest.raises(NoCheckpoint, match="no such folder"):
        open_checkpoint(tmp_path / "missing")


def test_a_wrong_tag_lists_the_nearest_first(folder):
    with pytest.raises(TagNotFound, match=r"'step11'.*nearest first: step1[05], step") as caught:
        open_checkpoint(folder, "step11")
    assert isinstance(caught.value, FileNotFoundError)
    for odd in ("../x", "a/b", ".", "..", "", "nul\0"):
        with pytest.raises(TagNotFound):
            open_checkpoint(folder, odd)


def test_latest_that_names_a_missing_tag_lists_those_there_are(folder):
    (folder / "latest").write_text("gone\n")
    with pytest.raises(TagNotFound, match=r"named by \"latest\".*step15, step10, step5"):
        open_checkpoint(folder)


def test_latest_is_trimmed_and_may_lack_its_digest(folder):
    (folder / "latest").write_text("\n  step10 \n\n")
    assert opened_tag(folder) == "step10"


@pytest.mark.parametrize("text", ["", " \n ", "step10\nblake2b:00", "\x00\xff"])
def test_a_damaged_latest_lists_the_valid_tags(folder, text):
    (folder / "latest").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match="step15, step10, step5"):
        open_checkpoint(folder)


def test_a_bit_flipped_in_latest_is_noticed(folder):
    raw = (folder / "latest").read_bytes()
    for place in range(len(raw) - 1):
        changed = bytearray(raw)
        changed[place] ^= 1
        (folder / "latest").write_bytes(changed)
        with pytest.raises((CorruptCheckpoint, TagNotFound)):
            open_checkpoint(folder)


@pytest.mark.parametrize(
    "tag", ["", " x", "x ", "a/b", ".hidden", "..", "latest", "latest.tmp", "new\nline", "t" * 300, "\ud800"]
)
def test_tags_that_cannot_name_a_folder_are_refused(tmp_path, tag):
    for failure in save_by(2, tmp_path, tag, tensors=SMALL):
        assert isinstance(failure, CheckpointError)
        assert "choose another tag" in str(failure)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tag", ["global_step10", "a b", "ünï", "x.y:z", "1"])
def test_ordinary_tags_work(tmp_path, tag):
    saved(tmp_path, tag, tensors=SMALL)
    assert opened_tag(tmp_path) == tag


def test_the_listing(folder):
    (folder / "not a checkpoint").mkdir()
    (folder / "half").mkdir()
    (folder / "half" / schema.MODEL_FILE).write_text("x")
    work = folder / (".step20.tmp-" + "0" * 32)
    work.mkdir()
    with (folder / "step10" / schema.MODEL_FILE).open("ab") as file:
        file.write(b"x")
    found = {(entry.tag, entry.status, entry.is_latest) for entry in tags.list_tags(folder)}
    assert found == {
        ("step5", "ok", False),
        ("step10", "corrupt", False),
        ("step15", "ok", True),
        ("half", "partial", False),
        ("step20", "partial", False),
    }


def test_an_interrupted_overwrite_is_found_and_cleared_by_the_next_save(folder, caplog):
    old = folder / (".step15.old-" + "a" * 32)
    (folder / "step15").rename(old)
    assert [entry.status for entry in tags.list_tags(folder) if entry.tag == "step15"] == ["recoverable"]
    assert opened_tag(folder) == "step15"
    assert "was being overwritten" in caplog.text
    saved(folder, "step15", tensors=SMALL)
    assert not old.exists()
    assert opened_tag(folder) == "step15"


def test_folders_may_be_links(folder, tmp_path_factory):
    link = tmp_path_factory.mktemp("links") / "link"
    link.symlink_to(folder)
    saved(link, "through link", tensors=SMALL)
    assert opened_tag(folder) == "through link"


def check_tags(mode, tag_of):
    return outcomes(3, lambda comm: tags.check_same_tag(comm, tag_of(comm.rank), mode))


@pytest.mark.parametrize("mode", ["Ignore", "WARN", "fail"])
def test_equal_tags_pass(mode):
    assert check_tags(mode, lambda rank: "t") == ["t"] * 3


def test_different_tags(caplog):
    with caplog.at_level(logging.WARNING):
        assert check_tags("ignore", lambda rank: f"t{rank}") == ["t0"] * 3
        assert caplog.text == ""
        assert check_tags("warn", lambda rank: f"t{rank}") == ["t0"] * 3
    assert caplog.text.count("rank 1 has 't1', rank 2 has 't2'") == 1
    failures = check_tags("fail", lambda rank: f"t{rank // 2}")
    assert len({str(failure) for failure in failures}) == 1
    for failure in failures:
        assert isinstance(failure, TagMismatch)
        assert isinstance(failure, AssertionError)
        assert "rank 2 has 't1'" in str(failure)


def test_an_unknown_mode_is_a_config_error():
    for failure in check_tags("strict", lambda rank: "t"):
        assert isinstance(failure, ConfigError)
        assert "'strict'" in str(failure)
