"""Blocks of the documentation marked run do what their pages say; the others compile, load, and name what there is.

Pages of one rank run in forks of one process, pages of several ranks in one job for each number of them.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpispeed.launch import plan_launch
from tests.docs.scenes import SCENES
from tests.helpers.block_checks import check_block
from tests.helpers.code_blocks import page_names, read_page
from tests.helpers.system import CHECKOUT

PAGES = {name: read_page(name) for name in page_names()}
RUN = {name: page for name, page in PAGES.items() if page.runs}
LIMIT_SECONDS = 900
FEWEST = {"python": 68, "console": 16}
"""Blocks that run; fewer than these have lost their marks."""


@pytest.fixture(scope="module")
def reports(request, tmp_path_factory):
    """Page -> what became of it; only those run whose tests were asked for."""
    wanted = {
        item.callspec.params["name"] for item in request.session.items if item.function is test_what_a_page_runs_works
    }
    found = {}
    for ranks in sorted({page.ranks for page in RUN.values()}):
        names = [name for name, page in RUN.items() if page.ranks == ranks and name in wanted]
        if names:
            found |= run_pages(ranks, names, tmp_path_factory.mktemp(f"ranks{ranks}"))
    return found


def run_pages(ranks, names, folder):
    words = [sys.executable, "-m", "tests.docs.run_pages", str(folder), *names]
    environment = {**os.environ, "PYTHONPATH": CHECKOUT}
    if ranks > 1:
        launch = plan_launch(words, ranks)
        words, environment = launch.argv, environment | launch.added
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    report = folder / "report.json"
    if done.returncode or not report.exists():
        told = f"the job on {ranks} ranks ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return {name: {"ran": 0, "failed": told} for name in names}
    return json.loads(report.read_text())


@pytest.mark.parametrize("name", RUN)
def test_what_a_page_runs_works(name, reports):
    told = reports[name]
    assert not told["failed"], told["failed"]
    assert told["ran"] == len(RUN[name].runs)


MARKED = [name for name, page in PAGES.items() if page.blocks and not any(block.mistake() for block in page.blocks)]


@pytest.mark.parametrize("name", MARKED)
def test_blocks_of_a_page_compile_load_and_name_what_there_is(name):
    found = [mistake for block in PAGES[name].blocks for mistake in check_block(block)]
    assert not found, "\n".join(found)


def test_blocks_run_that_ran():
    counts = {language: 0 for language in FEWEST}
    for page in RUN.values():
        for block in page.runs:
            counts[block.language] += 1
    assert all(counts[language] >= least for language, least in FEWEST.items()), counts


def test_scenes_that_pages_name_are_there():
    for file in Path(__file__).parent.glob("scenes_*.py"):
        importlib.import_module(f"tests.docs.{file.stem}")
    used = {name for page in PAGES.values() for scene in page.scenes for name in scene.names}
    assert used <= SCENES.keys(), f"no scene: {used - SCENES.keys()}"
