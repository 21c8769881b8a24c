"""Saves in child processes that are killed at every file operation in turn; run by test_failed_save.

Prints the number of kills. For each: the previous tag loads, the new tag is absent or whole, the
listing works, and the next save succeeds.
"""

import functools
import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from mpispeed.ckpt.format import tags
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.ckpt.write.save import SaveOptions
from tests.unit.ckpt.sample import saved, tensors_of
from tests.zoo import has_same_bits

WATCHED = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}


@functools.cache
def small(seed):
    tensors = tensors_of(seed)
    return {key: tensors[key] for key in (("layers.0.weight", "master"), ("mask", "buffer"))}


def save_until(folder, tag, kill_at, **more):
    """Save in a child that kills itself at its `kill_at`-th file operation; True if it was killed."""
    child = os.fork()
    if child == 0:
        count = 0

        def watch(event, arguments):
            nonlocal count
            if event in WATCHED or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
                count += 1
                if count == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        saved(folder, tag, tensors=small(1), **more)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        sys.exit(f"the save failed instead of being killed (operation {kill_at})")
    return os.WIFSIGNALED(status)


def holds(folder, tag, seed):
    with open_checkpoint(folder, tag) as checkpoint:
        return all(has_same_bits(checkpoint.read_whole(*key), value) for key, value in small(seed).items())


def expect(is_so, what):
    if not is_so:
        sys.exit(what)


def kill_new_tag(folder, kill_at):
    """The next tag: the previous one stays whole."""
    saved(folder, "first", tensors=small(0))
    was_killed = save_until(folder, "second", kill_at)
    expect(holds(folder, "first", 0), f"killed at {kill_at}: the previous tag is damaged")
    entries = {entry.tag: entry for entry in tags.list_tags(folder) if entry.status == "ok"}
    expect("first" in entries, f"killed at {kill_at}: the previous tag is not listed")
    if "second" in entries:
        expect(holds(folder, "second", 1), f"killed at {kill_at}: a half-written tag looks whole")
    with open_checkpoint(folder) as checkpoint:
        expect(checkpoint.tag in entries, f"killed at {kill_at}: latest names no whole tag")
    saved(folder, "third", tensors=small(0))
    expect(holds(folder, None, 0), f"killed at {kill_at}: the next save failed")
    return was_killed


def kill_overwrite(folder, kill_at):
    """The same tag again: its old or its new content is found, never neither and never a mixture."""
    replace = SaveOptions(overwrite=True)
    saved(folder, "only", tensors=small(0))
    was_killed = save_until(folder, "only", kill_at, options=replace)
    expect(holds(folder, "only", 0) or holds(folder, "only", 1), f"overwrite killed at {kill_at}: content is lost")
    saved(folder, "only", tensors=small(0), options=replace)
    expect(holds(folder, None, 0), f"overwrite killed at {kill_at}: the next save failed")
    return was_killed


def kill_overwrite_by_two_names(folder, kill_at):
    """The same where the file system cannot let folders change places."""
    tags.exchange = lambda *_: False
    return kill_overwrite(folder, kill_at)


def main(folder):
    torch.set_num_threads(1)  # a child of fork has none of the threads its parent's OpenMP counts on
    kills = 0
    for scenario in (kill_new_tag, kill_overwrite, kill_overwrite_by_two_names):
        kill_at = 1
        while scenario(folder, kill_at):
            kill_at += 1
            shutil.rmtree(folder)
            folder.mkdir()
        kills += kill_at - 1
        shutil.rmtree(folder)
        folder.mkdir()
    sys.stdout.write(f"{kills}\n")


main(Path(sys.argv[1]))
