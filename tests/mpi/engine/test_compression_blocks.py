"""Sparse pruning with snip_momentum under an engine: the masks of plain torch, with the same bits at every stage."""

import logging

import pytest
import torch
from torch.func import functional_call

from mpispeed.base.errors import ConfigError
from mpispeed.nn.compression.blocks import Pattern
from tests.helpers import pipes
from tests.helpers.covering import in_turn
from tests.zoo import same_bits
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import ADAM, SGD, config, start, train_averaged, weights

pytestmark = pytest.mark.mpi(min_size=1)

BATCH, STEPS = 12, 7


def pruning(pattern="4x1", ratio=0.5, offset=2, end=7, stride=3, **shared):
    """The section of the config, for all layers."""
    ramp = {"schedule_offset": offset, "schedule_offset_end": end, "schedule_offset_stride": stride}
    method = {"enabled": True, "method": "snip_momentum", "block_pattern": pattern, "dense_ratio": ratio}
    return {"compression_training": {"sparse_pruning": {"shared_parameters": {**method, **ramp, **shared}}}}


def follow(engine, data):
    train_averaged(engine, data)
    return engine


def outcome(engine):
    """Masks and weights, by name; ends the engine."""
    found = masks(engine.module) | weights(engine)
    engine.destroy()
    return found


def masks(model):
    return {name: mask.clone() for name, mask in model.named_buffers() if name.endswith("sparse_mask")}


def untied():
    return TinyLM(is_tied=False)


ORDERED = {"reduction": "ordered", "gradient_clipping": 0.5, **ADAM}


@pytest.mark.parametrize("pattern", in_turn(["4x1", "2:4", "1x4", "2x2"]))
def test_stages_prune_alike(pattern, mpi_tmp_path):
    """Without accumulation, whose sums stages make in different orders. States in files are read in several pieces."""
    nvme = {"offload_optimizer": {"device": "nvme", "nvme_path": str(mpi_tmp_path)}, "sub_group_size": 4096}
    outcomes = []
    for stage, zero in ((0, {}), (1, {"offload_optimizer": {"device": "cpu"}}), (2, {}), (3, {}), (3, nvme)):
        engine = start(config(stage, BATCH, 1, zero=zero, **ORDERED, **pruning(pattern)), untied())
        outcomes.append(outcome(follow(engine, batches(STEPS, BATCH))))
    for other in outcomes[1:]:
        same_bits(outcomes[0], other)
    fitting = Pattern.parse(pattern).fits
    found = [mask for name, mask in outcomes[0].items() if name.endswith("mask") and fitting(mask.shape)]
    assert sum(int((~mask).sum()) for mask in found) == sum(mask.numel() for mask in found) // 2


