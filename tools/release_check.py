"""`make release-check`: proves what docs/release.md promises of a release; says of each point whether it holds.

    python tools/release_check.py                  all
    python tools/release_check.py versions files   some of them

The exit code is 1 if one does not hold.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
LARGEST_BYTES = 512 << 10
#: files may be larger only here
LARGE = ("docs/", "benchmarks/results/", "tests/releases/")
STRAY = re.compile(
    r"\.(so|o|a|pyc|pyo|orig|rej|swp|log|tmp|whl|core|h5)$|(^|/)(core|nohup\.out|\.DS_Store|\.env|id_\w+)$"
)
STRAY_ALLOWED = re.compile(r"^tests/releases/.*\.h5$")
#: how the licences of what is installed beside begin, in metadata
LICENCES = re.compile(r"apache|bsd|\bmit\b|\bmpl|mozilla|\bpsf|python software foundation|\bisc\b|zlib", re.IGNORECASE)
SOURCES = ("cython/", "cuda/", "slurm/", "src/mpispeed/", "pyproject.toml", "setup.py", "LICENSE", "CHANGELOG.md")
NEVER_IN_SDIST = re.compile(r"\.(so|o|pyc)$|/(\.venv|\.git|__pycache__)(/|$)|^/(build|dist|runs)/")


def run(words: list[str], folder: Path = ROOT, **variables: str) -> tuple[int, str]:
    """Exit code and output of a command."""
    done = subprocess.run(
        words, cwd=folder, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def failure(words: list[str], folder: Path = ROOT, **variables: str) -> list[str]:
    """A problem with the last lines of a command's output, if it fails."""
    code, output = run(words, folder, **variables)
    if not code:
        return []
    return [f"{' '.join(words[:6])} ended with {code}:\n" + "\n".join(output.splitlines()[-15:])]


# -- versions and files ------------------------------------------------------------------------------------------------


def check_versions(root: Path = ROOT) -> list[str]:
    """version.py, CITATION.cff, CHANGELOG.md and tests/releases name the same version."""
    found = re.search(r'^VERSION = "(.+)"$', (root / "src/mpispeed/base/version.py").read_text(), re.M)
    if found is None:
        return ["src/mpispeed/base/version.py has no VERSION"]
    version, problems = found[1], []
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        problems.append(f"{version} in version.py is no MAJOR.MINOR.PATCH")
    cited = re.search(r"^version: (\S+)$", (root / "CITATION.cff").read_text(), re.M)
    if cited is None or cited[1] != version:
        problems.append(f"CITATION.cff is of version {cited[1] if cited else 'none'}, version.py says {version}")
    changelog = (root / "CHANGELOG.md").read_text()
    dated = re.search(rf"^## {re.escape(version)} - (\d{{4}}-\d\d-\d\d)$", changelog, re.M)
    if dated is None:
        problems.append(f"CHANGELOG.md has no heading '## {version} - DATE'; what is new stands under Unreleased")
    elif f'date-released: "{dated[1]}"' not in (root / "CITATION.cff").read_text():
        problems.append(f"CITATION.cff has another date-released than CHANGELOG.md, {dated[1]}")
    if not re.search(r"^## Unreleased$", changelog, re.M):
        problems.append("CHANGELOG.md has no heading '## Unreleased' for what comes next")
    if not (root / "tests/releases" / version / "expected.json").is_file():
        problems.append(f"tests/releases/{version} has no files; make them with tools/make_release_files.py")
    return problems


def check_files() -> list[str]:
    """Everything is committed; no stray or large file is tracked."""
    _, status = run(["git", "status", "--porcelain"])
    problems = [f"not committed: {line}" for line in status.splitlines()]
    _, listed = run(["git", "ls-files"])
    return problems + stray_among({name: (ROOT / name).lstat().st_size for name in listed.splitlines()})


def stray_among(sizes: dict[str, int]) -> list[str]:
    """Problems of tracked files, by name and size in bytes."""
    problems = []
    for name, size in sizes.items():
        if STRAY.search(name) and not STRAY_ALLOWED.search(name):
            problems.append(f"a stray file is tracked: {name}")
        if size > LARGEST_BYTES and not name.startswith(LARGE):
            problems.append(f"{name} has {size >> 10} KiB; more than {LARGEST_BYTES >> 10} only in {', '.join(LARGE)}")
    return problems


# -- metadata ----------------------------------------------------------------------------------------------------------


def check_citation() -> list[str]:
    """CITATION.cff is valid."""
    if importlib.util.find_spec("cffconvert") is None:
        return ["cffconvert is not installed: pip install cffconvert"]
    return failure([str(Path(sys.executable).with_name("cffconvert")), "--validate"])


