"""Tags: listing, publication and removal of the checkpoints of a folder, its file `latest`, and homes of ranks.

A home is a group of ranks that share a folder. If all nodes share a folder of checkpoints, so do all ranks of a node.
With node-local storage every node has its own, and ranks of one node that pass different folders have a home each.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import errno
import hashlib
import logging
import os
import re
import shutil
import socket
import stat
import uuid as uuids
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import CheckpointError, ConfigError
from mpispeed.base.files import sync_folder
from mpispeed.base.log import once
from mpispeed.base.plain import printable, read_plain
from mpispeed.base.registry import suggest
from mpispeed.base.units import format_list
from mpispeed.ckpt.format import manifest as manifests
from mpispeed.ckpt.format import schema
from mpispeed.ckpt.format.errors import CorruptCheckpoint, IncompleteCheckpoint, NoCheckpoint, TagMismatch, TagNotFound
from mpispeed.ckpt.format.manifest import Manifest

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm


log = logging.getLogger(__name__)

#: leaves room for the prefix and suffix of work folders within the usual 255 bytes of a file name
_TAG_BYTES = 200
#: more than any tag and its digest take, whoever wrote the file
_LATEST_BYTES = 16 << 10
#: the longest name that file systems take
_NAME_BYTES = 255
_WORK_FOLDER = re.compile(r"^\.(?P<tag>.+)\.(?P<role>tmp|old)-(?P<uuid>[0-9a-f]{32})$")
_SHOWN_TAGS = 10
_CLOCKS_DIFFER = datetime.timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class TagEntry:
    """One row of a listing.

    Attributes:
        tag: the tag.
        path: its folder.
        status: "ok", "partial" (never committed), "corrupt" (a file is missing or of another size) or
            "recoverable" (the old copy of an overwrite that was interrupted).
        problem: the reason why the status is not "ok", or a remark about a tag that is.
        manifest: the tag's manifest, if it can be read.
        is_latest: True if `latest` names it.
    """

    tag: str
    path: Path
    status: str
    problem: str = ""
    manifest: Manifest | None = None
    is_latest: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of all its files on disk; files that another job removes meanwhile do not count."""
        total = 0
        for where, _, names in os.walk(self.path):
            for name in names:
                with contextlib.suppress(OSError):
                    status = os.lstat(os.path.join(where, name))  # noqa: PTH118 - names need not be text
                    total += status.st_size if stat.S_ISREG(status.st_mode) else 0
        return total


def check_tag(tag: str) -> str:
    """Return `tag` if it can name a folder and be read back from `latest`.

    Raises:
        CheckpointError: says what is wrong with it.
    """
    problem = ""
    if not tag or tag != tag.strip() or not tag.isprintable():
        problem = "is empty, starts or ends with a space, or has control characters"
    elif tag.startswith(".") or "/" in tag:
        problem = 'starts with "." or contains "/"'
    elif tag.startswith(schema.LATEST_FILE):
        problem = f'starts with "{schema.LATEST_FILE}", which is the file that names the newest tag'
    elif len(tag.encode(errors="replace")) > _TAG_BYTES:
        problem = f"is longer than {_TAG_BYTES} bytes"
    if problem:
        msg = f"checkpoint tag {tag!r} {problem}; choose another tag"
        raise CheckpointError(msg)
    return tag


def check_same_tag(comm: Comm, tag: str, mode: str) -> str:
    """Compare the tags of all ranks and return rank 0's, which is the one to use.

    Args:
        comm: all ranks that save.
        tag: this rank's tag.
        mode: "ignore", "warn" or "fail", in any case.

    Collective over: comm.

    Raises:
        ConfigError: `mode` is another word.
        TagMismatch: tags differ and `mode` is "fail"; raised on every rank.
    """
    word = mode.lower()
    if word not in ("ignore", "warn", "fail"):
        msg = f"checkpoint.tag_validation is {mode!r}; it may be Ignore, Warn or Fail"
        raise ConfigError(msg)
    if word == "ignore":
        return str(comm.share(tag))
    tags = [str(other) for other in comm.gather_objects(tag)]
    odd = {rank: other for rank, other in enumerate(tags) if other != tags[0]}
    if odd:
        some = ", ".join(f"rank {rank} has {other!r}" for rank, other in list(odd.items())[:_SHOWN_TAGS])
        msg = f"ranks save under different tags: rank 0 has {tags[0]!r}, {some}; pass the same tag everywhere"
        if word == "fail":
            raise TagMismatch(msg)
        if comm.rank == 0:
            log.warning("%s; the tag of rank 0 is used", msg)
    return tags[0]


