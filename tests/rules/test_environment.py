"""The page of environment variables has those of the source, and no others."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"\bMPISPEED_[A-Z][A-Z_]*[A-Z]\b")


def names_in(*paths):
    return {name for path in paths for name in NAME.findall(path.read_text())}


def test_the_page_has_all_variables():
    scripts = (path for path in (ROOT / "slurm").rglob("*") if path.suffix in (".sh", ".sbatch"))
    sources = [*(ROOT / "src").rglob("*.py"), *scripts]
    page = ROOT / "docs" / "reference" / "environment.md"
    assert names_in(page) == names_in(*sources)
