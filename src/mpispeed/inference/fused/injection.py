"""Injection of fused layers into a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.units import format_bytes
from mpispeed.inference.fused.cache import check_room, growing_cache
from mpispeed.inference.fused.linear import use_thin_products
from mpispeed.inference.fused.policies import POLICIES, Policies, TransformerPolicy
from mpispeed.mesh.comm import Comm


@dataclass(slots=True)
class Report:
    """Result of the injection.

    Attributes:
        layers: path of each fused layer -> name of its policy.
        tensor: the group that slices the layers.
        thin: True if linear layers of the model use the loop for few rows.
        bytes_per_token: of keys and values on this rank, for one sequence.
        max_out_tokens: of prompt and answer together.
        min_out_tokens: that have to fit into memory.
    """

    layers: dict[str, str]
    tensor: Comm
    thin: bool
    bytes_per_token: int
    max_out_tokens: int
    min_out_tokens: int
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        kinds = sorted(set(self.layers.values()))
        text = f"{len(self.layers)} layers fused by {', '.join(kinds)}; "
        return f"{text}{format_bytes(self.bytes_per_token)} of keys and values for a token of one sequence"

    def cache(self, model: Any, batch: int) -> Any:
        """A cache that grows, for the model that was injected; see `growing_cache`.

        Collective over: the group of the injection.

        Raises:
            UsageError: the least number of tokens does not fit into memory; on all ranks.
        """
        with self.tensor.together(UsageError):
            check_room(self.bytes_per_token, self.min_out_tokens, batch, _device_of(model))
        return growing_cache(model.config, self.max_out_tokens)

    def revert(self) -> None:
        """Give the layers their own forward again."""
        for undo in self._undo:
            undo()
        self._undo.clear()


def inject_kernels(
    model: nn.Module,
    *,
    tensor: Comm,
    triangular_masking: bool = True,
    return_tuple: bool = True,
    max_out_tokens: int = 1024,
    min_out_tokens: int = 1,
    policy: Policies | None = None,
) -> Report:
    """Put fused forwards in front of the layers of a model that a policy knows, and fast products of few rows.

    Layers keep their class, their modules and their parameters, whether sliced or quantized. Where a fused forward does
    not fit, the layer's own runs: in training, with gradients, within autocast or `torch.compile`, with cross
    attention, when attention weights are asked for, and with hooks on the attention module.

    Args:
        model: sliced and loaded; changed in place.
        tensor: the group over which it is sliced.
        triangular_masking: False: the model must not be a causal one.
        return_tuple: without effect: a layer returns what its model takes.
        max_out_tokens: tokens of prompt and answer together.
        min_out_tokens: of which keys and values have to fit into memory, for one sequence.
        policy: layer class, or its name -> policy; only these layers are fused then. None: those of `POLICIES`.

    Collective over: `tensor`.

    Raises:
        ConfigError: no layer is known, a policy does not fit, the numbers of tokens contradict, or `min_out_tokens` do
            not fit into memory; on all ranks.
    """
    with tensor.together(ConfigError):
        return _injected(model, tensor, triangular_masking, (min_out_tokens, max_out_tokens), policy)


def has_known_layer(model: nn.Module) -> bool:
    """True if `inject_kernels` knows a layer of the model, also one without values."""
    return any(_policy_for(module, None) is not None for module in model.modules())


def _injected(
    model: nn.Module, tensor: Comm, triangular_masking: bool, tokens: tuple[int, int], policy: Policies | None
) -> Report:
    min_out_tokens, max_out_tokens = tokens
    if not 1 <= min_out_tokens <= max_out_tokens:
        msg = f"min_out_tokens is {min_out_tokens} and max_out_tokens {max_out_tokens}; expected 1 <= min <= max"
        raise ConfigError(msg)
    chosen = _chosen(model, policy)
    if not triangular_masking:
        _refuse_causal(model, chosen)
    made = {path: maker.fuse(model.get_submodule(path)) for path, maker in chosen.items()}
    bytes_per_token = sum(_bytes_per_token(fused) for path, fused in made.items() if type(chosen[path]).is_causal)
    device = _device_of(model)
    check_room(bytes_per_token, min_out_tokens, 1, device)
    report = Report({}, tensor, False, bytes_per_token, max_out_tokens, min_out_tokens)
    for path, fused in made.items():
        layer: Any = model.get_submodule(path)
        if "forward" in vars(layer):
            msg = f"{path} has a forward of its own already, from an earlier injection or another library"
            raise ConfigError(msg)
        layer.forward = fused
        report.layers[path] = type(chosen[path]).__name__
        report._undo.append(functools.partial(vars(layer).pop, "forward", None))
    if device.type == "cpu":
        report._undo.append(use_thin_products(model))
        report.thin = True
    return report


def _chosen(model: nn.Module, policy: Policies | None) -> dict[str, TransformerPolicy]:
    """Path of each layer -> its policy; layers inside of chosen ones are left."""
    makers: dict[type[TransformerPolicy], TransformerPolicy] = {}
    chosen: dict[str, TransformerPolicy] = {}
    for path, module in model.named_modules():
        if any(path.startswith(f"{above}.") for above in chosen):
            continue
        kind = _policy_for(module, policy)
        if kind is not None:
            chosen[path] = makers.get(kind) or makers.setdefault(kind, kind())
    if not chosen:
        known = ", ".join(sorted({name for kind in POLICIES for name in kind.layer_names}))
        asked = "" if policy is None else f" of {', '.join(_name(key) for key in policy)}"
        msg = f"{type(model).__name__} has no layer{asked} that can be fused; known are {known}. Leave "
        msg += "replace_with_kernel_inject out, or give a policy for the model's layer"
        raise ConfigError(msg)
    return chosen


def _policy_for(module: nn.Module, policy: Policies | None) -> type[TransformerPolicy] | None:
    if policy is None:
        return next((kind for kind in POLICIES if kind.knows(module)), None)
    names = {base.__name__ for base in type(module).__mro__}
    for key, kind in policy.items():
        if not (isinstance(kind, type) and issubclass(kind, TransformerPolicy)):
            msg = f"injection policy of {_name(key)} is {kind!r}; expected a policy class, such as HFBertLayerPolicy"
            raise ConfigError(msg)
        if _name(key) in names:
            return kind
    return None


def _name(key: Any) -> str:
    return key if isinstance(key, str) else getattr(key, "__name__", str(key))


def _refuse_causal(model: nn.Module, chosen: Mapping[str, TransformerPolicy]) -> None:
    for path, maker in chosen.items():
        if type(maker).is_causal:
            kind = type(model.get_submodule(path)).__name__
            msg = (
                f"triangular_masking=False, but {path}, a {kind}, is causal: without its mask it would be another model"
            )
            raise ConfigError(msg)


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _bytes_per_token(fused: Any) -> int:
    attention = fused.attention
    layers = attention.inputs[1:] or attention.inputs
    count, element = 0, 2
    for layer in layers:
        weight = getattr(layer, "weight", None)
        bias = getattr(layer, "bias", None)
        width = bias.shape[0] if bias is not None else getattr(layer, "out_features", 0)
        if weight is not None and weight.dim() == 2 and weight.is_floating_point():
            element = weight.element_size()
            width = weight.shape[1] if width == weight.shape[1] else weight.shape[0]
        count += width
    if len(attention.inputs) == 1:
        count = count * 2 // 3
    return count * element
