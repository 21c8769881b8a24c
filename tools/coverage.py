"""DeepSpeed's documented names and JSON keys, tried one by one: the same here, later, or different.

    python tools/coverage.py               a table of counts by chapter
    python tools/coverage.py --differs     all rows that differ, with what
    python tools/coverage.py --markdown    write docs/reference/deepspeed-coverage.md
    python tools/coverage.py --json        all rows, for programs

What is tried stands in deepspeed_names.toml and deepspeed_keys.toml. A name is imported below `deepspeed` and below
`mpispeed`, and called with its documented parameters as far as binding them goes; nothing is run.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import importlib
import inspect
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import mpispeed.as_deepspeed
from mpispeed.compat.modules import NamesModule, missing, rows
from mpispeed.config import legacy
from mpispeed.config.ineffective import NO_EFFECT
from mpispeed.config.load import judge
from mpispeed.config.root import Config
from mpispeed.config.section import walk
from mpispeed.config.unavailable import find_unavailable
from mpispeed.engine.delegation import Value

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "reference" / "deepspeed-coverage.md"
SAME, LATER, DIFFERS = "same", "later", "differs"
NAMESPACE = {"torch": torch, "sys": sys, "datetime": datetime}
LATER_WORDS = "does not have yet"
MEMBERS = ("method", "field", "property", "value")
HEAD = """# DeepSpeed's names and keys

`python tools/coverage.py --markdown` makes this page by trying every name that DeepSpeed's API reference (0.14.1)
documents, below `deepspeed` and below `mpispeed`, and every key of its page of JSON settings.

- **same**: there under the same path, with all documented parameters in their order and by keyword, and the documented
  defaults. A key is accepted and has the documented default.
- **later**: belongs to a feature that is not there yet; importing it, or switching it on, ends with a sentence that
  names the feature.
- **differs**: there, and a documented call or default is not.