def plain_masks(model, data, lr, dense, due):
    """Scores, thresholds and updates of all Linear layers that 4x1 fits, by torch alone."""
    names = [name for name, param in model.named_parameters() if name.endswith(("up.weight", "down.weight"))]
    params, scores = dict(model.named_parameters()), dict.fromkeys(names, 0.0)
    kept = {name: torch.ones_like(params[name]) for name in names}
    for step, batch in enumerate(data, 1):
        used = {name: param * kept[name] if name in kept else param for name, param in params.items()}
        gradients = torch.autograd.grad(functional_call(model, used, (batch,)), list(params.values()))
        for (name, param), gradient in zip(params.items(), gradients, strict=True):
            if name in kept:
                scores[name] = 0.9 * scores[name] + (param * gradient).abs().detach()
            param.data -= lr * gradient
        if step in due:
            blocks = {name: scores[name].view(len(scores[name]) // 4, 4, -1).sum(1) for name in names}
            every = torch.cat([found.flatten() for found in blocks.values()])
            threshold = every.kthvalue(int(len(every) * due[step] * (1 - dense))).values
            for name, found in blocks.items():
                kept[name] *= (found > threshold).repeat_interleave(4, 0)
    return {name: mask.bool() for name, mask in kept.items()}


@pytest.mark.ranks(1, 3)
def test_masks_are_those_of_plain_torch():
    data = batches(STEPS, BATCH)
    expected = plain_masks(TinyLM(), data, 1e-2, 0.5, {5: 1 - 0.4**3, 7: 1})  # nothing goes after step 2
    engine = follow(start(config(2, BATCH, **SGD, **pruning()), TinyLM()), data)
    found = masks(engine.module)
    engine.destroy()
    for name, mask in expected.items():
        assert torch.equal(found[name.replace("weight", "sparse_mask")], mask), name


@pytest.mark.ranks(2, 3)
def test_ramp_goes_on_after_a_restart(mpi_tmp_path):
    """Scores come back at another stage; when pruning is over there are none."""
    data = batches(STEPS, BATCH)
    settings = [config(stage, BATCH, **ORDERED, **pruning()) for stage in (1, 3)]
    whole = follow(start(settings[0], TinyLM()), data)
    first = follow(start(settings[0], TinyLM()), data[:6])
    first.save_checkpoint(str(mpi_tmp_path))
    first.destroy()
    second = start(settings[1], TinyLM(seed=99))
    second.load_checkpoint(str(mpi_tmp_path))
    stores = second.mpispeed.parts.features.slots
    assert [len(stores(updates)) for updates in (7, 6)] == [0, 1]
    second.load_checkpoint(str(mpi_tmp_path))
    follow(second, data[6:])
    assert not stores(7)
    same_bits(outcome(whole), outcome(second))


@pytest.mark.ranks(1, 2)
def test_skipped_steps_count_for_nothing():
    """Also not as steps of the ramp: the first ones of fp16 overflow, and the run prunes after one that does not."""
    fp16 = {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}
    engine = start(config(1, BATCH, fp16=fp16, **ADAM, **pruning(offset=1, end=1)), TinyLM())
    seen = []
    for batch in batches(40, BATCH):
        follow(engine, [batch])
        seen.append(
            (engine.global_steps - engine.skipped_steps, all(mask.all() for mask in masks(engine.module).values()))
        )
    engine.destroy()
    assert (0, True) in seen
    assert all(is_dense == (applied < 1) for applied, is_dense in seen)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["pipe", "model"])
def test_stages_and_slices_have_one_threshold(axis):
    """Half of all blocks go, of each stage or slice another part. The head, which is not sliced, counts once."""
    layout = pipes.Layout(2, 1, 1) if axis == "pipe" else pipes.Layout(1, 2, 1)
    engine = pipes.Case(layout, stage=1).engine(**pruning(offset=1, end=2, stride=1))
    pipes.train(engine, range(2))
    counts = {name: (int((~mask).sum()), mask.numel()) for name, mask in masks(engine.module).items()}
    is_other_slice = axis == "model" and engine.mesh.rank > 0
    found = [count for name, count in counts.items() if not (name == "10.sparse_mask" and is_other_slice)]
    parts = engine.mesh[axis].gather_objects([sum(column) for column in zip(*found, strict=True)])
    engine.destroy()
    assert sum(gone for gone, _ in parts) == sum(size for _, size in parts) // 2
    assert parts[0][0] != parts[0][1] // 2


def refused(message, section, **settings):
    with pytest.raises(ConfigError, match=message):
        start(config(1, BATCH, **(ADAM | settings), **section), untied())


@pytest.mark.ranks(1, 2)
def test_what_cannot_be():
    refused(
        "takes away at most 0.5 of the weights, and dense_ratio is 0.1; make that at least 0.5", pruning("2:4", 0.1)
    )
    refused("1 is before schedule_offset 2", pruning(offset=2, end=1))
    refused("nothing is left to prune", pruning("7x1"))
    onebit = {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 2}}}
    refused("which the optimizer OneBitAdam does not have", pruning(), **onebit)


@pytest.mark.ranks(1, 2)
def test_layers_that_do_not_fit_are_named(caplog):
    with caplog.at_level(logging.WARNING, "mpispeed"):
        engine = start(config(1, BATCH, **ADAM, **pruning()), untied())
    is_first = engine.mesh.rank == 0
    engine.destroy()
    assert ("the weights of head are frozen, or no tiles of block_pattern 4x1" in caplog.text) == is_first
