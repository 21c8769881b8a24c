"""The folder that Sphinx reads: pages of the repository with links of the site, and pages made of the source."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from docpages import api, benchmarks, commands, errors, sites
from docpages.links import FIXED, GENERATED, PICTURES, docname, links, rewrite, slug
from docpages.markdown import escaped, fence, table, toctree

INDEX = "docs/index.md"
LANGUAGES = {
    ".py": "python",
    ".json": "json",
    ".toml": "toml",
    ".pyx": "cython",
    ".c": "c",
    ".cu": "c",
    ".sh": "bash",
    ".sbatch": "bash",
}
ONLY_SITE = re.compile(r"^<!-- site: (.*) -->$", re.MULTILINE)
"""Lines of docs/index.md that only the site shows, because they lead to pages that only the site has."""


@dataclass
class Group:
    """A heading of the index below its part, with the pages that it lists."""

    title: str
    lines: list[str] = field(default_factory=list)
    pages: list[str] = field(default_factory=list)


@dataclass
class Part:
    """A heading of the index: pages that it lists itself, then its groups."""

    title: str
    own: Group
    groups: list[Group] = field(default_factory=list)

    @property
    def pages(self) -> list[str]:
        """All its pages."""
        return [*self.own.pages, *(page for group in self.groups for page in group.pages)]


def parts(text: str) -> list[Part]:
    """The parts of the index; each page belongs where it is named first.

    Args:
        text: docs/index.md.
    """
    found: list[Part] = []
    seen: set[str] = set()
    for line in ONLY_SITE.sub(r"\1", text).split("\n"):
        if line.startswith("## "):
            found.append(Part(line[3:], Group(line[3:])))
        elif line.startswith("### "):
            found[-1].groups.append(Group(line[4:]))
        elif found:
            group = found[-1].groups[-1] if found[-1].groups else found[-1].own
            group.lines.append(line)
            for page in pages_of(line):
                if page not in seen:
                    seen.add(page)
                    group.pages.append(page)
    return found


def pages_of(line: str) -> Iterator[str]:
    """Pages of the site that a line of the index leads to; examples and other files have lists of their own."""
    for link in links(line):
        path = (PurePosixPath("docs") / link.target.partition("#")[0]).as_posix()
        path = re.sub(r"^docs/\.\./", "", path)
        if not link.is_external and (path in GENERATED or path in FIXED or path.endswith(".md")):
            yield GENERATED.get(path) or docname(path)


def landing(part: Part, group: Group) -> str:
    """The page of a group: the sidebar opens there."""
    return f"topics/{slug(part.title)}-{slug(group.title)}"


class Site:
    """All pages of the site, and the files of the repository that they lead to."""

    def __init__(self, root: Path) -> None:
        """Args: `root`: the repository."""
        self.root = root
        self.pages: dict[str, str] = {}
        self.used: dict[str, None] = {}

    def gather(self) -> None:
        """Fill `pages`.

        Raises:
            ValueError: a link of a page leads to nothing.
        """
        for path in sorted((self.root / "docs").rglob("*.md")):
            if not path.relative_to(self.root / "docs").parts[0].startswith("_"):
                self._add(path.relative_to(self.root).as_posix())
        for name in FIXED:
            path = self.root / name
            if path.is_file() and name.endswith(".md"):
                self._add(name)
        self._index()
        for found in (api.pages(self.root), commands.pages(), sites.pages(self.root), benchmarks.pages(self.root)):
            self.pages |= dict(found)
        self.pages |= dict(errors.pages(errors.Index(self.root / "src" / "mpispeed")))
        self._examples()
        for path in self.used:
            self._show(path)

    def write(self, folder: Path) -> None:
        """Write all pages and pictures; what has not changed keeps its time, what is not of the site any more goes."""
        wanted = {folder / f"{name}.md": text for name, text in self.pages.items()}
        pictures = {folder / path.relative_to(self.root / "docs"): path for path in self._pictures()}
        for path in folder.rglob("*"):
            if path.is_file() and path not in wanted and path not in pictures:
                path.unlink()
        for path, text in wanted.items():
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
        for path, source in pictures.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, path)

    def _pictures(self) -> list[Path]:
        return [path for path in (self.root / "docs").rglob("*") if path.suffix in PICTURES and "_" not in path.parts]

    def _add(self, source: str) -> None:
        text = (self.root / source).read_text(encoding="utf-8")
        self.pages[docname(source)] = rewrite(text, source, self.root, self._use)

    def _use(self, path: str) -> None:
        self.used[path] = None

    def _index(self) -> None:
        """The home page with the tables of contents, and a page for each group."""
        text = ONLY_SITE.sub(r"\1", (self.root / INDEX).read_text(encoding="utf-8"))
        lines = [rewrite(text, INDEX, self.root, self._use), ""]
        for part in parts(text):
            entries = [*part.own.pages, *(landing(part, group) for group in part.groups)]
            lines += toctree(entries, part.title, depth=2)
            for group in part.groups:
                name = landing(part, group)
                body = rewrite("\n".join(group.lines), INDEX, self.root, self._use, as_page=name)
                self.pages[name] = "\n".join([f"# {group.title}", "", body, "", *toctree(group.pages)])
        self.pages["index"] = "\n".join(lines)

    def _examples(self) -> None:
        """The list of examples, with what each says of itself."""
        paths = [path for path in sorted((self.root / "docs" / "examples").iterdir()) if path.is_file()]
        rows = []
        for path in paths:
            source = path.relative_to(self.root).as_posix()
            self._use(source)
            rows.append((f"[`{path.name}`]({path.name}.md)", escaped(first_line(path))))
        head = [
            "# Examples",
            "",
            "Complete scripts, in `docs/examples`; each says in its first lines how it is started.",
            "",
        ]
        self.pages["examples/index"] = "\n".join(
            [*head, *table(("file", "what"), rows), *toctree(f"examples/{path.name}" for path in paths)]
        )

    def _show(self, path: str) -> None:
        """A page with the text of a file, unless the file has a page already."""
        name = docname(path) if path not in GENERATED else GENERATED[path]
        if name in self.pages or PurePosixPath(path).suffix in PICTURES:
            return
        source = self.root / path
        if source.is_dir():
            message = f"a page links to the folder {path}, which has no page; link to a file of it"
            raise ValueError(message)
        lines = [] if path.startswith("docs/examples/") else ["---", "orphan: true", "---", ""]
        lines += [f"# {source.name}", "", f"`{path}`", ""]
        lines += fence(source.read_text(encoding="utf-8"), LANGUAGES.get(source.suffix, "text"))
        self.pages[name] = "\n".join(lines)


def first_line(path: Path) -> str:
    """What a script says of itself first; for other files what they are."""
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]
    return {".json": "a configuration", ".c": "a program in C"}.get(path.suffix, "")
