"""Detection of a foreign checkpoint's format, and its reading."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.foreign import folders, state_dicts, universal_files, zero_files
from mpispeed.ckpt.foreign.faults import ForeignMismatch, ForeignMissing
from mpispeed.ckpt.foreign.found import Found, ReadOptions

FORMS = ("auto", "safetensors", "torch", "zero", "universal")


def open_foreign(source: str | os.PathLike[str], tag: str | None = None, options: ReadOptions | None = None) -> Found:
    """Read a file or folder of another program. Elements are read when they are used.

    Args:
        source: a file of weights, a folder with shards, a folder of DeepSpeed checkpoints, or that of one tag.
        tag: checkpoint of a folder; None for the one that `latest` names.
        options: options for reading.

    Raises:
        ForeignMissing: it does not exist.
        NoForeignTag: a folder has neither weights nor a `latest`.
        ForeignMismatch, ForeignIncomplete, ForeignCorrupt, RefusedPickle: it cannot be converted.
    """
    path, options = Path(source), options or ReadOptions()
    with _translated(path):
        found = _open(path, tag, options)
        found.unwrap()
        found.check()
        return found


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Context that turns any error about unexpected content into one that names the source.

    Files hold trees of any values under any names: missing or wrong ones are found when they are used.
    """
    try:
        yield
    except CheckpointError:
        raise
    except OSError as failure:
        msg = f"{path} cannot be read: {failure}"
        raise ForeignMismatch(msg) from failure
    except Exception as failure:
        what = f"{type(failure).__name__}: {failure}"
        msg = f"{path} does not hold what a checkpoint of its kind holds, or is damaged: {what}"
        raise ForeignMismatch(msg) from failure


def _open(path: Path, tag: str | None, options: ReadOptions) -> Found:
    if options.form not in FORMS:
        msg = f"the format {options.form!r} is not known; it may be {', '.join(FORMS)}"
        raise ForeignMismatch(msg)
    if not path.is_file() and not path.is_dir():
        msg = f"{path} is no ordinary file or folder" if path.exists() else f"{path} does not exist"
        raise ForeignMissing(msg)
    form = _file_form(path) if path.is_file() else _folder_form(path, tag, options.form)
    if options.form not in ("auto", form):
        form = options.form
    if form in state_dicts.SUFFIXES:
        if tag is not None:
            path = folders.resolve(path, tag)
        return state_dicts.read(path, form, options)
    if path.is_file():
        msg = f"{path} is a file; a {form} checkpoint is a folder"
        raise ForeignMismatch(msg)
    folder = folders.resolve(path, tag, form == "universal")
    if form == "universal":
        if not folders.is_universal(folder):
            msg = f"{folder} has no folder `zero` with parameters; it is no universal checkpoint"
            raise ForeignMissing(msg)
        return universal_files.read(folder, options)
    return zero_files.read(folder, options)


def _file_form(path: Path) -> str:
    for form, suffixes in state_dicts.SUFFIXES.items():
        if path.suffix.lower() in suffixes:
            return form
    with path.open("rb") as file:
        start = file.read(9)
    return "safetensors" if start[8:] == b"{" else "torch"


def _folder_form(path: Path, tag: str | None, asked: str) -> str:
    """The format of a folder, by its files."""
    if asked != "auto":
        return asked
    has_tags = tag is not None or any((path / name).is_file() for name in (folders.LATEST, folders.LATEST_UNIVERSAL))
    if not has_tags and not folders.is_tag_folder(path):
        for form in state_dicts.SUFFIXES:
            if state_dicts.shards(path, form):
                return form
    return "universal" if folders.is_universal(folders.resolve(path, tag)) else "zero"
