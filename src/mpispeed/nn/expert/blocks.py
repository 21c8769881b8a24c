"""Blocks of experts of transformers' models as layers of ours, in place: names of parameters and classes stay.

A block and its router become instances of classes that are derived from ours and from their own, so that what looks
for them by class still finds them: transformers records the logits of routers so, for `output_router_logits` and the
loss of balance made of them. Parameters stay the same objects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from mpispeed.base.distinct import mark_distinct
from mpispeed.base.errors import ConfigError
from mpispeed.nn.expert.block_table import (
    COVERS,
    FAMILIES,
    ROWS,
    UNKNOWN,
    Described,
    Reader,
    Row,
    described_row,
    has_experts,
    row_of,
)
from mpispeed.nn.expert.experts import (
    ACTIVATIONS,
    AT_HAND,
    ExpertModules,
    Experts,
    FusedExperts,
    Hands,
    NumberedModules,
    Slicing,
    share_hands,
)
from mpispeed.nn.expert.layer import RoutedExperts
from mpispeed.nn.expert.router import Router, RouterOptions, Routing

_FLAGS = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True,
          "has_post_expert_norm": False}  # fmt: skip
"""Attributes by which transformers describes fused experts, and what they are for those that compute as ours."""

_HOOKS = "transformers.integrations.moe"


class BlockRouter(Router):
    """The router of a block: `weight`, a bias under its name there, and outputs as the block's router has them."""

    weight: torch.Tensor
    bias_name = ""

    @property
    def hidden_size(self) -> int:
        """As `Router`."""
        return self.weight.shape[-1]

    @property
    def bias(self) -> torch.Tensor | None:  # type: ignore[override]
        """The bias of choices, or None."""
        return getattr(self, self.bias_name) if self.bias_name else None

    def __setattr__(self, name: str, value: Any) -> None:
        """A bias is set under its name; torch would make a buffer of a property's value."""
        super().__setattr__(self.bias_name if name == "bias" and self.bias_name else name, value)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """As `Router`."""
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float())

    def forward(self, x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        """Logits, weights and experts, and loads. Shapes: x [..., hidden], the others as in `Router` and `Routing`."""
        logits = self.logits(x.reshape(-1, x.shape[-1]))
        found = self.route(logits)
        return logits, found.weights, found.experts, found.counts


class BlockFused(FusedExperts):
    """Gated MLPs whose tensors have the names that they have in a block.

    Attributes:
        act_fn: activation of gates.
    """

    def __init__(self, params: dict[str, nn.Parameter], act_fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """`params`: gates and up projections in one, and down projections; or gates, down and up projections."""
        down = list(params.values())[1]
        Experts.__init__(self, down.shape[0], range(down.shape[0]))
        self.hidden_size, self.intermediate_size, self.compute = down.shape[1], down.shape[2], "auto"
        self.names, self.act_fn = tuple(params), act_fn
        first, *others = [Slicing("column", 1) if len(params) > 2 else Slicing("sub", 1, 2), Slicing("row", 2)]
        self.slicing = dict(zip(params, (first, *others, first), strict=False))
        for name, param in params.items():
            self.register_parameter(name, param)

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """As `Experts`."""
        if not counts:
            return rows
        rows = self._entered(rows)
        first, down, *up = (self._parameters[name] for name in self.names)
        gates = self._products(rows, cast("torch.Tensor", first), counts)
        gates, ups = (gates, self._products(rows, up[0], counts)) if up else gates.chunk(2, -1)  # type: ignore[arg-type]
        return self._left(self._products(self.act_fn(gates) * ups, cast("torch.Tensor", down), counts))


class BlockModules(ExpertModules):
    """The modules of a block's list; in names of parameters their numbers follow the name of the list."""

    prefix = ""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Take the modules, which are those of all experts."""
        found = list(modules)
        Experts.__init__(self, len(found), range(len(found)))
        self._put(found, 0)

    @property
    def deepspeed_experts(self) -> NumberedModules:  # type: ignore[override]
        """The modules of this rank."""
        return NumberedModules(self._modules.values(), self.held.start)  # type: ignore[arg-type]

    def keep(self, held: range, hands: Hands = AT_HAND) -> None:
        """As `Experts`."""
        Experts.keep(self, held, hands)
        self._put(list(self.children()), held.start)

    def _put(self, modules: Iterable[nn.Module], first: int) -> None:
        self._modules.clear()
        self._modules.update({str(number): module for number, module in enumerate(modules, first)})

    def _narrow(self, places: range, hands: Hands) -> None:
        modules = list(self.children())
        share_hands(modules, places, hands)
        self._put(modules[places.start : places.stop], places.start)


class BlockExperts(RoutedExperts):
    """A block of experts: takes and returns hidden states as the block did.

    Attributes:
        row: where its parts are.
        jitter: width of random factors of the input in training.
        returns_logits: logits of the router are returned beside hidden states, as blocks of transformers 4 do.
    """

    row: Row
    jitter: float
    returns_logits: bool

    def forward(self, hidden_states: torch.Tensor) -> Any:  # type: ignore[override]
        """Collective over: the expert-parallel group. Shapes: [..., hidden], the result the same."""
        x = hidden_states
        if self.training and self.jitter > 0:
            x = x * torch.empty_like(x).uniform_(1.0 - self.jitter, 1.0 + self.jitter)
        tokens = x.reshape(-1, x.shape[-1])
        logits, weights, experts, counts = self.gate(tokens)
        none = logits.new_zeros(())
        routing = Routing(experts, weights, None, counts, none, none, none)
        shared = (lambda: self._shared_output(x)) if self.row.shared else None
        y = self._experts_of(tokens, routing, shared).view(x.shape)
        return (y, logits) if self.returns_logits else y

    def _shared_output(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.get_submodule(self.row.shared)(x)
        if self.row.shared_gate:
            output = torch.sigmoid(self.get_submodule(self.row.shared_gate)(x)) * output
        return output


_classes: dict[tuple[Any, ...], type[nn.Module]] = {}


def _derived(ours: type[nn.Module], theirs: type[nn.Module], **aliases: str) -> type[nn.Module]:
    """A class of both kinds; `aliases`: names of ours for modules that have others there."""

    def alias(name: str) -> property:
        return property(lambda self: self._modules[name])

    key = ours, theirs, tuple(aliases.items())
    if key not in _classes:
        made = {name: alias(other) for name, other in aliases.items() if name != other}
        _classes[key] = type(f"Routed{theirs.__name__}", (ours, theirs), {"__module__": __name__, **made})
    return _classes[key]


# -- finding blocks ------------------------------------------------------------------------------------------------


def find_blocks(model: nn.Module, family: str | None = None, pattern: str | None = None) -> list[tuple[str, Row]]:
    """Names and rows of the blocks of a model that are not ours yet.

    Args:
        model: any module.
        family: that all blocks are of.
        pattern: regular expression for names of blocks; those that match need no row.

    Raises:
        ConfigError: names a block that is not known or of another family.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            continue
        row = row_of(module)
        if pattern is not None:
            if re.fullmatch(pattern, name) and (row is not None or _looks_like_one(module)):
                found.append((name, row or FAMILIES.get(family or "", UNKNOWN)))
        elif row is not None:
            _check_family(name, module, row, family)
            found.append((name, row))
        elif has_experts(module):
            msg = f"expert_parallel: block {name} is a {type(module).__name__}, which mpispeed does not know (known: "
            msg += f"{', '.join(ROWS)}); describe it by expert_parallel.moe_layer_pattern and the keys beside it, or "
            msg += "remove the section"
            raise ConfigError(msg)
    return found


def _looks_like_one(module: nn.Module) -> bool:
    """True for modules that may be a block: dense ones that a pattern matches too have no list or 3-d tensor."""
    inner = [each for child in module.children() for each in (child, *child.children())]
    is_fused = any(param.ndim == 3 for child in inner for param in child.parameters(recurse=False))
    return is_fused or any(isinstance(child, nn.ModuleList) and len(child) > 1 for child in module.children())


def _check_family(name: str, module: nn.Module, row: Row, family: str | None) -> None:
    if family is not None and row.family not in COVERS.get(family, (family,)):
        msg = (
            f"expert_parallel.preset_model is {family!r}, and block {name} is a {type(module).__name__} of the family "
        )
        msg += f"{row.family!r}; set preset_model to it, or leave the key out"
        raise ConfigError(msg)


# -- making them ours ----------------------------------------------------------------------------------------------


def replace_block(
    name: str, block: nn.Module, row: Row, ep_size: int, described: Described | None = None, config: Any = None
) -> RoutedExperts:
    """Make a block a layer of experts of ours, in place.

    Args:
        name: that of the block in the model, for messages.
        block: the block.
        row: where its parts are.
        ep_size: ranks that the experts are meant for.
        described: what else is known of it.
        config: that of the model.

    Raises:
        ConfigError: the block has something that layers of ours have not.
    """
    described = described or Described()
    reader = Reader(name, block, described_row(row, described), config)
    row = reader.row
    for part, what in ((row.shared, "experts for all tokens"), (row.shared_gate, "gate of these")):
        if part:
            reader.child(part, what)
    reader.refuse_others()
    count = reader.count(described)
    options = reader.options(described, count)
    returns_logits = type(reader.gate) is nn.Linear and row_of(block) is not None
    experts = _experts_of(reader, described)
    _become_router(reader, options, count)
    block.__class__ = _derived(BlockExperts, type(block), gate=row.router, experts=row.experts)
    made = cast("BlockExperts", block)
    block._modules[row.experts] = experts
    made.experts_name, made.row, made.dispatcher, made.ep_size = row.experts, row, None, ep_size
    made.shared_overlap = False
    made.jitter = float(getattr(block, row.jitter, 0.0) or 0.0) if row.jitter else 0.0
    made.returns_logits = returns_logits
    if ep_size > 1:
        mark_distinct(experts.parameters(), ep_size)
    return made


def _experts_of(reader: Reader, described: Described) -> Experts:
    """Experts of ours with the parameters of a block's."""
    theirs = reader.experts
    if isinstance(theirs, nn.ModuleList):
        if described.activation is not None:
            msg = f"has a module for each expert, with its own activation: expert_activation {described.activation!r} "
            msg += "cannot be; leave the key out"
            raise reader.fail(msg)
        return BlockModules(theirs)
    for flag, value in _FLAGS.items():
        if getattr(theirs, flag, value) != value:
            msg = f"has experts with {flag} = {not value}, and mpispeed computes only those with {value}"
            raise reader.fail(msg)
    gate = getattr(type(theirs), "_apply_gate", None)
    if gate is not None and gate.__module__ != _HOOKS:
        msg = f"has experts of {type(theirs).__name__} that apply their gates in their own way (_apply_gate)"
        raise reader.fail(msg)
    made = BlockFused(_tensors(reader), _activation(reader, described))
    made.compute = described.compute
    return made.train(theirs.training)


def _tensors(reader: Reader) -> dict[str, nn.Parameter]:
    """The tensors of fused experts, in the order of the row."""
    theirs, names = dict(reader.experts.named_parameters()), reader.row.weights
    if theirs.keys() != set(names):
        msg = f"has experts with the tensors {', '.join(theirs) or 'none'}, not {', '.join(names)}; name them by "
        msg += "expert_parallel.expert_w1, expert_w2 and, if there are three, expert_w3"
        raise reader.fail(msg)
    found = {name: theirs[name] for name in names}
    first, down, *_ = shapes = [tuple(param.shape) for param in found.values()]
    inner = down[-1] * (1 if len(names) > 2 else 2)
    if any(len(shape) != 3 for shape in shapes) or first[1:] != (inner, down[1]) or shapes[2:] not in ([], [first]):
        told = ", ".join(f"{name} {shape}" for name, shape in zip(names, shapes, strict=True))
        msg = f"has experts with tensors of shapes that do not fit [experts, out, in]: {told}"
        raise reader.fail(msg)
    return found


def _activation(reader: Reader, described: Described) -> Callable[[torch.Tensor], torch.Tensor]:
    if described.activation is not None:
        return ACTIVATIONS[described.activation]
    found = getattr(reader.experts, "act_fn", None)
    if not callable(found):
        msg = "has experts without act_fn; set expert_parallel.expert_activation"
        raise reader.fail(msg)
    return cast("Callable[[torch.Tensor], torch.Tensor]", found)


def _become_router(reader: Reader, options: RouterOptions, count: int) -> None:
    gate, name = reader.gate, reader.row.bias
    if name and not isinstance(getattr(gate, name, None), torch.Tensor):
        msg = f"has a router without {name}"
        raise reader.fail(msg)
    with torch.device("meta"):
        like = Router(gate.get_parameter("weight").shape[-1], count, options)
    gate.__class__ = _derived(BlockRouter, type(gate))
    if name:
        vars(gate)["bias_name"] = name
    vars(gate).update({key: value for key, value in vars(like).items() if key not in vars(nn.Module())})
