"""Sparse pruning with snip_momentum under an engine: the masks of plain torch, with the same bits at every stage."""

import logging

import pytest
import torch
from torch.func import functional_call

from mpispeed.base.errors import ConfigError
from mpispeed.nn.compression import Group, Pruning, compress, compression_of
from mpispeed.nn.compression.blocks import Pattern
from tests.helpers import pipes
from tests.helpers.covering import in_turn
from tests.zoo import same_bits
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import ADAM, SGD, config, start, train_averaged, weights

pytestmark = pytest.mark.mpi(min_size=1)

BATCH, STEPS = 12, 7


def group(pattern="4x1", ratio=0.5, offset=2, end=7, stride=3, **more):
    technique = Pruning("sparse", ratio, "snip_momentum", offset, end, block_pattern=pattern, stride=stride)
    return Group("all", technique, **more)


def pruned(*groups, model=TinyLM):
    made = model()
    compress(made, groups)
    return made


def follow(engine, data, first=0):
    """Train, with techniques switched on at their steps."""
    for step, batch in enumerate(data, first):
        compression_of(engine.module).set_step(step)
        train_averaged(engine, [batch])
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
        engine = start(config(stage, BATCH, 1, zero=zero, **ORDERED), pruned(group(pattern), model=untied))
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


def test_masks_are_those_of_plain_torch():
    data = batches(STEPS, BATCH)
    expected = plain_masks(TinyLM(), data, 1e-2, 0.5, {5: 1 - 0.4**3, 7: 1})  # nothing goes after step 2
    engine = follow(start(config(2, BATCH, **SGD), pruned(group())), data)
    found = masks(engine.module)
    engine.destroy()
    for name, mask in expected.items():
        assert torch.equal(found[name.replace("weight", "sparse_mask")], mask), name


@pytest.mark.ranks(2, 3)
def test_ramp_goes_on_after_a_restart(mpi_tmp_path):
    """Scores come back at another stage; saved once, and not at all when pruning is over."""
    data = batches(STEPS, BATCH)
    settings = [config(stage, BATCH, **ORDERED) for stage in (1, 3)]
    whole = follow(start(settings[0], pruned(group())), data)
    first = follow(start(settings[0], pruned(group())), data[:6])
    first.save_checkpoint(str(mpi_tmp_path))
    first.destroy()
    second = start(settings[1], pruned(group()))
    second.load_checkpoint(str(mpi_tmp_path))
    follow(second, data[6:], 6)
    same_bits(outcome(whole), outcome(second))


@pytest.mark.ranks(1, 2)
def test_skipped_steps_count_for_nothing():
    """Also not as steps of the ramp: the first ones of fp16 overflow, and the run prunes after one that does not."""
    fp16 = {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}
    engine = start(config(1, BATCH, fp16=fp16, **ADAM), pruned(group(offset=1, end=1)))
    seen = []
    for batch in batches(40, BATCH):
        follow(engine, [batch], engine.global_steps)
        seen.append(
            (engine.global_steps - engine.skipped_steps, all(mask.all() for mask in masks(engine.module).values()))
        )
    engine.destroy()
    assert (0, True) in seen
    assert all(is_dense == (applied < 1) for applied, is_dense in seen)


@pytest.mark.ranks(2)
def test_stages_of_a_pipeline_have_one_threshold():
    """Half of all blocks go, of each stage another part."""
    case = pipes.Case(pipes.Layout(2, 1, 1), stage=1)
    module = case.module()
    compress(module, [group(offset=1, end=2, stride=1)])
    engine = start(case.settings(), module)
    for step in range(2):
        compression_of(module).set_step(step)
        pipes.train(engine, [step])
    found = [(int((~mask).sum()), mask.numel()) for mask in masks(module).values() if not mask.all()]
    parts = engine.mesh["pipe"].gather_objects([sum(column) for column in zip(*found, strict=True)])
    engine.destroy()
    assert sum(gone for gone, _ in parts) == sum(size for _, size in parts) // 2
    assert parts[0][0] != parts[0][1] // 2


def refused(message, *groups, **settings):
    with pytest.raises(ConfigError, match=message):
        start(config(1, BATCH, **(ADAM | settings)), pruned(*groups, model=untied))


@pytest.mark.ranks(1, 2)
def test_what_cannot_be():
    refused("takes away at most 0.5 of the weights, and dense_ratio is 0.1; make that at least 0.5", group("2:4", 0.1))
    refused("schedule_offset_end: 1 is before schedule_offset 2", group(offset=2, end=1))
    refused("nothing is left to prune", group("7x1"))
    onebit = {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 2}}}
    refused("which the optimizer OneBitAdam does not have", group(), **onebit)


@pytest.mark.ranks(1, 2)
def test_layers_that_do_not_fit_are_named(caplog):
    with caplog.at_level(logging.WARNING, "mpispeed"):
        engine = start(config(1, BATCH, **ADAM), pruned(group(), model=untied))
    is_first = engine.mesh.rank == 0
    engine.destroy()
    assert ("the weights of head are frozen, or no tiles of block_pattern 4x1" in caplog.text) == is_first
