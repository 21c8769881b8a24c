"""Blocks of experts of transformers as layers of ours: one process, without engines."""

import copy

import pytest
import torch
from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.config import load
from mpispeed.engine.blocks import take_blocks
from mpispeed.nn.expert import RoutedExperts
from mpispeed.nn.expert.block_table import ROWS
from mpispeed.nn.expert.blocks import BlockExperts, BlockModules, BlockRouter
from tests.helpers.hub_experts import MODELS, model_of, tokens_of
from tests.helpers.tensor import assert_near

BOUND = 1e-5  # of the largest element, fp32: other orders of summation


def take(model, **section):
    take_blocks(model, load({"expert_parallel": {"enabled": True, **section}}).config)
    return model


def compare(ours, theirs, *inputs, **more):
    """Outputs and gradients of two models, as in training."""
    found, expected = ours(*inputs, **more), theirs(*inputs, **more)
    for output in (found, expected):
        (output.loss if hasattr(output, "loss") else output.sin().sum()).backward()
    grads = dict(theirs.named_parameters())
    for name, param in ours.named_parameters():
        assert_near(param.grad, grads[name].grad, BOUND, name)
    return found, expected


@pytest.mark.parametrize("kind", MODELS)
def test_names_values_and_gradients(kind):
    theirs, tokens = model_of(kind), tokens_of(3)
    ours = take(copy.deepcopy(theirs))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert {id(param) for param in ours.parameters()} == {id(param) for param in take(ours).parameters()}
    found, expected = compare(ours, theirs, input_ids=tokens, labels=tokens)
    assert_near(found.logits.detach(), expected.logits.detach(), BOUND, "logits")
    ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
@pytest.mark.parametrize("ran_before", [False, True])
def test_logits_of_routers_and_the_loss_made_of_them(kind, ran_before):
    """transformers looks for routers by class, once, at the first pass of a model."""
    theirs, tokens = model_of(kind), tokens_of(3)
    if ran_before:
        theirs(input_ids=tokens, output_router_logits=True)
    ours = take(copy.deepcopy(theirs))
    theirs.config.router_aux_loss_coef = ours.config.router_aux_loss_coef = 0.5
    ours.router_aux_loss_coef = theirs.router_aux_loss_coef = 0.5
    found, expected = compare(ours, theirs, input_ids=tokens, labels=tokens, output_router_logits=True)
    assert len(found.router_logits) == 2
    for one, other in zip(found.router_logits, expected.router_logits, strict=True):
        assert_near(one.detach(), other.detach(), BOUND, "router logits")
    assert found.aux_loss.detach() == pytest.approx(float(expected.aux_loss.detach()), rel=BOUND)


@pytest.mark.parametrize("name", ROWS)
def test_every_row_of_the_table(name):
    """The block alone, of the classes that the installed transformers has."""
    import importlib

    family = ROWS[name].family
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    configuration = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    made = [each for each in vars(configuration).values() if isinstance(each, type) and "num_experts_per_tok" in
            getattr(each, "__annotations__", {})]  # fmt: skip
    sizes = {"hidden_size": 8, "intermediate_size": 12, "moe_intermediate_size": 6, "num_experts_per_tok": 2,
             "n_routed_experts": 8, "num_experts": 8, "num_local_experts": 8, "shared_expert_intermediate_size": 4,
             "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
             "topk_method": "group_limited_greedy", "num_attention_heads": 2}  # fmt: skip
    config = made[0](**sizes, experts_implementation="eager")
    theirs = getattr(modeling, name)(config)
    torch.manual_seed(2)
    with torch.no_grad():
        for tensor in (*theirs.parameters(), *theirs.buffers()):
            tensor.uniform_(-1, 1)
    model = nn.Sequential(copy.deepcopy(theirs))
    ours = take(model)[0]
    assert type(ours).__mro__[1:3] == (BlockExperts, RoutedExperts)
    assert isinstance(ours, type(theirs))
    assert isinstance(ours.gate, BlockRouter)
    assert isinstance(ours.gate, type(theirs.gate))
    x = torch.randn(2, 5, 8)
    assert_near(compare(ours, theirs, x)[0].detach(), theirs(x).detach(), BOUND, name)