def last_serial(folder: Path) -> int:
    """The highest serial of the checkpoints in a folder; 0 without any."""
    try:
        return max((manifests.serial_of(path) for path in folder.iterdir() if path.is_dir()), default=0)
    except (FileNotFoundError, NotADirectoryError):
        return 0


def read_latest(folder: Path) -> str | None:
    """The tag that `latest` names; None when there is no such file.

    Raises:
        CorruptCheckpoint: it is no file, is empty, or its digest line does not fit.
        CheckpointError: it may not be read.
    """
    path = folder / schema.LATEST_FILE
    try:
        text = read_plain(path, _LATEST_BYTES).decode()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as failure:
        msg = f"{path} cannot be read: {failure.strerror}"
        raise CheckpointError(msg) from failure
    except (OSError, UnicodeDecodeError) as failure:
        msg = f"{path} is damaged: {failure}.{_valid_tags(folder)}"
        raise CorruptCheckpoint(msg) from failure
    tag = text.strip().partition("\n")[0].strip()
    # a file of one line, as DeepSpeed or a person writes it, has no digest
    what = "" if tag else "it is empty"
    if len(tag.encode()) > _NAME_BYTES:
        what = f"what it names is longer than {_NAME_BYTES} bytes"
    elif text.strip() != tag and text != _latest_text(tag):
        what = "its digest line does not match the tag"
    if what:
        msg = f"{path} is damaged: {what}.{_valid_tags(folder)} Pass a tag or write one into the file"
        raise CorruptCheckpoint(msg)
    return tag


def write_latest(folder: Path, tag: str, uuid: str) -> None:
    """Make `latest` name `tag`, at once or not at all.

    Raises:
        OSError: the file system refuses.
    """
    temporary = folder / f".{schema.LATEST_FILE}.tmp-{uuid}"
    try:
        manifests.write_durably(temporary, _latest_text(tag))
        temporary.rename(folder / schema.LATEST_FILE)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(folder)


def _latest_text(tag: str) -> str:
    return f"{tag}\nblake2b:{hashlib.blake2b(tag.encode(), digest_size=16).hexdigest()}\n"


def list_tags(folder: Path) -> list[TagEntry]:
    """All checkpoints of a folder, work folders of unfinished saves included, by step and time.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    try:
        latest = read_latest(folder)
    except CheckpointError:
        latest = None
    return _scan(folder, latest)


def _scan(folder: Path, latest: str | None) -> list[TagEntry]:
    entries = [_entry(path, latest) for path in folder.iterdir() if path.is_dir()]
    found = [entry for entry in entries if entry is not None]
    return sorted(found, key=_age)


def _age(entry: TagEntry) -> tuple[bool, int, str, str]:
    known = entry.manifest
    return (known is None, known.global_step if known else 0, known.created if known else "", entry.path.name)


def _entry(path: Path, latest: str | None) -> TagEntry | None:
    work = _WORK_FOLDER.match(path.name)
    if work is None and (path.name.startswith(".") or not _looks_like_checkpoint(path)):
        return None
    tag = work["tag"] if work else path.name
    if work and work["role"] == "old" and (path.parent / tag).exists():
        return TagEntry(tag, path, "partial", "left over from an overwrite")
    try:
        known = manifests.read(path)
        manifests.check_sizes(path, known)
    except IncompleteCheckpoint as failure:
        return TagEntry(tag, path, "partial", str(failure))
    except CheckpointError as failure:
        # what was replaced or removed loses its files one by one, and a job may end before the last is gone
        is_left_over = work is not None and work["role"] == "tmp"
        return TagEntry(tag, path, "partial" if is_left_over else "corrupt", str(failure))
    if work and work["role"] == "tmp" and known.uuid != work["uuid"]:
        return TagEntry(tag, path, "partial", "left over from an overwrite", known)
    if work and work["role"] == "old":
        return TagEntry(tag, path, "recoverable", "never moved to its place", known, is_latest=tag == latest)
    if work:
        return TagEntry(tag, path, "partial", "never moved to its place", known)
    ahead = f"it says that it was saved {known.created}, which is yet to come: a clock is or was wrong"
    return TagEntry(tag, path, "ok", ahead if _is_ahead(known) else "", known, is_latest=tag == latest)


def _is_ahead(manifest: Manifest) -> bool:
    """True if the manifest's time is later than now by more than clocks of nodes differ."""
    try:
        created = datetime.datetime.fromisoformat(manifest.created)
        return created > datetime.datetime.now(datetime.timezone.utc) + _CLOCKS_DIFFER
    except (ValueError, TypeError, OverflowError):  # as others may have written it
        return False


