"""Features that change what a model sees of its data, or how often: how one sees that they were in effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.helpers.feature_models import SHAPE, Block

if TYPE_CHECKING:
    from tests.helpers.pairs import Run

STEPS = 3
TEXTS = 60
"""Samples of runs that sample by difficulty."""


class Texts(torch.utils.data.Dataset[Any]):
    """Pairs of inputs and labels, made of their numbers."""

    def __len__(self) -> int:
        return TEXTS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = (torch.arange(SHAPE.block + 1) + 7 * index) % 256
        return tokens[:-1], tokens[1:]


def recomputed(run: Run) -> bool:
    return run.block_runs == 2 * _expected_runs(run) + _trials(run)


def _trials(run: Run) -> int:
    """Runs of a block by which an engine learns what it returns: where the first that it would run is left out."""
    is_new = "loaded by other ranks" in run.names or any(feature.makes_engines for feature in run.features)
    return int("progressive layer drop" in run.names and is_new and 0 in _blocks(run))


def _blocks(run: Run) -> list[int]:
    """Numbers of the blocks of this rank, by their names; the first layer of a pipeline is none."""
    own = [name for name, module in run.engine.module.named_modules() if isinstance(module, Block)]
    return [int(name.rpartition(".")[2]) - ("." not in name) for name in own]


def _expected_runs(run: Run) -> int:
    """How often blocks of this rank run forward in the steps of this run."""
    own, micros = _blocks(run), range(run.engine.gradient_accumulation_steps())
    left_out = {0: 0, 1: 1}  # micro-batch of the third step -> block, by the seed of the row
    missing = sum(left_out.get(micro) in own for micro in micros) if "progressive layer drop" in run.names else 0
    return len(own) * run.steps * len(micros) - missing


def drops_layers(run: Run) -> bool:
    runs = _expected_runs(run) * (2 if "activation checkpointing" in run.names else 1) + _trials(run)
    expected = run.engine.progressive_layer_drop.theta_at(2)
    return bool(run.engine.get_pld_theta() == expected < 1 and run.block_runs == runs)


def grows(run: Run) -> bool:
    """The third step had a length between the first and the last, here and in the model."""
    own = getattr(run.engine.module, "length", 0) * run.engine.mesh["sequence"].size
    seen = run.notes.get("length") or own
    return run.engine.curriculum_scheduler_legacy.get_current_difficulty() == seen == 6


def is_sampled(run: Run) -> bool:
    """The samples of all steps are of this run's loader, and the last ones were admitted by the second difficulty."""
    loader, samples = run.engine.training_dataloader, STEPS * run.engine.train_batch_size()
    return bool(loader.position == samples and loader.order.difficulties(samples) == {"number": TEXTS - 1})


def drops_tokens(run: Run) -> bool:
    """The first block, where this rank has it, saw 4 of the tokens in the third step."""
    blocks = {name: each for name, each in run.engine.module.named_modules() if isinstance(each, Block)}
    first = "1" if run.engine.mesh["pipe"].size > 1 else "blocks.0"
    lengths = [each.length for name, each in blocks.items() if name == first]
    seen = {4} if "progressive layer drop" not in run.names else {0, 2, 4}  # it may have been left out then
    return run.engine.random_ltd_scheduler.get_current_seq() == 4 and seen >= set(lengths)


def compresses(run: Run) -> bool:
    """Weights of this rank's blocks are rounded and rows pruned, and training passes saw the ranges of inputs."""
    layers = run.engine.compression.layers
    ranges = [buffer for name, buffer in run.engine.module.named_buffers() if name.endswith("activation_range")]
    rounding = [state for state in layers.values() if "activation_quantization" in state.active]
    is_seen = len(rounding) == len(ranges) > 0 and all(bool(each.isfinite().all()) for each in ranges)
    return is_seen and all("weight_quantization" in state.active and state.bits == 8 for state in layers.values())
