"""Scripts as DeepSpeed's users write them, with `import deepspeed` as it is: all of them in one job on 2 ranks."""

import json
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("deepspeed_worker.py")
SCRIPTS = sorted(Path(__file__).with_name("deepspeed_scripts").glob("*.py"))
LINES = 40


@pytest.fixture(scope="module")
def ran(job, tmp_path_factory):
    """Script -> what it ended with on each rank."""
    folder = tmp_path_factory.mktemp("scripts")
    done = job(2, "--as-deepspeed", WORKER, folder, *SCRIPTS)
    texts = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    assert len(texts) == 2, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
    return texts


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_it_runs(ran, script):
    found = [rank["results"][script.stem][1] for rank in ran]
    assert found == ["", ""], "\n".join(found)


def test_the_scripts_see_a_version_of_deepspeed(ran):
    assert {rank["version"].partition("+")[2] for rank in ran} == {"mpispeed"}


def test_the_scripts_are_small_and_say_deepspeed():
    assert len(SCRIPTS) >= 22
    for script in SCRIPTS:
        lines = script.read_text().splitlines()
        assert len(lines) <= LINES, script.name
        assert any(line.startswith(("import deepspeed", "from deepspeed")) for line in lines), script.name
        assert not any("mpispeed" in line and "import" in line for line in lines), script.name
