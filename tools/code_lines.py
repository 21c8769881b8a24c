"""Code lines of source and tests, of one commit or several: lines with tokens other than docstrings and comments.

    python tools/code_lines.py [COMMIT ...]

Without a commit the files of the working tree are counted. Cython counts by the same rule, without its docstrings.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "tools", "benchmarks", "docs")
_LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """Lines of a Python file on which code stands."""
    lines: set[int] = set()
    begins = True  # the next string would be a docstring, or a text that does nothing
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _LAYOUT:
            begins = begins or token.type in (tokenize.NEWLINE, tokenize.INDENT)
            continue
        if not (begins and token.type == tokenize.STRING):
            lines.update(range(token.start[0], token.end[0] + 1))
        begins = False
    return len(lines)


def files_of(commit: str) -> dict[str, str]:
    """Path -> text of the Python files of a commit; of the working tree for ""."""
    command = (
        ["git", "ls-tree", "-r", "--name-only", commit] if commit else ["git", "ls-files", "-co", "--exclude-standard"]
    )
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    wanted = [path for path in listed if path.endswith(".py") and path.split("/")[0] in FOLDERS]
    if not commit:
        return {path: (ROOT / path).read_text() for path in wanted if (ROOT / path).is_file()}
    return {
        path: subprocess.run(
            ["git", "show", f"{commit}:{path}"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for path in wanted
    }


def main() -> None:
    """Print a row per folder and a column per commit."""
    commits = sys.argv[1:] or [""]
    table: dict[str, Counter[str]] = {}
    for commit in commits:
        for path, text in files_of(commit).items():
            counts = table.setdefault(path.split("/")[0], Counter())
            counts[commit] += code_lines(text)
            counts[f"{commit} files"] += 1
    print(f"{'folder':12}" + "".join(f"{commit[:12] or 'now':>14}{'files':>7}" for commit in commits))
    for folder, counts in sorted(table.items()):
        print(f"{folder:12}" + "".join(f"{counts[commit]:14}{counts[f'{commit} files']:7}" for commit in commits))


if __name__ == "__main__":
    main()
