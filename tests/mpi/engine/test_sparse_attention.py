"""The section `sparse_attention` under an engine: transformers' encoders and own layers train as in one process."""

import json

import pytest
import torch
from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.checkpoints import open_checkpoint
from mpispeed.nn.sparse import FixedSparsityConfig, SparseAttentionUtils, SparseSelfAttention, sparsity_of
from tests.helpers import hub_models
from tests.helpers.covering import on_ranks
from tests.zoo import same_bits
from tests.zoo.training import SGD, config, own_part, start, weights

pytestmark = pytest.mark.mpi(min_size=1)

BATCH, STEPS, LENGTH = 12, 3, 14
SECTION = {"mode": "bigbird", "block": 4, "num_random_blocks": 1}


class Encoder(nn.Module):
    """A `transformers` encoder whose loss is its output's distance to the labels' embedding."""

    def __init__(self, kind):
        super().__init__()
        self.inner = hub_models.build(kind)

    def forward(self, ids, mask):
        return self.inner(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss


class Layer(nn.Module):
    """One attention of our own, with the pattern of whoever has one."""

    def __init__(self, pattern=None):
        super().__init__()
        torch.manual_seed(3)
        self.project, self.attention = nn.Linear(24, 72), SparseSelfAttention(pattern, max_seq_length=16)

    def forward(self, x, y):
        parts = self.project(x).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4)
        return (self.attention(*parts).transpose(1, 2).flatten(2) - y).square().mean()


def tokens():
    draw = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        ids, mask = torch.randint(3, 60, (BATCH, LENGTH), generator=draw), torch.ones(BATCH, LENGTH, dtype=torch.long)
        mask[:, LENGTH - 2 :] = 0  # as many valid tokens in each sample, so that means of means are means
        yield ids, mask


def vectors():
    draw = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        yield torch.randn(2, BATCH, 16, 24, generator=draw).unbind()


def trained(engine, data):
    for batch in data:
        engine.backward(engine(*own_part(engine, batch)))
        engine.step()
    return weights(engine)


def expected(model, data):
    optimizer = torch.optim.SGD(model.parameters(), **SGD["optimizer"]["params"])
    for batch in data:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()
    return dict(model.named_parameters())


def assert_close(found, wanted):
    for name, value in wanted.items():
        # the order of sums in fp32; biases of keys have no gradient but rounding, which Adam would turn into steps
        assert torch.allclose(found[name].float(), value.detach(), rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize(("kind", "stage"), on_ranks(["bert", "roberta"], [0, 1, 2, 3]))
def test_encoders_of_transformers_attend_over_blocks(kind, stage):
    twin = Encoder(kind)
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        twin.inner, {"bert": 32, "roberta": 30}[kind], sparsity_of(SECTION, 4)
    )
    engine = start(config(stage, BATCH, 1, sparse_attention=SECTION, **SGD), Encoder(kind))
    found = trained(engine, tokens())
    engine.destroy()
    assert_close(found, expected(twin, tokens()))


@pytest.mark.ranks(1, 3)
def test_a_layer_without_a_pattern_takes_that_of_the_section_and_another_keeps_its_own():
    given = config(2, BATCH, 1, sparse_attention=SECTION | {"different_layout_per_head": True}, **SGD)
    engine = start(given, Layer())
    found = trained(engine, vectors())
    engine.destroy()
    assert_close(found, expected(Layer(sparsity_of(given["sparse_attention"], 4)), vectors()))
    own = FixedSparsityConfig(4, 8, attention="unidirectional")
    engine = start(given, Layer(own))
    assert engine.module.attention.sparsity_config is own
    assert_close(trained(engine, vectors()), expected(Layer(own), vectors()))
    engine.destroy()


@pytest.mark.ranks(2)
def test_the_pattern_is_in_checkpoints_and_a_run_goes_on(mpi_tmp_path):
    given = config(3, BATCH, 1, sparse_attention=SECTION, **SGD)
    data = list(vectors())
    engine = start(given, Layer())
    trained(engine, data[:2])
    engine.save_checkpoint(str(mpi_tmp_path))
    whole = trained(engine, data[2:])
    engine.destroy()
    again = start(given, Layer())
    again.load_checkpoint(str(mpi_tmp_path))
    same_bits(trained(again, data[2:]), whole)
    again.destroy()
    with open_checkpoint(str(mpi_tmp_path)) as found:
        told = json.dumps(found.state(), default=str)
    assert '"layers": ["attention"]' in told
    assert "bigbird" in told


REFUSED = {
    "has nothing that it applies to": lambda: (nn.Linear(2, 2), {}),
    "no multiple of num_global_blocks": lambda: (Layer(), {"mode": "fixed", "num_global_blocks": 3}),
    "no dropout": lambda: (hub_models.build("bert", attention_probs_dropout_prob=0.1), {}),
}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_is_said_on_all_ranks(sentence):
    model, section = REFUSED[sentence]()
    with pytest.raises(ConfigError, match=sentence):
        start(config(1, BATCH, 1, sparse_attention=SECTION | section, **SGD), model)


CUTS = {
    "whole sequences only; set": (lambda: hub_models.build("bert"), {"sequence_parallel_size": 2}),
    "sequence_parallel.ring_size cuts them": (
        Layer,
        {"sequence_parallel_size": 2, "sequence_parallel": {"ring_size": 2}},
    ),
    "tensor_parallel cuts them": (lambda: hub_models.build("bert"), {"tensor_parallel": {"autotp_size": 2}}),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sentence", CUTS)
def test_cuts_without_whole_heads_are_refused(sentence):
    make, more = CUTS[sentence]
    with pytest.raises(ConfigError, match=sentence):
        start(config(1, BATCH, 1, sparse_attention=SECTION, **more, **SGD), make())


@pytest.mark.ranks(1)
def test_keys_of_other_modes_are_told(caplog):
    start(config(0, BATCH, 1, sparse_attention=SECTION | {"num_local_blocks": 3}, **SGD), Layer()).destroy()
    assert "sparse_attention.num_local_blocks has no effect here: mode bigbird does not read it" in caplog.text
