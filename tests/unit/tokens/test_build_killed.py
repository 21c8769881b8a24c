"""kill -9 at any instant of a build: what is left says so, and the same build goes on to the same bytes.

An instant is a call of a function, so that those of a busy machine are the same.
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

from mpispeed.mesh.backends.solo import solo_comm
from mpispeed.tokens_build.job import Request, build
from mpispeed.tokens_build.work_folder import folder_of, unfinished

KILLS = 50 if os.environ.get("MPISPEED_MATRIX") == "full" else 10


class Clock:
    """Counts calls of functions, and kills the process at one of them."""

    def __init__(self, limit):
        self.calls, self._limit = 0, limit

    def __call__(self, frame, event, argument):
        self.calls += 1
        if self.calls == self._limit:
            os.kill(os.getpid(), signal.SIGKILL)


def in_child(request, limit=-1):
    """A build in a child, which is killed at a call; the number of calls, or None if it was killed."""
    reading, writing = os.pipe()
    number = os.fork()
    if not number:
        code = 1
        try:
            clock = Clock(limit)
            sys.setprofile(clock)
            build(solo_comm(), request)
            sys.setprofile(None)
            os.write(writing, str(clock.calls).encode())
            code = 0
        except Exception as failure:
            os.write(2, f"{failure}\n".encode())
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        calls = pipe.read()
    status = os.waitpid(number, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return int(calls) if calls else None


def digest(path):
    return hashlib.blake2b(path.read_bytes()).digest()


def main(folder, kills):
    """Kill builds; print how many left nothing, parts, or the whole store."""
    draw = random.Random(7)
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": "ab" * draw.randint(1, 90)}) + "\n" for _ in range(300)))
    seen = {"nothing": 0, "parts": 0, "whole": 0}
    for row in (0, 100):

        def request(name, row=row):
            output = folder / f"{row}-{name}.h5"
            return Request(output, [path], "byte", row=row, columns=("length",), part_bytes=4000)

        whole = request("whole")
        build(solo_comm(), request("first"))  # which imports what the others find there
        calls = in_child(whole)
        expected = digest(whole.output)
        for number in range(kills // 2):
            killed = request(number)
            assert in_child(killed, draw.randint(1, calls)) is None
            said, output = unfinished(killed.output), killed.output
            assert said is None or "goes on" in said
            assert said is not None or not any(folder_of(output).glob("part-*"))
            seen["whole" if output.exists() else "parts" if said else "nothing"] += 1
            assert not output.exists() or digest(output) == expected
            if output.exists() and folder_of(output).exists() and not any(folder_of(output).iterdir()):
                folder_of(output).rmdir()  # the kill came before the last step: all is done, as after it
            if folder_of(output).exists() or not output.exists():
                assert in_child(killed)
            assert digest(output) == expected
            assert not folder_of(output).exists()
    sys.stdout.write(json.dumps(seen))


def test_killed_builds_go_on(tmp_path):
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), str(KILLS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert sum(seen.values()) == KILLS
    assert seen["parts"] >= KILLS // 2, seen


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