def _looks_like_checkpoint(path: Path) -> bool:
    return any((path / name).exists() for name in (schema.MANIFEST_FILE, schema.MODEL_FILE, schema.STATE_FILE))


def resolve(folder: Path, tag: str | None) -> tuple[Path, str]:
    """The folder and the name of the tag to open.

    `folder` may be the tag's own folder when `tag` is None. The old copy of an overwrite that was
    interrupted between its two renames is found under its tag.

    Raises:
        NoCheckpoint: no tag was given and there is no `latest`.
        TagNotFound: there is no such tag; lists those there are.
        CorruptCheckpoint: `latest` is damaged.
    """
    if tag is None and _looks_like_checkpoint(folder):
        work = _WORK_FOLDER.match(folder.name)
        return folder, work["tag"] if work else folder.name
    wanted = read_latest(folder) if tag is None else str(tag)
    if wanted is None:
        what = f'no file "{schema.LATEST_FILE}" in it' if folder.is_dir() else "no such folder"
        msg = f"nothing to load from {folder}: {what}.{_valid_tags(folder)}"
        raise NoCheckpoint(msg)
    is_name = wanted not in ("", ".", "..") and "/" not in wanted and "\0" not in wanted
    is_name = is_name and len(wanted.encode(errors="replace")) <= _NAME_BYTES
    if is_name and (folder / wanted).is_dir():
        return folder / wanted, wanted
    old = _interrupted(folder, wanted)
    if old is not None:
        log.warning("tag %r was being overwritten when its job ended; its previous content %s is used", wanted, old)
        return old, wanted
    if is_name and (folder / wanted).is_dir():  # its overwriting ended between these looks
        return folder / wanted, wanted
    source = f'named by "{schema.LATEST_FILE}"' if tag is None else "asked for"
    msg = f"checkpoint tag {wanted!r}, {source}, is not in {folder}.{_valid_tags(folder, wanted)}"
    raise TagNotFound(msg)


def _interrupted(folder: Path, tag: str) -> Path | None:
    for path in sorted(folder.glob(".*.old-*")):
        work = _WORK_FOLDER.match(path.name)
        if work and work["tag"] == tag:
            with contextlib.suppress(CheckpointError):
                manifests.check_sizes(path, manifests.read(path))
                return path
    return None


def _valid_tags(folder: Path, wanted: str = "") -> str:
    if not folder.is_dir():
        return ""
    tags = [entry.tag for entry in _scan(folder, None) if entry.status in ("ok", "recoverable")]
    if not tags:
        return " It holds no complete checkpoint."
    near = suggest(wanted, tags, _SHOWN_TAGS) if wanted else []
    rest = [tag for tag in reversed(tags) if tag not in near]
    shown = format_list(map(printable, near + rest), _SHOWN_TAGS)
    return f" Complete tags, {'nearest' if near else 'newest'} first: {shown}."


def publish(work: Path, final: Path, uuid: str, *, overwrite: bool) -> None:
    """Move a finished work folder to its place.

    An existing tag stays complete and readable until the new one replaces it. The two are exchanged atomically; where
    the file system cannot do that, the old one first gets a name by which it is found while the tag is missing.

    Raises:
        CheckpointError: the place is taken and `overwrite` is False.
        OSError: the file system refuses; what was there before is still there.
    """
    is_taken = final.exists() or final.is_symlink()
    if is_taken:
        refuse_taken(final, overwrite=overwrite)
    if is_taken and _exchanged(work, final):
        sync_folder(final.parent)
        shutil.rmtree(work, ignore_errors=True)  # what was there before
    else:
        _move(work, final, uuid, is_taken=is_taken)
        sync_folder(final.parent)
    for stale in _old_copies(final):
        shutil.rmtree(stale, ignore_errors=True)


def _exchanged(work: Path, final: Path) -> bool:
    try:
        return exchange(work, final)
    except FileNotFoundError:  # another job has removed it meanwhile
        return False


def _move(work: Path, final: Path, uuid: str, *, is_taken: bool) -> None:
    old = final.with_name(f".{final.name}.old-{uuid}")
    if is_taken:
        with contextlib.suppress(FileNotFoundError):  # another job has removed it meanwhile
            final.rename(old)
    try:
        # renaming onto a folder with content fails, so a second job's tag is never mixed with ours
        work.rename(final)
    except OSError:
        if old.exists() and not final.exists():
            old.rename(final)
        raise


