"""Runs scripts that say `import deepspeed`, one after the other in one job: deepspeed_worker.py FOLDER SCRIPT...

Each has a working folder of its own, and its result stands in FOLDER/<rank>.json: the text of the error it ended with.
"""

import gc
import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path

import deepspeed

SCRIPTS = Path(__file__).resolve().with_name("deepspeed_scripts")
CONFIGS = {"train_loop": SCRIPTS / "ds_config.json"} | {path.stem: path for path in SCRIPTS.glob("compression_*.json")}
FOLDER = Path(sys.argv[1])
RANK = os.environ["RANK"]


def result_of(script):
    """(seconds, what the script ended with, "" if it ran to its end)."""
    there = FOLDER / script.stem
    there.mkdir(parents=True, exist_ok=True)
    os.chdir(there)
    config = CONFIGS.get(script.stem)
    sys.argv = [str(script), *(["--deepspeed", "--deepspeed_config", str(config)] if config else [])]
    start = time.perf_counter()
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception as error:
        said = "".join(traceback.format_exception(error)) if isinstance(error, AssertionError) else f"{error!r}"
    else:
        said = ""
    return round(time.perf_counter() - start, 2), said


def main():
    results = {}
    gc.freeze()  # else each collection looks at all that was imported
    for script in map(Path, sys.argv[2:]):
        results[script.stem] = result_of(script)
        text = json.dumps({"version": deepspeed.__version__, "results": results})
        (FOLDER / f"{RANK}.json").write_text(text)  # each time: the next one may end the job
        gc.collect()


main()