def check_licences() -> list[str]:
    """The licence is there, and those of what every installation brings are known ones."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    problems = [] if "Apache License" in (ROOT / "LICENSE").read_text() else ["LICENSE is not that of pyproject.toml"]
    for requirement in project["dependencies"]:
        name = re.split(r"[^\w.-]", requirement)[0]
        try:
            about = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # tomli, where Python has its own
        classes = [word for word in about.get_all("Classifier") or [] if word.startswith("License ::")]
        words = [word for word in (about.get("License-Expression"), about.get("License"), *classes) if word]
        if not any(LICENCES.search(word) for word in words):
            problems.append(f"the licence of {name} is none that is known here: {str(words)[:120]}")
    return problems


# -- archives ----------------------------------------------------------------------------------------------------------


def check_sdist() -> list[str]:
    """The sdist has the sources that a build needs, the licence, and nothing that was built."""
    with tempfile.TemporaryDirectory(prefix="mpispeed-sdist-") as folder:
        code = "from setuptools import build_meta; import sys; build_meta.build_sdist(sys.argv[1])"
        problems = failure([sys.executable, "-c", code, folder], _clean_copy(Path(folder) / "source"))
        if problems:
            return problems
        with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
            names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    _, listed = run(["git", "ls-files", "--", *SOURCES])
    wanted = {name for name in listed.splitlines() if not name.endswith((".gitignore",))}
    return sdist_problems(names, wanted)


def sdist_problems(names: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """Problems of the names in an sdist."""
    there = set(names)
    missing = [f"the sdist lacks {name}" for name in sorted(set(wanted) - there)]
    return missing + [f"the sdist has {name}" for name in sorted(there) if NEVER_IN_SDIST.search(f"/{name}")]


def check_wheel() -> list[str]:
    """Two builds of the wheel in different folders are identical, and have the licence."""
    _, told = run(["git", "log", "-1", "--format=%ct"])
    epoch = told.strip() or str(int(time.time()))
    with tempfile.TemporaryDirectory(prefix="mpispeed-wheels-") as folder:
        wheels = []
        for name in ("one", "another-folder"):
            source, target = _clean_copy(Path(folder) / name / "source"), Path(folder) / name / "wheel"
            words = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(target), str(source)]
            problems = failure([sys.executable, "-m", "pip", "wheel", *words], SOURCE_DATE_EPOCH=epoch)
            if problems:
                return problems
            wheels.append(next(target.glob("*.whl")))
        with zipfile.ZipFile(wheels[0]) as archive:
            problems = (
                [] if any(name.endswith("LICENSE") for name in archive.namelist()) else ["no licence in the wheel"]
            )
        return problems + differences(*wheels)


def differences(one: Path, other: Path) -> list[str]:
    """A problem that names what differs in two archives; none if they are identical to the byte."""
    if one.name == other.name and one.read_bytes() == other.read_bytes():
        return []
    with zipfile.ZipFile(one) as first, zipfile.ZipFile(other) as second:
        sums = [
            {name: hashlib.sha256(file.read(name)).hexdigest() for name in file.namelist()} for file in (first, second)
        ]
    names = sorted(name for name in {*sums[0], *sums[1]} if sums[0].get(name) != sums[1].get(name))
    what = f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else "order or times of members"
    return [f"two builds of the wheel differ: {what}"]


def _clean_copy(folder: Path) -> Path:
    """The committed files in a new folder."""
    folder.mkdir(parents=True)
    packed = folder.with_name(f"{folder.name}.tar")
    subprocess.run(["git", "archive", "-o", str(packed), "HEAD"], cwd=ROOT, check=True)
    with tarfile.open(packed) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)
    packed.unlink()
    return folder


# -- tests and docs ----------------------------------------------------------------------------------------------------


def check_formats() -> list[str]:
    """Files of all releases load, and newer formats are refused."""
    return failure([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/releases"])


def check_docs() -> list[str]:
    """`make docs` ends without warnings."""
    code, _ = run(["make", "-n", "docs"])
    return ["the Makefile has no target docs"] if code else failure(["make", "docs"])


CHECKS: dict[str, Callable[[], list[str]]] = {
    "versions": check_versions,
    "files": check_files,
    "citation": check_citation,
    "licences": check_licences,
    "sdist": check_sdist,
    "wheel": check_wheel,
    "formats": check_formats,
    "docs": check_docs,
}


def main() -> int:
    """Run the checks that are asked for."""
    parser = argparse.ArgumentParser(description="Proves what docs/release.md promises of a release.")
    parser.add_argument("checks", nargs="*", choices=[[], *CHECKS], help="all by default")
    chosen = parser.parse_args().checks or list(CHECKS)
    has_failed = False
    for name in chosen:
        began = time.monotonic()
        problems = CHECKS[name]()
        has_failed |= bool(problems)
        print(f"{'FAIL' if problems else 'ok':5} {name:10} {time.monotonic() - began:6.1f} s", flush=True)
        for problem in problems[:20]:
            print("      " + problem.replace("\n", "\n      "), flush=True)
        if len(problems) > 20:
            print(f"      and {len(problems) - 20} more")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
