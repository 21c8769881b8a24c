"""Models that no table knows: the rule cuts what it can prove, users name the rest, and what is left is right."""

import copy

import pytest
import torch
from torch import nn

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.nn.activation_checkpointing import Checkpointer
from mpispeed.nn.checkpointing_options import Options
from mpispeed.nn.tensor import ColumnLinear, cuts, inject, partial_gradients
from tests.helpers import home_made as made
from tests.helpers.tensor import assert_near, whole_gradients

pytestmark = pytest.mark.mpi(min_size=1)

ATTENTION = {
    "separate": lambda: made.Separate(12, 4),
    "grouped": lambda: made.Separate(12, 4, 2),
    "fused": lambda: made.Fused(12, 4),
    "normed": lambda: made.Normed(12, 4),
}


def compare(comm, whole, cut, length=12):
    expected, found = whole(made.tokens(length)), cut(made.tokens(length))
    assert_near(found.detach(), expected.detach(), what="loss")
    expected.backward()
    found.backward()
    grads = whole_gradients(comm, cut)
    for name, param in whole.named_parameters():
        assert_near(grads[name], param.grad, 1e-5, name)


@pytest.mark.parametrize("attention", ATTENTION)
def test_the_rule_cuts_what_it_proves(comm, attention):
    whole, cut = made.build(ATTENTION[attention]), made.build(ATTENTION[attention])
    report = inject(cut, comm)
    assert set(report.whole) == {"embed", "head"}
    assert all("proved" in how for how in report.cut.values())
    compare(comm, whole, cut)
    if attention == "normed":
        expected = [f"blocks.{i}.attention.inner_norm.{name}" for i in range(2) for name in ("bias", "weight")]
        assert partial_gradients(cut) == (expected if comm.size > 1 else [])


def test_three_heads_on_two_ranks(comm):
    def build():
        return made.build(lambda: made.Separate(12, 3))

    cut = build()
    if comm.size > 3:
        with pytest.raises(ConfigError, match=r"3 heads, fewer than the 4 ranks") as caught:
            inject(cut, comm)
        assert caught.value.is_collective
        return
    inject(cut, comm)
    heads = comm.gather_objects(cut.blocks[0].attention.n_heads)
    assert heads == {1: [3], 2: [2, 1], 3: [1, 1, 1]}[comm.size]
    compare(comm, build(), cut)


@pytest.mark.parametrize(
    ("attention", "mlp", "reason"),
    [
        (lambda: made.FromInput(12, 4), made.sequential, "blocks.0.attention: whole (fails when it is cut"),
        (ATTENTION["fused"], lambda: made.Mixed(12, 20), "blocks.0.mlp: whole (fails when it is cut"),
        (ATTENTION["fused"], lambda: made.Numbered(12, 20, 0.1), "blocks.0.mlp: whole (drops activations by the"),
        (lambda: nn.Identity(), made.sequential, "embed: whole"),
    ],
    ids=["width of the input", "inner norm", "functional dropout", "no attention"],
)
def test_what_cannot_be_cut_stays_whole_and_right(comm, attention, mlp, reason):
    whole, cut = made.build(attention, mlp).eval(), made.build(attention, mlp).eval()
    report = inject(cut, comm)
    if comm.size > 1:
        assert reason in str(report)
    compare(comm, whole, cut)


def test_multihead_attention_of_torch_stays_whole(comm):
    def build():
        torch.manual_seed(0)
        return nn.TransformerEncoderLayer(12, 4, 20, dropout=0.0, batch_first=True)

    whole, cut = build(), build()
    report = inject(cut, comm)
    assert "without calling them" in report.whole["self_attn"]
    assert set(report.cut) == {"linear1", "linear2"}
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))
    assert_near(cut(x).detach(), whole(x).detach())


POLICIES = {
    "suffixes": {"wq": "column", "wk": "column", "wv": "column", "wo": "row", "mlp.0": "column", "mlp.2": "row"},
    "expressions": {r"blocks\.\d+\.attention\.w[qkv]": "column", r".*\.wo": "row"},
    "gathered": {"wq": "whole", "mlp.0": "column"},
    "vocabulary": {"embed": "vocab", "head": "vocab"},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_of_users(comm, policy):
    whole, cut = made.build(ATTENTION["grouped"]), made.build(ATTENTION["grouped"])
    report = inject(cut, comm, POLICIES[policy])
    assert len(report.cut) == {"suffixes": 12, "expressions": 8, "gathered": 2, "vocabulary": 2}[policy]
    compare(comm, whole, cut)


def test_fused_layers_are_named(comm):
    policy = {"qkv": "qkv", "proj": "row"}
    whole, cut = made.build(ATTENTION["fused"]), made.build(ATTENTION["fused"])
    inject(cut, comm, policy)
    assert cuts(cut)["blocks.0.attention.qkv.weight"].sub_sizes == (12, 12, 12)
    compare(comm, whole, cut)


class Gate(nn.Module):
    """Gate and up in one layer."""

    def __init__(self):
        super().__init__()
        self.both, self.down = nn.Linear(12, 14), nn.Linear(7, 12)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.down(gate.sigmoid() * up)


def test_gate_and_up_in_one_layer(comm):
    whole, cut = made.build(nn.Identity, Gate), made.build(nn.Identity, Gate)
    inject(cut, comm, {"both": "gate_up", "down": "row"}, grain=2)
    assert (
        cut.blocks[0].mlp.down.weight.shape[1]
        == {1: [7], 2: [4, 3], 3: [4, 2, 1], 4: [2, 2, 2, 1]}[comm.size][comm.rank]
    )
    compare(comm, whole, cut)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"mlp.0": "columns"}, "'mlp.0' is 'columns'; known are column"),
        ({"mpl.0": "column"}, r"'mpl.0' fits to no layer of Model; near are \[.*mlp.0"),
        ({"mlp.(": "column"}, "no regular expression"),
        ({"mlp.2": "row"}, "mlp.2 is 'row' in the policy, but no column-cut layer"),
        ({"mlp.0": "column", "wo": "row"}, "wo is 'row' in the policy, but no column-cut layer"),
        ({"mlp.0": "gate_up"}, "only 'column' can be gathered"),
        ({"wq": "column", "mlp.2": "row"}, r"wq \(column\) has 12 outputs, and blocks.0.mlp.2 behind it 20 inputs"),
        ({"embed": "column"}, "embed is Embedding, no plain linear layer"),
    ],
)
def test_policies_that_cannot_be(comm, policy, message):
    with pytest.raises(ConfigError, match=message) as caught:
        inject(made.build(ATTENTION["separate"]), comm, policy)
    assert caught.value.is_collective


