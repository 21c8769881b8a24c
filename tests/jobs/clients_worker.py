"""Runs the cases of client libraries one after the other in one job: clients_worker.py FOLDER [sequences].

With "sequences" those of ranks that share sequences, else all others.

Of each case a rank writes FOLDER/RANKS/NUMBER-RANK.json: name, seconds, what it found, traceback of a failure. Needs
`--as-deepspeed`.
"""

import faulthandler
import json
import os
import sys
import time
import traceback
from pathlib import Path

import mpispeed
from tests.jobs.clients import accelerate_loops, launched_loop, sequences, trainers, trl_trainers
from tests.jobs.clients.clean import clean_state
from tests.jobs.clients.place import Place

LATE_SECONDS = 200
"""A case that still runs is stuck; its stacks are written, and the job ends."""

GRACE_SECONDS = 30
"""Where a case failed on one rank, the others may wait for it for ever."""

CLIENTS = (trainers, accelerate_loops, launched_loop, trl_trainers)


def cases_of(place, shares_sequences):
    """Name -> case, of all clients."""
    clients = [sequences] if shares_sequences else list(CLIENTS)
    if place.ranks > 1 and not shares_sequences:  # one rank has no case of Lightning, whose import takes a second
        from tests.jobs.clients import lightning_trainers

        clients.append(lightning_trainers)
    return {name: case for client in clients for name, case in client.cases(place).items()}


def verdict_of(case):
    """What a case found, or the traceback of its failure."""
    start = time.perf_counter()
    try:
        with clean_state():
            found, failure = case(), ""
    except Exception:
        found, failure = None, traceback.format_exc()
    return {"seconds": round(time.perf_counter() - start, 2), "found": found, "failure": failure}


def write(path, verdict):
    """Written whole: other ranks wait for the file."""
    path.with_suffix(".new").write_text(json.dumps(verdict))
    path.with_suffix(".new").rename(path)


def meet(files, has_failed):
    """Wait until all ranks have ended the case, by their files: after a failure MPI may be in any state."""
    start = time.monotonic()
    while not all(path.exists() for path in files):
        has_failed = has_failed or any(path.exists() and json.loads(path.read_text())["failure"] for path in files)
        if has_failed and time.monotonic() > start + GRACE_SECONDS:
            os._exit(1)
        time.sleep(0.002)


def main(folder, *kinds):
    world = mpispeed.init_distributed()
    place = Place(folder, world.size)
    results = folder / str(world.size)
    results.mkdir(exist_ok=True)
    for number, (name, case) in enumerate(cases_of(place, "sequences" in kinds).items()):
        files = [results / f"{number:02}-{rank}.json" for rank in range(world.size)]
        mine = files[world.rank]
        with mine.with_suffix(".stacks").open("w") as stacks:
            stacks.write(f"{name}\n")
            stacks.flush()
            faulthandler.dump_traceback_later(LATE_SECONDS, exit=True, file=stacks)
            verdict = verdict_of(case)
            write(mine, {"name": name, **verdict})
            meet(files, verdict["failure"])
            faulthandler.cancel_dump_traceback_later()
        mine.with_suffix(".stacks").unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
