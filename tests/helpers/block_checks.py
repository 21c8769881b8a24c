"""What can be checked of a code block without running it; each check yields a line for each mistake."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click

from mpispeed.base.errors import ConfigError
from mpispeed.cli.main import cli as command_line
from mpispeed.config import parse
from mpispeed.tuning.api import read as read_lists
from tests.helpers.code_blocks import ROOT, Block, words_of

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same under its older name
    import tomli as tomllib

OURS = "mpispeed"


def check_block(block: Block) -> Iterator[str]:
    """All checks for its language and mark."""
    if block.language == "python":
        yield from check_python(block)
    elif block.language in {"console", "bash"}:
        yield from check_shell(block)
        yield from check_options(block)
    elif block.language == "json" and block.mark == "check":
        yield from check_config(block)
    elif block.language == "toml":
        yield from check_toml(block)
    elif block.language == "diff":
        yield from check_options(block)
    elif block.language == "c":
        yield from check_c(block)


# -- Python ----------------------------------------------------------------------------------------------------------


def check_python(block: Block) -> Iterator[str]:
    """It compiles, what it imports of mpispeed is there, and so is each name it takes from there."""
    source = "\n" * block.line + as_program(block.text)
    try:
        tree = ast.parse(source, block.page)
    except SyntaxError as error:
        yield f"{block.page}:{error.lineno}: {error.msg}"
        return
    ours = importlib.import_module(OURS)
    known: dict[str, Any] = {OURS: ours, "engine": ours.Engine}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _import(block, node, known)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if isinstance(node.ctx, ast.Load):
                yield from _look_up(block, node, known)
        elif isinstance(node, ast.Call):
            yield from _check_call(block, node, known)


def as_program(text: str) -> str:
    """A signature, `name(a: int, *, b=1) -> int`, becomes a definition; dicts of a sketch lose their three dots."""
    if re.match(r"[\w.]+\(", text):
        try:
            ast.parse(text)
        except SyntaxError:
            return f"def {text.rstrip()}: ...".replace("<factory>", "...")
    return text.replace("{..., ", "{")


def _import(block: Block, node: ast.Import | ast.ImportFrom, known: dict[str, Any]) -> Iterator[str]:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    for name in names:
        if name.split(".")[0] != OURS:
            continue
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            yield f"{block.page}:{node.lineno}: {error}"
            continue
        for alias in node.names:
            if isinstance(node, ast.Import):
                if alias.asname:
                    known[alias.asname] = module
            elif hasattr(module, alias.name):
                known[alias.asname or alias.name] = getattr(module, alias.name)
            else:
                yield f"{block.page}:{node.lineno}: {name} has no {alias.name}"


def _resolve(node: ast.expr, known: dict[str, Any]) -> Any:
    """What an expression of names and dots is in the package, or None."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_resolve(node.value, known), node.attr, None)
    return None


def _look_up(block: Block, node: ast.Attribute, known: dict[str, Any]) -> Iterator[str]:
    owner = _resolve(node.value, known)
    if isinstance(owner, type) and owner.__name__ == "Engine":
        return  # what its constructor sets is not known here; its calls are looked at
    if (inspect.ismodule(owner) or inspect.isclass(owner)) and not hasattr(owner, node.attr):
        yield f"{block.page}:{node.lineno}: {owner.__name__} has no {node.attr}"


def _check_call(block: Block, node: ast.Call, known: dict[str, Any]) -> Iterator[str]:
    """Keywords of a call are those of the function's signature."""
    if isinstance(node.func, ast.Name) and node.func.id == "engine":
        return  # a forward; its arguments are the model's
    called = _resolve(node.func, known)
    if (
        isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "engine"
    ):
        called = getattr(importlib.import_module(OURS).Engine, node.func.attr, None)
    keywords = {word.arg: None for word in node.keywords if word.arg is not None}
    if not callable(called) or not keywords:
        return
    try:
        parameters = list(inspect.signature(called).parameters.values())
        if inspect.isfunction(called) and parameters and parameters[0].name == "self":
            parameters = parameters[1:]
        inspect.Signature(parameters).bind_partial(**keywords)
    except ValueError:
        return  # what is built in says no signature
    except TypeError as error:
        yield f"{block.page}:{node.lineno}: {ast.unparse(node.func)}: {error}"


# -- configurations --------------------------------------------------------------------------------------------------


def check_config(block: Block) -> Iterator[str]:
    """A config file, or some sections of one: the loader takes it."""
    text = block.text.strip()
    text = text if text.startswith("{") else f"{{{text}}}"
    try:
        settings = json.loads(text)
        if not settings.keys() & {"train_batch_size", "train_micro_batch_size_per_gpu", "elasticity"}:
            text = text.replace("{", '{"train_micro_batch_size_per_gpu": 1, ', 1)
        if "autotuning" in settings:
            read_lists(json.loads(text))
        else:
            parse(text, block.place)
    except ValueError as error:
        yield f"{block.place}: {error}"
    except ConfigError as error:
        yield str(error)


