"""transformers' models whose blocks of experts are shared out: values and gradients of the plain model."""

import pytest

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
