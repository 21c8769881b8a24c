"""Config of a fused transformer layer: DeepSpeed's keys with its defaults, and one of ours."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from mpispeed.base.errors import ConfigError
from mpispeed.base.registry import did_you_mean

ATTENTIONS = ("auto", "sdpa", "explicit")

_WHOLE = ("batch_size", "hidden_size", "intermediate_size", "heads", "num_hidden_layers", "local_rank", "seed")
_REAL = ("attn_dropout_ratio", "hidden_dropout_ratio", "initializer_range", "layer_norm_eps")


@dataclass
class TransformerConfig:
    """Sizes and options of a `TransformerLayer`. A value of -1 means not given.

    Keys may be set after the construction as well: the layer checks them, and keeps a copy.

    Attributes:
        batch_size: accepted and without effect: a layer takes any batch.
        hidden_size: width of input and output.
        intermediate_size: width inside of the MLP; 4 times `hidden_size` if it is not above 0.
        heads: of the attention; divides `hidden_size`.
        attn_dropout_ratio: part of the attention probabilities that is dropped in training.
        hidden_dropout_ratio: part of the outputs of attention and MLP that is dropped in training.
        num_hidden_layers: of the model; needed by `adjust_init_range`.
        initializer_range: deviation of the weights at the start.
        layer_norm_eps: added to the variance.
        local_rank: index of the device made the current one, if the process sees so many.
        seed: accepted and without effect: dropout follows torch's generators, which activation checkpointing restores.
        fp16: accepted and without effect: a layer computes in the dtype of its parameters, or of `torch.autocast`.
        pre_layer_norm: norms stand before attention and MLP; else behind their residual sums.
        normalize_invertible: accepted and without effect. Inputs of norms are kept: recovering them from outputs
            divides by weights that may be 0.
        gelu_checkpoint: recompute the GELU in backward instead of keeping it.
        adjust_init_range: the two output weights start with a deviation of initializer_range / sqrt(2 layers).
        attn_dropout_checkpoint: recompute the dropout of the probabilities in backward instead of keeping its result.
            Fused attention keeps neither.
        stochastic_mode: accepted and without effect: no kernel of ours is faster without an order.
        return_tuple: `forward` returns a tuple of one.
        training: accepted and without effect: `layer.train()` and `layer.eval()` decide at each call.
        attention: "sdpa" (torch's fused attention), "explicit" (probabilities written out, the softmax kernel), or
            "auto". Not a key of DeepSpeed.
    """

    batch_size: int = -1
    hidden_size: int = -1
    intermediate_size: int = -1
    heads: int = -1
    attn_dropout_ratio: float = -1
    hidden_dropout_ratio: float = -1
    num_hidden_layers: int = -1
    initializer_range: float = -1
    layer_norm_eps: float = 1e-12
    local_rank: int = -1
    seed: int = -1
    fp16: bool = False
    pre_layer_norm: bool = True
    normalize_invertible: bool = False
    gelu_checkpoint: bool = False
    adjust_init_range: bool = True
    attn_dropout_checkpoint: bool = False
    stochastic_mode: bool = False
    return_tuple: bool = False
    training: bool = True
    attention: str = "auto"

    @classmethod
    def from_dict(cls, json_object: Mapping[str, Any]) -> TransformerConfig:
        """A config of these keys.

        Raises:
            ConfigError: a key is not known.
        """
        names = [field.name for field in fields(cls)]
        for key in json_object:
            if key not in names:
                msg = (
                    f'"{key}" is no key of a transformer layer.{did_you_mean(str(key), names)} '
                    f"Its keys are {', '.join(names)}"
                )
                raise ConfigError(msg)
        return cls(**json_object)

    @classmethod
    def from_json_file(cls, json_file: str | Path) -> TransformerConfig:
        """A config of the keys of a JSON file in UTF-8.

        Raises:
            ConfigError: the file cannot be read, is no JSON object, or has a key that is not known.
        """
        try:
            found = json.loads(Path(json_file).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            msg = f"{json_file} is no config of a transformer layer: {error}; expected JSON in UTF-8"
            raise ConfigError(msg) from error
        if not isinstance(found, dict):
            msg = f"{json_file} has a {type(found).__name__}; expected a JSON object with the keys of a layer"
            raise ConfigError(msg)
        return cls.from_dict(found)

    @property
    def mlp_size(self) -> int:
        """Width inside of the MLP."""
        return self.intermediate_size if self.intermediate_size > 0 else 4 * self.hidden_size

    @property
    def output_range(self) -> float:
        """Deviation of the two output weights at the start."""
        return self.initializer_range / (math.sqrt(2.0 * self.num_hidden_layers) if self.adjust_init_range else 1.0)

    def check(self, *, draws_weights: bool = True) -> None:
        """Check that a layer can be made of this config; `draws_weights` if its weights are to be drawn.

        Raises:
            ConfigError: a value is of the wrong kind or missing, or values do not fit together.
        """
        self._check_kinds()
        for name in ("hidden_size", "heads"):
            if getattr(self, name) < 1:
                _refuse(name, getattr(self, name), "set it to the model's, a whole number from 1")
        if self.hidden_size % self.heads:
            _refuse("hidden_size", self.hidden_size, f'it has to be a multiple of "heads" = {self.heads}')
        for name in ("attn_dropout_ratio", "hidden_dropout_ratio"):
            if getattr(self, name) >= 1:
                _refuse(name, getattr(self, name), "expected a number at least 0 and below 1")
        if not 0 <= self.layer_norm_eps < math.inf:
            _refuse("layer_norm_eps", self.layer_norm_eps, "expected a small number at least 0, such as 1e-12")
        if self.attention not in ATTENTIONS:
            _refuse("attention", self.attention, f"expected one of {', '.join(ATTENTIONS)}")
        if draws_weights and not 0 <= self.initializer_range < math.inf:
            _refuse("initializer_range", self.initializer_range, "set it to the deviation of the weights, such as 0.02")
        if draws_weights and self.adjust_init_range and self.num_hidden_layers < 1:
            cure = 'set it to the number of layers of the model, or "adjust_init_range" to false'
            _refuse("num_hidden_layers", self.num_hidden_layers, cure)

    def _check_kinds(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in _WHOLE and (isinstance(value, bool) or not isinstance(value, int)):
                _refuse(name, value, "expected a whole number")
            if name in _REAL and (isinstance(value, bool) or not isinstance(value, int | float) or value != value):
                _refuse(name, value, "expected a number")
            if isinstance(field.default, bool) and not isinstance(value, bool):
                _refuse(name, value, "expected true or false")


def _refuse(name: str, value: object, cure: str) -> NoReturn:
    msg = f'"{name}" of a transformer layer is {value!r}; {cure}'
    raise ConfigError(msg)