def check_toml(block: Block) -> Iterator[str]:
    """It is TOML."""
    try:
        tomllib.loads(block.text)
    except tomllib.TOMLDecodeError as error:
        yield f"{block.place}: {error}"


def check_c(block: Block) -> Iterator[str]:
    """A C compiler takes it; HDF5's and MPI's headers may lack."""
    done = subprocess.run(
        ["cc", "-fsyntax-only", "-x", "c", "-"], input=block.text, text=True, capture_output=True, check=False
    )
    if done.returncode and "No such file or directory" not in done.stderr:
        yield f"{block.place}: {done.stderr}"


# -- shell -----------------------------------------------------------------------------------------------------------


def check_shell(block: Block) -> Iterator[str]:
    """bash can read it."""
    done = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True, check=False)
    if done.returncode:
        yield f"{block.place}: {done.stderr.strip()}"


def check_options(block: Block) -> Iterator[str]:
    """Commands of mpispeed are there, with all options they are given; scripts of this repository too."""
    for number, line in lines_of_shell(block):
        try:
            simple = list(words_of(line))
        except ValueError as error:
            yield f"{block.page}:{number}: {error}"
            continue
        for words in simple:
            if OURS in words:
                at = words.index(OURS)
                try:
                    check_words(words[at + 1 :])
                except click.UsageError as error:
                    yield f"{block.page}:{number}: {' '.join(words[at:])}: {error.format_message()}"
            yield from (f"{block.page}:{number}: {mistake}" for mistake in check_scripts(words))


def lines_of_shell(block: Block) -> Iterator[tuple[int, str]]:
    r"""Lines, with those joined that end in `\`; of a diff those that come in."""
    begin, kept = 0, ""
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        if block.language == "diff":
            line = line[2:] if re.match(r"\+ (\w+=\S+ )*(mpispeed|srun|mpirun) ", line) else ""
        begin = begin if kept else number
        kept += line
        if not kept.endswith("\\"):
            yield begin, kept
            kept = ""
        else:
            kept += "\n"


def is_option(word: Any) -> bool:
    """True for a text that begins as an option; what is not given is no text."""
    return isinstance(word, str) and word.startswith("-")


JOBS = frozenset({"generate", "tune", "data"})
"""Commands that `mpispeed sbatch` takes in place of a script."""


def check_words(words: list[str]) -> None:
    """Parse the words of a command as far as options go.

    Raises:
        click.UsageError: No such command or option, or an option without its value.
    """
    command: click.Command = command_line
    is_job = False
    context = click.Context(command, info_name=OURS, **command.context_settings)
    while True:
        given, rest, _ = command.make_parser(context).parse_args(list(words))
        script = given.get("script")
        if "names" in given and is_option(script):  # of drills: options may stand behind the names, too
            again, _, _ = command.make_parser(context).parse_args([script, *given["arguments"]])
            script = again["names"]
        if is_option(script):
            raise click.NoSuchOption(script)
        if is_job and script in JOBS:
            check_words([script, *given["arguments"]])
        if not isinstance(command, click.Group) or not rest:
            return
        found = command.get_command(context, rest[0])
        if found is None:
            message = f"no command {rest[0]!r}"
            raise click.UsageError(message)
        command, words = found, rest[1:]
        is_job = rest[0] == "sbatch"
        context = click.Context(command, parent=context, info_name=rest[0], **command.context_settings)


SCRIPT = re.compile(r"(docs|benchmarks|tools|tests|slurm)/[\w/.-]+\.\w+")


def check_scripts(words: list[str]) -> Iterator[str]:
    """Files of this repository are there, and options behind a script of ours stand in its source, or in one beside."""
    for at, word in enumerate(words):
        if not SCRIPT.fullmatch(word) or (at and words[at - 1].startswith(("--json", "--output", "--picture", ">"))):
            continue
        path = ROOT / word
        if not path.exists():
            yield f"no file {word}"
        elif path.suffix == ".py" and "pytest" not in words:
            known = known_options(path)
            yield from (f"{word} has no option {option}" for option in options_behind(words[at + 1 :]) - known)
            return


def options_behind(words: list[str]) -> set[str]:
    """Long options among these words."""
    return {word.partition("=")[0] for word in words if re.match(r"--\w", word)}


def imported_beside(path: Path) -> Iterator[Path]:
    """Modules of the benchmarks and examples that a script imports by their bare names."""
    for name in re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.MULTILINE):
        for folder in ("benchmarks", "docs/examples"):
            yield from (ROOT / folder).rglob(f"{name}.py")


@cache
def known_options(path: Path) -> set[str]:
    """Options that the source of a script names, or modules beside it."""
    files = [path, *imported_beside(path)]
    texts = [file.read_text() for file in files]
    named = {name for text in texts for name in re.findall(r"[\"'](--[\w-]+)[\"']", text)}
    for text in texts:
        if 'f"--{' in text:  # options of a table: their names stand there without the two dashes
            named |= {f"--{name}" for name in re.findall(r"[\"']([\w-]+)[\"']", text)}
    return named | {"--deepspeed_config", "--deepspeed", "--help"}
