"""Plans of slicing: tables, plans of transformers, DeepSpeed's policies, heads dealt to ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.mesh import sim
from mpispeed.nn.tensor import TensorCut, inject
from mpispeed.nn.tensor.attention_plan import Heads
from mpispeed.nn.tensor.auto_policy import ruled_sites
from mpispeed.nn.tensor.hub_plan import planned_sites
from mpispeed.nn.tensor.row_policy import row_sites
from mpispeed.nn.tensor.shard_plan import Division
from mpispeed.nn.tensor.trial_copies import RandomCopies
from tests.helpers.hub_models import VOCAB, build, builders

BOUND = 1e-5
WIDE = {"intermediate_size": 14336, "vocab_size": 32000}


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 8))
def test_every_rank_has_heads_and_every_query_its_key(keys, each, size):
    heads, division = Heads(keys * each, keys, 4), Division(min(size, keys * each), forward_only=True)
    queries, owned = heads.on_ranks(division)
    assert [query for start, stop in queries for query in range(start, stop)] == list(range(keys * each))
    for (start, stop), (first, last) in zip(queries, owned, strict=True):
        assert stop > start
        assert {query // each for query in range(start, stop)} == set(range(first, last))
        assert (stop - start) % (last - first) == 0
    most = [stop - start for start, stop in queries]
    if keys < division.size:
        assert max(most) <= -(-each // (division.size // keys))


def test_copies_of_keys_are_taken_and_joined():
    cut = TensorCut("copied", 0, (6, 2), (), (2,), (((0, 2),), ((2, 4), (0, 2)), ((4, 6),)))
    whole = torch.arange(12.0).view(6, 2)
    parts = [cut.take(whole, rank, 3) for rank in range(3)]
    assert (
        [tuple(part.shape) for part in parts]
        == [cut.local_shape(rank, 3) for rank in range(3)]
        == [
            (2, 2),
            (4, 2),
            (2, 2),
        ]
    )
    assert torch.equal(parts[1], whole[[2, 3, 0, 1]])
    assert torch.equal(cut.join(parts), whole)
    with pytest.raises(ConfigError, match="3 ranks have pieces"):
        cut.ranges(0, 2)


def hub(name, count):
    """Models of families without a table, with weights away from their starting values."""
    import transformers as hub

    small = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 32}
    experts = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
    latent = {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 6,
    }
    own = {
        "Phi3": {},
        "Gemma3Text": {"head_dim": 6},
        "Qwen3Moe": {"head_dim": 6, "num_experts": 4, **experts},
        "Llama4Text": {"head_dim": 6, "num_local_experts": 4, "intermediate_size_mlp": 48, **experts},
        "DeepseekV2": {**latent, **experts},
        "Olmo2": {},
    }[name]
    kind = {"Gemma3Text": "Gemma3ForCausalLM", "Llama4Text": "Llama4ForCausalLM"}.get(name, f"{name}ForCausalLM")
    made = []
    for _ in range(count):
        torch.manual_seed(4)
        model = getattr(hub, kind)(getattr(hub, f"{name}Config")(**{**small, **own})).eval()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.05 * torch.randn(param.shape))
        made.append(model)
    return made


@pytest.mark.parametrize("name", ["Phi3", "Gemma3Text", "Qwen3Moe", "Llama4Text", "DeepseekV2", "Olmo2"])
def test_models_by_their_own_plan(name):
    """Gathered outputs and split inputs, packed experts, latent keys, norms of whole queries, scaled embeddings."""
    plain, *cut = hub(name, 4)
    tokens = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))

    def work(world):
        model = cut[world.comm.rank]
        report = inject(model, world.comm, vocab=True, forward_only=True)
        with torch.no_grad():
            return report, model(tokens).logits

    results = sim.run(3, work)
    with torch.no_grad():
        expected = plain(tokens).logits
    for report, logits in results:
        assert (logits - expected).abs().max() <= BOUND
        assert any("tp_plan" in how for how in report.cut.values())
        assert not any("rule" in how for how in report.cut.values())
        assert report.local_elements < 0.5 * report.elements


def test_plans_are_read_without_values():
    with torch.device("meta"):
        model = builders()["gpt_neox"]()
    chosen, experts = planned_sites(model, Division(2), ("lm_head",))
    assert len(chosen.sites) == 4
    assert not experts
    attention = chosen.sites[0]
    assert attention.heads == ((0, 2), (2, 4))
    assert attention.columns[0].grains == (18,)  # query, key and value of one head


def test_styles_without_translation_leave_a_block_whole():
    model = build("gpt_neox")
    model._tp_plan["gpt_neox.layers.*.mlp"] = "local_params"
    chosen, _ = planned_sites(model, Division(2), ("lm_head",))
    assert {site.scope.rpartition(".")[2] for site in chosen.sites} == {"attention"}
    assert "in the style 'local_params'" in chosen.whole["gpt_neox.layers.0.mlp"]


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (
            {"BertLayer": ("attention.outputs.dense",)},
            r"'attention.outputs.dense' of BertLayer is not valid.*attention.outp",
        ),
        ({"BertLayr": ("output.dense",)}, r"class BertLayr is not valid.*did you mean BertLayer"),
        ({"BertLayer": 3}, r"of BertLayer: 3 is not valid; give the name"),
        (("output.dens",), r"'output.dens' of blocks of BertForMaskedLM is not valid.*did you mean output.dense"),
    ],
)
def test_policies_that_do_not_fit(policy, words):
    with pytest.raises(ConfigError, match=words):
        row_sites(build("bert"), policy, Division(2))


def test_layers_of_a_policy():
    import transformers

    layer = transformers.models.bert.modeling_bert.BertLayer
    by_class = row_sites(build("bert"), {layer: ("attention.output.dense", "output.dense")}, Division(2)).sites
    by_name = row_sites(build("bert"), ["output.dense"], Division(2)).sites
    assert by_class == by_name
    assert [site.row.split(".", 4)[-1] for site in by_class[:2]] == ["attention.output.dense", "output.dense"]
    assert [len(site.columns) for site in by_class] == [3, 1, 3, 1]


class Gate(nn.Module):
    """A module that no table knows, which needs its hidden states alone."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.second(torch.sigmoid(self.first(x)))


