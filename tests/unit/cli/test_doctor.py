"""`mpispeed doctor`: right answers on this machine, alone and as ranks; never a traceback."""

import html.parser
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from click.testing import CliRunner

import mpispeed
from mpispeed.cli import doctor as doctor_module
from mpispeed.cli.doctor_page import as_page, as_text
from mpispeed.launch.findings import Finding, Verdict
from mpispeed.launch.mpirun import find_mpirun
from mpispeed.launch.probes_ranks import Place, check_pair
from tests.helpers.system import cannot

ROOT = Path(__file__).resolve().parents[3]
DOCTOR = [sys.executable, "-m", "mpispeed.cli.main", "doctor"]


def start(argv, **env):
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, **env)


def checkout_only(folder):
    """Python of a copy of this environment in which mpispeed is not installed, and the folder to find it in.

    That folder has the modules of the checkout and no metadata, which an installation leaves beside them.
    """
    if sys.prefix == sys.base_prefix:
        cannot("its Python is that of no virtual environment")
    prefix, packages = Path(sys.prefix), Path(sysconfig.get_path("purelib"))
    links = {path: folder / path.name for path in prefix.iterdir() if path.name not in ("lib", "lib64")}
    copy = folder / packages.relative_to(prefix)
    copy.mkdir(parents=True)
    links |= {path: copy / path.name for path in packages.iterdir() if "mpispeed" not in path.name}
    links |= {path: folder / "lib" / path.name for path in packages.parents[1].iterdir() if path != packages.parent}
    for path, link in links.items():
        link.symlink_to(path)
    source = folder / "checkout"
    source.mkdir()
    (source / "mpispeed").symlink_to(ROOT / "src" / "mpispeed")
    return str(folder / "bin" / Path(sys.executable).name), source


def read(done):
    assert "Traceback" not in done.stdout + done.stderr
    answer = json.loads(done.stdout)
    return answer, {finding["name"]: finding for finding in answer["findings"]}


def test_alone_in_a_checkout_that_is_not_installed(tmp_path, tmp_path_factory):
    page = tmp_path / "page.html"
    python, source = checkout_only(tmp_path_factory.mktemp("environment"))
    env = {**os.environ, "PYTHONPATH": str(source)}
    asked = "import importlib.metadata as m; print([d.name for d in m.distributions(name='mpispeed')])"
    assert start([python, "-c", asked], env=env).stdout == "[]\n"
    done = start([python, *DOCTOR[1:], "--json", "--html", str(page), "--folder", str(tmp_path)], env=env)
    answer, findings = read(done)
    assert (done.returncode, answer["ok"]) == (0, True), done.stdout
    assert findings["mpispeed"]["detail"] == mpispeed.__version__
    needed = ("Python", "torch", "MPI library", "world of 2", "HDF5", "cores", "nvcc", "pycuda", "block I/O", "memory",
              "/dev/shm", "progress", "MPI and GPU memory", "rename", "flock locks", "fcntl locks", "mmap", "fsync",
              "speed", "O_DIRECT", "file system", "free space", "SLURM", "thread level")  # fmt: skip
    for name in needed:
        assert findings[name]["detail"], name
        assert findings[name]["verdict"] != "fail"
    assert any(name.startswith("compiled ") for name in findings)
    assert str(tmp_path) in findings["file system"]["detail"]
    assert html_names(page.read_text()) >= set(needed)
    assert list(tmp_path.iterdir()) == [page]  # what was tried is gone


def html_names(text):
    """Texts of the cells of the second column."""
    found, state = set(), []

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            state[:] = [tag, dict(attrs).get("class")]

        def handle_data(self, data):
            if state == ["td", "name"]:
                found.add(data)

    Reader().feed(text)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_as_ranks_only_the_first_reports(ranks, tmp_path):
    argv = [str(find_mpirun().path), "-n", str(ranks), *DOCTOR, "--json", "--folder", str(tmp_path)]
    done = start(argv)
    answer, findings = read(done)
    assert (done.returncode, answer["ok"]) == (0, True), done.stdout
    assert findings["world"]["detail"].startswith(f"{ranks} ranks on 1 node ")
    assert findings["clocks"]["verdict"] == "ok"
    assert len(answer["findings"]) == len(findings)  # one node, one line each
    assert "Iallreduce" in findings["progress"]["detail"]
    assert findings["rename"]["verdict"] == "ok"


def test_ranks_that_are_alone_are_told(tmp_path, monkeypatch):
    """A launcher of another MPI: it starts two processes that each find themselves alone."""
    alone = tmp_path / "mpirun"
    alone.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo other && exit\n'
        'while [ "$1" != -n ]; do shift; done; shift 2\nPMI_SIZE=2 PMI_RANK=0 "$@"\n'
    )
    alone.chmod(0o755)
    monkeypatch.setattr("mpispeed.launch.command.find_mpirun", lambda *_, **__: find_mpirun(python=str(alone)))
    findings = {finding.name: finding for finding in check_pair()}
    assert findings["world of 2"].verdict is Verdict.FAIL
    assert "different MPIs" in findings["world of 2"].detail
    assert "belong to different MPIs" in findings["world of 2"].cure


def test_ranks_that_do_not_meet_are_one_finding(monkeypatch):
    monkeypatch.setattr(doctor_module, "find_place", lambda: Place(0, 2, 1))
    monkeypatch.setattr("mpispeed.launch.probes_ranks._PROBE", ("-c", "raise SystemExit('no PMI')"))
    done = CliRunner().invoke(doctor_module.doctor, [])
    assert done.exit_code == 1
    assert "2 ranks did not meet: no PMI" in done.output


def test_a_check_that_breaks_is_a_finding_after_those_it_had():
    def broken():
        yield Finding("machine", "cores", Verdict.OK, "2")
        message = "strange machine"
        raise ValueError(message)

    found = doctor_module.examine("machine", broken)
    assert [(finding.name, finding.verdict) for finding in found] == [("cores", Verdict.OK), ("machine", Verdict.WARN)]
    assert "ValueError: strange machine" in found[1].detail


def test_exit_code_and_words_for_what_is_missing(monkeypatch, tmp_path):
    missing = Finding("software", "torch", Verdict.FAIL, "not <there>", "install it", place="n1")
    monkeypatch.setattr(doctor_module, "_alone", lambda *_, **__: [missing])
    done = CliRunner().invoke(doctor_module.doctor, ["--html", str(tmp_path / "no" / "page.html")])
    assert done.exit_code == 1
    assert "FAIL  torch  [n1] not <there>" in done.stdout
    assert "-> install it" in done.stdout
    assert "page.html cannot be written: No such file" in done.stderr
    page = as_page("title", [missing])
    assert "not &lt;there&gt;" in page
    assert "http" not in page  # it needs no other file
    assert "fail: 1, warn: 0, good: 0" in as_text([missing])


def test_a_folder_that_cannot_be_written_to(monkeypatch):
    for other in ("check_software", "check_machine", "check_pair"):
        monkeypatch.setattr(doctor_module, other, list)
    done = CliRunner().invoke(doctor_module.doctor, ["--json", "--folder", "/proc"])
    answer = json.loads(done.stdout)
    assert (done.exit_code, answer["ok"]) == (1, False)
    assert [row["name"] for row in answer["findings"] if row["verdict"] == "fail"] == ["folder"]
    monkeypatch.chdir("/proc")
    assert CliRunner().invoke(doctor_module.doctor, []).exit_code == 0  # nobody asked for this folder
