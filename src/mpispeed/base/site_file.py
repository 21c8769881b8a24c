"""The file of site defaults that an administrator owns: read, and checked for who may write it.

It is /etc/mpispeed/site.toml, or what MPISPEED_SITE_FILE names, as a module of the site sets it. Its keys guard against
mistakes: they are no protection from people, who can run other programs than this one.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mpispeed.base.errors import ConfigError
from mpispeed.base.plain import hide_secrets, printable, read_plain
from mpispeed.base.ways import walk_to

VARIABLE = "MPISPEED_SITE_FILE"
"""Variable with the path of the file."""

SYSTEM_FILE = Path("/etc/mpispeed/site.toml")

LARGEST_BYTES = 1 << 20
_TABLES = {"config": dict, "locked": list, "environment": dict, "profile": str}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WRITABLE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class SiteFile:
    """Contents of a file of site defaults; everything may be left out.

    Attributes:
        path: of the file; "" where there is none.
        owner: name or number of the user that the file belongs to.
        config: defaults under the users' settings, by sections as these.
        locked: paths of settings that users' files may not change.
        environment: variables for the ranks of `mpispeed run`, `sbatch`, `qsub` and `env`; those that are set stay.
        profile: the site's profile where none is chosen: a name, or the path of a file ending in .toml.
    """

    path: str = ""
    owner: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    locked: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    profile: str = ""

    def missing_from(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables that `environ` does not have."""
        return {name: value for name, value in self.environment.items() if name not in environ}

    def as_facts(self) -> dict[str, Any]:
        """For records, without keys and passwords; empty where there is no file."""
        if not self.path:
            return {}
        return {**asdict(self), "config": hide_secrets(self.config), "environment": hide_secrets(self.environment)}


NONE = SiteFile()

_held: SiteFile | None = None
_is_aside = False


def hold(site: SiteFile | None) -> None:
    """Keep what rank 0 has read, for all settings that this process reads from now on; None: read the file again."""
    global _held
    _held = site


@contextmanager
def set_aside() -> Iterator[None]:
    """Within it there is no site file: for settings that this library makes itself, of a user's with the site's."""
    global _held, _is_aside
    before = _held, _is_aside
    _held, _is_aside = NONE, True
    try:
        yield
    finally:
        _held, _is_aside = before


def read_for_job() -> SiteFile:
    """The site defaults as the first rank of a job reads them, for all.

    Raises:
        ConfigError: as `read_site_file`.
    """
    return NONE if _is_aside else read_site_file()


def current(environ: Mapping[str, str] = os.environ) -> SiteFile:
    """The site defaults of this process: what rank 0 has read for the job, else the file.

    Raises:
        ConfigError: as `read_site_file`.
    """
    return read_site_file(environ) if _held is None else _held


def read_site_file(environ: Mapping[str, str] = os.environ, system: Path = SYSTEM_FILE) -> SiteFile:
    """Read the file of site defaults.

    Args:
        environ: where MPISPEED_SITE_FILE may name it.
        system: the file that counts without that variable, and whose owner has to own what the variable names.

    Raises:
        ConfigError: the named file is not there, others than its owner may write it, or it says what it cannot say.
    """
    named = environ.get(VARIABLE, "")
    path = Path(named) if named else system
    try:
        if not named and not path.exists():
            return NONE
        owner, real = _require_safe(path, system if named else path)
        text = read_plain(real, LARGEST_BYTES, follows_links=True).decode("utf-8-sig")
    except (OSError, RuntimeError, UnicodeDecodeError) as error:  # Python's word for links in a circle is the second
        why = getattr(error, "strerror", None) or error
        cure = f"correct {VARIABLE}, or unset it" if named else "ask the administrators of this site"
        msg = f"the site file {printable(str(path))} cannot be read: {why}; {cure}"
        raise ConfigError(msg) from None
    return _parse(text, str(path), owner)


def _require_safe(path: Path, system: Path) -> tuple[str, Path]:
    """The owner of a file that only its owner can write or replace, and its path without links.

    Raises:
        ConfigError: others can; or the system's own file is there, and this one belongs to neither root nor its owner.
        OSError: it cannot be looked at.
    """
    where = printable(str(path))
    real = path.resolve(strict=True)
    status = real.stat()
    if status.st_mode & _WRITABLE:
        msg = f"the site file {where} can be written by others than its owner; chmod go-w {where}"
        raise ConfigError(msg)
    unsafe = _unsafe_folder(path, real, status.st_uid)
    if unsafe is not None:
        parent = printable(str(unsafe))
        msg = (
            f"the site file {where} can be replaced by others than its owner, who may write the folder {parent}; "
            f"chmod go-w {parent}, and give it to the owner of the file; or keep the file elsewhere"
        )
        raise ConfigError(msg)
    if system != path and system.exists() and status.st_uid not in (0, system.stat().st_uid):
        own = _user(system.stat().st_uid)
        msg = (
            f"{VARIABLE} names {where} of {_user(status.st_uid)}, but this machine has {system}; only one of root or "
            f"{own} can stand in its place: unset {VARIABLE}"
        )
        raise ConfigError(msg)
    return _user(status.st_uid), real


def _unsafe_folder(path: Path, real: Path, owner: int) -> Path | None:
    """The first folder on the way to a file where others than its owner could put another file or link.

    Folders on the way to a link may also be those of who starts the run. Where everybody may add names (/tmp), the name
    on the way has to belong to root or to who starts the run.
    """
    above = (0, owner)
    for here, about in walk_to(path):
        folder = here.parent
        own = folder.stat()
        owners = above if folder in real.parents else (*above, os.geteuid())
        is_shared = bool(own.st_mode & _WRITABLE)
        is_kept = bool(own.st_mode & stat.S_ISVTX) and about.st_uid in (0, os.geteuid())
        if own.st_uid not in owners or (is_shared and not is_kept):
            return folder
    return None


def _user(number: int) -> str:
    """Name of a user; the number where the system has no name for it, as inside of containers."""
    try:
        import pwd

        return pwd.getpwuid(number).pw_name
    except (ImportError, KeyError):
        return f"user {number}"


def _parse(text: str, path: str, owner: str) -> SiteFile:
    """The contents of a file.

    Raises:
        ConfigError: it is no TOML, or has other entries than those of a site file.
    """
    if sys.version_info >= (3, 11):
        import tomllib  # most machines have no site file
    else:
        import tomli as tomllib
    where = f"the site file {printable(path)}"
    try:
        entries = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"{where} is no TOML: {printable(str(error), 300)}"
        raise ConfigError(msg) from None
    for name, value in entries.items():
        kind = _TABLES.get(name)
        if kind is None or not isinstance(value, kind):
            msg = (
                f"{where}: {printable(name, 100)} is nothing that it can say; it has the tables [config] and "
                '[environment], locked = ["path", ...] and profile = "name", the last two before the first table'
            )
            raise ConfigError(msg)
    environment = entries.get("environment", {})
    for name, value in environment.items():
        if not _NAME.fullmatch(name) or not isinstance(value, str) or "\0" in value or name == VARIABLE:
            msg = f'{where}: [environment] {printable(name, 100)} is no variable; write NAME = "text"'
            raise ConfigError(msg)
    locked = entries.get("locked", [])
    if not all(isinstance(name, str) and name for name in locked):
        msg = f'{where}: locked is a list of paths of settings, such as ["checkpoint.compression"]'
        raise ConfigError(msg)
    return SiteFile(path, owner, entries.get("config", {}), tuple(locked), environment, entries.get("profile", ""))
