"""Links of Markdown pages: found, checked in the repository, and rewritten for the site.

A page links to files of the repository by relative paths, so that it can be read without the site. On the site the same
link leads to the page that shows the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

FIXED = {
    "README.md": "project/readme",
    "CONTRIBUTING.md": "project/contributing",
    "CHANGELOG.md": "project/changelog",
    "SECURITY.md": "project/security",
    "LICENSE": "project/license",
    "slurm/README.md": "hpc/batch-templates",
    "slurm/sites": "sites/index",
    "benchmarks/README.md": "benchmarks/scripts",
    "benchmarks/results": "benchmarks/index",
    "benchmarks": "benchmarks/scripts",
    "docs/examples": "examples/index",
    "docs": "index",
}
"""Files and folders of the repository whose place on the site is no rule's."""

API = "docs/reference/api.md"
PICTURES = {".png", ".svg", ".jpg"}

_FENCE = re.compile(r"^\s*(`{3,}|~{3,})")
_CODE_SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
_TARGET = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_EXTERNAL = re.compile(r"^[a-z][a-z0-9+.-]*:")


@dataclass(frozen=True)
class Link:
    """A link of a page: the line that has it, and its target as written."""

    line: int
    target: str

    @property
    def is_external(self) -> bool:
        """True if the target is a URL."""
        return bool(_EXTERNAL.match(self.target))


def prose(text: str) -> Iterator[tuple[int, str, bool]]:
    """(line number, line, is it prose) of a page; what stands in fences is none."""
    fence = ""
    for number, line in enumerate(text.split("\n"), 1):
        mark = _FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
            yield number, line, False
        elif mark and mark[1].startswith(fence) and line.strip() == mark[1]:
            fence = ""
            yield number, line, False
        else:
            yield number, line, not fence


def links(text: str) -> Iterator[Link]:
    """All links and pictures of a page, in their order; a line of comment has none."""
    for number, line, is_prose in prose(text):
        if is_prose and not line.startswith("<!--"):
            yield from (Link(number, found[1]) for found in _TARGET.finditer(_CODE_SPAN.sub("", line)))


def slug(heading: str) -> str:
    """The anchor that GitHub, and MyST, give to a heading."""
    plain = _LINK.sub(r"\1", heading).replace("`", "").replace("*", "")
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """All anchors of a page; a heading that stands there twice has a number the second time."""
    found: set[str] = set()
    times: dict[str, int] = {}
    for _, line, is_prose in prose(text):
        heading = _HEADING.match(line) if is_prose else None
        if heading:
            name = slug(heading[1])
            seen = times.get(name, 0)
            times[name] = seen + 1
            found.add(f"{name}-{seen}" if seen else name)
    return found


def broken(page: Path, root: Path) -> Iterator[str]:
    """A sentence for each local link of a page that leads nowhere."""
    for link in links(page.read_text(encoding="utf-8")):
        if link.is_external:
            continue
        name, _, anchor = link.target.partition("#")
        target = (page.parent / name).resolve() if name else page
        where = f"{page.relative_to(root)}:{link.line}: {link.target}"
        if not target.exists():
            yield f"{where}: there is no such file"
        elif not target.is_relative_to(root):
            yield f"{where}: outside of the repository"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8")):
            yield f"{where}: {target.relative_to(root)} has no heading with this anchor"


def docname(path: str) -> str:
    """The page of the site that shows a file of the repository, both without a leading slash."""
    if path in FIXED:
        return FIXED[path]
    name = PurePosixPath(path)
    for folder, place in (
        ("docs/examples", "examples"),
        ("slurm/sites", "sites"),
        ("benchmarks/results", "benchmarks"),
    ):
        if name.is_relative_to(folder):
            return f"{place}/{name.name if place == 'examples' else name.stem}"
    if name.is_relative_to("docs") and name.suffix == ".md":
        return name.relative_to("docs").with_suffix("").as_posix()
    return f"source/{path}"


def rewrite(text: str, source: str, root: Path, uses: Callable[[str], None], as_page: str = "") -> str:
    """A page of the repository with its links as the site has them, on the same lines.

    Args:
        text: the page.
        source: its path from the root of the repository, by which its links are meant.
        root: the repository.
        uses: called with the path of each file that a link leads to.
        as_page: the page of the site that shows the text, if it is not the file's own.

    Raises:
        ValueError: a link leads to nothing, or out of the repository.
    """
    here = PurePosixPath(as_page or docname(source)).parent

    def changed(found: re.Match[str]) -> str:
        target, _, anchor = found[1].partition("#")
        if _EXTERNAL.match(found[1]) or not target:
            return found[0]
        path = Path(os.path.normpath(PurePosixPath(source).parent / target)).as_posix()
        generated = GENERATED.get(path)
        if not (root / path).resolve().is_relative_to(root.resolve()):
            message = f"{source}: the link to {target} leads out of the repository"
            raise ValueError(message)
        if not generated and not (root / path).exists():
            message = f"{source}: the link to {target} leads to nothing"
            raise ValueError(message)
        uses(path)
        if PurePosixPath(path).suffix in PICTURES:
            place = path.removeprefix("docs/")
        elif path == API and anchor:
            return f"]({os.path.relpath(api_page(anchor), here)}#{anchor})"
        else:
            place = f"{generated or docname(path)}.md"
        return f"]({os.path.relpath(place, here)}{'#' + anchor if anchor else ''})"

    lines = []
    for _, line, is_prose in prose(text):
        lines.append(_outside_code(line, changed) if is_prose else line)
    return "\n".join(lines)


GENERATED = {
    f"docs/{name}.md": name
    for name in (
        "reference/commands",
        "reference/errors",
        "sites/index",
        "benchmarks/index",
        "examples/index",
    )
}
"""Pages that only the site has, by the paths with which docs/index.md names them."""


def api_page(anchor: str) -> str:
    """The page of a module that has a name of the API reference, by the name's anchor there."""
    import mpispeed

    fitting = [name for name in mpispeed.PUBLIC_MODULES if anchor.startswith(slug(f"mpispeed.{name}"))]
    return f"reference/api/mpispeed{'.' + max(fitting, key=len) if fitting else ''}.md"


def _outside_code(line: str, changed: Callable[[re.Match[str]], str]) -> str:
    """A line with its link targets changed, code left alone."""
    parts, end = [], 0
    for code in _CODE_SPAN.finditer(line):
        parts += [_TARGET.sub(changed, line[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, _TARGET.sub(changed, line[end:])])
