"""Folders as killed runs leave them, small file systems, and the rights of a plain user."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from mpispeed.store.owner import OWNER_FILE, Identity, boot_id
from mpispeed.store.private_folder import run_name
from mpispeed.store.swap import SWAP
from tests.helpers.system import CHECKOUT, with_own_mounts

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
SCRIPT_SECONDS = 60


def leftover(root, run=None, *, rank=0, swap_bytes=10, **changes):
    """The rank folder of a process that died; `changes` to what its owner file says."""
    folder = root / SWAP.parent_name / f"{run or run_name()}.rank{rank}"
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700)
    identity = Identity(os.uname().nodename, 1, os.geteuid(), 0.0, boot_id())
    (folder / OWNER_FILE).write_text(json.dumps({**asdict(identity), **changes}))
    (folder / "a.swap").write_bytes(bytes(swap_bytes))
    return folder


def python(code, *arguments, prefix=()):
    """Run `code` in a process of its own."""
    argv = [*prefix, sys.executable, "-c", code, *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": CHECKOUT}
    return subprocess.run(argv, capture_output=True, text=True, timeout=SCRIPT_SECONDS, env=env, check=False)


def python_on_tmpfs(code, size, folder):
    """Run `code` with `folder` as a memory file system of `size` that nobody else sees."""
    mount = f'mount -t tmpfs -o size={size} tmpfs "$0" && exec "$@"'
    return python(code, folder, prefix=(*with_own_mounts(), "sh", "-c", mount, str(folder)))


@contextlib.contextmanager
def without_rights():
    """A new folder that may be read but not written; without the rights of root, which may write anywhere."""
    folder = Path(tempfile.mkdtemp(prefix="mpispeed-swap-test-"))
    folder.chmod(0o555)
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.seteuid(NOBODY)
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o755)
        shutil.rmtree(folder)
