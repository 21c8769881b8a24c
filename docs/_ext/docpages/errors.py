"""The index of errors: messages of our exceptions by class, read from the source."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from docpages.markdown import code, docstring, escaped, table, toctree

FOLDER = "reference/errors"
ROOT_CLASS = "MpispeedError"
UNKNOWN = "..."

HELP = {
    "ckpt": "guides/checkpoints",
    "cli": "reference/commands",
    "comm": "guides/communication",
    "compat": "guides/from-deepspeed",
    "compression": "guides/compression",
    "config": "guides/config",
    "curriculum": "guides/curriculum",
    "data": "guides/data-loading",
    "drill": "hpc/faults",
    "flops": "guides/flops-profiler",
    "generation": "guides/generate",
    "inference": "guides/inference",
    "launch": "hpc/launch",
    "lightning": "guides/lightning",
    "logs": "hpc/faults",
    "mesh": "hpc/hangs",
    "monitor": "guides/monitors",
    "nn": "guides/zero3",
    "nn/expert": "guides/moe",
    "nn/sparse": "guides/sparse-attention",
    "nn/tensor": "guides/tensor-parallel",
    "optim": "guides/cpu-optimizers",
    "pipe": "guides/pipeline",
    "plan": "guides/memory",
    "process_group": "guides/torch-distributed",
    "record": "guides/run-record",
    "sharding": "guides/zero3",
    "store": "guides/offload",
    "tokens": "guides/token-store",
    "tokens_build": "guides/token-store-building",
    "tuning": "guides/autotuning",
    "walltime": "hpc/walltime",
    "watchdog": "hpc/hangs",
}
"""The page that helps with errors of a room, the longest name first."""


@dataclass(frozen=True)
class Class:
    """An exception: where it is, its bases as written, what its docstring says."""

    name: str
    module: str
    bases: tuple[str, ...]
    doc: str


@dataclass(frozen=True, order=True)
class Message:
    """A message as a template, and where it is made."""

    text: str
    module: str
    line: int


def parsed(path: Path) -> ast.Module:
    """What is in a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


class Index:
    """All exceptions of the package and the messages they are made with."""

    def __init__(self, source: Path, parse: Callable[[Path], ast.Module] = parsed) -> None:
        """Args: `source`: the folder of the package; `parse`: makes a syntax tree of a file."""
        trees = {path.relative_to(source).as_posix(): parse(path) for path in sorted(source.rglob("*.py"))}
        self.classes = own_classes(trees)
        self.messages: dict[str, set[Message]] = defaultdict(set)
        self.passed_on = 0
        for module, tree in trees.items():
            self._read(module, tree)

    def _read(self, module: str, tree: ast.Module) -> None:
        for nodes in scopes(tree):
            texts: dict[str, list[ast.expr]] = defaultdict(list)
            used: dict[str, int] = {}
            for node in nodes:
                if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                    texts[node.targets[0].id].append(node.value)
            for call in nodes:
                if isinstance(call, ast.Call) and name_of(call.func) in self.classes and call.args:
                    self._note(module, name_of(call.func), call, texts, used)

    def _note(
        self, module: str, name: str, call: ast.Call, texts: dict[str, list[ast.expr]], used: dict[str, int]
    ) -> None:
        """Note a call; a text that has a name is what the name was set to since it was last `used`."""
        first = call.args[0]
        made_of = [first]
        if isinstance(first, ast.Name):
            after = used.get(first.id, 0)
            before = [text for text in texts.get(first.id, []) if text.lineno <= call.lineno]
            made_of = [text for text in before if text.lineno > after] or before[-1:]
            used[first.id] = call.lineno
        found = [text for text in map(template, made_of) if text.strip(f"{UNKNOWN} :\n")]
        if not found:
            self.passed_on += 1
        for text in found:
            self.messages[name].add(Message(text, module, call.lineno))


