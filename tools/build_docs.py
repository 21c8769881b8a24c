"""The documentation site: pages are gathered in build/docs-source, and Sphinx builds build/docs/VERSION of them.

    python tools/build_docs.py                     build/docs/dev
    python tools/build_docs.py --version 0.1.0     build/docs/0.1.0, which the pages of other versions know
    python tools/build_docs.py --external          list the links that lead out of the site; nothing is fetched

Nothing comes from the network, and pages load nothing from it. A warning of Sphinx is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))
VERSION = re.compile(r"dev|\d+(\.\d+)*([ab]|rc)?\d*")
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Links(HTMLParser):
    """Anchors of a page, what it links to, and what it loads."""

    def __init__(self, text: str) -> None:
        """Args: `text`: the page."""
        super().__init__()
        self.anchors: set[str] = {""}
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called by the parser."""
        values = {key: value or "" for key, value in attrs}
        self.anchors |= {values[key] for key in ("id", "name") if key in values}
        if tag == "a" and "href" in values:
            self.targets.append(values["href"])
        if tag in LOADED and LOADED[tag] in values and values.get("rel") != "canonical":
            self.loaded.append(values[LOADED[tag]])


def is_outside(target: str) -> bool:
    """True for a URL of another place."""
    return bool(re.match(r"[a-z][a-z0-9+.-]*:|//", target)) and not target.startswith("data:")


def problems(folder: Path) -> Iterator[str]:
    """A sentence for each link of the built pages that leads nowhere, and for each thing loaded from the network."""
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    for path, page in pages.items():
        where = path.relative_to(folder)
        for target in page.loaded:
            if is_outside(target):
                yield f"{where} loads {target}"
        for target in page.targets:
            if is_outside(target) or target.startswith("data:"):
                continue
            name, _, anchor = unquote(target).partition("#")
            other = (path.parent / name.partition("?")[0]).resolve() if name else path
            if not other.exists():
                yield f"{where} links to {target}, which is not there"
            elif other in pages and anchor not in pages[other].anchors:
                yield f"{where} links to {target}, which has no such anchor"


def external(folder: Path) -> list[str]:
    """All URLs that pages link to."""
    pages = (Links(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html"))
    return sorted({target for page in pages for target in page.targets if is_outside(target)})


def known_versions(output: Path) -> list[str]:
    """Versions that are built below a folder: the development's, then the newest release first."""
    names = [path.name for path in output.iterdir() if (path / "index.html").is_file() and VERSION.fullmatch(path.name)]
    numbered = sorted((name for name in names if name != "dev"), key=order, reverse=True)
    return [name for name in names if name == "dev"] + numbered


def order(version: str) -> tuple[tuple[int, ...], bool, str]:
    """Key by which versions stand in order: numbers, a release after its candidates."""
    numbers = re.match(r"[\d.]*\d", version)
    text = numbers[0] if numbers else "0"
    return tuple(map(int, text.split("."))), version == text, version


def write_versions(output: Path) -> None:
    """Write the list of versions for the pages of all of them, and a start page that leads to the newest release."""
    names = known_versions(output)
    newest = next((name for name in names if name != "dev"), "dev")
    listed = {"newest": newest, "versions": names}
    (output / "versions.json").write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    # Pages read it as a script, which works from files too; a browser lets no page of a file fetch another file.
    (output / "versions.js").write_text(f"window.MPISPEED_VERSIONS = {json.dumps(listed)};\n", encoding="utf-8")
    start = f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={newest}/index.html">'
    (output / "index.html").write_text(
        f'{start}<a href="{newest}/index.html">mpispeed {newest}</a>\n', encoding="utf-8"
    )


def main() -> int:
    """Gather, build, check."""
    parser = argparse.ArgumentParser(description="build the documentation site")
    parser.add_argument("--version", default="dev", help="a release; dev if left out")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "docs", help="the folder of all versions")
    parser.add_argument("--external", action="store_true", help="list links out of the site that was built")
    options = parser.parse_args()
    if not VERSION.fullmatch(options.version):
        parser.error(f"--version {options.version}: a version is dev or numbers such as 0.1.0 and 0.2.0rc1")
    target = options.output / options.version
    if options.external:
        print("\n".join(external(target)))
        return 0
    from docpages.assemble import Site

    source = ROOT / "build" / "docs-source"
    site = Site(ROOT)
    site.gather()
    site.write(source)
    words = [
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        "-c",
        str(ROOT / "docs"),
        "-d",
        str(ROOT / "build" / "docs-trees"),
    ]
    environment = {**os.environ, "MPISPEED_DOCS_VERSION": options.version}
    code = subprocess.run(
        [sys.executable, "-m", "sphinx", *words, str(source), str(target)], env=environment, check=False
    ).returncode
    if code:
        return code
    write_versions(options.output)
    found = list(problems(target))
    print("\n".join([*found, f"{len(site.pages)} pages in {target}, {len(found)} links that lead nowhere"]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
