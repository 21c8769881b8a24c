"""Pages of the site that are made of the source: they have everything, and say it rightly."""

import ast
import importlib
import importlib.util
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import click
import pytest
from docpages import api, benchmarks, charts, commands, errors, sites
from docpages.assemble import Site
from docpages.links import slug
from docpages.markdown import code, docstring, escaped, fence, table

import mpispeed
from mpispeed.cli.main import cli
from tests.rules.trees import tree_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def build_docs():
    spec = importlib.util.spec_from_file_location("build_docs", ROOT / "tools" / "build_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def error_index():
    return errors.Index(ROOT / "src" / "mpispeed", tree_of)


def test_the_api_has_every_public_name():
    pages = dict(api.pages(ROOT))
    for place in ["mpispeed", *(f"mpispeed.{name}" for name in mpispeed.PUBLIC_MODULES)]:
        text = pages[f"reference/api/{place}"]
        names = importlib.import_module(place).__all__ if place != "mpispeed" else ["initialize", "Engine"]
        for name in names:
            assert f"## `{place}.{name}`\n" in text
            assert f"(api/{place}.md#{slug(f'{place}.{name}')})" in pages["reference/api"]
    engine = pages["reference/api/mpispeed"]
    assert ":::{py:method} step(lr_kwargs=None)" in engine
    assert "- `UsageError`: inside `no_sync`" in engine


def options(command, context):
    for parameter in command.get_params(context):
        if isinstance(parameter, click.Option) and not parameter.hidden:
            yield from parameter.opts
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if not inner.hidden:
                yield from options(inner, click.Context(inner, context, name))


def test_the_command_line_has_every_option():
    pages = dict(commands.pages())
    context = click.Context(cli, info_name="mpispeed")
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        text = pages[f"{commands.FOLDER}/{name}"]
        missing = [each for each in options(command, click.Context(command, context, name)) if each not in text]
        assert not missing, f"{name}: {missing}"


def test_errors_are_under_their_classes(error_index):
    known = {message.text: message for message in error_index.messages["UsageError"]}
    message = known["parameters differ over ... ranks; give a whole number of at least 1"]
    line = (ROOT / "src" / "mpispeed" / message.module).read_text().split("\n")[message.line - 1]
    assert "UsageError(" in line
    assert {"ConfigError", "CheckpointError", "TokenStoreError"} <= error_index.classes.keys()
    assert sum(map(len, error_index.messages.values())) > 10 * error_index.passed_on > 0
    assert error_index.classes["StageError"].bases == ("TopologyError", "RuntimeError")


def test_every_class_of_errors_has_a_page_that_says_what_it_is(error_index):
    pages = dict(errors.pages(error_index))
    for name, each in error_index.classes.items():
        assert f"(errors/{name}.md)" in pages[errors.FOLDER]
        assert escaped(each.doc.split("\n")[0]) in pages[f"{errors.FOLDER}/{name}"]


def test_a_message_by_name_is_the_one_set_before_its_error():
    source = "def f(x):\n    if x:\n        m = f'a {x}'\n        raise E(m)\n    m = 'b ' + str(x)\n    raise E(m)\n"
    index = errors.Index.__new__(errors.Index)
    index.classes, index.messages, index.passed_on = {"E": None}, errors.defaultdict(set), 0
    index._read("m.py", ast.parse(source))
    assert sorted((message.line, message.text) for message in index.messages["E"]) == [(4, "a ..."), (6, "b ...")]


def test_pages_that_help_are_there():
    pages = set(errors.HELP.values()) - {commands.FOLDER}
    assert not [page for page in pages if not (ROOT / "docs" / f"{page}.md").is_file()]


def test_rooms_that_are_helped_are_there():
    assert not [
        room
        for room in errors.HELP
        if not any((ROOT / "src" / "mpispeed" / f"{room}{end}").exists() for end in ("", ".py"))
    ]


def test_each_profile_of_a_site_has_a_page():
    pages = dict(sites.pages(ROOT))
    for path in (ROOT / "slurm" / "sites").glob("*.toml"):
        assert path.read_text().strip() in pages[f"sites/{path.stem}"]
        assert f"({path.stem}.md)" in pages["sites/index"]


def test_each_record_of_a_benchmark_has_a_page_with_its_machine():
    pages = dict(benchmarks.pages(ROOT))
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        record, text = json.loads(path.read_text()), pages[f"benchmarks/{path.stem}"]
        assert benchmarks.machine(record) in text
        assert str(record.get("commit", "")) in text
        assert f"({path.stem}.md)" in pages["benchmarks/index"]
        charted = text.count("<svg")
        assert charted == text.count("</svg>")
    assert "stage 3" in pages["benchmarks/step-fsdp-82m"].split("<svg")[1]
    assert "| DDP and FSDP2" not in pages["benchmarks/step-fsdp-82m"]


def test_every_number_of_a_record_is_shown():
    record = {
        "benchmark": "x/y",
        "results": {
            "ours": {"seconds": [1.0, 2.0, 3.5], "peak": 3 * 2**20, "inner": {"ratio": 1.25}},
            "torch": {"seconds": [4.0], "peak": 2**20, "inner": {"ratio": 1.5}},
            "all": 17,
            "rows": [{"name": "a", "ms": 1.5}, {"name": "b", "ms": 2.5}],
        },
    }
    text = "\n".join(benchmarks.page("y", record, "", "")).replace(benchmarks.NARROW, " ")
    for shown in ("2 s (1 to 3.5)", "3.0 MiB", "1.25", "1.5", "17", "2.5 ms", "| ours |"):
        assert shown in text


def svg(lines):
    return ET.fromstring("\n".join(line for line in lines if line.startswith("<")))


def test_bars_are_as_long_as_their_values():
    drawn = svg(charts.bars({"torch <x>": (1.0, "1 s"), "ours": (4.0, "4 s")}, ["torch <x>"]))
    peer, own = drawn.findall("rect")
    assert float(own.get("width")) == pytest.approx(4 * float(peer.get("width")), abs=0.2)  # one place is written
    assert "peer" in peer.get("fill") and "ours" in own.get("fill")
    assert drawn.find("text").text == "torch <x>"


def test_curves_are_within_their_axes():
    drawn = svg(charts.curves("step", "loss", {"a": [(0, 1.0), (10, 0.5)], "b": [(0, 1.2), (10, 0.5)]}))
    for line in drawn.findall("polyline"):
        points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        assert points[0][0] < points[1][0] and points[0][1] < points[1][1]
        assert all(0 <= x <= charts.WIDTH and 0 <= y <= 301 for x, y in points)


def test_docstrings_become_lists():
    text = (
        "First *line*.\n\nArgs:\n    a: one,\n        more.\n    *rest: `x * y`.\n\n"
        "Collective over: all.\n\nRaises:\n    KeyError: gone."
    )
    assert docstring(text) == [
        "First \\*line\\*.", "", "",
        "**Args**", "", "- `a`: one,", "  more.", "- `*rest`: `x * y`.", "",
        "**Collective over:** all.", "",
        "**Raises**", "", "- `KeyError`: gone.", "",
    ]  # fmt: skip


def test_tables_and_code_hold_any_text():
    assert table(("a", "b"), [("x | y", "`p | q`")], "lr") == ["| a | b |", "|---|--:|", "| x \\| y | `p \\| q` |", ""]
    assert code("a `b`") == "`` a `b` ``"
    assert fence("```\nx\n```\n", "text") == ["````text", "```", "x", "```", "````", ""]


def test_versions_stand_in_order_and_the_newest_release_is_the_start(build_docs, tmp_path):
    for name in ("0.9.0", "0.10.0", "0.10.0rc1", "dev", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text("")
    build_docs.write_versions(tmp_path)
    listed = json.loads((tmp_path / "versions.json").read_text())
    assert listed == {"newest": "0.10.0", "versions": ["dev", "0.10.0", "0.10.0rc1", "0.9.0"]}
    assert (tmp_path / "versions.js").read_text() == f"window.MPISPEED_VERSIONS = {json.dumps(listed)};\n"
    assert "url=0.10.0/index.html" in (tmp_path / "index.html").read_text()


def test_built_pages_with_dead_links_or_things_of_the_network_are_named(build_docs, tmp_path):
    (tmp_path / "a.html").write_text(
        '<p id="x"></p><a href="#x"></a><a href="#y"></a><a href="b.html#z"></a><a href="gone.html"></a>'
        '<script src="https://cdn.example/x.js"></script><a href="https://example.org"></a>'
    )
    (tmp_path / "b.html").write_text('<h1 id="z"></h1>')
    assert list(build_docs.problems(tmp_path)) == [
        "a.html loads https://cdn.example/x.js",
        "a.html links to #y, which has no such anchor",
        "a.html links to gone.html, which is not there",
    ]
    assert build_docs.external(tmp_path) == ["https://example.org"]


def test_a_folder_of_pages_keeps_what_is_the_same(tmp_path):
    site = Site(ROOT)
    site.pages = {"a": "one", "b/c": "two"}
    site.write(tmp_path)
    before = (tmp_path / "a.md").stat().st_mtime_ns
    site.pages = {"a": "one", "d": "three"}
    site.write(tmp_path)
    assert (tmp_path / "a.md").stat().st_mtime_ns == before
    assert {path.name for path in tmp_path.rglob("*.md")} == {"a.md", "d.md"}


def test_sphinx_builds_pages_without_a_warning(build_docs, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "index.md").write_text("# Home\n\n```{toctree}\n/one\n```\n")
    (source / "one.md").write_text(
        '# One\n\n```console run\nmpispeed run -n 2 a.py  # words\n```\n\n```json check\n{"a": true} // why\n```\n\n'
        "```text output\nany <thing>\n```\n\n[down](#two)\n\n"
        "## Two\n\n`mpispeed.zero.Init` and `mpispeed.zero.Other`\n\n"
        + "\n".join(dict(api.pages(ROOT))["reference/api/mpispeed.zero"].split("\n")[1:])
    )
    words = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "-c", str(ROOT / "docs")]
    done = subprocess.run([*words, str(source), str(target)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = (target / "one.html").read_text()
    assert 'href="#mpispeed.zero.Init"><code' in text
    assert '<code class="docutils literal notranslate"><span class="pre">mpispeed.zero.Other' in text
    assert "highlight-console" in text and "versions" in text
    assert not list(build_docs.problems(target))
