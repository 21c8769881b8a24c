"""What the libraries of Weights & Biases and Comet wrote offline, by their own reader and from the archive."""

import json
import os
import subprocess
import sys
import zipfile
from collections import defaultdict
from pathlib import Path

# No test reaches a server, on machines with a network neither: nothing listens at this port.
NOWHERE = {"WANDB_BASE_URL": "http://127.0.0.1:9", "COMET_URL_OVERRIDE": "http://127.0.0.1:9/clientlib/"}


def wandb_records(folder):
    """Records of the runs below `folder` that were not sent, in order of their folders' names."""
    program = Path(sys.executable).with_name("wandb")
    found = []
    for path in sorted(folder.rglob("offline-run-*/*.wandb")):
        environ = {**os.environ, "WANDB_ERROR_REPORTING": "false"}
        done = subprocess.run(
            [program, "leet", "inspect", "--json", path], capture_output=True, text=True, check=True, env=environ
        )
        found.append([json.loads(line) for line in done.stdout.splitlines()])
    return found


def wandb_points(folder):
    """Series -> its (samples, value) pairs, of all runs below `folder`."""
    found = defaultdict(list)
    for record in (record for run in wandb_records(folder) for record in run if record["type"] == "history"):
        row = record["history"]["item"]
        for name, value in row.items():
            if not name.startswith("_") and name != "samples":
                found[name].append((row["samples"], float(value)))
    return dict(found)


def comet_facts(folder):
    """The facts of the one archive in `folder`, with the experiment's name as `Name`."""
    (path,) = folder.glob("*.zip")
    with zipfile.ZipFile(path) as archive:
        facts = json.loads(archive.read("experiment.json"))
        messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
    others = [message["payload"] for message in messages if message["type"] == "log_other"]
    return facts | {other["key"]: other["value"] for other in others}


def comet_points(folder):
    """Series -> its (samples, value) pairs, of all archives in `folder`; without what the library measures itself."""
    found = defaultdict(list)
    for path in sorted(folder.glob("*.zip")):
        with zipfile.ZipFile(path) as archive:
            messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
        for message in messages:
            if message["type"] == "metric_msg":
                metric = message["payload"]["metric"]
                if not metric["metricName"].startswith(("sys.", "process duration")):
                    found[metric["metricName"]].append((metric["step"], float(metric["metricValue"])))
    return dict(found)


def thinned(points, interval):
    """The points of a series that Comet gets."""
    kept = points[:1]
    for x, value in points[1:]:
        if x - kept[-1][0] >= interval:
            kept.append((x, value))
    return kept
