"""Small parts of Markdown pages."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence

SECTIONS = ("Args", "Returns", "Yields", "Raises", "Attributes", "Collective over", "Example", "Examples", "Note")

_SECTION = re.compile(rf"^({'|'.join(SECTIONS)}):\s*(.*)$")
_ITEM = re.compile(r"^([\w*., /\[\]`()-]+?)(?: \(([^)]*)\))?: (.*)$")
_CODE_SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
_SPECIAL = re.compile(r"([*<\[\]|])|(?<=_)(_)|(^|(?<=\s))(#)")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> list[str]:
    """Lines of a table; `|` inside of cells is escaped, line ends become spaces.

    Args:
        head: titles of the columns.
        rows: cells of the rows.
        align: for each column `r` for right, anything else for left; missing ones are left.
    """

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(map(_in_cell, cells)) + " |"

    rule = "|" + "|".join("--:" if align[at : at + 1] == "r" else "---" for at in range(len(head))) + "|"
    return [line(head), rule, *(line(row) for row in rows), ""]


def _in_cell(text: str) -> str:
    return re.sub(r"[ \t\n]+", " ", re.sub(r"(?<!\\)\|", r"\\|", text)).strip(" ")


def escaped(text: str) -> str:
    """Plain text in which Markdown finds no marks but code spans."""
    parts, end = [], 0
    for code in _CODE_SPAN.finditer(text):
        parts += [_SPECIAL.sub(_with_backslash, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, _SPECIAL.sub(_with_backslash, text[end:])])


def code(text: str) -> str:
    """A code span of any text without line ends."""
    if "`" not in text:
        return f"`{text}`"
    marks = "`" * (max(len(run) for run in re.findall("`+", text)) + 1)
    return f"{marks} {text} {marks}"


def fence(text: str, language: str) -> list[str]:
    """Lines of a code block of any text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return [f"{marks}{language}", *text.rstrip("\n").split("\n"), marks, ""]


def toctree(entries: Iterable[str], caption: str = "", *, is_hidden: bool = True, depth: int = 1) -> list[str]:
    """Lines of a table of contents; entries are pages from the root of the site."""
    return [
        "```{toctree}",
        *([":hidden:"] if is_hidden else []),
        *([f":caption: {caption}"] if caption else []),
        f":maxdepth: {depth}",
        "",
        *(f"/{entry}" for entry in entries),
        "```",
        "",
    ]


def docstring(text: str | None) -> list[str]:
    """A docstring in Google's style as lines of Markdown: sections become lists."""
    lines: list[str] = []
    title, body = "", []
    for line in [*inspect.cleandoc(text or "").split("\n"), None]:
        found = _SECTION.match(line) if line is not None else None
        if line is not None and not found and (not title or not line or line.startswith(" ") or not body_ended(body)):
            body.append(line)
            continue
        lines += _section(title, body) if title else _paragraphs(body)
        title, body = "", [line or ""]
        if found:
            title, body = found[1], [found[2]] if found[2] else []
    return lines


def body_ended(body: list[str]) -> bool:
    """True if a section is over at the next line that is not indented."""
    return not body or body[-1] == "" or body[-1].startswith(" ")


def _paragraphs(body: list[str]) -> list[str]:
    """Text as it is, but for marks that nobody meant; indented lines stay code."""
    return [line if line.startswith("    ") else escaped_line(line) for line in body] + [""]


def escaped_line(line: str) -> str:
    """As `escaped`, with the mark of a list item kept."""
    bullet = re.match(r"^\s*(?:[-*]|\d+\.) ", line)
    head = bullet[0] if bullet else ""
    return head + escaped(line[len(head) :])


def _section(title: str, body: list[str]) -> list[str]:
    """A section with its items as a list, or with its text."""
    dedented = inspect.cleandoc("\n" + "\n".join(body)).split("\n")
    items = list(_items(dedented))
    if title in ("Args", "Raises", "Attributes") and items:
        return [f"**{title}**", "", *items, ""]
    return [f"**{title}:** " + escaped_line(dedented[0]), *map(escaped_line, dedented[1:]), ""]


def _items(lines: list[str]) -> Iterator[str]:
    """List items of lines `name: text` whose continuations are indented."""
    for line in lines:
        found = _ITEM.match(line) if not line.startswith(" ") else None
        if found:
            kind = f" ({escaped(found[2])})" if found[2] else ""
            yield f"- {code(found[1].strip('`'))}{kind}: {escaped(found[3])}"
        elif line.strip():
            yield "  " + escaped_line(line.strip())


def _with_backslash(found: re.Match[str]) -> str:
    return "\\" + (found[1] or found[2] or found[4])
