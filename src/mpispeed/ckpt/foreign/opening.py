"""Finding out what a foreign checkpoint is, and reading it."""

from __future__ import annotations

import os
from pathlib import Path

from mpispeed.ckpt.foreign import folders, state_dicts, universal_files, zero_files
from mpispeed.ckpt.foreign.faults import ForeignMismatch, ForeignMissing
from mpispeed.ckpt.foreign.found import Found, ReadOptions

FORMS = ("auto", "safetensors", "torch", "zero", "universal")


def open_foreign(source: str | os.PathLike[str], tag: str | None = None, options: ReadOptions | None = None) -> Found:
    """What a file or folder of another program holds. Elements are read when they are used.

    Args:
        source: a file of weights, a folder with shards, a folder of DeepSpeed checkpoints, or that of one tag.
        tag: which checkpoint of a folder; None for the one that `latest` names.
        options: how to read.

    Raises:
        ForeignMissing: it does not exist.
        NoForeignTag: a folder has neither weights nor a `latest`.
        ForeignMismatch, ForeignIncomplete, ForeignCorrupt, RefusedPickle: it cannot be converted.
    """
    path, options = Path(source), options or ReadOptions()
    if options.form not in FORMS:
        msg = f"the format {options.form!r} is not known; it may be {', '.join(FORMS)}"
        raise ForeignMismatch(msg)
    if not path.exists():
        msg = f"{path} does not exist"
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
    """The form of a folder by what lies in it."""
    if asked != "auto":
        return asked
    has_tags = tag is not None or any((path / name).is_file() for name in (folders.LATEST, folders.LATEST_UNIVERSAL))
    if not has_tags and not folders.is_tag_folder(path):
        for form in state_dicts.SUFFIXES:
            if state_dicts.shards(path, form):
                return form
    return "universal" if folders.is_universal(folders.resolve(path, tag)) else "zero"