class Expert(nn.Module):
    """An expert of Mixtral as transformers 4 has it."""

    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = (nn.Linear(*sizes, bias=False) for sizes in ((8, 5), (8, 5), (5, 8)))

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class MixtralSparseMoeBlock(nn.Module):
    """A block with a module for each expert and a plain linear router; returns the logits too."""

    def __init__(self):
        super().__init__()
        self.top_k, self.jitter_noise = 2, 0.0
        self.gate, self.experts = nn.Linear(8, 4, bias=False), nn.ModuleList(Expert() for _ in range(4))

    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, 8)
        logits = self.gate(x)
        weights, chosen = logits.softmax(-1).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        every = torch.stack([expert(x) for expert in self.experts], 1)
        rows = every.gather(1, chosen[..., None].expand(-1, -1, 8))
        return (rows * weights[..., None]).sum(1).view_as(hidden_states), logits


def test_a_module_for_each_expert():
    torch.manual_seed(0)
    theirs = MixtralSparseMoeBlock()
    ours = take(nn.Sequential(copy.deepcopy(theirs)))[0]
    assert isinstance(ours.experts, BlockModules)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(2, 5, 8)
    for one, other in zip(ours(x), theirs(x), strict=True):
        assert_near(one.detach(), other.detach(), BOUND, "outputs")
    ours.experts.keep(range(2, 4))
    assert [name for name, _ in ours.experts.named_children()] == ["2", "3"]
    assert torch.equal(ours.experts.deepspeed_experts[1].w1.weight, theirs.experts[3].w1.weight)


class Own(nn.Module):
    """A block that no table knows: other names, three tensors, a shared expert."""

    def __init__(self, experts=4, k=2):
        super().__init__()
        self.k = k
        self.router, self.mlps = nn.Linear(8, experts, bias=False), nn.Module()
        for name, shape in (("a", (experts, 5, 8)), ("b", (experts, 8, 5)), ("c", (experts, 5, 8))):
            self.mlps.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.common = nn.Linear(8, 8)

    def forward(self, x):
        tokens = x.reshape(-1, 8)
        weights, chosen = torch.sigmoid(self.router(tokens)).topk(self.k)
        gate, up = (torch.einsum("nh,eih->nei", tokens, each) for each in (self.mlps.a, self.mlps.c))
        every = torch.einsum("nei,ehi->neh", torch.relu(gate) * up, self.mlps.b)
        rows = every.gather(1, chosen[..., None].expand(-1, -1, 8))
        return (rows * 3 * weights[..., None]).sum(1).view_as(x) + self.common(x)


OWN = {
    "moe_layer_pattern": r"\d+", "router_pattern": "router", "expert_pattern": "mlps", "expert_w1": "a",
    "expert_w2": "b", "expert_w3": "c", "shared_experts_pattern": "common", "has_shared_experts": True, "top_k": 2,
    "score_func": "sigmoid", "route_norm": False, "route_scale": 1.5, "routed_scaling_factor": 2,
    "expert_activation": "relu",
}  # fmt: skip


def test_a_block_that_is_described_by_names():
    torch.manual_seed(0)
    theirs = Own()
    ours = take(nn.Sequential(nn.Linear(8, 8), copy.deepcopy(theirs)), **OWN)[1]
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(2, 5, 8)
    found, expected = compare(ours, theirs, x)
    assert_near(found.detach(), expected.detach(), BOUND, "output")
    twin = copy.deepcopy(ours)
    assert_near(twin(x).detach(), expected.detach(), BOUND, "output of a copy")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"router_pattern": "gate"}, "no router named 'gate'; it has router, mlps, common"),
        ({"expert_w3": None}, "tensors a, b, c, not a, b"),
        ({"has_shared_experts": False}, "parameters that its row of the table does not name: common.weight"),
        ({"top_k": "auto"}, "does not say what top_k is; set expert_parallel.top_k"),
        ({"score_func": "auto"}, "does not say what score_func is"),
        ({"route_norm": None}, "does not say what route_norm is"),
        ({"top_k": 5}, "k = 5"),
        ({"num_expert_groups": 3}, "groups = 3"),
        ({"load_balance_coeff": 0.001}, "no bias that balances loads"),
        ({"num_experts_attr": "experts"}, "model.config.experts: None"),
        ({"moe_layer_pattern": "layers"}, "no block whose name matches moe_layer_pattern 'layers'"),
        ({"moe_layer_pattern": "("}, "no regular expression"),
        ({"expert_w2": None}, "expert_w1 and expert_w2 go together"),
        ({"expert_w1": "b", "expert_w2": "a"}, "shapes that do not fit"),
    ],
)
def test_descriptions_that_do_not_fit(change, problem):
    with pytest.raises(ConfigError, match="expert_parallel") as error:
        take(nn.Sequential(Own()), **{**OWN, **change})
    assert problem in str(error.value)


