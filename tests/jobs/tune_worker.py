"""A script to tune: trains a small model, tells what it finds in its process, and does what --do says."""

import argparse
import atexit
import builtins
import itertools
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
import tune_helper

import mpispeed
from mpispeed import comm, features
from mpispeed.mesh import world

parser = mpispeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--do", default="")
parser.add_argument("--rows", type=int, default=4)
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--in_code", default="")
args = parser.parse_args()


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")


def facts():
    """What a run finds before it has done anything."""
    now = world.current()
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "channels": [channel.number for channel in now.channels],
        "groups": len(now._own),
        "features": [row.name for row in features.registered()],
        "generators": [random.random(), float(np.random.rand()), torch.rand(1).item()],
        "torch": [torch.get_num_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled()],
        "loggers": [len(logging.root.handlers), logging.root.level, len(logging.getLogger("of script").handlers)],
        "signal": str(signal.getsignal(signal.SIGUSR1)),
        "folder": str(Path.cwd()),
        "variable": os.environ.get("TUNE_WORKER"),
        "distributed": torch.distributed.is_initialized(),
        "imported": tune_helper.COUNT,
        "print": print.__module__,
        "start method": multiprocessing.get_start_method(allow_none=True),
    }


say("FACTS", json.dumps(facts()))


def change():
    """Change the process as scripts do."""
    tune_helper.COUNT += 1
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    torch.set_num_threads(torch.get_num_threads() + 1)
    logging.basicConfig(level=logging.DEBUG)
    logging.getLogger("of script").addHandler(logging.StreamHandler())
    signal.signal(signal.SIGUSR1, lambda *_: None)
    os.environ["TUNE_WORKER"] = "was here"
    sys.argv.append("--more")
    features.register(features.Feature("of_the_script"))
    atexit.register(say, "atexit of the script")
    torch.distributed.new_group([0])
    multiprocessing.set_start_method("spawn")
    builtins.print = say
    os.chdir("/")


mpispeed.init_distributed()
rank = comm.get_rank()
if args.do == "change":
    change()


def fail(step):
    """Do what --do says at this step; `one` means rank 1."""
    if args.do == "raise_one" and rank == 1 and step == 2:
        raise ValueError("only here\nand in two lines")  # noqa: TRY003
    if args.do == "raise" and step == 2:
        raise ValueError("planted")
    if args.do == "memory" and step == 2:
        raise MemoryError
    if args.do == "hang" and rank == 1 and step == 2:
        time.sleep(600)
    if args.do == "kill" and rank == 1 and step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if args.do == "leave" and step == 2:
        os._exit(3)
    if args.do == "eat" and rank == 1 and step == 2:
        held = bytearray(b"x") * (3 << 30)
        del held


def train():
    """The loop of most scripts."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    given = {"config": json.loads(args.in_code)} if args.in_code else {}
    engine, _, _, _ = mpispeed.initialize(args=args, model=model, model_parameters=model.parameters(), **given)
    say("STAGE", engine.zero_optimization_stage(), engine.train_micro_batch_size_per_gpu())
    rows = args.rows if args.do == "other rows" else engine.train_micro_batch_size_per_gpu()
    while engine.global_steps < args.steps:
        loss = engine(torch.ones(rows, 32)).square().mean()
        engine.backward(loss)
        fail(engine.global_steps)
        try:
            engine.step()
        except BaseException as error:
            if args.do != "swallow":
                raise
            say("swallowed", type(error).__name__)
        engine.save_checkpoint("never_written")


def train_pipeline():
    """A stage on each rank."""
    torch.manual_seed(7)
    layers = [torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)]
    model = mpispeed.PipelineModule(layers, num_stages=2, loss_fn=lambda out, _: out.square().mean())
    engine, _, _, _ = mpispeed.initialize(args=args, model=model, model_parameters=model.parameters())
    say("STAGE", engine.stage_id)
    batch = torch.ones(engine.train_micro_batch_size_per_gpu(), 32), torch.zeros(1)
    while engine.global_steps < args.steps:
        engine.train_batch(itertools.repeat(batch))


if args.do == "nothing":
    sys.exit()
try:
    train_pipeline() if args.do == "pipeline" else train()
finally:
    say("finally")
if args.do == "exit":
    sys.exit("no more data")
