"""Code blocks of the documentation: what they are in, their marks, the commands in them.

A fence says the language, the mark, and for a file its name: ```` ```python run ````, ```` ```json check ds.json ````.
CONTRIBUTING.md has the table of marks; `tests/docs` runs and checks what is marked so.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE_DOCS = ("README.md", "CONTRIBUTING.md", "slurm/README.md", "benchmarks/README.md")

NEEDS = frozenset({"needs-slurm", "needs-gpu"})
MARKS = {
    "python": NEEDS | {"run", "check"},
    "console": NEEDS | {"run", "check"},
    "bash": NEEDS | {"check"},
    "json": frozenset({"check", "output"}),
    "toml": frozenset({"check", "output"}),
    "c": frozenset({"check"}),
    "text": frozenset({"output"}),
    "diff": frozenset({"output"}),
}
"""Language -> the marks it can have."""

FENCE = re.compile(r"^( *)(`{3,}|~{3,})(.*)$")
SCENE = re.compile(r"^<!-- scene: ([\w ]+?)(?: on (\d+) ranks)? -->$")
SEPARATORS = frozenset({"|", "||", "&&", ";", "&", "(", ")", "do", "then", "{", "}", "!", "time", "exec", "if"})


@dataclass(frozen=True)
class Block:
    """A block of a page; `line` is that of its fence, counted from 1, `file` its name in the page's folder.

    `shows` is true of a block of output that stands directly behind a block marked run: it is what that one prints.
    """

    page: str
    line: int
    language: str
    mark: str
    file: str
    text: str
    shows: bool = False

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.page}:{self.line}"

    def mistake(self) -> str:
        """What is wrong with the marks, or ""."""
        if not self.language:
            return "a fence without language and mark"
        if self.language not in MARKS:
            return f"language {self.language!r}; there are {', '.join(MARKS)}"
        if not self.mark:
            return f"no mark behind {self.language!r}; {', '.join(sorted(MARKS[self.language]))}"
        if self.mark not in MARKS[self.language]:
            return f"{self.language} cannot be {self.mark!r}; {', '.join(sorted(MARKS[self.language]))}"
        if self.file and (self.mark in {"run", *NEEDS} or not re.fullmatch(r"[\w.-]+", self.file)):
            return f"{self.file!r} behind the mark: only blocks that are a file name it, without a folder"
        return ""


@dataclass(frozen=True)
class Scene:
    """What a page has from this line on."""

    line: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Page:
    """A page's blocks and scenes in order; `ranks` is how many run it."""

    name: str
    blocks: tuple[Block, ...]
    scenes: tuple[Scene, ...]
    ranks: int

    @property
    def runs(self) -> list[Block]:
        """Its blocks marked run."""
        return [block for block in self.blocks if block.mark == "run"]


@dataclass(frozen=True)
class Command:
    """A command of a console block: its text, and how it has to end."""

    line: int
    text: str
    exit_code: int


def page_names(root: Path = ROOT) -> list[str]:
    """All pages, from the checkout's root."""
    return [*OUTSIDE_DOCS, *(str(path.relative_to(root)) for path in sorted((root / "docs").rglob("*.md")))]


def read_page(name: str, root: Path = ROOT) -> Page:
    """Parse a page.

    Raises:
        ValueError: A fence that never ends, or scenes for several numbers of ranks.
    """
    return parse_page(name, (root / name).read_text())


def parse_page(name: str, text: str) -> Page:
    """Parse the text of a page; see `read_page`."""
    blocks: list[Block] = []
    scenes: list[Scene] = []
    ranks: set[int] = set()
    lines = text.splitlines()
    at, is_behind_run = 0, False
    while at < len(lines):
        if found := SCENE.match(lines[at]):
            scenes.append(Scene(at + 1, tuple(found[1].split())))
            ranks |= {int(found[2])} if found[2] else set()
        elif opening := FENCE.match(lines[at]):
            block, at = _read_block(name, lines, at, opening, is_behind_run)
            blocks.append(block)
            is_behind_run = block.mark == "run"
        elif lines[at].strip():
            is_behind_run = False
        at += 1
    if len(ranks) > 1:
        message = f"{name}: scenes on {sorted(ranks)} ranks; a page runs on one number of them"
        raise ValueError(message)
    return Page(name, tuple(blocks), tuple(scenes), ranks.pop() if ranks else 1)


def _read_block(name: str, lines: list[str], at: int, opening: re.Match[str], is_behind_run: bool) -> tuple[Block, int]:
    indent, fence, info = opening.groups()
    for end in range(at + 1, len(lines)):
        closing = FENCE.match(lines[end])
        if closing and closing[2].startswith(fence) and not closing[3].strip():
            break
    else:
        message = f"{name}:{at + 1}: the block never ends"
        raise ValueError(message)
    words = info.split()
    language, mark, file = (*words, "", "", "")[:3]
    if len(words) > 3:
        mark = info.strip()  # said by the mistake
    body = "".join(line.removeprefix(indent) + "\n" for line in lines[at + 1 : end])
    return Block(name, at + 1, language, mark, file, body, is_behind_run and mark == "output"), end


def commands_of(block: Block) -> Iterator[Command]:
    r"""The commands of a console block: one a line, continued by `\`; `# exit code 2` tells how one ends."""
    begin, kept = 0, ""
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        begin = begin if kept else number
        kept += line
        if kept.endswith("\\"):
            kept += "\n"
            continue
        if kept.strip() and not kept.lstrip().startswith("#"):
            ends = re.search(r"# .*exit code (\d+)", kept)
            yield Command(begin, kept, int(ends[1]) if ends else 0)
        kept = ""


def words_of(text: str) -> Iterator[list[str]]:
    """The simple commands in a line of shell, each as its words; comments and what joins commands are left out.

    Raises:
        ValueError: Quotes that do not close.
    """
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words: list[str] = []
    for word in lexer:
        if word in SEPARATORS or set(word) <= set("();<>|&"):
            if words:
                yield words
            words = []
        else:
            words.append(word)
    if words:
        yield words


def is_shown(shown: str, printed: str) -> bool:
    """True if `printed` is what a page shows, where `...` stands for anything, also for several lines."""
    parts = [re.escape(part) for part in _trimmed(shown).split("...")]
    return re.fullmatch(r"[\s\S]*?".join(parts), _trimmed(printed)) is not None


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