def test_groups_and_attributes_of_the_config():
    model = nn.Sequential(Own())
    model.config = type("Sizes", (), {"experts": 4, "chosen": 1})()
    changes = {"top_k": "auto", "top_k_attr": "chosen", "num_experts_attr": "experts", "use_grouped_mm": False}
    layer = take(model, **{**OWN, **changes, "num_expert_groups": 2, "num_limited_groups": 1})[0]
    options = layer.gate.options
    assert (options.k, options.groups, options.kept_groups, options.weight_scale) == (1, 2, 1, 3.0)
    assert layer.experts.compute == "loop"


def test_an_unknown_block_is_named():
    class Unknown(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    class Derived(MixtralSparseMoeBlock):
        def forward(self, x):
            return super().forward(x)[0]

    for block in (Unknown(), Derived()):
        with pytest.raises(ConfigError, match=f"block 1 is a {type(block).__name__}, which mpispeed does not know"):
            take(nn.Sequential(nn.Linear(8, 8), block))


def test_what_else_is_refused():
    with pytest.raises(ConfigError, match=r"the model \(Linear\) has no block of experts"):
        take(nn.Linear(3, 3))
    with pytest.raises(ConfigError, match=r"preset_model is 'qwen3_moe', and block model.layers.0.mlp is a Mixtral"):
        take(model_of("mixtral"), preset_model="qwen3_moe")
    replaced = model_of("mixtral")
    replaced.model.layers[1].mlp.experts.forward = lambda *_: None
    with pytest.raises(ConfigError, match=r"block model.layers.1.mlp .* has another forward than its class in experts"):
        take(replaced)
    flagged = model_of("qwen3_moe")
    flagged.model.layers[0].mlp.experts.has_bias = True
    with pytest.raises(ConfigError, match="has experts with has_bias = True"):
        take(flagged)
    method = model_of("deepseek_v2")
    method.model.layers[1].mlp.gate.topk_method = "noaux_tc"
    with pytest.raises(ConfigError, match="topk_method 'noaux_tc'"):
        take(method)


def test_a_preset_and_changes_of_it():
    assert take(model_of("qwen2_moe"), preset_model="qwen3_moe").model.layers[0].mlp.ep_size == 1
    options = take(model_of("qwen3_moe"), top_k=1, route_norm=False, score_func="sigmoid").model.layers[0].mlp.gate
    assert (options.options.k, options.options.renormalize, options.options.score) == (1, False, "sigmoid")


def test_biases_that_balance_loads():
    gate = take(model_of("deepseek_v3"), load_balance_coeff=0.25).model.layers[1].mlp.gate
    before = gate.e_score_correction_bias.clone()
    gate(torch.randn(50, 16))
    gate.update_bias()
    moved = gate.e_score_correction_bias - before
    assert moved.abs().max() == pytest.approx(0.25)
    assert dict(gate.named_buffers()).keys() == {"e_score_correction_bias"}
    assert gate.bfloat16().bias.dtype == torch.float32


def test_jitter_of_mixtral():
    model, tokens = model_of("mixtral", router_jitter_noise=0.5), tokens_of(2)
    ours = take(copy.deepcopy(model))
    torch.manual_seed(1)
    found = ours(input_ids=tokens).logits
    torch.manual_seed(1)
    assert_near(found.detach(), model(input_ids=tokens).logits.detach(), BOUND, "logits")
    assert not torch.equal(found, ours(input_ids=tokens).logits)
    assert_near(
        ours.eval()(input_ids=tokens).logits.detach(), model.eval()(input_ids=tokens).logits.detach(), BOUND, ""
    )
