"""`make release-check` finds what a release must not have."""

import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CHANGELOG = "# Changelog\n\n## Unreleased\n\n## 1.2.3 - 2026-01-02\n"
CITATION = 'version: 1.2.3\ndate-released: "2026-01-02"\n'


@pytest.fixture(scope="module")
def release_check():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import release_check
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return release_check


def tree(root, version="1.2.3", citation=CITATION, changelog=CHANGELOG, has_files=True):
    (root / "src/mpispeed/base").mkdir(parents=True)
    (root / "src/mpispeed/base/version.py").write_text(f'VERSION = "{version}"\n')
    (root / "CITATION.cff").write_text(citation)
    (root / "CHANGELOG.md").write_text(changelog)
    if has_files:
        (root / "tests/releases" / version).mkdir(parents=True)
        (root / "tests/releases" / version / "expected.json").touch()
    return root


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, []),
        ({"version": "1.2.4"}, ["CITATION.cff is of version 1.2.3", "no heading '## 1.2.4"]),
        ({"version": "1.2"}, ["no MAJOR.MINOR.PATCH", "CITATION.cff", "no heading"]),
        ({"citation": CITATION.replace("01-02", "01-03")}, ["another date-released"]),
        ({"citation": "version: 1\n"}, ["of version 1,", "another date-released"]),
        ({"changelog": "# Changelog\n\n## 1.2.3 - 2026-01-02\n"}, ["no heading '## Unreleased'"]),
        ({"has_files": False}, ["tests/releases/1.2.3 has no files"]),
    ],
)
def test_versions_agree(release_check, tmp_path, changes, told):
    problems = release_check.check_versions(tree(tmp_path, **changes))
    assert len(problems) == len(told), problems
    assert all(word in problem for word, problem in zip(told, problems, strict=True))


def test_stray_and_large_files(release_check):
    large = release_check.LARGEST_BYTES + 1
    good = {"src/a.py": 10, "docs/a.png": large, "tests/releases/1.0.0/run.h5": large, "src/core.py": 1}
    assert release_check.stray_among(good) == []
    bad = {"src/a.so": 1, "nohup.out": 1, "x/run.h5": 1, "core": 1, "src/b.py": large, "home/id_rsa": 1}
    assert len(release_check.stray_among(bad)) == len(bad)


def test_contents_of_an_sdist(release_check):
    assert release_check.sdist_problems({"a.py", "src/x/build/b.py"}, {"a.py"}) == []
    assert release_check.sdist_problems({"b.so", "build/x.c"}, {"a.py"}) == [
        "the sdist lacks a.py", "the sdist has b.so", "the sdist has build/x.c",
    ]  # fmt: skip


def archive(path, **members):
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as file:
        for name, (text, year) in members.items():
            file.writestr(zipfile.ZipInfo(name, (year, 1, 1, 0, 0, 0)), text)
    return path


def test_wheels_that_differ(release_check, tmp_path):
    one = archive(tmp_path / "1/a.whl", x=("1", 2000), y=("2", 2000))
    assert release_check.differences(one, archive(tmp_path / "2/a.whl", x=("1", 2000), y=("2", 2000))) == []
    assert "differ: y" in release_check.differences(one, archive(tmp_path / "3/a.whl", x=("1", 2000), y=("3", 2000)))[0]
    assert "times" in release_check.differences(one, archive(tmp_path / "4/a.whl", x=("1", 2001), y=("2", 2000)))[0]


def test_what_this_checkout_can_show_quickly(release_check):
    assert release_check.CHECKS["licences"]() == []
