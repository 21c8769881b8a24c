"""A small checkpoint to alter on purpose, and a watch over what reading an altered one touches and takes."""

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import h5py
import numpy as np
import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import index, schema, tags
from mpispeed.ckpt.format import manifest as manifests
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.ckpt.write.save import SaveOptions
from tests.unit.ckpt.sample import saved

CPU_SECONDS = 5
"""For one attack; its own time, because the neighbours of a shared machine take what they want."""
SECONDS = 60
"""For one that waits for something."""
MORE_BYTES = 400 << 20
TENSORS = {
    ("a.weight", "master"): torch.arange(30000.0).reshape(100, 300),
    ("a.weight", "exp_avg"): torch.arange(30000.0).reshape(100, 300) / 7,
    ("b.weight", "master"): torch.arange(999.0),
    ("c.bias", "weight16"): torch.arange(64.0).bfloat16(),
    ("steps", "buffer"): torch.tensor(12),
}
_IN_OPEN = 0x20


def make(where, files=1):
    """A checkpoint `step7` in `where`, in one file or several."""
    options = SaveOptions(files=files)
    return saved(where, tensors=TENSORS, rng={"cpu": b"12"}, aliases={"tied": "b.weight"}, options=options)


def copy(good, where):
    """Its copy beside a folder `outside` that holds the same once more, for links to lead to."""
    shutil.copytree(good, where / "outside")
    return shutil.copytree(good, where / "copy")


def sign(tag, /, **changes):
    """Change manifest.json and make its digest fit."""
    path = tag / schema.MANIFEST_FILE
    path.write_text(manifests.signed(json.loads(path.read_text()) | changes))


def records(tag):
    """What the manifest says of files."""
    return json.loads((tag / schema.MANIFEST_FILE).read_text())["files"]


def sign_files(tag):
    """Make the manifest fit altered files, as whoever alters a checkpoint on purpose does."""
    found = records(tag)
    for name in found:
        if (tag / name).is_file() and not (tag / name).is_symlink():
            record = index.plain_record(tag / name)
            found[name] |= {"bytes": record.bytes, "crc32c": record.crc32c, "index_extents": [], "index_crc32c": 0}
    sign(tag, files=found)


def fixed(owner, name, value):
    """An attribute of text as a checkpoint has it, of fixed length."""
    if name in owner.attrs:
        del owner.attrs[name]
    owner.attrs.create(name, np.bytes_(value))


def make_dict(group, names):
    """Let a group of the state be a dict of these keys."""
    fixed(group, "%kind", "dict")
    group.attrs["%length"] = len(names)
    if "%keys" in group:
        del group["%keys"]
    text = json.dumps(names)
    if len(text) < 60_000:
        fixed(group, "%keys", text)
    else:
        group["%keys"] = np.bytes_(text)


def read_all(folder, tag=None):
    """Everything that a checkpoint holds."""
    with open_checkpoint(folder, tag) as checkpoint:
        state = checkpoint.state()
        rest = checkpoint.config(), [checkpoint.rng_of(rank) for rank in range(checkpoint.rng_ranks)]
        values = {(t.name, t.slot): checkpoint.read_whole(t.name, t.slot) for t in checkpoint.tensors()}
        return values, dict(checkpoint.index.params), checkpoint.aliases(), state, rest


def refused(folder, outside=None, tag=None):
    """The message of the CheckpointError that reading raises: soon, in little memory, opening nothing in `outside`."""
    before = _memory()
    began = time.process_time()
    with limited(SECONDS), opened_in(outside) as opened:
        try:
            read_all(folder, tag)
            message = ""
        except CheckpointError as failure:
            message = str(failure)
        with contextlib.suppress(FileNotFoundError):
            tags.list_tags(Path(folder))
    assert time.process_time() - began < CPU_SECONDS
    assert _memory(peak=True) - before < MORE_BYTES
    assert opened == []
    assert message, "it was read as if nothing were wrong"
    assert len(message) < 3000
    return message


@contextlib.contextmanager
def limited(seconds):
    """A body that hangs fails, also one that waits inside of the system."""

    def late(*_):
        raise TimeoutError

    old = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@contextlib.contextmanager
def opened_in(folder):
    """Names of files in `folder` (and one level below) that anything, a C library too, opens in the body."""
    found = []
    if folder is None:
        yield found
        return
    libc = ctypes.CDLL(None, use_errno=True)
    handle = libc.inotify_init1(os.O_NONBLOCK)
    assert handle >= 0
    try:
        for path in [folder, *(sub for sub in folder.rglob("*") if sub.is_dir())]:
            assert libc.inotify_add_watch(handle, os.fsencode(path), _IN_OPEN) >= 0
        yield found
        with contextlib.suppress(BlockingIOError):
            found += [match.decode() for match in re.findall(rb"[\w.]{3,}", os.read(handle, 1 << 16))]
    finally:
        os.close(handle)


def _memory(peak=False):
    if not peak:
        Path("/proc/self/clear_refs").write_text("5")
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{'VmHWM' if peak else 'VmRSS'}:\s*(\d+) kB", text, re.MULTILINE)[1]) << 10


def as_older_file(path):
    """Write an HDF5 file anew in the first version of the format, whose headers have no checksums."""
    new = path.with_name("new.h5")
    with h5py.File(path, "r") as source, h5py.File(new, "w", libver="earliest") as target:
        _anew(source, target)
    new.replace(path)


def _anew(source, target):
    for name, value in source.attrs.items():
        target.attrs.create(name, value, dtype=source.attrs.get_id(name).dtype)
    for name, item in source.items():
        if isinstance(item, h5py.Group):
            _anew(item, target.create_group(name))
        else:
            made = target.create_dataset(name, data=item[()])
            for key, value in item.attrs.items():
                made.attrs.create(key, value, dtype=item.attrs.get_id(key).dtype)


def move_data(path, dataset, offset):
    """Let a dataset of such a file say that its elements are at another place."""
    with h5py.File(path, "r") as file:
        old = file[dataset].id.get_offset()
    raw = path.read_bytes()
    place = old.to_bytes(8, "little")
    assert raw.count(place) >= 1
    path.write_bytes(raw.replace(place, (offset % 2**64).to_bytes(8, "little")))
