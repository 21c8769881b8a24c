"""Layers of experts in models whose layers are cut: experts whole on every slice, or cut too."""

import copy

import pytest
import torch

from mpispeed.checkpoints import open_checkpoint
from mpispeed.nn.expert import MLPExperts, SwiGLUExperts
from mpispeed.nn.tensor import cuts
from tests.helpers.covering import in_turn, pairwise
from tests.helpers.expert_training import BATCH, SGD, Net, data, reference, same_tensors
from tests.helpers.experts import HIDDEN
from tests.helpers.tensor import assert_near, joined
from tests.zoo.training import ADAM, config, own_part, start, weights

pytestmark = pytest.mark.mpi(min_size=2)

POLICY = {"up": "column", "down": "row"}
FUSED = {"swiglu": SwiGLUExperts, "mlp": MLPExperts}


def settings(stage, slices, **more):
    return config(stage, BATCH, 1, tensor_parallel={"autotp_size": slices, "injection_policy_tuple": POLICY}, **more)


def train(engine, batches):
    norms = []
    for batch in batches:
        engine.backward(engine(*own_part(engine, tuple(batch))))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def joined_weights(engine):
    """Values of this rank's experts and of all other parameters, whole."""
    slices, known = engine.mpispeed.parts.mesh["model"], cuts(engine.module)
    return {name: joined(slices, known.get(name), value) for name, value in weights(engine).items()}


def compare(engine, expected):
    held = engine.module.second.experts.held
    for name, value in joined_weights(engine).items():
        wanted = expected[name][held.start : held.stop] if name.startswith("second.experts.") else expected[name]
        assert_near(value, wanted, 1e-5, name)


def shapes_of(comm):
    """(ranks of a slicing group, ep_size) on so many ranks."""
    found = [size for size in range(2, comm.size + 1) if comm.size % size == 0]
    return [(size, ep) for size in found for ep in range(1, comm.size // size + 1) if comm.size // size % ep == 0]


CASES = pairwise([0, 1, 2, 3], [False, True], list(FUSED), [0.0, 0.05])


@pytest.mark.parametrize(("stage", "is_cut", "fused", "clip"), in_turn(CASES, ranks=(2, 3, 4)))
def test_training_is_that_of_one_process(comm, stage, is_cut, fused, clip):
    expected, wanted = reference(clip, fused=FUSED[fused])
    for slices, ep_size in shapes_of(comm):
        model = Net(ep_size, fused=FUSED[fused], slices=is_cut)
        engine = start(settings(stage, slices, gradient_clipping=clip, **SGD), model)
        assert train(engine, data()) == pytest.approx(wanted, rel=1e-5)
        compare(engine, expected)
        known = cuts(model)
        assert ("second.experts.down_proj" in known) is is_cut
        assert any("deepspeed_experts" in name for name in known) is is_cut
        assert any(name.startswith("first.mlp.") for name in known)
        engine.destroy()


@pytest.mark.parametrize(("stage", "later", "is_cut"), in_turn([(2, 3, True), (1, 2, True), (3, 0, False)], (2, 3, 4)))
def test_a_checkpoint_fits_other_slices_and_groups(comm, mpi_tmp_path, stage, later, is_cut):
    zero = {"stage3_gather_16bit_weights_on_model_save": True}
    slices, ep_size = shapes_of(comm)[-1 if comm.size == 3 else 1 if comm.size == 4 else 0]
    engine = start(settings(stage, slices, zero=zero, **ADAM), Net(ep_size, fused=MLPExperts, slices=is_cut))
    train(engine, data())
    engine.save_checkpoint(str(mpi_tmp_path), tag="first")
    assert engine.save_16bit_model(str(mpi_tmp_path), "whole.bin")
    found = joined_weights(engine)
    held = engine.module.second.experts.held
    engine.destroy()
    opened = open_checkpoint(mpi_tmp_path, "first")
    assert set(opened.names()) == {name for name, _ in Net(fused=MLPExperts).named_parameters()}
    whole = torch.load(mpi_tmp_path / "whole.bin", weights_only=True) if comm.rank == 0 else None
    for name, value in found.items():
        stored = opened.read_whole(name, "master")
        if whole is not None:
            assert torch.equal(whole[name], stored), name
        assert torch.equal(stored[held.start : held.stop] if name.startswith("second.experts.") else stored, value), (
            name
        )
    for slices, ep_size in [(1, comm.size), *shapes_of(comm)]:
        given = config(later, BATCH, 1, **ADAM) if slices == 1 else settings(later, slices, **ADAM)
        engine = start(given, Net(ep_size, fused=MLPExperts, slices=is_cut))
        engine.load_checkpoint(str(mpi_tmp_path), tag="first")
        engine.save_checkpoint(str(mpi_tmp_path), tag="again")
        assert same_tensors(mpi_tmp_path / "again", mpi_tmp_path / "first")
        engine.destroy()


def test_ranks_with_other_numbers_of_tokens_and_slices_without_any(comm):
    for slices, ep_size in shapes_of(comm):
        engine = start(settings(2, slices, **ADAM), Net(ep_size))
        place = engine.mpispeed.parts.mesh.index("data")
        generator = torch.Generator().manual_seed(place)
        for step in range(3):
            length = (place + step) % 3
            x, y = torch.randn(2, 1, length, HIDDEN, generator=generator)
            loss = engine(x, y) if length else engine(x, y).nan_to_num()
            engine.backward(loss)
            engine.step()
        assert all(value.isfinite().all() for value in joined_weights(engine).values())
        engine.destroy()


def test_a_model_goes_on_in_another_engine(comm):
    for is_cut in (False, True):
        expected, _ = reference()
        slices, ep_size = shapes_of(comm)[-1]
        model = Net(ep_size, slices=is_cut)
        for stage, batches in ((1, data()[:1]), (3, data()[1:])):
            engine = start(settings(stage, slices, **SGD), model)
            train(engine, batches)
            if stage == 1:
                model = copy.deepcopy(engine.module)
            else:
                compare(engine, expected)
            engine.destroy()
