"""`mpispeed h5`: any HDF5 file that this package writes, and plain trees of others. Needs neither torch nor MPI.

Exit codes: 0 fine, 2 usage, not found, no HDF5, or a file of which nothing can be verified, 3 damaged, 4 unfinished.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from mpispeed.base.errors import CheckpointError, MpispeedError
from mpispeed.base.plain import printable
from mpispeed.base.units import format_bytes
from mpispeed.ckpt.format.errors import CorruptCheckpoint
from mpispeed.ckpt.tools import tree
from mpispeed.cli import h5_kinds
from mpispeed.cli.ckpt_report import as_json_option, print_table, reported, say
from mpispeed.cli.h5_kinds import Found, Verdict

_EXIT_CODES = {h5_kinds.OK: 0, h5_kinds.UNKNOWN: 2, h5_kinds.DAMAGED: 3, h5_kinds.UNFINISHED: 4}
_MOST_SIGNS = 160
_MOST_OBJECTS = 200
_SUFFIXES = (".h5", ".hdf5")

_paths = click.argument("paths", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))


@click.group()
def h5() -> None:
    """Tell what HDF5 files are, show them, and compare them with their checksums.

    The attributes `format` and `version` of the root say what a file is. A folder stands for its files *.h5 and
    *.hdf5, also those in folders below. Links inside of files are never followed.
    """


@h5.command("ls")
@_paths
@as_json_option
def ls(paths: tuple[Path, ...], as_json: bool) -> None:
    """One line per file: what it is, its version, size, and contents in short."""
    rows = []
    for path in _files(paths, as_json):
        row: dict[str, Any] = {"file": str(path), "kind": "", "version": "", "bytes": path.stat().st_size}
        try:
            found = h5_kinds.find(path)
            row |= {"kind": found.title, "version": found.version, "contents": h5_kinds.described(found)}
            _warn(found)
        except CheckpointError as failure:
            row |= {"kind": "unreadable", "contents": {"problem": str(failure)}}
        rows.append(row)
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    else:
        cells = [(row["file"], row["kind"], row["version"] or "-", format_bytes(row["bytes"]),
                  printable(h5_kinds.in_short(row["contents"]), _MOST_SIGNS)) for row in rows]  # fmt: skip
        print_table(("file", "kind", "version", "size", "contents"), cells)
    if any(row["kind"] == "unreadable" for row in rows):
        click.get_current_context().exit(2)


@h5.command("show")
@_paths
@click.option("--all", "wants_all", is_flag=True, help=f"All objects, not the first {_MOST_OBJECTS}.")
@as_json_option
def show(paths: tuple[Path, ...], wants_all: bool, as_json: bool) -> None:
    """What files are, their settings or series, and their tree with shapes, types, sizes and attributes.

    Works on HDF5 files of other programs, too, and on damaged ones as far as they go. What leads elsewhere (links,
    elements in other files, virtual datasets) is named and not followed.
    """
    shown, code = [], 0
    with reported(as_json):
        for number, path in enumerate(_files(paths, as_json)):
            found, is_damaged = _found(path)
            told = h5_kinds.described(found)
            is_unread = "problem" in told and not found.refusal
            code = max(code, 3 if is_damaged or is_unread else 2 if found.refusal else 0)
            _warn(found)
            if as_json:
                row = {"file": str(path), "kind": found.title, "format": found.form, "version": found.version}
                shown.append({**row, "contents": told, "tree": list(tree.rows_of(path))})
            else:
                click.echo() if number else None
                _print(found, told)
                _print_tree(tree.rows_of(path), None if wants_all else _MOST_OBJECTS)
    if as_json:
        click.echo(json.dumps(shown, indent=1))
    click.get_current_context().exit(code)


def _found(path: Path) -> tuple[Found, bool]:
    """What a file is, and True if its root is too damaged to say so, but not to be walked through.

    Raises:
        CheckpointError: as `h5_kinds.find`, where there is nothing to show.
    """
    try:
        return h5_kinds.find(path), False
    except CorruptCheckpoint as failure:
        next(tree.rows_of(path))  # raises for what HDF5 cannot open
        return Found(path, None, "", "", str(failure)), True


@h5.command("verify")
@_paths
@click.option("--quick", "is_quick", is_flag=True, help="Layout, sizes and manifests only; no elements where possible.")
@as_json_option
def verify(paths: tuple[Path, ...], is_quick: bool, as_json: bool) -> None:
    """Compare files with their checksums, each as its own tool does; name what is damaged.

    A file of a checkpoint stands for its whole tag, because checksums of files are in its manifest. Results of generate
    and exported weights have no checksums: their tables and shapes are compared with each other. Of HDF5 files of other
    programs nothing is known, which is exit code 2.
    """
    rows: list[dict[str, Any]] = []
    done: dict[Path, Verdict] = {}
    for path in _files(paths, as_json):
        verdict = _verified(path, is_quick, done)
        rows.append({"file": str(path), **vars(verdict)})
    worst = max((_EXIT_CODES[row["status"]] for row in rows), key=[0, 2, 4, 3].index)
    if as_json:
        click.echo(json.dumps({"ok": worst == 0, "files": rows}, indent=1))
    for row in [] if as_json else rows:
        say(f"{row['file']}: {row['status']}; {row['said']}", err=row["status"] != h5_kinds.OK)
        for problem in row["problems"]:
            say(f"  {problem}", err=True)
    click.get_current_context().exit(worst)


def _verified(path: Path, is_quick: bool, done: dict[Path, Verdict]) -> Verdict:
    """The verdict on a file; files of one checkpoint have theirs in common, which `done` keeps by folder."""
    try:
        found = h5_kinds.find(path)
        _warn(found)
        if found.kind is None:
            said = found.refusal or "no file of mpispeed, so there is nothing to compare it with"
            return Verdict(h5_kinds.UNKNOWN, said)
    except CorruptCheckpoint as failure:
        return Verdict(h5_kinds.DAMAGED, "layout", [str(failure)])
    except CheckpointError as failure:
        return Verdict(h5_kinds.UNKNOWN, str(failure))
    place = h5_kinds.shared_folder(found) or path
    if place not in done:
        try:
            done[place] = found.kind.verify(path, is_quick)
        except MpispeedError as failure:  # it says that it is of this kind, and cannot be read as such
            done[place] = Verdict(h5_kinds.DAMAGED, "layout", [str(failure)])
        except OSError as failure:
            done[place] = Verdict(h5_kinds.UNKNOWN, str(failure))
    return done[place]


def _files(paths: Sequence[Path], as_json: bool) -> list[Path]:
    """Files in the order given; those of a folder by name. A file that is not there is one message for all."""
    found: list[Path] = []
    with reported(as_json):
        for path in paths:
            if path.is_dir():
                inner = sorted(each for suffix in _SUFFIXES for each in path.rglob(f"*{suffix}") if _is_plain(each))
                if not inner:
                    msg = f"{path} is a folder without files *.h5 or *.hdf5"
                    raise CheckpointError(msg)
                found += inner
            elif not path.exists():
                msg = f"{path} is not there"
                raise CheckpointError(msg)
            else:
                found.append(path)
    return list(dict.fromkeys(found))


def _is_plain(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


def _warn(found: Found) -> None:
    for sentence in filter(None, (found.refusal, found.warning)):
        say(f"warning: {sentence}", err=True)


def _print(found: Found, told: dict[str, Any]) -> None:
    version = f" {found.version}" if found.version else ""
    say(f"{found.path}: {found.title}{version}, {format_bytes(found.path.stat().st_size)}")
    if found.kind is None and not found.refusal:
        said = f"its format is {found.form!r:.60}" if found.form else "it does not say what it is"
        say(f"no file of mpispeed ({said}); this is its plain tree")
    lines = h5_kinds.as_lines(told)
    width = min(24, max((len(label) for label, _ in lines), default=0))
    for label, text in lines:
        say(f"{printable(label, 40):<{width}}  {printable(text, _MOST_SIGNS)}")
    if told.get("series"):
        click.echo()
        heads = tuple(told["series"][0])
        print_table(heads, [tuple(_cell(row[name]) for name in heads) for row in told["series"]])
    if found.kind is not None:
        say(f"more: {found.kind.see} {h5_kinds.shared_folder(found) or found.path}")
    click.echo()


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _print_tree(rows: Iterator[dict[str, Any]], most: int | None) -> None:
    left = 0
    for number, row in enumerate(rows):
        if most is not None and number >= most:
            left += 1
            continue
        say(f"{printable(row['path'], _MOST_SIGNS)}  {tree.text_of(row)}")
        for name, value in row["attributes"].items():
            say(f"  @{printable(name, 60)} = {printable(json.dumps(value, ensure_ascii=False), _MOST_SIGNS)}")
    if left:
        say(f"and {left} more objects; all with --all")
