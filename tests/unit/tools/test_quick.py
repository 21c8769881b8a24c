"""What `make quick` chooses: the tests nearest to a change, the nearest first, as many as fit."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.delitem(sys.modules, "run_tests", raising=False)
    import quick

    return quick


def names(paths):
    return [path.relative_to(ROOT).as_posix() for path in paths]


def test_tests_of_what_was_changed_come_first(quick):
    chosen, _ = quick.choose(["src/mpispeed/precision/scaler.py", "tests/unit/base/test_units.py"], 1e9)
    found = names(chosen)
    assert found[0] == "tests/unit/base/test_units.py"  # changed itself
    direct = {name for name in found if "mpispeed.precision.scaler" in quick.imports_of(ROOT / name)}
    assert direct and set(found[1 : 1 + len(direct)]) == direct
    assert len(found) > 1 + len(direct)


def test_what_nobody_imports_has_no_tests(quick):
    assert quick.choose(["README.md"], 1e9) == ([], [])


def test_time_decides_how_many_run(quick, monkeypatch):
    changed = ["src/mpispeed/precision/scaler.py"]
    every, left = quick.choose(changed, 1e9)
    assert left == []
    monkeypatch.setattr(quick, "kept_durations", lambda kind: dict.fromkeys(names(every), 10.0))
    some, left = quick.choose(changed, 35.0)
    assert some == every[:3] or len(some) == 3
    assert sorted(some + left) == sorted(every)


def test_distances_count_imports(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(quick, "ROOT", tmp_path)
    texts = {
        "a": "",
        "b": "import p.a",
        "c": "def f():\n    from p import b",
        "d": "from p.c import x",
        "e": "import os",
    }
    sources = {}
    for name, text in texts.items():
        path = tmp_path / "src" / "p" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        sources[quick.module_of(path)] = path
    assert quick.distances(["p.a"], sources) == {"p.a": 0, "p.b": 1, "p.c": 2, "p.d": 3}


def test_each_folder_has_a_process_of_its_own(quick, monkeypatch):
    paths = [ROOT / "tests" / "unit" / folder / f"test_{name}.py" for folder, name in (("a", 1), ("b", 2), ("a", 3))]
    monkeypatch.setattr(quick, "kept_durations", lambda kind: dict(zip(names(paths), [1, 5, 2], strict=True)))
    *_, first, second = quick.pieces_of(paths)
    assert (first.name, second.name) == ("unit/b", "unit/a")
    assert second.words[-2:] == (str(paths[0]), str(paths[2]))
