"""Scenes whose models are larger than a perceptron: a small GPT, layers of experts, a pipeline, models of mup."""

from __future__ import annotations

import json
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import mpispeed
from tests.docs.scenes import CONFIG, Names, model, scene, write_once

VOCABULARY, LENGTH = 256, 16


def small_gpt(names: Names) -> nn.Module:
    """The GPT of the examples, in two narrow blocks."""
    from gpt import GPT, Block, Shape  # of docs/examples

    shape = Shape(layers=2, heads=2, width=16, block=LENGTH)
    names |= {"GPT": GPT, "Block": Block, "shape": shape}
    return GPT(shape)


@scene
def gpt(names: Names) -> None:
    """`GPT`, `Block` and `shape` of the examples, a `model` of it, `tokens` for it; `config`, also as files."""
    model(names)
    names["model"] = small_gpt(names)
    names["tokens"] = torch.randint(VOCABULARY, (4, LENGTH))


@scene
def token_dropping(names: Names) -> None:
    """The scene `gpt`; in its config the second of three blocks sees some tokens alone."""
    gpt(names)
    names["LlamaDecoderLayer"] = names["Block"]
    growth = {"require_steps": 10, "seq_per_step": 4}
    schedule = {"min_value": 4, "max_value": LENGTH, "schedule_type": "fixed_linear", "schedule_config": growth}
    section = {
        "enabled": True,
        "total_layer_num": 2,
        "random_ltd_layer_num": 1,
        "random_ltd_layer_id": [0],
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": schedule,
    }
    routing = {"enabled": True, "data_routing": {"enabled": True, "random_ltd": section}}
    names["config"] = {**CONFIG, "data_efficiency": routing}


@scene
def experts(names: Names) -> None:
    """An `mlp` of 1024 features, inputs `x` (2, 4, 1024) for it, and the `model_loss` of a model around it."""
    mlp = nn.Sequential(nn.Linear(1024, 64), nn.GELU(), nn.Linear(64, 1024))
    names |= {"mlp": mlp, "x": torch.randn(2, 4, 1024), "model_loss": torch.ones(())}


