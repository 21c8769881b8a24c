"""The identity of a job of batch generation: what has to be equal for two starts to be the same job."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mpispeed.base.errors import UsageError
from mpispeed.base.files import sync_folder
from mpispeed.base.plain import printable, read_plain
from mpispeed.store.owner import OwnerLock

JOB_FILE = "job.json"
"""In the work folder of a job."""

ANSWERED_FILE = "answered.json"
"""In the work folder of a job whose results are written: their paths, {"results": [...]}; finished batches are gone."""

FINISHED_SUFFIX, LOCK_FILE = ".finished", ".lock"
FORMAT = "mpispeed-generate-1"
_MOST_BYTES = 4 << 20


class OtherJob(UsageError):
    """A work folder, a file of finished batches or a file of results belongs to another job."""


@dataclass(frozen=True)
class Identity:
    """Everything that has an influence on the results of a job.

    Attributes:
        prompts: digest of the file of prompts.
        batches: digest of the batches.
        model: digest of the model, as precise as the caller can tell (digest of its files, or names, sizes and times).
        settings: plain values of JSON: the model's name, options of generation, dtype, ranks of a tensor group...
        requests: answers that are wanted.
        count: of batches.
        left_out: requests that are in no batch.
        notes: plain values that do not matter for whether two jobs are the same, such as versions.
    """

    prompts: str
    batches: str
    model: str
    settings: Mapping[str, Any]
    requests: int
    count: int
    left_out: int = 0
    notes: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """Of all but the notes."""
        own = {name: value for name, value in asdict(self).items() if name != "notes"}
        return f"blake2b:{blake2b(_canonical(own), digest_size=32).hexdigest()}"

    def as_json(self) -> str:
        """Text that `from_json` reads."""
        return json.dumps({"format": FORMAT, "digest": self.digest, **asdict(self)}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Identity:
        """What `as_json` wrote.

        Raises:
            ValueError: it is no such text, or its digest is not that of its content.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as failure:
            msg = f"it is no JSON ({failure})"
            raise ValueError(msg) from None
        if not isinstance(value, dict) or value.pop("format", None) != FORMAT:
            msg = f"it is not of the format {FORMAT}"
            raise ValueError(msg)
        digest = value.pop("digest", None)
        kinds: dict[str, type] = {"prompts": str, "batches": str, "model": str, "settings": dict, "notes": dict}
        kinds |= {"requests": int, "count": int, "left_out": int}
        if value.keys() != kinds.keys() or not all(type(value[name]) is kind for name, kind in kinds.items()):
            msg = f"its entries are {printable(str(sorted(value)), 200)}; expected {sorted(kinds)}"
            raise ValueError(msg)
        if not 0 <= value["left_out"] <= value["requests"] < 2**48 or not 0 <= value["count"] <= value["requests"]:
            msg = f"it speaks of {value['requests']} requests in {value['count']} batches"
            raise ValueError(msg)
        found = cls(**value)
        if found.digest != digest:
            msg = "its digest is not that of its content; it is damaged"
            raise ValueError(msg)
        return found

    def differences(self, other: Identity) -> list[str]:
        """What differs, by name: "prompts", "model", "settings.temperature (0.7 there, 0.8 here)"..."""
        found = [name for name in ("prompts", "model") if getattr(self, name) != getattr(other, name)]
        for name in sorted({*self.settings, *other.settings}):
            here, there = self.settings.get(name), other.settings.get(name)
            if here != there:
                found.append(f"{name} ({printable(repr(there), 40)} there, {printable(repr(here), 40)} here)")
        if not found and self.digest != other.digest:
            found.append("batches")
        return found


def claim(folder: Path, identity: Identity) -> bool:
    """Make the work folder of a job, or find that of an earlier start of the same job.

    To be called by one rank.

    Returns:
        True if an earlier start was here.

    Raises:
        OtherJob: the folder belongs to another job, or is none of a job.
        OSError: it cannot be made or read.
    """
    path = folder / JOB_FILE
    folder.mkdir(parents=True, exist_ok=True)
    if path.exists():
        found = read(folder)
        differences = identity.differences(found)
        if differences and not _has_answers(folder):  # the settings of a start that came to nothing were put right
            put_text(path, identity.as_json() + "\n")
            return False
        if differences:
            msg = (
                f"{folder} has the work of another job: these differ: {', '.join(differences)}; give this job another "
            )
            msg += "file of results, or remove the folder"
            raise OtherJob(msg)
        return True
    if _is_foreign(folder):
        msg = f"{folder} has files but no {JOB_FILE}, as a job would; give this job another file of results"
        raise OtherJob(msg)
    put_text(path, identity.as_json() + "\n")
    return False


def lock(folder: Path) -> OwnerLock | None:
    """Keep other jobs out of a work folder, which is made, as long as this process lives. To be called by one rank.

    None where there is nothing to keep: the folder is none of a job, or its file system has no locks.

    Raises:
        OtherJob: another process has it.
        OSError: it cannot be made or read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / JOB_FILE).exists() and _is_foreign(folder):
        return None
    path = folder / LOCK_FILE
    found = OwnerLock(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666))
    try:
        is_free = found.take()
    except OSError:
        found.close()
        return None
    if not is_free:
        found.close()
        msg = f"another job is at work in {folder}: wait for its end, or give this job another file of results"
        raise OtherJob(msg)
    return found


def _is_foreign(folder: Path) -> bool:
    """True if a folder without an identity has files of somebody else."""
    return any(each.name != LOCK_FILE and not each.name.startswith(f".{JOB_FILE}.tmp-") for each in folder.iterdir())


def _has_answers(folder: Path) -> bool:
    return any(each.name == ANSWERED_FILE or FINISHED_SUFFIX in each.name for each in folder.iterdir())


def read(folder: Path) -> Identity:
    """The identity of the job that a work folder belongs to.

    Raises:
        OtherJob: there is none, or it cannot be read.
    """
    path = folder / JOB_FILE
    try:
        return Identity.from_json(read_plain(path, _MOST_BYTES))
    except (OSError, ValueError) as failure:
        msg = f"{path} does not say whose work this is: {failure}; if nothing of it is needed, remove the folder"
        raise OtherJob(msg) from failure


def put_text(path: Path, text: str) -> None:
    """Write a small file at once: to a temporary one, which takes its place when it is on disk.

    Raises:
        OSError: the file system refuses.
    """
    temporary = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
