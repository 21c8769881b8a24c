"""A page for each profile of a site in slurm/sites."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from docpages.markdown import code, escaped, fence, table, toctree

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = "sites"


def pages(root: Path) -> Iterator[tuple[str, str]]:
    """(page, text) of each profile and their index.

    Args:
        root: the repository.
    """
    rows, names = [], []
    for path in sorted((root / "slurm" / "sites").glob("*.toml")):
        text = path.read_text(encoding="utf-8")
        profile = tomllib.loads(text)
        names.append(path.stem)
        rows.append((f"[`{path.stem}`]({path.stem}.md)", escaped(profile.get("description", ""))))
        yield f"{FOLDER}/{path.stem}", "\n".join(page(path.stem, text, profile))
    head = [
        "# Site profiles",
        "",
        "What a cluster has, for `mpispeed sbatch --site NAME` and `mpispeed scale`. How a profile is chosen is told",
        "in [jobs of SLURM](../hpc/slurm.md); a copy of the nearest one is the start of your own.",
        "",
    ]
    yield (
        f"{FOLDER}/index",
        "\n".join([*head, *table(("profile", "for"), rows), *toctree(f"{FOLDER}/{name}" for name in names)]),
    )


def page(name: str, text: str, profile: dict[str, object]) -> Iterator[str]:
    """One profile: for what it is, what it sets, the file."""
    yield f"# `{name}`\n"
    lines = text.split("\n")
    first = next(at for at, line in enumerate(lines) if not line.startswith("#"))
    yield " ".join(line.lstrip("# ") for line in lines[:first]) + "\n"
    yield from table(("setting", "value"), [(code(key), code(json.dumps(value))) for key, value in profile.items()])
    yield from fence(f"mpispeed sbatch --site {name} --dry-run --config ds_config.json train.py", "console")
    yield f"## slurm/sites/{name}.toml\n"
    yield from fence(text, "toml")
