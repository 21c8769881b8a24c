"""transformers' models whose blocks of experts are shared out: values and gradients of the plain model."""

import pytest
import torch

from mpispeed.base.errors import UsageError
from mpispeed.checkpoints import open_checkpoint
from mpispeed.ckpt.tools.exporting import export
from mpispeed.nn.expert.blocks import BlockExperts
from mpispeed.zero import safe_get_full_grad
from tests.helpers.covering import on_ranks
from tests.helpers.hub_experts import MODELS, model_of, tokens_of
from tests.helpers.tensor import assert_near
from tests.zoo.training import SGD, config, start

pytestmark = pytest.mark.mpi(min_size=1)

BATCH = 4
BOUND = 1e-5  # of the largest element, fp32: other orders of summation, through two layers and back


def settings(stage, ep_size, **section):
    return config(stage, BATCH, 1, **SGD, expert_parallel={"enabled": True, "autoep_size": ep_size, **section})


def plain(kind, **options):
    """Loss, logits and gradients of the model of transformers, with its own experts, on the whole batch."""
    model, tokens = model_of(kind), tokens_of(BATCH)
    output = model(input_ids=tokens, labels=tokens, **options)
    output.loss.backward()
    return output, {name: param.grad for name, param in model.named_parameters()}


def held_part(name, value, engine):
    """Of a tensor of all experts the part of this rank."""
    layer, _, rest = name.partition(".experts.")
    if not rest:
        return value
    held = engine.module.get_submodule(layer).experts.held
    return value[held.start : held.stop]


def sizes(comm):
    return [size for size in (1, 2, 4) if comm.size % size == 0]


@pytest.mark.parametrize(("kind", "stage"), on_ranks(list(MODELS), [0, 1, 2, 3], ranks=(1, 2, 4)))
def test_values_and_gradients_are_those_of_the_plain_model(comm, kind, stage):
    expected, grads = plain(kind)
    for ep_size in sizes(comm):
        engine = start(settings(stage, ep_size), model_of(kind))
        tokens = tokens_of(BATCH).chunk(comm.size)[comm.rank]
        output = engine(input_ids=tokens, labels=tokens)
        assert_near(output.logits.detach(), expected.logits.detach().chunk(comm.size)[comm.rank], BOUND, "logits")
        engine.backward(output.loss)
        for name, param in engine.module.named_parameters():
            assert_near(safe_get_full_grad(param), held_part(name, grads[name], engine), BOUND, name)
        layers = [each for each in engine.module.modules() if isinstance(each, BlockExperts)]
        assert layers
        assert all(len(each.experts.held) == 8 // ep_size for each in layers)
        engine.step()
        engine.destroy()


def step(engine, comm, seed=0):
    tokens = tokens_of(BATCH, seed).chunk(comm.size)[comm.rank]
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()


def trained_weights(kind, steps=2):
    """Of plain torch in one process."""
    model = model_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for number in range(steps):
        tokens = tokens_of(BATCH, number)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(("kind", "stage"), on_ranks(["mixtral", "deepseek_v3"], [0, 1, 2, 3], ranks=(1, 2, 4)))
def test_saved_models_load_in_plain_transformers(comm, mpi_tmp_path, kind, stage):
    """Files of `save_16bit_model`, of `save_pretrained` and of an exported checkpoint hold the same bits."""
    folder, written = mpi_tmp_path, {}
    more = {} if stage < 3 else {"zero": {"stage3_gather_16bit_weights_on_model_save": True}}
    section = {"enabled": True, "autoep_size": comm.size}
    engine = start(config(stage, BATCH, 1, **SGD, **more, expert_parallel=section), model_of(kind))
    for number in range(2):
        step(engine, comm, number)
    engine.save_16bit_model(folder / "bits")
    engine.save_checkpoint(folder / "run", tag="two")
    state = engine._zero3_consolidated_16bit_state_dict()
    if comm.size > 1 and stage < 3:
        with pytest.raises(UsageError, match=r"of model\.layers\.\d\.mlp, and the state dict has not all 8"):
            engine.module.save_pretrained(folder / "part")
    engine.destroy()
    if comm.rank == 0:
        engine.module.save_pretrained(folder / "pretrained", state_dict=state)
        engine.module.config.save_pretrained(folder / "bits")
        with open_checkpoint(folder / "run") as reader:
            export(reader, folder / "exported", to="safetensors")
        engine.module.config.save_pretrained(folder / "exported")
        for name in ("bits", "pretrained", "exported"):
            made = type(engine.module).from_pretrained(folder / name, dtype=torch.float32)
            written[name] = made.state_dict()
        expected = trained_weights(kind)
        assert list(state) == list(expected)
        for name, value in expected.items():
            assert torch.equal(written["bits"][name], state[name])
            assert torch.equal(written["pretrained"][name], state[name])
            assert torch.equal(written["exported"][name], state[name])
            assert_near(state[name], value, BOUND, name)
