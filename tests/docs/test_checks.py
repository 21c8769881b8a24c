"""Checks of code blocks see what is wrong in them, and the runner names page and line of what fails."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.block_checks import check_block
from tests.helpers.code_blocks import parse_page
from tests.helpers.system import CHECKOUT


def mistakes(info, text):
    (block,) = parse_page("page.md", f"\n```{info}\n{text}\n```\n").blocks
    assert not block.mistake()
    return list(check_block(block))


@pytest.mark.parametrize(
    ("info", "text", "said"),
    [
        ("python check", "x = (", "page.md:3"),
        ("python run", "\nmpispeed.initialize_all()", "page.md:4: mpispeed has no initialize_all"),
        ("python check", "from mpispeed.zero import Imit", "mpispeed.zero has no Imit"),
        ("python check", "from mpispeed.zeros import Init", "No module named 'mpispeed.zeros'"),
        ("python check", "import mpispeed.comm as d\nd.all_reduced(x)", "mpispeed.comm has no all_reduced"),
        ("python check", "engine.save_checkpoint('a', async_safe=True)", "async_safe"),
        ("python check", "mpispeed.initialize(modelx=x)", "modelx"),
        ("json check", '{"zero_optimization": {"stage": 4}}', "must be at most 3"),
        ("json check", '"zero_optimisation": {}', "zero_optimisation"),
        ("json check", '{"a": }', "page.md:2"),
        ("json check", '{"autotuning": {"enabled": true, "tuner_tipe": "gridsearch"}}', "tuner_tipe"),
        ("toml check", "a = ", "page.md:2"),
        ("console check", "mpispeed plans ds.json", "no command 'plans'"),
        ("console needs-slurm", "srun mpispeed ckpt ls --tagz a", "--tagz"),
        ("console check", "a && mpispeed run -n 4 \\\n  --np x.py", "--np"),
        ("console needs-slurm", "mpispeed sbatch --nodes 2 generate --modelx x", "--modelx"),
        ("console check", "mpispeed ckpt show 'a", "page.md"),
        ("console check", "mpispeed drill kill --nn 2 x.py", "--nn"),
        ("console check", "python docs/examples/train_gtp.py", "no file docs/examples/train_gtp.py"),
        ("console check", "mpispeed run docs/examples/train_gpt.py --stepz 3", "no option --stepz"),
        ("bash check", "if true; then", "page.md:2"),
        ("diff output", "- deepspeed train.py\n+ mpispeed run --as-deapspeed train.py", "--as-deapspeed"),
        ("c check", "int main( { }", "page.md:2"),
    ],
)
def test_what_is_wrong_in_a_block_is_said(info, text, said):
    (found, *_) = mistakes(info, text)
    assert said in found


@pytest.mark.parametrize(
    ("info", "text"),
    [
        ("python check", "save_checkpoint(\n    save_dir: str,\n    *,\n    tag: str | None = None,\n) -> bool"),
        ("python check", "x = {..., 'a': 1}\nself.up = mpispeed.nn.TiledLinear(4, 4, in_splits=2)"),
        ("json check", '"zero_optimization": {"stage": 3}'),
        ("json check", '{"zero_optimization": {"stage": "all"}, "autotuning": {"enabled": true}}'),
        ("console check", "for n in 1 2; do mpispeed run -n $n train.py --any thing; done   # mpispeed nothing"),
        ("console check", "mpispeed run -n 2 docs/examples/train_gpt.py --steps 3 --deepspeed_config ds.json"),
        ("diff output", "- deepspeed --num_gpus 4 train.py"),
        ("toml check", "[a]\nb = 1"),
        ("console check", "mpispeed drill kill,exit -n 2 x.py --any thing"),
        ("console check", "mpispeed run -n 4 ..."),
        ("c check", "#include <hdf5.h>\nint main(void) { return 0; }"),
    ],
)
def test_what_is_right_passes(info, text):
    assert mistakes(info, text) == []


PAGE = """<!-- scene: model -->

```json check a.json
{"train_batch_size": 4}
```

```python run
first = model(x, y)
```

```console run
mpispeed config check a.json
```

```text output
ok
```

```python run
print("two", "lines")
print(first.ndim)
```

```text output
two ...
0
```
"""


@pytest.mark.parametrize(
    ("old", "new", "ran", "said"),
    [
        ("", "", 3, ""),
        ("first = model", "\nfirst = modelx", 0, "page.md:9: "),
        ('"train_batch_size": 4', '"train_batch_size": 0', 1, "page.md:12: mpispeed config check a.json\nexit code 2"),
        ("\nok\n", "\nfine\n", 1, "page.md:11: it does not print what the page shows, but\nok"),
        ("\n0\n", "\n1\n", 2, "page.md:19: it does not print what the page shows, but\ntwo lines\n0"),
        ("scene: model", "scene: modelx", 0, "page.md:1: no scene 'modelx'"),
        ("first = model", "import time; time.sleep(60); first = model", 0, "page.md: still ran after 20 s"),
        ("first = model", "import os; os._exit(3); first = model", 0, "page.md: the process ended by itself"),
    ],
)
def test_a_page_that_does_not_do_what_it_says_fails_with_its_line(reports, old, new, ran, said):
    told = reports[new]
    assert told["ran"] == ran
    assert told["failed"].startswith(said) and bool(told["failed"]) == bool(said), told["failed"]


@pytest.fixture(scope="module")
def reports(request, tmp_path_factory):
    """What is new in a page -> its report; all pages in one run, with what is wrong in each."""
    folder = tmp_path_factory.mktemp("pages")
    cases = [item.callspec.params for item in request.session.items if "said" in getattr(item, "fixturenames", ())]
    changes = {case["new"]: case["old"] for case in cases if "ran" in case}
    names = {}
    for number, (new, old) in enumerate(changes.items()):
        path = folder / str(number) / "page.md"
        path.parent.mkdir()
        assert old in PAGE
        path.write_text(PAGE.replace(old, new, 1) if old else PAGE)
        names[str(path)] = new
    environment = {**os.environ, "PYTHONPATH": CHECKOUT, "MPISPEED_DOCS_LIMIT": "20"}
    words = [sys.executable, "-m", "tests.docs.run_pages", str(folder), *names]
    subprocess.run(words, cwd=folder, env=environment, check=True, stdin=subprocess.DEVNULL, timeout=600)
    found = json.loads((folder / "report.json").read_text())
    return {names[path]: {**told, "failed": told["failed"].replace(path, "page.md")} for path, told in found.items()}