class Wide(nn.Module):
    """A network that grows with its width, with the last layer of mup."""

    def __init__(self, width: int) -> None:
        import mup

        super().__init__()
        self.first = nn.Linear(8, width)
        self.last = mup.MuReadout(width, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean square error."""
        return nn.functional.mse_loss(self.last(torch.tanh(self.first(x))), y)


@scene
def widths(names: Names) -> None:
    """`GPT(width)`, which ends in a layer of mup."""
    names["GPT"] = Wide


@scene
def whole_layers(names: Names) -> None:
    """`MyModel`, a `config` of stage 3 and its file, `batches` for an engine, and names for what is done with one.

    `load_my_weights(model)` and `generate(model, prompt)` are a script's own; TMPDIR is the page's folder.
    """
    names |= {
        "MyModel": Headed,
        "config": {**CONFIG, "zero_optimization": {"stage": 3}},
        "batches": [torch.randn(4, 8) for _ in range(2)],
        "load_my_weights": lambda module: nn.init.zeros_(module.head.weight),
        "generate": lambda module, prompt: module.head(prompt),
        "prompt": torch.ones(1, 8),
    }
    local_disk(names)
    write_once("ds.json", json.dumps(names["config"]))


class Headed(nn.Module):
    """A loss of inputs (batch, 8) alone, by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean square of the outputs."""
        return self.head(torch.tanh(self.body(x))).square().mean()


@scene
def local_disk(names: Names) -> None:
    """TMPDIR, as a batch system sets it, is a folder of its own."""
    names["os"].environ["TMPDIR"] = tempfile.mkdtemp(dir=".")
    names["os"].environ["TMPDIR"] = names["os"].path.abspath(names["os"].environ["TMPDIR"])


@scene
def offloading(names: Names) -> None:
    """The scene `engine` at stage 3, with TMPDIR on a disk; `generate` uses the model."""
    model(names)
    local_disk(names)
    config = {**CONFIG, "zero_optimization": {"stage": 3}}
    names["engine"] = mpispeed.initialize(model=names["model"], config=config)[0]
    names["generate"] = lambda module: module(names["x"], names["y"])


@scene
def masked_position(names: Names) -> None:
    """The scene `model`; `position` is an embedding in it, with a `mask` for it; `others` are its other parameters."""
    model(names)
    whole = names["model"]
    names["position"] = position = whole.blocks[0]
    names |= {
        "mask": torch.ones_like(position.weight),
        "others": [param for param in whole.parameters() if param is not position.weight],
    }
    file = {**CONFIG, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 10}}}
    write_once("ds_config.json", json.dumps(file))


@scene
def a_group(names: Names) -> None:
    """A group `comm` and a buffer `x`."""
    mpispeed.init_distributed()
    names |= {"comm": mpispeed.comm.get_world_group(), "x": torch.randn(64)}


@scene
def stages(names: Names) -> None:
    """An `engine` of a pipeline of one stage, an iterator `data` for it, and a `log`."""
    import logging

    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
    pipeline = mpispeed.PipelineModule(layers, num_stages=1, loss_fn=nn.functional.mse_loss)
    names["engine"] = mpispeed.initialize(model=pipeline, config=CONFIG)[0]
    names |= {"data": iter([(torch.ones(4, 8), torch.ones(4, 8))] * 4), "log": logging.getLogger("train")}


@scene
def attention_inputs(names: Names) -> None:
    """Queries, keys and values of 128 tokens, whose padding is told; `x`, `logits`, `labels`; layers of a model."""
    heads = [torch.randn(1, 12, 128, 8) for _ in range(3)]
    names |= dict(zip(("query", "key", "value"), heads, strict=True)) | dict(zip("qkv", heads, strict=True))
    names |= {
        "padding": torch.zeros(1, 128),
        "x": torch.randn(1, 128, 8),
        "hidden": torch.randn(1, 128, 8, requires_grad=True),
        "logits": torch.randn(1, 128, 32),
        "labels": torch.randint(32, (1, 128)),
        "self": SimpleNamespace(mlp=nn.Sequential(nn.Linear(8, 32), nn.GELU()), head=nn.Linear(8, 32)),
    }


@scene
def as_deepspeed(names: Names) -> None:
    """`import deepspeed` is mpispeed."""
    import mpispeed.as_deepspeed  # noqa: F401


class Named(nn.Module):
    """A block whose linear layers have the names of a model that no table knows."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 2, 4
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(8, 8) for _ in range(4))
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(8, 16), "fc2": nn.Linear(16, 8)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and a perceptron."""
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.wq, self.wk, self.wv))
        x = x + self.wo(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp["fc2"](torch.tanh(self.mlp["fc1"](x)))


@scene
def slices(names: Names) -> None:
    """A `model` of blocks with layers `wq` to `mlp.fc2`, and the group `comm` to cut it over."""
    a_group(names)
    names["model"] = nn.Sequential(Named(), Named())


@scene
def own_layers(names: Names) -> None:
    """A module `self` under construction, inputs `x` (2, 3, 1024) of its last layer, and `target`."""
    a_group(names)
    names |= {"self": nn.Module(), "x": torch.randn(2, 3, 1024), "target": torch.randint(32000, (2, 3))}


@scene
def own_slices(names: Names) -> None:
    """The scene `model`, whose `mpu` says that there is no rank to cut layers over; `self` is one of its layers."""
    model(names)
    topology = mpispeed.pipe.PipeModelDataParallelTopology(num_pp=1, num_mp=1, num_dp=1)
    names["mpu"] = mpispeed.PipelineModule([nn.Linear(8, 8)], topology=topology).mpu()
    names["self"] = names["model"].blocks[0]


@scene
def routed(names: Names) -> None:
    """The scene `model`, with a `dense` layer and a class `MixtureOfExperts` of one of its parts."""
    model(names)

    class MixtureOfExperts(nn.Sequential):
        """Experts that a router chooses among."""

    names["model"] = nn.Sequential(MixtureOfExperts(nn.Linear(8, 8)))
    names |= {"MixtureOfExperts": MixtureOfExperts, "dense": nn.Linear(2048, 8192)}


@scene
def scores(names: Names) -> None:
    """Scores of attention (2, 4, 8, 8) with heads of `d` features and a `mask` that is added to them."""
    names |= {"scores": torch.randn(2, 4, 8, 8), "mask": torch.zeros(2, 1, 1, 8), "d": 16}


@scene
def torch_groups(names: Names) -> None:
    """`dist` is torch.distributed, and its backend is there."""
    import torch.distributed as dist

    import mpispeed.torch_backend  # noqa: F401

    names["dist"] = dist
    sys.argv = ["train.py"]


@scene
def recorded(names: Names) -> None:
    """`runs` with the records of two runs of an engine, one of them also as `run.h5`; `old` and `new` with one each."""
    import shutil
    from pathlib import Path

    for folder in ("runs", "old", "new"):
        config: dict[str, Any] = {**CONFIG, "run_record": {"enabled": True, "path": folder}}
        config |= {"trace": {"enabled": True, "start_step": 1, "end_step": 2}}
        model(names)
        made = mpispeed.initialize(model=names["model"], config=config)[0]
        for _ in range(4):
            made.backward(made(names["x"], names["y"]))
            made.step()
        made.destroy()
        (file,) = Path(folder).glob("*.h5")
        shutil.copy(file, "run.h5")
        if folder != "runs":
            file.rename(Path(folder, "run.h5"))


@scene
def documents(names: Names) -> None:
    """A file `corpus.jsonl` of 32 documents."""
    lines = [json.dumps({"text": f"{number} " * 300}) for number in range(32)]
    write_once("corpus.jsonl", "\n".join(lines) + "\n")


class Pairs(nn.Module):
    """The loss of what is said about the next byte by a byte alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(257, 257)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy."""
        return nn.functional.cross_entropy(self.table(x).flatten(0, 1), y.flatten())


@scene
def token_windows(names: Names) -> None:
    """A store `corpus.h5` of some thousand bytes, and a model of windows of 2048 of them."""
    from mpispeed import token_stores

    documents(names)
    token_stores.build_store("corpus.h5", ["corpus.jsonl"], "byte", columns=["length"])
    names["model"] = Pairs()
    names["config"] = {**CONFIG, "train_micro_batch_size_per_gpu": 1}
    names |= {"values": torch.rand(32).numpy(), "begin": 0, "end": 10}


@scene
def llama(names: Names) -> None:
    """A small `model` of transformers and `prompts` for it."""
    from tests.helpers.tiny_models import prompts, tiny_model

    names |= {"model": tiny_model("llama", hidden_size=96, intermediate_size=128), "prompts": prompts()}


@scene
def foreign_files(names: Names) -> None:
    """`ds_checkpoints` as DeepSpeed leaves them, of one tag; `model.safetensors` of the `model` within another."""
    from pathlib import Path

    from safetensors.torch import save_file

    from tests.unit.ckpt import foreign_folders

    model(names)
    foreign_folders.write_grouped(Path("ds_checkpoints"), foreign_folders.Known(), 2)
    Path("ds_checkpoints", foreign_folders.TAG).rename("ds_checkpoints/global_step500")
    Path("ds_checkpoints/latest").write_text("global_step500")
    save_file({f"model.{name}": value for name, value in names["model"].state_dict().items()}, "model.safetensors")
