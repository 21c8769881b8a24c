"""Parts of transformers' blocks of experts: a table by class of block, and a reader of blocks by its rows.

A row says what a class of block does; numbers and names are read from the module and from the model's config. A block
that is in no row can be described by names (`Described`).

Source: the modeling files of transformers 5.23 (mixtral, qwen2_moe, qwen3_moe, qwen3_next, qwen3_5_moe, olmoe,
deepseek_v2, deepseek_v3, glm4_moe). Blocks of 4.57, with one module for each expert, have the same classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.nn.expert.router import RouterOptions


@dataclass(frozen=True, slots=True)
class Row:
    """Parts and rules of blocks of one class.

    Attributes of theirs are looked up in the router, the block, its config and the model's.

    Attributes:
        family: DeepSpeed's name of a preset, or ours where it has none.
        router: name of the router; it has `weight` [experts, hidden].
        experts: name of the experts.
        weights: names of their tensors: gates and up projections in one, and down projections; or gates, down, up.
        shared: name of the experts for all tokens; "": none.
        shared_gate: name of a linear map to the logit of a factor of their output; "": none.
        score: "softmax" or "sigmoid"; "": as the attribute `scoring_func` says.
        renormalize: whether a token's weights are divided by their sum; None: as the attribute `norm_topk_prob` says.
        scaled: weights have the factor `routed_scaling_factor`.
        grouped: tokens choose groups of experts first (`num_group` or `n_group`, `topk_group`).
        group_best: scores of a group that are added up for this choice.
        bias: name of the router's buffer that is added to scores for the choice; "": none.
        jitter: attribute of the block that is the width of random factors of the input in training; "": none.
    """

    family: str
    router: str = "gate"
    experts: str = "experts"
    weights: tuple[str, ...] = ("gate_up_proj", "down_proj")
    shared: str = ""
    shared_gate: str = ""
    score: str = "softmax"
    renormalize: bool | None = None
    scaled: bool = False
    grouped: bool = False
    group_best: int = 2
    bias: str = ""
    jitter: str = ""


_QWEN2 = Row("qwen2_moe", shared="shared_expert", shared_gate="shared_expert_gate")
_DEEPSEEK_V3 = Row(
    "deepseek_v3", shared="shared_experts", score="sigmoid", scaled=True, grouped=True, bias="e_score_correction_bias"
)

ROWS: Mapping[str, Row] = {
    "MixtralSparseMoeBlock": Row("mixtral", renormalize=True, jitter="jitter_noise"),
    "Qwen2MoeSparseMoeBlock": _QWEN2,
    "Qwen3MoeSparseMoeBlock": Row("qwen3_moe"),
    "Qwen3NextSparseMoeBlock": replace(_QWEN2, family="qwen3_next"),
    "Qwen3_5MoeSparseMoeBlock": replace(_QWEN2, family="qwen3_5_moe", renormalize=True),
    "OlmoeSparseMoeBlock": Row("olmoe"),
    "DeepseekV2Moe": Row(
        "deepseek_v2", shared="shared_experts", renormalize=False, scaled=True, grouped=True, group_best=1
    ),
    "DeepseekV3MoE": _DEEPSEEK_V3,
    "Glm4MoeMoE": replace(_DEEPSEEK_V3, family="glm4_moe"),
}
"""By the name of the class that has the block's `forward`, so that derived classes with another one are not taken."""

COVERS = {"qwen3_moe": ("qwen3_moe", "qwen2_moe")}
"""Families that a preset of DeepSpeed stands for, where it is more than one."""

FAMILIES: Mapping[str, Row] = {row.family: row for row in ROWS.values()}
UNKNOWN = Row("described", score="")


@dataclass(frozen=True, slots=True)
class Described:
    """Facts about blocks that a user gives; None: as the table and the model say.

    Attributes:
        names: fields of `Row` that are names (`router`, `experts`, `shared`, `shared_gate`), and `weights`.
        has_shared: whether there are experts for all tokens.
        options: fields of `RouterOptions`.
        scale: one more factor of weights.
        k_attribute: attribute of the model's config that is `k`.
        count_attribute: attribute of the model's config that is the number of experts.
        activation: that of gates, by its name in `experts.ACTIVATIONS`.
        compute: as `FusedExperts.compute`.
    """

    names: Mapping[str, Any] = field(default_factory=dict)
    has_shared: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    scale: float = 1.0
    k_attribute: str | None = None
    count_attribute: str | None = None
    activation: str | None = None
    compute: str = "auto"


def row_of(block: nn.Module) -> Row | None:
    """The row of a block, by the class that has its `forward`."""
    owner = next((each for each in type(block).__mro__ if "forward" in vars(each)), nn.Module)
    return ROWS.get(owner.__name__)


def has_experts(module: nn.Module) -> bool:
    """True for modules with a router and several experts, of any class."""
    experts = module._modules.get("experts")
    if experts is None or not {"gate", "router"} & module._modules.keys():
        return False
    if isinstance(experts, nn.ModuleList):
        return len(experts) > 1
    return any(param.ndim == 3 for param in experts.parameters(recurse=False))


def described_row(row: Row, described: Described) -> Row:
    """The row with the names that a user gives."""
    row = replace(row, **described.names)
    return replace(row, shared="", shared_gate="") if described.has_shared is False else row


