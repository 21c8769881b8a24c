"""Scenes whose folder holds what pages read: checkpoints, token stores, scripts."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import mpispeed
from mpispeed import token_stores
from mpispeed.checkpoints import LogicalTensor, ParamInfo, Piece, TensorSlice, open_checkpoint, save
from tests.docs.scenes import CONFIG, Names, engine, model, scene, write_once

SHAPES = {"embed.weight": (256, 64), "layers.0.weight": (64, 64), "blocks.3.mlp.weight": (64, 64)}

SCRIPT = '''
"""Trains a layer for some steps; saves now and then."""

import argparse
import torch
import mpispeed

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=4)
args, _ = mpispeed.add_config_arguments(parser).parse_known_args()
config = args.deepspeed_config or "ds_config.json"
engine, *_ = mpispeed.initialize(model=torch.nn.Linear(8, 8), config=config)
for _ in range(args.steps):
    engine.backward(engine(torch.ones(4, 8)).square().mean())
    engine.step()
'''


@scene
def script(names: Names) -> None:
    """A `train.py` that takes `--steps`, and its config."""
    model(names)
    write_once("train.py", SCRIPT)


@scene
def checkpoints(names: Names) -> None:
    """`save_dir` with three tags of parameters and states of Adam; names for calls that read and write checkpoints.

    A rank of a group of two has `values`, the first half of the columns of "embed.weight", which `info` tells.
    """
    engine(names)
    names["args"] = {"lr": 1e-3}
    comm = names["comm"] = mpispeed.comm.get_world_group()
    for step in (100, 400, 500):
        infos = [ParamInfo(name, shape, step=step) for name, shape in SHAPES.items()]
        tensors = [
            LogicalTensor(name, slot, shape, torch.float32, [Piece(0, scale * torch.randn(shape).flatten())])
            for name, shape in SHAPES.items()
            for slot, scale in (("master", 1.0), ("exp_avg", 0.1))
        ] + [
            LogicalTensor(name, "exp_avg_sq", shape, torch.float32, [Piece(0, torch.rand(shape).flatten())])
            for name, shape in SHAPES.items()
        ]
        state = {"engine": {"global_steps": step}, "client": {"epoch": step // 100}}
        save(comm, "save_dir", f"global_step{step}", params=infos, tensors=tensors, state=state)
    info = ParamInfo("embed.weight", SHAPES["embed.weight"], tp_kind="row")
    cut = TensorSlice(info, 0, 2)
    names |= {
        "start": 0,
        "my_part": torch.randn(256 * 64),
        "name": "embed.weight",
        "info": info,
        "tp_rank": 0,
        "tp_size": 2,
        "values": torch.randn(cut.shape).flatten(),
        "out": torch.empty(cut.shape).flatten(),
        "checkpoint": open_checkpoint("save_dir/global_step500"),
    }


@scene
def tokens(names: Names) -> None:
    """A store `corpus.h5` of three documents of bytes, and the `corpus.jsonl` it was made of; a model beside it."""
    model(names)
    texts = ["the cat sat on the mat", "a dog", "the dog and the cat ran"] * 4
    write_once("corpus.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    token_stores.build_store("corpus.h5", ["corpus.jsonl"], "byte")


@scene
def swap_files(names: Names) -> None:
    """A file `weights.bin` of 64 MiB."""
    with Path("weights.bin").open("wb") as file:
        file.truncate(4 << 24)


@scene
def trained_compressed(names: Names) -> None:
    """An engine whose model was compressed in training, saved in `save_dir`."""
    compressed(names)
    model = mpispeed.compression.init_compression(names["model"], names["config"])
    engine, *_ = mpispeed.initialize(model=model, config=names["config"])
    engine.backward(engine(names["x"], names["y"]))
    engine.step()
    engine.save_checkpoint("save_dir")
    names["engine"] = engine


@scene
def compressed(names: Names) -> None:
    """The scene `model`, with weights of 4 bits in its config."""
    model(names)
    groups = {"wq": {"params": {"start_bits": 8, "target_bits": 4}, "modules": ["blocks"]}}
    shared = {"enabled": True, "quantize_weight_in_forward": True, "quantize_groups": 1}
    section = {"weight_quantization": {"shared_parameters": shared, "different_groups": groups}}
    names["config"] = {**CONFIG, "compression_training": section}