`mpispeed compat names MODULE` tells where each name is here. How scripts and libraries that say `import deepspeed` are
started is told by `mpispeed run --help` (`--as-deepspeed`) and `mpispeed compat wheel --help`.
"""


@dataclass(frozen=True)
class Name:
    """A documented name."""

    chapter: str
    kind: str
    owner: str  # the class of a member, else ""
    path: str
    signature: inspect.Signature | None = None
    default: Any = ...
    aliases: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """The path below the package."""
        return f"{self.owner}.{self.path}" if self.owner else self.path


@dataclass(frozen=True)
class Key:
    """A documented JSON key."""

    chapter: str
    path: str
    value: Any
    has_default: bool
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """A tried row."""

    part: str
    chapter: str
    kind: str
    path: str
    word: str
    why: str


# -- reading the facts ------------------------------------------------------------------------------------------------


def read_names() -> Iterator[Name]:
    """All names of deepspeed_names.toml."""
    for chapter in tomllib.loads((HERE / "deepspeed_names.toml").read_text())["chapter"]:
        owner = ""
        for line in chapter["names"].strip().splitlines():
            kind, _, text = line.strip().partition(" ")
            above = owner if line.startswith("  ") else ""
            name = parse_name(chapter["title"], kind, above, text)
            if kind == "class":
                owner = name.path
            yield name


def parse_name(chapter: str, kind: str, owner: str, text: str) -> Name:
    """One line: NAME, NAME(PARAMETERS), or NAME = DEFAULT as ALIASES."""
    head, _, tail = text.partition("(" if kind not in ("field",) else " = ")
    path = head.strip()
    if kind == "method" and not owner:
        owner, _, path = path.rpartition(".")
    if kind == "field":
        value, _, aliases = tail.partition(" as ")
        return Name(chapter, kind, owner, path, None, evaluate(value), tuple(aliases.replace(",", " ").split()))
    return Name(chapter, kind, owner, path, parse_signature(f"({tail}") if tail else None)


def parse_signature(text: str) -> inspect.Signature:
    """The signature that a parameter list has in Python."""
    arguments = ast.parse(f"def f{text}: pass").body[0].args
    kinds = inspect.Parameter
    plain = [*arguments.posonlyargs, *arguments.args]
    lacking = [None] * (len(plain) - len(arguments.defaults))
    found = [
        kinds(entry.arg, kinds.POSITIONAL_OR_KEYWORD, default=default_of(value))
        for entry, value in zip(plain, [*lacking, *arguments.defaults], strict=True)
    ]
    if arguments.vararg:
        found.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for entry, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(kinds(entry.arg, kinds.KEYWORD_ONLY, default=default_of(value)))
    if arguments.kwarg:
        found.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(found)


def default_of(node: ast.expr | None) -> Any:
    """The value of a written default; `empty` where none is written."""
    return inspect.Parameter.empty if node is None else evaluate(ast.unparse(node))


def evaluate(text: str) -> Any:
    """A value as written in the facts."""
    return eval(text, dict(NAMESPACE))


def read_keys() -> Iterator[Key]:
    """All keys of deepspeed_keys.toml."""
    for section in tomllib.loads((HERE / "deepspeed_keys.toml").read_text())["section"]:
        prefix = f"{section['path']}." if "path" in section else ""
        settings = json.loads(section.get("settings", "{}"))
        for line in section["keys"].strip().splitlines():
            key, mark, value = line.split(" ", 2)
            yield Key(section["title"], prefix + key, json.loads(value), mark == "=", settings)


# -- trying names -----------------------------------------------------------------------------------------------------


def try_name(name: Name) -> tuple[str, str]:
    """(verdict, reason) of one name below both packages."""
    verdicts = [try_below(package, name) for package in ("deepspeed", "mpispeed")]
    for verdict in verdicts:
        if verdict[0] == DIFFERS:
            return verdict
    if verdicts[0][0] != verdicts[1][0]:
        return DIFFERS, f"deepspeed: {verdicts[0][0]}, mpispeed: {verdicts[1][0]}"
    return verdicts[0]


def try_below(package: str, name: Name) -> tuple[str, str]:
    """(verdict, reason) of one name below one package."""
    try:
        found = find(package, name.owner or name.path)
        if name.kind in MEMBERS:
            return try_member(found, name)
        if name.kind == "module":
            return try_module(found)
    except (ImportError, AttributeError) as error:
        text = str(error)
        return (LATER, text.replace("deepspeed.", "", 1)) if LATER_WORDS in text else (DIFFERS, shorten(text))
    wrong = compare(name.signature, found)
    return (DIFFERS, wrong) if wrong else (SAME, "")


def shorten(text: str) -> str:
    """The first part of a message, as long as a cell of a table."""
    return text.partition(";")[0].partition("\n")[0][:120]


def find(package: str, path: str) -> Any:
    """The object at a path: the module by import, the rest by attributes."""
    module, _, name = f"{package}.{path}".rpartition(".")
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError:
        return getattr(find(package, path.rpartition(".")[0]), name)
    return getattr(home, name)


def try_module(found: Any) -> tuple[str, str]:
    """A module is there if it is one; later if all that it has is."""
    path = found.__name__.partition(".")[2]
    if isinstance(found, NamesModule) and not rows(path):
        for name in missing(path):
            getattr(found, name)  # raises the sentence
    return SAME, ""


def try_member(cls: type, name: Name) -> tuple[str, str]:
    """A method, property, class variable or field."""
    if name.kind == "field":
        wrong = field_fault(cls, name)
        return (DIFFERS, wrong) if wrong else (SAME, "")
    missing_here = object()
    found = inspect.getattr_static(cls, name.path, missing_here)
    if found is missing_here:
        return DIFFERS, "there is no such attribute"
    if name.kind == "property":
        return (SAME, "") if isinstance(found, property | Value) else (DIFFERS, "is no property")
    if name.kind == "value":
        return SAME, ""
    wrong = compare(name.signature, getattr(cls, name.path), drops_first=not isinstance(found, staticmethod))
    return (DIFFERS, wrong) if wrong else (SAME, "")


def field_fault(cls: type, name: Name) -> str:
    """What is wrong with a field of a class of settings, "" if nothing."""
    value = getattr(cls(), name.path)
    if name.default is not ... and value != name.default:
        return f"default {value!r}, documented {name.default!r}"
    given = value if name.default is ... else name.default
    for spelling in (name.path, *name.aliases):
        try:
            cls(**{spelling: given})
        except (TypeError, ValueError):
            return f"{spelling}={given!r} is refused"
    return ""


def compare(wanted: inspect.Signature | None, found: Any, *, drops_first: bool = False) -> str:
    """How a callable refuses the documented parameters, or has other defaults; "" if neither."""
    if not callable(found):
        return "cannot be called"
    if wanted is None:
        return ""
    try:
        ours = inspect.signature(found)
    except (TypeError, ValueError) as error:
        return f"has no signature: {error}"
    parameters = list(ours.parameters.values())
    if drops_first and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        ours = ours.replace(parameters=parameters[1:])
    return positional_fault(wanted, ours) or keyword_fault(wanted, ours) or default_fault(wanted, ours)


def split(wanted: inspect.Signature) -> tuple[list[str], list[str], bool, bool]:
    """Names by position, names by keyword only, and whether there are `*args` and `**kwargs`."""
    found = list(wanted.parameters.values())
    return (
        [each.name for each in found if each.kind is each.POSITIONAL_OR_KEYWORD],
        [each.name for each in found if each.kind is each.KEYWORD_ONLY],
        any(each.kind is each.VAR_POSITIONAL for each in found),
        any(each.kind is each.VAR_KEYWORD for each in found),
    )


def positional_fault(wanted: inspect.Signature, ours: inspect.Signature) -> str:
    """The documented parameters by position, and one more for `*args` and one for `**kwargs`.

    One of ours may stand among the optional ones, as in later releases of DeepSpeed: their order stays.
    """
    plain, only, has_args, has_kwargs = split(wanted)
    order = [name for name in ours.parameters if name in plain]
    optional = [name for name in plain if wanted.parameters[name].default is not inspect.Parameter.empty]
    if order == plain and not has_args:
        strays = [name for name in list(ours.parameters)[: len(plain)] if name not in plain]
        first = min((list(ours.parameters).index(name) for name in strays), default=len(plain))
        plain = plain[:first] if set(plain[first:]) <= set(optional) else plain
    positional = [*plain, *(["(one of *args)"] if has_args else [])]
    keywords = {**{name: name for name in only}, **({"any_keyword": ""} if has_kwargs else {})}
    try:
        bound = ours.bind(*positional, **keywords).arguments
    except TypeError as error:
        return f"by position: {error}"
    for name in plain:
        if bound.get(name) != name:
            return f"{name} is not parameter {plain.index(name) + 1}"
    return ""


def keyword_fault(wanted: inspect.Signature, ours: inspect.Signature) -> str:
    """The documented parameters by keyword."""
    plain, only, _, _ = split(wanted)
    try:
        bound = ours.bind(**{name: name for name in (*plain, *only)}).arguments
    except TypeError as error:
        return f"by keyword: {error}"
    lost = [name for name in (*plain, *only) if bound.get(name) != name]
    return f"no parameters of their own: {', '.join(lost)}" if lost else ""


def default_fault(wanted: inspect.Signature, ours: inspect.Signature) -> str:
    """Defaults other than documented."""
    for name, parameter in wanted.parameters.items():
        if parameter.default in (parameter.empty, ...):
            continue
        value = ours.parameters[name].default
        if value is parameter.empty:
            return f"{name} has no default, documented {parameter.default!r}"
        if not is_equal(value, parameter.default):
            return f"{name}={value!r}, documented {parameter.default!r}"
    return ""


def is_equal(ours: Any, documented: Any) -> bool:
    """Equal as a default; None and tuples stand for empty or filled containers, which must not be shared by calls."""
    if isinstance(documented, (list, dict)) and not documented:
        return ours is None or len(ours) == 0
    if isinstance(documented, list) and isinstance(ours, tuple):
        return list(ours) == documented
    if isinstance(documented, torch.device):
        return torch.device(ours) == documented
    return bool(ours == documented)


# -- trying keys ------------------------------------------------------------------------------------------------------


def try_key(key: Key) -> tuple[str, str]:
    """(verdict, reason) of one key."""
    verdict = judge(content_of(key))
    for problem in verdict.problems:
        is_here = problem.path == key.path or problem.path.startswith((f"{key.path}.", f"{key.path}["))
        is_above = key.path.startswith(f"{problem.path}.") and "unknown" in problem.what
        if is_here or is_above:
            return DIFFERS, f"refused: {problem.what}"
    if key.has_default and not key.path.startswith("optimizer.params."):
        value = default_of_key(key.path)
        if value != key.value:
            return DIFFERS, f"default {json.dumps(value)}, documented {json.dumps(key.value)}"
    if verdict.config is None:
        return DIFFERS, "nothing is left to look at"
    for problem in find_unavailable(verdict.config):
        if key.path == problem.path or key.path.startswith(f"{problem.path}."):
            return LATER, problem.what
    why = NO_EFFECT.get(present_spelling(key.path)) or legacy.IGNORED.get(key.path, "").removeprefix("has no effect; ")
    return SAME, f"no effect, {why}" if why else ""


def content_of(key: Key) -> dict[str, Any]:
    """Settings that have the key, and every section on the way switched on."""
    content: dict[str, Any] = json.loads(json.dumps(key.settings))
    fields = {entry.path for entry in walk(Config)}
    node, parts = content, key.path.split(".")
    for depth, part in enumerate(parts[:-1], 1):
        node = node.setdefault(part, {})
        here = ".".join(parts[:depth])
        if f"{here}.enabled" in fields:
            node.setdefault("enabled", True)
        if f"{here}.shared_parameters.enabled" in fields:
            node.setdefault("shared_parameters", {}).setdefault("enabled", True)
    node[parts[-1]] = True if parts[-1] == "enabled" else key.value
    return content


def present_spelling(path: str) -> str:
    """A key as it is spelled now."""
    return next((alias.new for alias in legacy.ALIASES if alias.old == path), path)


def default_of_key(path: str) -> Any:
    """The default of a key; false for an old switch that stands for a section."""
    found = next(entry.default for entry in walk(Config) if entry.path == present_spelling(path))
    is_switch = any(alias.old == path and alias.convert is not None for alias in legacy.ALIASES)
    return found is not None if is_switch else found


# -- output -----------------------------------------------------------------------------------------------------------


def verdicts() -> list[Verdict]:
    """All rows, tried."""
    warnings.simplefilter("ignore")
    names = [Verdict("names", row.chapter, row.kind, row.shown, *try_name(row)) for row in read_names()]
    keys = [Verdict("keys", row.chapter, "key", row.path, *try_key(row)) for row in read_keys()]
    return names + keys


def counts(found: list[Verdict]) -> Iterator[tuple[str, int, int, int, int]]:
    """(chapter, rows, same, later, differs), in the order of the facts."""
    for chapter in dict.fromkeys(row.chapter for row in found):
        words = Counter(row.word for row in found if row.chapter == chapter)
        yield chapter, words.total(), words[SAME], words[LATER], words[DIFFERS]


def table(found: list[Verdict]) -> str:
    """Counts by chapter as Markdown."""
    lines = ["| chapter | items | same | later | differs |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in counts(found)]
    words = Counter(row.word for row in found)
    lines.append(f"| **all** | {len(found)} | {words[SAME]} | {words[LATER]} | {words[DIFFERS]} |")
    return "\n".join(lines)


def page(found: list[Verdict]) -> str:
    """The whole page as Markdown."""
    parts = [HEAD]
    for part, title in (("names", "Names"), ("keys", "JSON keys")):
        own = [row for row in found if row.part == part]
        parts += [f"## {title}\n", f"{table(own)}\n"]
        for chapter in dict.fromkeys(row.chapter for row in own):
            parts += [f"### {chapter}\n", *chapter_lines(own, chapter), ""]
    return "\n".join(parts)


def chapter_lines(found: list[Verdict], chapter: str) -> Iterator[str]:
    """The rows of one chapter, members below their class."""
    yield "| name | verdict |\n|---|---|"
    for row in found:
        if row.chapter == chapter:
            yield f"| `{row.path}` | {row.word}{': ' + cell(row.why) if row.why else ''} |"


def cell(text: str) -> str:
    """A text in a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> int:
    """Print, or write the page."""
    parser = argparse.ArgumentParser(description="try DeepSpeed's names and keys")
    parser.add_argument("--differs", action="store_true", help="rows that differ")
    parser.add_argument("--markdown", action="store_true", help="write the page")
    parser.add_argument("--json", action="store_true", help="all rows, and the page")
    chosen = parser.parse_args()
    if not mpispeed.as_deepspeed.IS_SERVED:
        print("DeepSpeed itself is installed here; the names of mpispeed cannot be tried", file=sys.stderr)
        return 2
    found = verdicts()
    if chosen.json:
        print(json.dumps({"rows": [asdict(row) for row in found], "page": page(found)}))
    elif chosen.differs:
        for row in found:
            if row.word == DIFFERS:
                print(f"{row.path}: {row.why}")
    elif chosen.markdown:
        PAGE.write_text(page(found), encoding="utf-8")
    else:
        print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
