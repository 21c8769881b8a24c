"""A small virtual environment, packed, moved and started from: everything comes from the copy, and it is made once."""

import fcntl
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.base.errors import StagingError
from mpispeed.staging import contents, elf, pack, unpack
from mpispeed.staging.archive import Seal
from mpispeed.staging.pack import find_packed
from tests.helpers.small_environment import small_environment
from tests.helpers.system import ROOT, cannot, with_own_mounts

ENVIRON = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MPISPEED_STAGE_DIR")}
FINDER = '''"""As setuptools writes it for packages that are in no folder src."""
import sys
from importlib.machinery import PathFinder
MAPPING: dict[str, str] = {mapping!r}
def install():
    for name, place in MAPPING.items():
        sys.path.append(place.rpartition("/")[0])
'''


def run(python, *words):
    done = subprocess.run([python, *words], env=ENVIRON, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


def packed(python, *words):
    """The archive of an environment, as `mpispeed stage` shows it."""
    run(python, "-m", "mpispeed", "stage", "pack", *words)
    return json.loads(run(python, "-m", "mpispeed", "stage", "show", "--json", *words[: 2 * (words[:1] == ("-o",))]))


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment with editable installs, links and a script; and folders outside that it needs."""
    folder = tmp_path_factory.mktemp("environment")
    python = small_environment(folder / "venv")
    sites = next((folder / "venv" / "lib").glob("python*/site-packages"))
    outside = folder / "outside"
    for name in ("edited", "mapped/in_table", "linked"):
        (outside / name).mkdir(parents=True)
        (outside / name / "__init__.py").write_text("x = 1\n")
    (outside / "module_of_link.py").write_text("x = 1\n")
    (sites / "edited.pth").write_text(f"{outside}\n# no folder\n{outside}/none\n")
    (sites / "__editable___mapped_finder.py").write_text(
        FINDER.format(mapping={"in_table": f"{outside}/mapped/in_table"})
    )
    (sites / "__editable__.mapped.pth").write_text(
        "import __editable___mapped_finder; __editable___mapped_finder.install()\n"
    )
    (sites / "by_link").symlink_to(outside / "linked")
    (sites / "file_by_link.py").symlink_to(outside / "module_of_link.py")
    script = folder / "venv" / "bin" / "tell"
    script.write_text(f"#!{folder}/venv/bin/python3\nimport sys; print(sys.prefix)\n")
    script.chmod(0o755)
    return python, sites, outside


@pytest.fixture(scope="module")
def archive(environment):
    return packed(environment[0])


@pytest.fixture(scope="module")
def moved(environment, archive, tmp_path_factory):
    """The folder that the archive was unpacked to."""
    place = tmp_path_factory.mktemp("place")
    (folder,) = unpack.begin(f"mpispeed-env-{os.geteuid()}-p1-0123abcd", archive["room"], archive["inodes"], str(place))
    unpack.unpack(Path(archive["path"]), Seal.parse(archive["seal"]), folder)
    yield folder
    unpack.end(folder)


ASKS = """
import json, sys
import by_link, click, edited, file_by_link, in_table, mpispeed.launch.rank
from mpi4py import MPI
maps = [line.split()[-1] for line in open("/proc/self/maps") if ".so" in line]
files = [getattr(module, "__file__", None) for module in sys.modules.values()]
cached = [getattr(module, "__cached__", None) for module in sys.modules.values()]
print(json.dumps([sys.prefix, sys.base_prefix, sys.path, maps, files, cached]))
"""


def test_everything_comes_from_the_copy(moved, archive, environment):
    """By the paths of modules and mapped libraries; none leads back, and no bytecode was missing."""
    before = sorted(moved.rglob("*.pyc"))
    variables = {"LD_LIBRARY_PATH": str(moved / archive["libraries"])} if archive["libraries"] else {}
    done = subprocess.run(
        [moved / archive["python"], "-P", "-c", ASKS],
        env={**ENVIRON, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    prefix, base, path, maps, files, cached = json.loads(done.stdout)
    assert (prefix, base) == (str(moved / "venv"), str(moved / "base"))
    here = {str(environment[0].parents[1]), os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix), str(ROOT)}
    here -= {"/usr", "/"}  # a Python of the system has its libraries among others
    found = [name for name in (*path, *maps, *files) if name]
    assert len(found) > 100
    strange = [name for name in found if any(name.startswith(f"{folder}/") for folder in here)]
    assert not strange
    assert sorted(moved.rglob("*.pyc")) == before
    assert all(Path(name).exists() for name in cached if name)


def test_scripts_of_the_environment_start_the_copy(moved):
    assert run(moved / "venv" / "bin" / "tell") == f"{moved}/venv\n"


def test_there_are_only_plain_files(moved):
    assert not [path for path in moved.rglob("*") if path.is_symlink() or not (path.is_file() or path.is_dir())]


def test_a_process_of_the_copy_holds_its_lock(moved, archive):
    from mpispeed.staging.folders import locked

    words = [moved / archive["python"], "-c", "print(1, flush=True); input()"]
    with subprocess.Popen(words, env=ENVIRON, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "1\n"
        with locked(moved, is_exclusive=True) as is_free:
            assert not is_free
        process.communicate("\n")
    with locked(moved, is_exclusive=True) as is_free:
        assert is_free


BUT_PYTHON = ("--exclude", "base/*", "--exclude", "venv/lib/*mpi*")  # enough to see that it is packed


def test_it_is_packed_again_when_it_has_changed_and_only_then(environment, tmp_path):
    python, sites, outside = environment
    place = ("-o", tmp_path / "archive")
    first = packed(python, *place, *BUT_PYTHON)
    written = Path(first["path"]).stat().st_mtime_ns
    assert packed(python, *place) == first  # what was left out stays so
    assert Path(first["path"]).stat().st_mtime_ns == written
    (outside / "edited" / "new.py").write_text("y = 2\n")
    by_edit = packed(python, *place)
    record = sites / "thing-1.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("thing.py,,\n")
    by_install = packed(python, *place)
    record.write_text("thing.py,,\nother.py,,\n")
    by_upgrade = packed(python, *place)
    by_choice = packed(python, *place, "--exclude", "base/*", "--exclude", "venv/*")
    found = (first, by_edit, by_install, by_upgrade, by_choice)
    assert len({each["key"] for each in found}) == 5
    assert by_choice["files"] < by_upgrade["files"] == by_install["files"] == by_edit["files"] + 1


def test_an_environment_in_the_folder_of_a_project_is_not_packed_with_it(environment, tmp_path):
    python, sites, _ = environment
    project = tmp_path / "project"
    shutil.copytree(sites / "click", project / "click_of_project")
    inner = project / ".venv"
    (inner / "staged-archive").mkdir(parents=True)
    (inner / "pyvenv.cfg").touch()
    (project / "\udcff\x1b.py").touch()
    (sites / "project.pth").write_text(f"{project}\n")
    first = packed(python, "-o", tmp_path / "archive", *BUT_PYTHON)
    listed = run(python, "-m", "mpispeed", "stage", "show", "--files", "-o", tmp_path / "archive")
    (inner / "staged-archive" / "archive.json").touch()
    again = packed(python, "-o", tmp_path / "archive", *BUT_PYTHON)
    (sites / "project.pth").unlink()
    assert r"/\udcff\x1b.py" in listed
    assert ("click_of_project/core.py" in listed, ".venv" in listed) == (True, False)
    assert again == first


def test_two_packers_at_once_make_one_archive(environment, tmp_path):
    python = environment[0]
    words = [python, "-m", "mpispeed", "stage", "pack", "-o", tmp_path / "both", *BUT_PYTHON]
    both = [subprocess.Popen(words, env=ENVIRON, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[0] for process in both]
    assert said[0] == said[1] != ""
    names = [path.name.partition("-")[0].partition(".")[0] for path in (tmp_path / "both").iterdir()]
    assert sorted(names) == ["archive", "environment", "lock"]


def test_a_packer_waits_for_another_one_but_not_for_ever_and_opens_no_other_file(tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "WAIT_SECONDS", 0.3)
    refused = pytest.raises(StagingError, match="end it, or give another folder")
    with pack._only_packer(tmp_path), refused, pack._only_packer(tmp_path):
        pass
    monkeypatch.setattr(pack, "WAIT_SECONDS", 60.0)
    held = os.open(tmp_path / "lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    threading.Timer(0.3, os.close, [held]).start()
    with pack._only_packer(tmp_path), pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held)  # the other one has ended
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StagingError, match="cannot be opened"), pack._only_packer(tmp_path):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_who_cannot_write_the_environment_takes_the_archive_inside(environment, tmp_path):
    python = Path(environment[0])
    archive = packed(python)
    venv = python.parents[1]
    for is_stale in (False, True):
        if is_stale:
            (environment[2] / "edited" / "newer.py").write_text("y = 3\n")
        protect = f"mount --bind {venv} {venv} && mount -o remount,ro,bind {venv}"
        words = [*with_own_mounts(), "sh", "-c", f"{protect} && exec {python} -m mpispeed stage pack"]
        done = subprocess.run(
            words,
            env={**ENVIRON, "XDG_CACHE_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
        )
        assert done.returncode == 0, done.stderr
        assert (str(archive["path"]) in done.stdout, any(tmp_path.iterdir())) == (not is_stale, is_stale)


def test_a_loop_of_links_is_refused(environment):
    python, sites, _ = environment
    (sites / "loop").symlink_to(sites)
    done = subprocess.run(
        [python, "-m", "mpispeed", "stage", "pack", "--again"], env=ENVIRON, capture_output=True, text=True
    )
    (sites / "loop").unlink()
    assert done.returncode == 2
    assert "which contains it; remove that link" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_cannot_be_written_is_told(environment, tmp_path):
    (tmp_path / "file").touch()
    words = [environment[0], "-m", "mpispeed", "stage", "pack", "-o", tmp_path / "file" / "x"]
    done = subprocess.run(words, env=ENVIRON, capture_output=True, text=True, check=False)
    assert (done.returncode, "give another one with --output" in done.stderr) == (2, True)


def test_an_archive_that_others_could_have_put_there_is_not_used(environment, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    words = [environment[0], "-m", "mpispeed", "stage", "pack", "-o", tmp_path / "open"]
    done = subprocess.run(words, env=ENVIRON, capture_output=True, text=True, check=False)
    assert (done.returncode, "give a folder of your own with --output" in done.stderr) == (2, True)
    assert not list((tmp_path / "open").iterdir())


def test_the_archive_is_for_those_alone_who_can_read_all_that_is_in_it(archive):
    assert Path(archive["path"]).stat().st_mode & 0o077 == 0  # folders of tests are ours alone
    with tempfile.TemporaryDirectory(dir="/tmp") as top:
        key, other = Path(top, "inner", "key.txt"), Path(top, "other.py")
        key.parent.mkdir()
        files = {path.name: contents.File(path.name, str(path)) for path in (key, other)}
        for path, mode in ((key, 0), (other, 0o644), (Path(top), 0o755)):
            path.touch()
            path.chmod(mode)
        found = []
        for own, folder in ((0o644, 0o755), (0o640, 0o755), (0o600, 0o755), (0o644, 0o710)):
            key.chmod(own)
            key.parent.chmod(folder)
            found.append(pack._readers_of(contents.Contents(files=files)))
    assert found == [0o044, 0o040, 0, 0o040]


def test_what_others_put_into_the_folder_is_not_believed(tmp_path):
    if os.geteuid() != 0:
        cannot("only root can give a file to somebody else")
    (tmp_path / "x.tar").touch()
    facts = {**dict.fromkeys(("seal", "key", "python", "libraries", "source"), ""), "exclude": [], "path": "x.tar"}
    facts |= {"format": 1, **dict.fromkeys(("size", "room", "inodes", "files"), 0)}
    (tmp_path / "archive.json").write_text(json.dumps(facts))
    assert find_packed(tmp_path).path == tmp_path / "x.tar"
    os.chown(tmp_path / "archive.json", 4321, 4321)
    assert find_packed(tmp_path) is None


@pytest.mark.parametrize("table", ["{'a': open('x')}", "{1: 2, 'a': 'b'}", "{'a': }"])
def test_a_table_of_an_editable_install_that_is_none_is_told(tmp_path, table):
    (tmp_path / "__editable___x_finder.py").write_text(f"MAPPING: dict[str, str] = {table}\n")
    with pytest.raises(StagingError, match=r"x_finder\.py has no table of folders"):
        list(contents._mapped([tmp_path]))


def test_an_environment_that_cannot_be_read_is_told(tmp_path):
    with pytest.raises(StagingError, match=r"cannot be read: .*gone'; mend or remove"):
        pack.key_of(contents.Paths(tmp_path, tmp_path, (tmp_path / "gone",), (), "python3"))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    wanted = contents.Contents("a", "", {"a": contents.File("a", str(tmp_path / "gone"))})
    with pytest.raises(StagingError, match=r"gone cannot be packed: No such file.*--exclude"):
        pack.write_archive(io.BytesIO(), wanted)


@pytest.mark.parametrize("text", ["5", "[]", "[" * 100_000, "{}", '{"format": 1, "path": 2}'])
def test_facts_that_are_none_are_no_archive(tmp_path, text):
    (tmp_path / "archive.json").write_text(text)
    assert find_packed(tmp_path) is None


def test_a_pipe_in_place_of_the_facts_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "archive.json")
    assert find_packed(tmp_path) is None


def test_an_archive_that_is_used_stays_young(tmp_path):
    path = tmp_path / "environment-0.tar"
    path.touch()
    os.utime(path, (0, 0))
    pack._mark_used(path)
    pack._remove_old(tmp_path, tmp_path / "environment-1.tar")
    assert path.exists()


def test_without_an_archive_there_is_nothing_to_show(environment, tmp_path):
    words = [environment[0], "-m", "mpispeed", "stage", "show", "-o", tmp_path]
    done = subprocess.run(words, env=ENVIRON, capture_output=True, text=True, check=False)
    assert (done.returncode, "mpispeed stage pack" in done.stderr) == (2, True)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A program with an absolute library path, made by the system's compiler."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "x.c").write_text("int main(void) { return 0; }\n")
    compiler = shutil.which("cc") or shutil.which("gcc")
    words = [compiler, "x.c", "-o", "x", "-Wl,-rpath,/opt/python/lib:/elsewhere/lib"]
    subprocess.run(words, cwd=folder, check=True)
    return (folder / "x").read_bytes()


def test_library_paths_become_relative(program, tmp_path):
    def place(folder):
        return "$ORIGIN/../lib" if folder == "/opt/python/lib" else folder

    changed = elf.relocated(program, place)
    assert len(changed) == len(program)
    assert b"$ORIGIN/../lib:/elsewhere/lib\0" in changed
    (tmp_path / "x").write_bytes(changed)
    (tmp_path / "x").chmod(0o755)
    assert subprocess.run([tmp_path / "x"], check=False).returncode == 0
    assert elf.relocated(changed, place) is None
    assert elf.relocated(program, lambda folder: folder + "/longer") is None  # no room for it


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_broken_files_are_left_as_they_are(program, data):
    cut = bytearray(program[: data.draw(st.integers(0, len(program)))])
    for place in data.draw(st.lists(st.integers(0, 2000), max_size=8)):
        if place < len(cut):
            cut[place] = data.draw(st.integers(0, 255))
    changed = elf.relocated(bytes(cut), lambda folder: "$ORIGIN")
    assert changed is None or len(changed) == len(cut)


def test_a_python_that_does_not_start_is_told(monkeypatch):
    monkeypatch.setattr(contents.sys, "executable", "/nowhere/python")
    with pytest.raises(StagingError, match="does not tell its path"):
        contents.own_paths()