def test_nothing_to_cut(comm):
    with pytest.raises(ConfigError, match="no layer of Sequential can be cut; name layers in a policy"):
        inject(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), comm)
    with pytest.raises(ConfigError, match="vocab: Model does not tell its embedding"):
        inject(made.build(ATTENTION["fused"]), comm, vocab=True)
    with pytest.raises(ConfigError, match="grain=0"):
        inject(made.build(ATTENTION["fused"]), comm, grain=0)


def test_models_that_differ(comm):
    if comm.size > 1:
        model = made.build(ATTENTION["fused"], layers=2 + comm.rank)
        with pytest.raises(UsageError, match="have different models") as caught:
            inject(model, comm)
        assert caught.value.is_collective


def test_sequences_between_sites(comm):
    whole, cut = made.build(ATTENTION["grouped"]), made.build(ATTENTION["grouped"])
    inject(cut, comm, sequence_parallel=True)
    norms = {f"blocks.{i}.{norm}.weight" for i in range(2) for norm in ("first", "second")}
    assert norms <= set(partial_gradients(cut))
    compare(comm, whole, cut)
    if comm.size > 1:
        with pytest.raises(UsageError, match="a sequence of length 13 cannot be cut"):
            cut(made.tokens(13))
    assert_near(cut.eval()(made.tokens(13)).detach(), whole.eval()(made.tokens(13)).detach())


@pytest.mark.parametrize("is_sequence_cut", [False, True])
def test_checkpointed_blocks_whose_inputs_are_partitioned(comm, is_sequence_cut):
    """Inputs that are whole are cut over the group, those that are parts already are recognised."""
    whole, cut = made.build(ATTENTION["grouped"], layers=3), made.build(ATTENTION["grouped"], layers=3)
    inject(cut, comm, sequence_parallel=is_sequence_cut)
    checkpointer = Checkpointer(Options(partition_activations=True), comm)
    cut.call = checkpointer.checkpoint
    compare(comm, whole, cut)


def test_sequences_need_all_layers(comm):
    model = made.build(ATTENTION["separate"])
    with pytest.raises(ConfigError, match=r"and blocks.0.attention.wq is not"):
        inject(model, comm, {"mlp.0": "column", "mlp.2": "row"}, sequence_parallel=True)


def test_shared_layers_and_weights(comm):
    """A block that is used twice is cut once; layers with one weight stay whole."""

    def build():
        model = made.build(ATTENTION["fused"])
        model.blocks[1] = model.blocks[0]
        return model

    whole, cut = build(), build()
    inject(cut, comm)
    assert cut.blocks[0] is cut.blocks[1]
    compare(comm, whole, cut)
    tied = made.build(ATTENTION["fused"])
    tied.blocks[1].mlp[0].weight = tied.blocks[0].mlp[0].weight
    report = inject(tied, comm)
    assert "shares its weight" in report.whole["blocks.0.mlp"]
    assert isinstance(tied.blocks[0].attention.qkv, ColumnLinear)


def test_dropout_inside_and_outside(comm):
    """One dropout serves the heads and the sum: masks differ between ranks in one place, and not in the other."""
    model = made.build(lambda: made.Fused(12, 4, 0.3)).train()
    inject(model, comm)
    torch.manual_seed(1)
    loss = model(made.tokens())
    loss.backward()
    assert len(set(comm.gather_objects(loss.item()))) == 1
    whole_gradients(comm, model)  # what is whole has equal gradients, asserted there
    state = torch.get_rng_state()
    assert all(torch.equal(other, state) for other in comm.gather_objects(state))


def test_copies_train_by_themselves(comm):
    cut = made.build(ATTENTION["grouped"])
    inject(cut, comm, sequence_parallel=True)
    reference = copy.deepcopy(cut)
    compare(comm, made.build(ATTENTION["grouped"]), reference)
    assert all(param.grad is None for param in cut.parameters())
    compare(comm, made.build(ATTENTION["grouped"]), cut)


def test_hooked_layers_stay_whole(comm):
    model = made.build(ATTENTION["fused"])
    seen = []
    model.blocks[0].mlp[0].register_forward_hook(lambda *_: seen.append(1))
    report = inject(model, comm)
    assert "blocks.0.mlp.0" in report.whole
    assert "blocks.1.mlp.0" in report.cut
    model(made.tokens())
    assert seen == [1]
