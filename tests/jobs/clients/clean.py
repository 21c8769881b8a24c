"""A state as in a new process for each case: client libraries keep a lot in variables of modules."""

import contextlib
import gc
import os
import random

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from mpispeed import Engine

SEED = 11


@contextlib.contextmanager
def clean_state():
    """Context of a case: its variables, singletons and engines end with it; MPI and its process group stay.

    Collective over: all ranks, unless a case fails.
    """
    gc.freeze()  # what the libraries have made at import is half a million objects, and Trainers collect garbage often
    variables, dtype = dict(os.environ), torch.get_default_dtype()
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    try:
        yield
    except BaseException:
        _forget(variables, dtype)
        raise
    _forget(variables, dtype)
    _destroy_engines()


def _forget(variables, dtype):
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.clear()
    os.environ.update(variables)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)


def _destroy_engines():
    gc.collect()
    for engine in [thing for thing in gc.get_objects() if isinstance(thing, Engine)]:
        engine.destroy()