def own_classes(trees: dict[str, ast.Module]) -> dict[str, Class]:
    """Classes that come from the root of our exceptions, by name."""
    every = {
        node.name: Class(node.name, module, tuple(map(name_of, node.bases)), ast.get_docstring(node) or "")
        for module, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    found = {ROOT_CLASS}
    while more := {name for name, each in every.items() if name not in found and found.intersection(each.bases)}:
        found |= more
    return {name: every[name] for name in sorted(found) if not name.startswith("_")}


def scopes(tree: ast.Module) -> list[list[ast.AST]]:
    """Assignments and calls of a module, and of each function in it by itself, in the order of their lines."""
    found: list[list[ast.AST]] = []
    waiting: list[tuple[ast.AST, list[ast.AST]]] = [(tree, [])]
    while waiting:
        node, nodes = waiting.pop()
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)):
            nodes = []
            found.append(nodes)
        elif isinstance(node, (ast.Assign, ast.Call)):
            nodes.append(node)
        waiting += [(child, nodes) for child in ast.iter_child_nodes(node)]
    return [sorted(nodes, key=lambda node: node.lineno) for nodes in found]


def name_of(node: ast.expr) -> str:
    """The last name of `a.b.C`, or of a generic class; else ""."""
    if isinstance(node, ast.Subscript):
        return name_of(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def template(node: ast.expr) -> str:
    """A text with `...` where values come in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) if isinstance(part, ast.Constant) else UNKNOWN for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return UNKNOWN


def help_page(module: str) -> str:
    """The page that helps with what a module says; "" if there is none."""
    fitting = [room for room in HELP if module == f"{room}.py" or module.startswith(f"{room}/")]
    return HELP[max(fitting, key=len)] if fitting else ""


def pages(index: Index) -> Iterator[tuple[str, str]]:
    """(page, text) of the front page and of each class."""
    yield FOLDER, "\n".join(front(index))
    for name in index.classes:
        yield f"{FOLDER}/{name}", "\n".join(class_page(index, name))


def front(index: Index) -> Iterator[str]:
    """The index: all classes, with what each means."""
    count = sum(map(len, index.messages.values()))
    yield "# Errors\n"
    yield (
        f"The {count} messages that exceptions of mpispeed are made with, by class; the search box finds them by their "
        "words. `...` stands for a value. A message names the fault, the value, its source and the cure; all of "
        "these classes are `MpispeedError`s, and DeepSpeed's and Python's classes where scripts catch those. "
        f"{index.passed_on} more places hand on what another error or rank said.\n"
    )
    rows = [
        (
            f"[`{name}`](errors/{name}.md)",
            ", ".join(f"`{base}`" for base in each.bases),
            str(len(index.messages[name])),
            first_lines(each.doc),
        )
        for name, each in index.classes.items()
    ]
    yield from table(("class", "is also", "messages", "what it says"), rows, "llr")
    yield from toctree(f"{FOLDER}/{name}" for name in index.classes)


def first_lines(text: str) -> str:
    """The first paragraph of a docstring."""
    return escaped(" ".join(text.split("\n\n")[0].split()))


def class_page(index: Index, name: str) -> Iterator[str]:
    """One class: its docstring, its place among the others, its messages by where they are raised."""
    each = index.classes[name]
    yield f"# `{name}`\n"
    yield from docstring(each.doc)
    below = [other for other, found in index.classes.items() if name in found.bases]
    above = [f"[`{base}`]({base}.md)" if base in index.classes else f"`{base}`" for base in each.bases]
    yield f"Is: {', '.join(above)}. Defined in `mpispeed/{each.module}`.\n"
    if below:
        yield "Narrower: " + ", ".join(f"[`{other}`]({other}.md)" for other in below) + ".\n"
    rooms: dict[str, list[Message]] = defaultdict(list)
    for message in sorted(index.messages[name], key=lambda message: (message.module, message.line)):
        rooms[message.module.partition("/")[0].removesuffix(".py")].append(message)
    for room, messages in rooms.items():
        yield f"## {room}\n"
        helping = list(dict.fromkeys(page for message in messages if (page := help_page(message.module))))
        if helping:
            yield "What helps: " + ", ".join(f"[](../../{page}.md)" for page in helping) + ".\n"
        yield from table(
            ("message", "where"),
            [(code(" ".join(message.text.split())), f"`{message.module}:{message.line}`") for message in messages],
        )
