"""`mpispeed ckpt stats`: what it prints and writes, its exit codes, and what it does not import."""

import csv
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from mpispeed.ckpt.format import schema
from mpispeed.ckpt.read.reader import open_reader
from mpispeed.ckpt.tools import stats, stats_html, stats_plot
from mpispeed.cli.ckpt import ckpt
from tests.unit.ckpt.sample import saved
from tests.unit.ckpt.stats_sample import EVIL, STATE, change, check_moments, known, row_of, saved_run

PNG_START = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("stats")
    saved(where, "one", tensors=known(), state=STATE)
    return where


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    where = tmp_path_factory.mktemp("drift")
    return where, saved_run(where)


def call(*arguments, code=0):
    result = CliRunner().invoke(ckpt, ["stats", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_tables(folder):
    lines = call(folder, "blocks.*").stdout.splitlines()
    assert lines[0].split() == [
        *("name", "slot", "count", "min", "max", "mean", "std", "rms"),
        *("zeros", "nan", "inf", "update", "histogram", "(log)"),
    ]
    rows = {line.split()[0]: line.split() for line in lines if line}
    assert rows["blocks.2.odd"][1:12] == ["master", "6", "-3", "5", "0.6667", "3.3", "3.367", "1", "1", "2", "-"]
    assert rows["blocks.2.w"][-1] == "█"
    assert rows["blocks.10"][1] == "weight16"


def test_bars(folder):
    text = call(folder, "blocks.2.odd", "--bins", 4).stdout
    assert re.search(r"blocks\.2\.odd master: -3 to 5\n +-3  1  █+\n +-1  1  █+\n +1  0\n +3  1  █+\n", text)


def test_json(folder):
    report = json.loads(call(folder, "--json", "--slots", "master,exp_avg", "--bins", 8).stdout)
    assert (report["tag"], report["step"], report["drift"]) == ("one", 1, None)
    assert {row["slot"] for row in report["params"]} == {"master", "exp_avg"}
    check_moments(row_of(report, EVIL), known()[EVIL, "master"].numpy())
    assert len(row_of(report, EVIL)["histogram"]["counts"]) == 8


def test_csv(folder, tmp_path):
    file = tmp_path / "rows.csv"
    call(folder, "--csv", file, "--bins", 6)
    with file.open(newline="", encoding="utf-8") as text:
        rows = {row["name"]: row for row in csv.DictReader(text)}
    assert float(rows[EVIL]["std"]) == pytest.approx(known()[EVIL, "master"].double().numpy().std(), rel=1e-12)
    assert rows["blocks.2.w"]["shape"] == "5x7"
    assert sum(map(int, rows["blocks.0.w"]["histogram"].split())) == 1_300_000
    assert rows["empty"]["mean"] == ""


def test_tags_of_the_command(run, tmp_path):
    where, kept = run
    report = json.loads(call(where, "--all-tags", "--json").stdout)
    assert [row["tag"] for row in report["drift"]["tags"]] == ["b,c", "a", "d"]
    assert report["tag"] == "d"
    file = tmp_path / "drift.csv"
    text = call(where, "--tags", "a", "--tags", "b,c", "--csv", file).stdout
    assert re.search(r"b,c +9 +blocks\.0 +1\.5", text)
    assert re.search(r"gone\.w .*missing", text)
    with file.open(newline="", encoding="utf-8") as lines:
        rows = {(row["tag"], row["name"]): row for row in csv.DictReader(lines)}
    moved, _ = change(kept[1]["blocks.0.w"].ravel(), kept[0]["blocks.0.w"].ravel())
    assert float(rows["b,c", "blocks.0.w"]["first_change"]) == pytest.approx(moved)
    assert "d" in call(where, "gone", "--tags", "a,d").stdout


class Page(HTMLParser):
    """Checks that every tag is closed in order; collects tags, attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.attributes, self.texts = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_html(folder, run, tmp_path):
    file = tmp_path / "page.html"
    call(run[0], "--all-tags", "--html", file)
    text = file.read_text(encoding="utf-8")
    page = Page(text)
    assert not page.open
    assert page.seen.count("script") == 1
    assert EVIL in "".join(page.texts)  # in parts, between places where a line may break
    assert ("data-v", EVIL) in page.attributes
    assert "alert" not in "".join(value for key, value in page.attributes if key not in ("data-v",))
    assert not {key for key, _ in page.attributes} & {"src", "href", "onclick", "onload", "onerror"}
    assert not {"link", "img", "iframe", "object"} & set(page.seen)
    assert "url(" not in text
    assert "://" not in text
    assert "prefers-color-scheme" in text
    assert "since the first tag" in text
    assert '<td class="name" data-v="blocks.0.w">blocks.<wbr>0.<wbr>w</td><td class="text" data-v="master">' in text
    assert page.seen.count("svg") == 5  # blocks.0.b, blocks.0.w, head.w, new.w and the evil one
    call(folder, "--html", file)
    assert "tag before" not in file.read_text(encoding="utf-8")


def test_html_allows_its_own_script_only(folder):
    with open_reader(folder, "one") as reader:
        report = {"tag": "t", "step": 1, "drift": None} | stats.statistics(reader, EVIL)
    text = stats_html.page(report)
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL).group(1)
    digest = subprocess.run(
        [sys.executable, "-c", "import sys,hashlib,base64;d=sys.stdin.buffer.read();"
         "print(base64.b64encode(hashlib.sha256(d).digest()).decode())"],
        input=script.encode(), capture_output=True, check=True,
    ).stdout.decode().strip()  # fmt: skip
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text
    assert text.index("Content-Security-Policy") < text.index("<script>")


def picture(file):
    from matplotlib.image import imread

    assert file.read_bytes().startswith(PNG_START)
    return imread(file)


def test_png(folder, run, tmp_path):
    file, maps = tmp_path / "a.png", tmp_path / "maps.png"
    call(folder, "[!b]*", "--png", file)  # names with signs of LaTeX and HTML among them
    image = picture(file)
    assert image.shape[1] == 1540
    assert len(np.unique(image.reshape(-1, 4), axis=0)) > 20
    call(run[0], "blocks", "--all-tags", "--png", maps)
    assert picture(maps).shape[0] > image.shape[0] + 200
    call(folder, "empty", "--png", file)
    assert picture(file).shape[0] < image.shape[0]


def test_picture_takes_the_largest():
    rows = [{"name": str(n), "count": n % 40, "histogram": None if n == 39 else {}} for n in range(40)]
    assert [row["name"] for row in stats_plot.chosen(rows)] == [str(n) for n in range(15, 39)]


def test_png_without_matplotlib(folder, tmp_path):
    program = (
        "import sys\n"
        "sys.modules['matplotlib'] = None\n"
        "from mpispeed.cli.ckpt import ckpt\n"
        "ckpt(['stats', *sys.argv[1:]])\n"
    )
    command = [sys.executable, "-c", program, str(folder), "--png", str(tmp_path / "a.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install mpispeed[monitor]" in done.stderr
    assert "Traceback" not in done.stderr


def test_neither_torch_nor_mpi_nor_matplotlib_is_imported(run, tmp_path):
    program = (
        "import sys\n"
        "from mpispeed.cli.ckpt import ckpt\n"
        "ckpt(['stats', *sys.argv[1:]], standalone_mode=False)\n"
        "bad = {'torch', 'mpi4py', 'rich', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported: {bad}' if bad else 0)\n"
    )
    files = ["--html", str(tmp_path / "a.html"), "--csv", str(tmp_path / "a.csv")]
    command = [sys.executable, "-c", program, str(run[0]), "--all-tags", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nobody"], "nothing in"),
        (["counter"], "that is a parameter fits 'counter'"),
        (["--slots", "exp_avq"], 'Did you mean "exp_avg"?'),
        (["blocks.2.w", "--slots", "fp8"], "in the slots fp8 fits"),
        (["--tags", "one,two"], "'two'"),
        (["--tags", " , "], "names no tag"),
        (["--tags", "one", "--all-tags"], "one way"),
        (["--csv", "missing/rows.csv"], "No such file"),
    ],
)
def test_usage_errors(folder, arguments, told):
    assert told in call(folder, *arguments, code=2).output
    failure = json.loads(call(folder, *arguments, "--json", code=2).stdout)
    assert told in failure["error"]


def test_bins_are_checked(folder):
    assert "2000" in call(folder, "--bins", 0, code=2).output
    assert "one way" in call(f"{folder}:one", "--all-tags", code=2).output
    assert "no complete checkpoint" in call(folder / "one", "--all-tags", code=2).output


def test_corrupt_and_incomplete(tmp_path):
    tensors = {("w", "master"): torch.arange(1000.0), ("v", "master"): torch.ones(3)}
    saved(tmp_path, "a", tensors=tensors, state={"engine": {"global_steps": 1}})
    saved(tmp_path, "b", tensors=tensors, state={"engine": {"global_steps": 2}})
    with open_reader(tmp_path, "b") as opened:
        place = opened.stored("w", "master").offset
    model = tmp_path / "b" / schema.MODEL_FILE
    raw = bytearray(model.read_bytes())
    raw[place + 5] ^= 1
    model.write_bytes(raw)
    assert "w/master" in call(tmp_path, code=3).output
    call(tmp_path, "v")
    call(tmp_path, "--all-tags", code=3)
    model.write_bytes(raw[:-9])
    listed = call(tmp_path, "--all-tags")
    assert "not compared: b is corrupt" in listed.stderr
    (tmp_path / "b" / schema.MANIFEST_FILE).unlink()
    call(f"{tmp_path}:b", code=4)


def test_names_cannot_steer_the_terminal(tmp_path):
    saved(tmp_path, "a", tensors={("w\x1b[31m\n.x", "master"): torch.ones(3)})
    text = call(tmp_path, "--tags", "a").stdout
    assert "\x1b" not in text
    assert "w\\x1b[31m\\n.x" in text
