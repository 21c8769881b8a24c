"""Inputs of stores that tests build, and what is in the stores."""

import hashlib
import json
import random

import h5py
import numpy as np

from mpispeed.mesh.backends.solo import solo_comm
from mpispeed.tokens_build.job import build


def corpus(folder, count=300, seed=1):
    """Lines of JSON, and the tokens of the built-in tokenizer."""
    draw = random.Random(seed)
    texts = ["".join(draw.choices("abc \u20ac\n", k=draw.randint(0, 60))) for _ in range(count)]
    path = folder / f"corpus{seed}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path, [[*text.encode(), 256] for text in texts]


def opened(path):
    """Documents and columns of a store, by h5py alone."""
    with h5py.File(path) as file:
        tokens, begins = file["tokens"][:], file["documents"][:]
        documents = [part.tolist() for part in np.split(tokens, begins[1:-1].astype(int))]
        lookup = np.searchsorted(begins, np.arange(0, len(tokens), 4096), side="right") - 1
        assert file["lookup"][:].tolist() == lookup.tolist()
        columns = {name: group["values"][:] for name, group in file["columns"].items()}
        rows = file["rows"][:].tolist() if "rows" in file else None
        facts = json.loads(file["manifest"][()].split(b"\n", 1)[1])
    return documents, columns, rows, facts


def digest(path):
    return hashlib.blake2b(path.read_bytes()).hexdigest()


def alone(request):
    return build(solo_comm(), request)