def _old_copies(final: Path) -> Iterable[Path]:
    for path in list(final.parent.glob(".*.old-*")):
        work = _WORK_FOLDER.match(path.name)
        if work and work["tag"] == final.name:
            yield path


def refuse_taken(final: Path, *, overwrite: bool) -> None:
    """Refuse a tag that exists and may not be replaced.

    Raises:
        CheckpointError: it exists and `overwrite` is False, or what is there is no checkpoint.
    """
    is_own = not final.is_symlink() and final.is_dir() and (_looks_like_checkpoint(final) or not any(final.iterdir()))
    if (final.exists() or final.is_symlink()) and not is_own:
        msg = f"{final} is there and is no checkpoint; nothing replaces it: choose another tag or folder"
        raise CheckpointError(msg)
    if final.exists() and not overwrite:
        msg = (
            f"checkpoint tag {final.name!r} exists already in {final.parent} and may not be replaced; choose another "
            "tag, or allow it (overwrite=True in the call, checkpoint.overwrite in the config)"
        )
        raise CheckpointError(msg)


def retain(folder: Path, keep_last: int, keep_every: int = 0, *, spared: Iterable[str] = ()) -> list[str]:
    """Remove old complete checkpoints; return the removed tags.

    Kept are the `keep_last` that were saved last in this folder, those whose step is a multiple of `keep_every`, the
    one that `latest` names, copies under another name, those in `spared`, and recoverable ones.

    Raises:
        OSError: the file system refuses to remove some; all others went.
    """
    entries = list_tags(folder)
    for entry in entries:
        if entry.status == "ok" and entry.problem:
            once(log, logging.WARNING, f"{entry.path}: {entry.problem}; what is kept goes by the order of saves")
    gone = [entry for entry in beyond(entries, keep_last, keep_every) if entry.tag not in spared]
    remove_all(entry.path for entry in gone)
    return [entry.tag for entry in gone]


def beyond(entries: Iterable[TagEntry], keep_last: int, keep_every: int = 0) -> list[TagEntry]:
    """Complete checkpoints that `retain` would remove, oldest first."""
    # In the order of saves and not of the clock, which may have been wrong; and not of steps, because a run that went
    # back to an earlier step goes on from what it saves now. What is recoverable is the only copy of its tag, perhaps
    # between two renames of another job: it neither goes nor takes the place of one that stays.
    known = [(entry, entry.manifest) for entry in entries if entry.manifest and entry.status == "ok"]
    known = [(entry, manifest) for entry, manifest in known if entry.tag == manifest.tag]
    known.sort(key=lambda pair: (*pair[1].order, pair[0].tag))
    old = known[: max(0, len(known) - keep_last)]
    return [e for e, m in old if not e.is_latest and not (keep_every and m.global_step % keep_every == 0)]


def remove(path: Path) -> None:
    """Remove the folder of a tag, which is no checkpoint from the start of the removal. Links are not followed.

    Raises:
        OSError: the file system refuses.
    """
    if path.is_symlink():
        path.unlink()
        return
    if _WORK_FOLDER.match(path.name) is None:
        hidden = path.with_name(f".{path.name}.tmp-{uuids.uuid4().hex}")
        path.rename(hidden)
        path = hidden
    shutil.rmtree(path)


def remove_all(paths: Iterable[Path]) -> None:
    """`remove` each of the paths, even if some fail.

    Raises:
        OSError: the file system refuses some; names the first, and says how many.
    """
    failures = []
    for path in paths:
        try:
            remove(path)
        except OSError as failure:
            failures.append(failure)
    if failures:
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        msg = f"{failures[0]}{more}"
        raise OSError(msg) from failures[0]


def own_node() -> tuple[str, str]:
    """Identity of this node; the host name alone may be that of containers on several nodes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot.read_text().strip() if boot.is_file() else ""


def leaders_of(homes: Sequence[Hashable]) -> tuple[int, ...]:
    """For each rank the first rank with an equal home."""
    first: dict[Hashable, int] = {}
    return tuple(first.setdefault(home, rank) for rank, home in enumerate(homes))


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
#: the system or the file system does not have it; NFS, for one, and layers above file systems or filters of calls
_UNKNOWN = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV}


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names on one file system atomically; False if that is not possible here.

    Neither name is ever missing, even if the process is killed.

    Raises:
        OSError: one of them is not there, or may not be renamed.
    """
    call = _renameat2()
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNKNOWN:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


@cache
def _renameat2() -> Any:
    """The C library's renameat2; None if it has none."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return call
