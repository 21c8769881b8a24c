"""`ckpt prune` and `ckpt latest`: removal of old checkpoints, and the tag to load."""

from __future__ import annotations

import contextlib
import time
import uuid as uuids
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mpispeed.base.errors import CheckpointError
from mpispeed.base.files import sync_folder
from mpispeed.ckpt.format import manifest as manifests
from mpispeed.ckpt.format import schema, tags
from mpispeed.ckpt.format.errors import NoCheckpoint, TagNotFound
from mpispeed.ckpt.format.tags import TagEntry

#: files of a save that is under way change more often
_SAVE_TAKES_NS = 3600 * 10**9


def prune(
    folder: Path, *, keep_last: int = 0, keep_every: int = 0, recover: bool = False, dry_run: bool = False
) -> list[dict[str, Any]]:
    """Remove old checkpoints, and leftovers of saves that were killed.

    A leftover folder is removed if nothing in it changed since the newest complete checkpoint was finished; a younger
    one may belong to a save under way. The previous content of a tag whose overwriting was interrupted is never removed
    while it is the only copy of the tag.

    Args:
        folder: folder of checkpoints.
        keep_last: so many complete tags that were saved last stay, with the one that `latest` names; 0 keeps all.
        keep_every: tags whose step is a multiple stay in any case; 0 for none.
        recover: restore the previous content of an interrupted overwrite under its tag. Not while a save is under way.
        dry_run: change nothing.

    Returns:
        One row per folder, with the keys tag, folder, step, bytes, action ("keep", "remove" or "recover") and reason.

    Raises:
        TagNotFound: there is no such folder.
        CheckpointError: a number is negative, or only `keep_every` was given.
        OSError: the file system refuses.
    """
    if not folder.is_dir():
        msg = f"{folder} is no folder"
        raise TagNotFound(msg)
    if keep_last < 0 or keep_every < 0 or (keep_every and not keep_last):
        msg = (
            f"keep_last is {keep_last} and keep_every {keep_every}; keep at least 1 of the newest when tags are pruned"
        )
        raise CheckpointError(msg)
    entries = tags.list_tags(folder)
    recovered = _recoverable(entries) if recover else []
    whole = [entry for entry in entries if entry.status == "ok"] + recovered
    plan = _unwanted(whole, keep_last, keep_every) | _leftovers(entries, _newest_change(whole))
    rows = []
    for entry in entries:
        if entry in recovered:
            rows.append(_row(entry, "recover", "the tag is missing, this is its previous content"))
        else:
            reason = plan.get(entry.path, "")
            rows.append(_row(entry, "remove" if reason else "keep", reason or _why_kept(entry)))
    if not dry_run:
        _carry_out(folder, recovered, [folder / row["folder"] for row in rows if row["action"] == "remove"])
    return rows


def _carry_out(folder: Path, recovered: Iterable[TagEntry], unwanted: Iterable[Path]) -> None:
    for entry in recovered:
        entry.path.rename(folder / entry.tag)
    sync_folder(folder)
    tags.remove_all(unwanted)


def _recoverable(entries: Iterable[TagEntry]) -> list[TagEntry]:
    """One old copy of each tag that is missing."""
    return list({entry.tag: entry for entry in entries if entry.status == "recoverable"}.values())


def _unwanted(whole: Iterable[TagEntry], keep_last: int, keep_every: int) -> dict[Path, str]:
    """Folder -> reason of removal, for complete checkpoints."""
    if not keep_last:
        return {}
    return {entry.path: f"not among the last {keep_last}" for entry in tags.beyond(whole, keep_last, keep_every)}


def _leftovers(entries: Iterable[TagEntry], newest_ns: int | None) -> dict[Path, str]:
    if newest_ns is None:
        return {}
    hidden = [entry for entry in entries if entry.path.name.startswith(".") and entry.status != "recoverable"]
    return {
        entry.path: "left over of a save that was killed or replaced"
        for entry in hidden
        if _last_change(entry.path) < newest_ns
    }


def _newest_change(whole: Iterable[TagEntry]) -> int | None:
    """Time when the newest complete checkpoint was finished; None without one.

    A time in the future comes from a wrong clock: then a past one is returned, so that a save under way is not taken
    for an older one.
    """
    newest = max(((entry.path / schema.MANIFEST_FILE).stat().st_mtime_ns for entry in whole), default=None)
    now = time.time_ns()
    return now - _SAVE_TAKES_NS if newest is not None and newest > now else newest


def _last_change(path: Path) -> int:
    changes = [path.lstat().st_mtime_ns]
    for found in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # of a save that is under way
            changes.append(found.lstat().st_mtime_ns)
    return max(changes)


def _why_kept(entry: TagEntry) -> str:
    if entry.status == "recoverable":
        return "all there is of its tag; --recover gives it the tag back"
    if entry.is_latest:
        return "named by latest"
    if entry.path.name.startswith("."):
        return "younger than the newest complete checkpoint: may be a save under way"
    return entry.problem if entry.status == "ok" else entry.status


def _row(entry: TagEntry, action: str, reason: str) -> dict[str, Any]:
    return {
        "tag": entry.tag,
        "folder": entry.path.name,
        "step": entry.manifest.global_step if entry.manifest else None,
        "bytes": entry.size_bytes,
        "action": action,
        "reason": reason,
    }


def latest(folder: Path) -> str:
    """The tag that `latest` names, which exists.

    Raises:
        NoCheckpoint: there is no `latest`.
        TagNotFound: it names a tag that does not exist.
        CorruptCheckpoint: it is damaged.
    """
    path, tag = tags.resolve(folder, tags.read_latest(folder) or _none(folder))
    manifests.read(path)
    return tag


def _none(folder: Path) -> str:
    msg = f'{folder} has no file "{schema.LATEST_FILE}"; set one with --set TAG'
    raise NoCheckpoint(msg)


def set_latest(folder: Path, tag: str) -> None:
    """Make `latest` name a complete checkpoint.

    Raises:
        TagNotFound: there is no such tag.
        IncompleteCheckpoint: it was never committed.
        CorruptCheckpoint: a file is missing or of another size, or the manifest is damaged.
        CheckpointError: it is no tag, or has to be recovered first.
        OSError: the file system refuses.
    """
    path, name = tags.resolve(folder, tags.check_tag(tag))
    manifests.check_sizes(path, manifests.read(path))
    if path.name != name:
        msg = f"the tag {tag!r} was being overwritten when its job ended; first run `ckpt prune --recover` on {folder}"
        raise CheckpointError(msg)
    tags.write_latest(folder, name, uuids.uuid4().hex)
