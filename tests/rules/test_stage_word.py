"""ZeRO stages are known to config and plan: the engine may show one, but not decide by it; no other floor has one.

A pipeline has stages too. Its floor is free to say so; elsewhere they are called in ways that name no stage of ZeRO.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "mpispeed"
PIPELINE = ("pipe/", "cli/plan_schedule.py")
# To stage an environment is to copy it to the nodes of a job.
COPIES = ("staging/", "launch/sbatch.py")
# delegation.py is the table of getters by which users of DeepSpeed ask for their stage; a search tries stages.
DECIDE = (*PIPELINE, *COPIES, "config/", "plan/", "engine/delegation.py", "tuning/")
# ckpt/foreign reads files of DeepSpeed, which have the word in names of classes and entries.
SHOW = (*DECIDE, "engine/", "compat/", "cli/", "ckpt/foreign/", "lightning.py")
# Those of a pipeline: stages, num_stages, stage_id, is_first_stage, is_last_stage, StageError.
STAGE = re.compile(r"(?<!first_)(?<!last_)stage(?!d|_in|s\b|_id\b|error\b)", re.IGNORECASE)


def docstring_lines(text):
    """Lines that belong to docstrings: prose may name stages to explain itself to users of DeepSpeed."""
    lines = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.update(range(first.lineno, first.end_lineno + 1))
    return lines


def uses_of_the_word(text):
    """(line, token) of identifiers and strings in code that say "stage"."""
    prose = docstring_lines(text)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if (
            token.type in (tokenize.NAME, tokenize.STRING)
            and STAGE.search(token.string)
            and token.start[0] not in prose
        ):
            yield token.start[0], token.string


def decisions_by_stage(text):
    """Lines that branch on a stage or look something up by it."""
    for node in ast.walk(ast.parse(text)):
        tested = {ast.If: "test", ast.IfExp: "test", ast.While: "test", ast.Match: "subject", ast.Subscript: "slice"}
        part = (
            getattr(node, tested[type(node)])
            if type(node) in tested
            else node
            if isinstance(node, ast.Compare)
            else None
        )
        for name in ast.walk(part) if part is not None else ():
            word = name.id if isinstance(name, ast.Name) else name.attr if isinstance(name, ast.Attribute) else ""
            if STAGE.search(word):
                yield f"line {node.lineno}: {ast.unparse(part)}"


def found_outside(allowed, search):
    """What `search` finds in modules whose path does not begin with one of the allowed ones."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if not name.startswith(allowed):
            yield from (f"{name}: {hit}" for hit in search(path.read_text()))


def test_no_floor_below_the_engine_knows_stages():
    found = list(found_outside(SHOW, uses_of_the_word))
    assert not found, f"{found}: take placements as arguments instead"


def test_only_the_plan_decides_by_stage():
    found = list(found_outside(DECIDE, decisions_by_stage))
    assert not found, f"{found}: ask the plan's placements instead"


def test_the_check_sees_names_and_strings_but_not_prose():
    text = '"""Stage 1."""\nx = 1  # stage\nzero_stage = {"stage": x}\n'
    assert [token for _, token in uses_of_the_word(text)] == ["zero_stage", '"stage"']
    assert not list(uses_of_the_word("num_stages = grid.stages(stage_id, grid.is_last_stage)\n"))


@pytest.mark.parametrize(
    "text", ["if plan.stage: pass", "x = 1 if stage > 1 else 2", "y = table[plan.stage]", "z = stage == 2"]
)
def test_the_check_sees_decisions(text):
    assert list(decisions_by_stage(text))
    assert not list(decisions_by_stage('raise_error(f"not at stage {plan.stage}")'))