class Reader:
    """Reads a block of a model by its row."""

    def __init__(self, name: str, block: nn.Module, row: Row, config: Any) -> None:
        """`name`: that of the block in the model; `config`: the model's, or None."""
        self.name, self.block, self.row, self._config = name, block, row, config
        self.gate = self.child(row.router, "router")
        self.experts = self.child(row.experts, "experts")
        self.refuse_replaced()

    def fail(self, problem: str) -> ConfigError:
        """The error about this block."""
        return ConfigError(f"expert_parallel: block {self.name} ({type(self.block).__name__}) {problem}")

    def child(self, name: str, what: str) -> nn.Module:
        """A module of the block.

        Raises:
            ConfigError: there is none of this name.
        """
        found = self.block._modules.get(name)
        if found is None:
            has = ", ".join(self.block._modules) or "nothing"
            msg = f"has no {what} named {name!r}; it has {has}"
            raise self.fail(msg)
        return found

    def refuse_replaced(self) -> None:
        """Refuse modules whose `forward` is another than their class's, as other libraries' hooks make it."""
        for name, module in ((self.name, self.block), (self.row.router, self.gate), (self.row.experts, self.experts)):
            if "forward" in vars(module):
                msg = f"has another forward than its class in {name}, put there by a library; let mpispeed.initialize "
                msg += "take the model before others change it"
                raise self.fail(msg)

    def read(self, *names: str) -> Any:
        """The first of these attributes that is there and not None; None: there is none."""
        places = (self.gate, self.block, getattr(self.block, "config", None), self._config)
        for place in places:
            for name in names:
                found = getattr(place, name, None)
                if found is not None and not isinstance(found, nn.Module):
                    return found
        return None

    def require(self, key: str, value: Any) -> Any:
        """`value`, which must not be None.

        Raises:
            ConfigError: names the key that gives it.
        """
        if value is None:
            msg = f"does not say what {key} is; set expert_parallel.{key}"
            raise self.fail(msg)
        return value

    def count(self, described: Described) -> int:
        """Number of experts.

        Raises:
            ConfigError: the router, the experts and the config do not agree.
        """
        weight = getattr(self.gate, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.ndim != 2:
            msg = f"has a router {self.row.router!r} without a weight of [experts, hidden]"
            raise self.fail(msg)
        others = [name for name, _ in self.gate.named_parameters() if name != "weight" and name != self.row.bias]
        if others:
            msg = f"has a router with {', '.join(others)}, which mpispeed does not know"
            raise self.fail(msg)
        counts = {f"rows of the router {self.row.router}": weight.shape[0]}
        if isinstance(self.experts, nn.ModuleList):
            counts[f"modules in {self.row.experts}"] = len(self.experts)
        else:
            first = getattr(self.experts, self.row.weights[0], None)
            counts[f"first dim of {self.row.weights[0]}"] = -1 if first is None else first.shape[0]
        if described.count_attribute is not None:
            counts[f"model.config.{described.count_attribute}"] = getattr(self._config, described.count_attribute, None)  # type: ignore[assignment]
        if len(set(counts.values())) > 1:
            msg = f"has numbers of experts that differ: {', '.join(f'{k}: {v}' for k, v in counts.items())}"
            raise self.fail(msg)
        return weight.shape[0]

    def options(self, described: Described, count: int) -> RouterOptions:
        """Options of the router.

        Raises:
            ConfigError: something is not known, or does not hold.
        """
        row, given = self.row, described.options
        attribute = described.k_attribute
        k = self.read("top_k", "num_experts_per_tok") if attribute is None else getattr(self._config, attribute, None)
        score = row.score or self.read("scoring_func", "score_func")
        norm = self.read("norm_topk_prob") if row.renormalize is None else row.renormalize
        scale = self.read("routed_scaling_factor") if row.scaled or row is UNKNOWN else None
        found = {
            "k": self.require("top_k", given.get("k", k)),
            "score": self.require("score_func", given.get("score", score)),
            "renormalize": bool(self.require("route_norm", given.get("renormalize", norm))),
            "weight_scale": float(given.get("weight_scale", 1.0 if scale is None else scale)) * described.scale,
            "bias_rate": given.get("bias_rate", 0.0),
            **self._groups(given),
        }
        if found["bias_rate"] and not row.bias:
            msg = f"has no bias that balances loads, and load_balance_coeff is {found['bias_rate']}; leave the key out"
            raise self.fail(msg)
        options = RouterOptions(**found, group_best=row.group_best)
        try:
            options.check(count)
        except ConfigError as error:
            msg = f"has a router that cannot be: {error}"
            raise self.fail(msg) from None
        return options

    def _groups(self, given: Mapping[str, Any]) -> dict[str, int]:
        method = self.read("topk_method")
        if self.row.family == "deepseek_v2" and method not in ("greedy", "group_limited_greedy", None):
            msg = f"has topk_method {method!r}; known are 'greedy' and 'group_limited_greedy'"
            raise self.fail(msg)
        reads = (self.row.grouped or self.row.family == UNKNOWN.family) and method != "greedy"
        groups, kept = (self.read("num_group", "n_group"), self.read("topk_group")) if reads else (None, None)
        return {"groups": given.get("groups") or groups or 1, "kept_groups": given.get("kept_groups") or kept or 1}

    def refuse_others(self) -> None:
        """Refuse parts with parameters that no name of the row stands for."""
        row = self.row
        known = {row.router, row.experts, row.shared, row.shared_gate}
        others = [name for name, _ in self.block.named_parameters() if name.partition(".")[0] not in known]
        if others:
            msg = f"has parameters that its row of the table does not name: {', '.join(others[:4])}; name their module "
            msg += "by expert_parallel.shared_experts_pattern if it computes for all tokens"
            raise self.fail(msg)
