"""Places and folders on a node: room, owners, locks; what others put in the way, and what killed jobs leave behind."""

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpispeed.base.errors import StagingError
from mpispeed.launch.staged import job_number, lease_of
from mpispeed.staging import folders, places, unpack
from mpispeed.staging.contents import Contents, File
from mpispeed.staging.pack import Archive, write_archive
from mpispeed.staging.spread import Here, staged
from tests.helpers.system import CHECKOUT, ROOT, cannot, with_own_mounts

NOBODY = 65534
UID = os.geteuid()
UNPACK = str(Path(unpack.__file__))
EPILOG = ROOT / "slurm" / "epilog.sh"


def name(job="7", letters="0123abcd", uid=UID):
    return f"mpispeed-env-{uid}-{job}-{letters}"


def left(place, job="7", letters="0123abcd", age=0.0, lease=""):
    """The folder of a job that ended so many seconds ago."""
    folder = place / name(job, letters)
    folders.make_folder(folder, lease)
    (folder / "venv").mkdir()
    (folder / "venv" / "x").touch()
    os.utime(folder / "lock", (time.time() - age,) * 2)
    return folder


def on_a_disk(options, script):
    """Run lines of Python with `place`, a file system of its own, and what they need; returns what they print."""
    lines = f"import os, pathlib\nfrom mpispeed.staging import places, unpack\nplace = pathlib.Path('/mnt')\n{script}"
    words = f'mount -t tmpfs -o mode=700,{options} none /mnt && exec "$0" -c "$1"'
    done = subprocess.run(
        [*with_own_mounts(), "sh", "-c", words, sys.executable, lines],
        env={**os.environ, "PYTHONPATH": CHECKOUT, "MPISPEED_STAGE_DIR": "/mnt"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_place_without_room_inodes_or_programs_is_unfit():
    script = "print(places.unfit(place, {}, {}))"
    assert on_a_disk("size=1m", script.format(2 << 20, 10)) == "1 MiB are free of 2"
    assert on_a_disk("size=1m", script.format(1 << 19, 10)) == ""
    assert on_a_disk("nr_inodes=20", script.format(1, 30)) == "19 inodes are free of 30"
    assert on_a_disk("size=1m,noexec", script.format(1, 1)) == "it is mounted with noexec"


@pytest.mark.parametrize(
    ("options", "what"), [("size=200k", "No space left"), ("size=9m,nr_inodes=6", "No space left")]
)
def test_a_disk_that_fills_up_meanwhile_is_left_empty(tmp_path, options, what):
    source = tmp_path / "source"
    source.write_bytes(os.urandom(300_000))
    script = f"""
import io
from mpispeed.base.errors import StagingError
from mpispeed.staging.contents import Contents, File
from mpispeed.staging.pack import write_archive
files = {{f"a/{{n}}": File(f"a/{{n}}", {str(source)!r}) for n in range(5)}}
with open({str(tmp_path / "x.tar")!r}, "wb") as file:
    seal, facts = write_archive(file, Contents("a", "", files))
(folder,) = unpack.begin({name()!r}, 1, 1)
try:
    unpack.unpack(pathlib.Path({str(tmp_path / "x.tar")!r}), seal, folder, workers=2)
except StagingError as error:
    print(error)
print(list(place.iterdir()))
"""
    said, stays = on_a_disk(options, script).splitlines()
    assert what in said
    assert "MPISPEED_STAGE_DIR" in said
    assert stays == "[]"


def test_the_reasons_of_all_places_are_told(place):
    with pytest.raises(StagingError, match=rf"{place}: \d+ MiB are free of {1 << 40}.*name one in MPISPEED_STAGE_DIR"):
        unpack.begin(name(), 1 << 60, 1)
    with pytest.raises(StagingError, match="No such file"):
        unpack.begin(name(), 1, 1, str(place / "none"))
    assert not list(place.iterdir())


def test_a_place_that_others_could_exchange_is_unfit(place):
    inner = place / "inner"
    inner.mkdir()
    assert places.unfit(inner, 1, 1) == ""
    place.chmod(0o777)
    assert places.unfit(place, 1, 1) == places.unfit(inner, 1, 1) == "another user can move what is in it"
    place.chmod(0o1777)
    assert places.unfit(inner, 1, 1) == ""


def test_a_link_to_a_place_that_others_could_exchange_is_unfit(place, tmp_path):
    (place / "link").symlink_to(tmp_path)
    assert places.unfit(place / "link", 1, 1) == ""
    place.chmod(0o777)
    assert places.unfit(place / "link", 1, 1) == "another user can move what is in it"


def test_a_link_of_another_user_is_no_way_to_a_place(place, tmp_path):
    if UID != 0:
        cannot("only root can give a link to somebody else")
    (tmp_path / "inner").mkdir()
    (place / "link").symlink_to(tmp_path)
    (place / "second").symlink_to("link")
    place.chmod(0o1777)
    assert places.unfit(place / "second" / "inner", 1, 1) == ""
    os.chown(place / "link", NOBODY, NOBODY, follow_symlinks=False)
    for path in ("link", "second", "second/inner"):
        assert places.unfit(place / path, 1, 1) == "another user can move what is in it"


def test_places_are_absolute_and_of_one_line(place, monkeypatch):
    monkeypatch.chdir(place)
    (place / "a\tb").mkdir()
    assert places.candidates("a") == [place / "a"]
    assert places.unfit(place / "a\tb", 1, 1) == "its name has a tab or a line break"


@pytest.mark.parametrize("limits", [(("100", "40"), ("max", "9")), (("max", "9"), ("100", "40"))])
def test_the_smallest_rest_of_memory_counts(tmp_path, limits):
    inner = tmp_path / "job" / "step"
    inner.mkdir(parents=True)
    for folder, (limit, used) in zip((inner, inner.parent), limits, strict=True):
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text(used + "\n")
    own = tmp_path / "cgroup"
    own.write_text("0::/job/step\n")
    assert places.free_memory(tmp_path, own) == 60
    own.write_text("5:cpu:/x\n")
    assert places.free_memory(tmp_path, own) > 1 << 20  # the node's


def test_a_name_that_is_taken_is_refused_whatever_it_is(place, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    for put in (Path.mkdir, Path.touch, lambda path: path.symlink_to(target), lambda path: path.symlink_to("nowhere")):
        put(place / name())
        with pytest.raises(StagingError, match="File exists"):
            unpack.begin(name(), 1, 1)
        with contextlib.suppress(OSError):
            (place / name()).unlink()
        shutil.rmtree(place / name(), ignore_errors=True)
    assert not list(target.iterdir())


def test_a_folder_that_became_a_link_or_open_to_others_is_not_used(place, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "kept").touch()
    (place / name()).symlink_to(target)
    for use in (unpack.end, folders.check_folder, lambda path: unpack.unpack(target, None, path)):
        with pytest.raises(StagingError, match="link or a file"):
            use(place / name())
    (place / name()).unlink()
    folders.make_folder(place / name())
    (place / name()).chmod(0o750)
    with pytest.raises(StagingError, match="not to us alone"):
        folders.check_folder(place / name())
    assert (target / "kept").exists()


def test_links_inside_are_not_followed_when_a_folder_goes(place, tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "x").touch()
    folder = left(place)
    (folder / "venv" / "out").symlink_to(tmp_path / "kept")
    unpack.end(folder)
    assert not folder.exists()
    assert (tmp_path / "kept" / "x").exists()


def test_only_what_is_old_and_unused_is_cleaned_away(place):
    long_ago = folders.GRACE_SECONDS + 60
    old, young = left(place, "p1", age=long_ago), left(place, "p2")
    used = left(place, "p3", age=long_ago)
    own = left(place, "9", "aaaaaaaa", age=long_ago)
    (place / name("p4", uid=UID + 1)).mkdir()
    (place / "mpispeed-env-other").mkdir()
    with (used / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert set(folders.left_over([place], "9")) == {old, own}
        (made,) = unpack.begin(name("9"), 1, 1)
    assert sorted(place.iterdir()) == sorted(
        [young, used, made, place / name("p4", uid=UID + 1), place / "mpispeed-env-other"]
    )
    assert list(folders.left_over([place])) == [used]


@pytest.mark.parametrize(
    ("lease", "stays"),
    [("2", True), ("2 other-host", True), (f"2 {socket.gethostname()}", False), ("1", False), ("1 other-host", False)],
)
def test_a_start_of_the_same_job_keeps_its_folder_until_the_job_is_over(place, lease, stays):
    """Staged by a batch script that has other work before its ranks start, so that no process holds the lock."""
    folder = left(place, "9", age=folders.GRACE_SECONDS + 60, lease=lease)
    (made,) = unpack.begin(name("9", "bbbbbbbb"), 1, 1, lease="2 x")
    assert (made / "lock").read_text() == "2 x"
    assert folder.exists() == stays
    if stays:  # requeued
        unpack.begin(name("9", "cccccccc"), 1, 1, lease="3")
        assert {path.name for path in place.iterdir()} == {made.name, name("9", "cccccccc")}


def test_two_starts_of_a_batch_script_long_after_each_other(place, tmp_path, monkeypatch):
    """As `mpispeed stage begin` and `mpispeed run --stage-env` in one job."""
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    (tmp_path / "python").write_text("#!/bin/sh\n")
    with (tmp_path / "x.tar").open("wb") as file:
        seal, _ = write_archive(file, Contents("python", "", {"python": File("python", str(tmp_path / "python"))}))
    archive = Archive(tmp_path / "x.tar", str(seal), "", "python", "", 1, 1, 1, 1, "")
    first = Here().stage(archive, folders.name_for(job_number(os.environ)), "", lease_of(os.environ, is_held=False))
    os.utime(first / "lock", (time.time() - folders.GRACE_SECONDS - 60,) * 2)
    lease = lease_of(os.environ, is_held=True)
    with staged(Here(), archive, job_number(os.environ), "", lease, warn=pytest.fail) as second:
        assert second.folder != first
        assert (first / "python").exists()
        os.utime(second.folder / "lock", (time.time() - folders.GRACE_SECONDS - 60,) * 2)
        assert list(folders.left_over([place], "9", lease)) == []  # the lock is held
    assert [path.name for path in place.iterdir()] == [first.name]


def test_what_is_being_removed_waits_for_nobody_and_is_used_by_nobody(place):
    """A process that comes meanwhile waits, and then finds nothing: it never goes on with half of a folder."""
    folder = left(place, "p1", age=folders.GRACE_SECONDS + 60)
    words = "import sys, pathlib\nfrom mpispeed.staging import folders\nprint('begun', flush=True)\n"
    words += "with folders.locked(pathlib.Path(sys.argv[1])) as held: print(held, (pathlib.Path(sys.argv[1])).exists())"
    for path in folders.left_over([place]):
        late = subprocess.Popen(
            [sys.executable, "-c", words, path], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": CHECKOUT},
        )  # fmt: skip
        assert late.stdout.readline() == "begun\n"
        with pytest.raises(subprocess.TimeoutExpired):
            late.wait(0.3)
        folders.remove(path)
    assert late.communicate()[0] == "True False\n"
    assert not folder.exists()


def test_a_look_at_a_folder_does_not_cost_others_their_lock(place):
    folder = left(place)
    with folders.locked(folder, is_exclusive=True), (folder / "lock").open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    with folders.locked(folder) as is_held:
        assert is_held
        with folders.locked(folder, is_exclusive=True) as is_free:
            assert not is_free


def test_a_folder_that_an_archive_is_sent_to_is_in_use(place):
    """As by sbcast, of which no process of the node holds the lock."""
    folder = left(place, "9", age=folders.GRACE_SECONDS + 60)
    (folder / "archive.tar").write_bytes(b"x")
    assert list(folders.left_over([place], "9")) == []
    os.utime(folder / "archive.tar", (time.time() - folders.GRACE_SECONDS - 60,) * 2)
    assert list(folders.left_over([place], "9")) == [folder]


@pytest.mark.parametrize(
    ("answer", "is_over"),
    [("echo RUNNING", False), ("echo PENDING", False), ("true", True), ("echo COMPLETED", True), ("exit 1", False),
     ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", True)],
)  # fmt: skip
def test_slurm_is_asked_whether_a_job_is_over(place, tmp_path, monkeypatch, answer, is_over):
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(f"#!/bin/sh\n{answer}\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    folder = left(place, "12", age=folders.GRACE_SECONDS + 60)
    assert list(folders.left_over([place])) == [folder] * is_over


def as_nobody(words, **env):
    if UID != 0:
        cannot("two users need root, who can be both")
    return subprocess.run(
        words, user=NOBODY, group=NOBODY, extra_groups=[], env={"PATH": os.environ["PATH"], **env}, capture_output=True,
        text=True, check=False, cwd="/",
    )  # fmt: skip


@pytest.fixture
def shared_place():
    """A place like /tmp: everybody's, with a sticky bit."""
    folder = Path("/tmp") / f"mpispeed-test-{os.getpid()}"
    folder.mkdir()
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def test_two_users_of_a_node_do_not_touch_each_others_folders(shared_place, monkeypatch):
    monkeypatch.setenv("MPISPEED_STAGE_DIR", str(shared_place))
    long_ago = folders.GRACE_SECONDS + 60
    mine = left(shared_place, "p1", age=long_ago)
    # Nobody cannot take the name of a folder of ours in a way that is believed, nor look into or remove one.
    squatted = shared_place / name("p2")
    own = shared_place / name("p3", uid=NOBODY)
    script = f"mkdir {squatted}; touch {squatted}/lock; ls {mine}; rm -rf {mine}; mv {mine} {mine}2; mkdir {own}"
    done = as_nobody(["sh", "-c", script])
    assert done.stderr.count("Permission denied") + done.stderr.count("not permitted") >= 3, done.stderr
    assert (mine / "venv" / "x").exists()
    assert list(folders.left_over([shared_place])) == [mine]
    with pytest.raises(StagingError, match="File exists"):
        unpack.begin(name("p2"), 1, 1)
    with pytest.raises(StagingError, match="belongs to user 65534"):
        unpack.end(squatted)
    assert {path.name for path in shared_place.iterdir()} == {squatted.name, own.name}


def epilog(shared_place, job, user, script=EPILOG, **env):
    variables = {"SLURM_JOB_ID": job, "SLURM_JOB_UID": str(user), "MPISPEED_STAGE_PLACES": str(shared_place), **env}
    done = subprocess.run(
        [script], env={"PATH": os.environ["PATH"], **variables}, capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_epilog_removes_what_the_job_has_left_and_nothing_else(shared_place, tmp_path):
    if UID != 0:
        cannot("an epilog runs as root")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "x").touch()
    made = [shared_place / name(job, letters, uid) for job, letters, uid in (
        ("71", "0123abcd", NOBODY), ("71", "aaaaaaaa", NOBODY), ("711", "0123abcd", NOBODY), ("72", "0123abcd", NOBODY),
        ("71", "0123abcd", 0))]  # fmt: skip
    for folder in made:
        (folder / "venv").mkdir(parents=True)
        (folder / "venv" / "x").touch()
        (folder / "out").symlink_to(tmp_path / "kept")
    for folder in made[:4]:
        for path in (folder, folder / "venv", folder / "venv" / "x"):
            os.chown(path, NOBODY, NOBODY)
    link = shared_place / name("71", "llllllll", NOBODY)
    link.symlink_to(tmp_path / "kept")
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    owned_by_root = shared_place / name("71", "rrrrrrrr", NOBODY)  # named so by somebody else
    owned_by_root.mkdir()
    epilog(shared_place, "71", NOBODY)
    assert set(shared_place.iterdir()) == {*made[2:], link, owned_by_root}
    assert (tmp_path / "kept" / "x").exists()
    for job, user in (("*", NOBODY), ("71", "*"), ("", ""), ("71 72", NOBODY), ("../x", NOBODY)):
        assert "nothing is removed" in epilog(shared_place, job, user).stderr
    assert set(shared_place.iterdir()) == {*made[2:], link, owned_by_root}


def test_the_epilog_removes_nothing_by_the_rights_of_root(shared_place, tmp_path):
    if UID != 0:
        cannot("an epilog runs as root")
    folder = shared_place / name("71", "0123abcd", NOBODY)
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    without = tmp_path / "epilog.sh"
    without.write_text(EPILOG.read_text().replace("command -v setpriv", "command -v setpriv-of-none"))
    without.chmod(0o755)
    assert "root removes no files of users" in epilog(shared_place, "71", NOBODY, script=without).stderr
    assert folder.exists()


def test_the_epilog_is_clean_for_shellcheck():
    if shutil.which("shellcheck") is None:
        cannot("shellcheck is not installed")
    done = subprocess.run(["shellcheck", EPILOG], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_signal_while_it_unpacks_leaves_nothing(place, tmp_path):
    """The archive is a pipe that never gives a byte, so that the signal comes in the middle."""
    folders.make_folder(place / name())
    fifo = tmp_path / "archive.tar"
    os.mkfifo(fifo)
    words = [sys.executable, "-I", "-S", UNPACK, "unpack", "--archive", fifo, "--seal", f"0.1.{'0' * 64}"]
    process = subprocess.Popen([*words, "--folder", place / name()], env=os.environ)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with folders.locked(place / name(), is_exclusive=True) as is_free:
            if not is_free:
                break
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert not list(place.iterdir())