def test_proof_without_values():
    with torch.device("meta"):
        model = nn.Sequential(Gate())

    def work(world):
        return inject(model if not world.comm.rank else other, world.comm, without_values=True, layers=RandomCopies())

    with torch.device("meta"):
        other = nn.Sequential(Gate())
    report = sim.run(2, work)[0]
    assert report.cut == {"0.first": "column, rule, proved", "0.second": "row, rule, proved"}


class Biased(nn.Module):
    """Attention that is right without the bias of all heads that others give it."""

    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, position_bias=None):
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(q, k, v, position_bias)
        return self.out(y.transpose(1, 2).flatten(2))


def test_attention_with_numbers_from_outside_stays_whole():
    found = ruled_sites(nn.Sequential(Biased()), Division(2), set())
    assert not found.sites
    assert found.whole == {"0": "may be given position_bias with all heads"}


def test_grains_only_where_each_rank_gets_one():
    sites = row_sites(build("bert"), ("output.dense",), Division(2, grain=64)).sites
    assert {site.grain for site in sites} == {1, 6}  # 44 units, and heads of 6
    assert Division(2, grain=64).grain_of(128) == 64
    assert Division(3, grain=64).grain_of(128) == 1


@pytest.mark.parametrize(
    ("name", "change", "size"),
    [
        ("gpt2", {"n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257, "n_positions": 1024}, 3),
        ("qwen2", {"hidden_size": 896, "num_attention_heads": 14, "intermediate_size": 4864, "vocab_size": 151936}, 4),
        ("bloom", {"hidden_size": 1024, "n_head": 16, "n_layer": 8, "vocab_size": 250880}, 4),
        ("mixtral", {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8} | WIDE, 3),
    ],
)
def test_share_of_each_rank(name, change, size):
    """Models of real widths, of which everything that is large is sliced."""
    with torch.device("meta"):
        cut = [builders()[name](**change) for _ in range(size)]
    options = {"vocab": True, "grain": 64, "forward_only": True, "without_values": True}
    reports = sim.run(size, lambda world: inject(cut[world.comm.rank], world.comm, **options))
    assert max(report.local_elements for report in reports) <= 1.05 * reports[0].elements / size
