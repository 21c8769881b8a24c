"""Settings and parameters of the fused transformer layer: DeepSpeed's keys, names and starting values."""

import json
import math

import pytest
import torch

import mpispeed
from mpispeed.base.errors import ConfigError
from mpispeed.nn.block import TransformerConfig, TransformerLayer

GIVEN = {"hidden_size": 256, "heads": 4, "num_hidden_layers": 8, "initializer_range": 0.02}

DEFAULTS = {
    "batch_size": -1, "hidden_size": -1, "intermediate_size": -1, "heads": -1, "attn_dropout_ratio": -1,
    "hidden_dropout_ratio": -1, "num_hidden_layers": -1, "initializer_range": -1, "layer_norm_eps": 1e-12,
    "local_rank": -1, "seed": -1, "fp16": False, "pre_layer_norm": True, "normalize_invertible": False,
    "gelu_checkpoint": False, "adjust_init_range": True, "attn_dropout_checkpoint": False, "stochastic_mode": False,
    "return_tuple": False, "training": True,
}  # fmt: skip


def layer(**changes):
    return TransformerLayer(TransformerConfig(**{**GIVEN, **changes}))


def test_the_names_of_deepspeed():
    assert mpispeed.DeepSpeedTransformerConfig is TransformerConfig
    assert mpispeed.DeepSpeedTransformerLayer is TransformerLayer
    found = vars(TransformerConfig())
    assert {name: found[name] for name in DEFAULTS} == DEFAULTS
    assert list(found)[: len(DEFAULTS)] == list(DEFAULTS)  # they may be given by position
    assert set(found) - set(DEFAULTS) == {"attention"}


def test_parameters_have_the_names_and_shapes_of_deepspeed():
    shapes = {name: tuple(p.shape) for name, p in layer(intermediate_size=300).named_parameters()}
    assert shapes == {
        "attn_qkvw": (768, 256), "attn_qkvb": (768,), "attn_ow": (256, 256), "attn_ob": (256,), "attn_nw": (256,),
        "attn_nb": (256,), "inter_w": (300, 256), "inter_b": (300,), "output_w": (256, 300), "output_b": (256,),
        "norm_w": (256,), "norm_b": (256,),
    }  # fmt: skip
    assert layer().inter_w.shape == (1024, 256)


@pytest.mark.parametrize("is_adjusted", [True, False])
@pytest.mark.parametrize("local_rank", [-1, 0, 3])
def test_weights_start_with_their_deviations_on_every_rank(is_adjusted, local_rank):
    torch.manual_seed(0)
    made = layer(adjust_init_range=is_adjusted, local_rank=local_rank)
    narrow = 0.02 / (math.sqrt(16) if is_adjusted else 1)
    for name, want in (("attn_qkvw", 0.02), ("inter_w", 0.02), ("attn_ow", narrow), ("output_w", narrow)):
        weight = getattr(made, name).detach()
        # 4 deviations of the estimate from so many numbers
        assert abs(weight.std() / want - 1) < 4 / math.sqrt(2 * weight.numel()), name
    assert all((getattr(made, name) == 1).all() for name in ("attn_nw", "norm_w"))
    zeros = ("attn_qkvb", "attn_ob", "attn_nb", "inter_b", "output_b", "norm_b")
    assert not any(getattr(made, name).any() for name in zeros)


def test_initial_tensors_are_copied():
    square, vector = torch.randn(4, 256, 256), torch.randn(8, 256)
    inner, outer, inner_bias = torch.randn(1024, 256), torch.randn(256, 1024), torch.randn(1024)
    weights = [*square, vector[0], inner, outer, vector[1]]
    biases = [*vector[:4], vector[4], inner_bias, vector[5], vector[6]]
    config = TransformerConfig(hidden_size=256, heads=4)  # nothing is drawn, so no range is needed
    made = TransformerLayer(config, weights, biases)
    assert torch.equal(made.attn_qkvw, torch.cat(weights[:3]))
    assert not made.attn_qkvb.any()
    for name, value in zip(
        ("attn_ow", "attn_nw", "inter_w", "output_w", "norm_w", "attn_ob", "attn_nb", "inter_b", "output_b", "norm_b"),
        (*weights[3:], *biases[3:]), strict=True,
    ):  # fmt: skip
        assert torch.equal(getattr(made, name), value), name
        assert getattr(made, name).data_ptr() != value.data_ptr()
    with pytest.raises(ConfigError, match=r"initial_weights: inter_w has shape \(256, 1024\); the config makes it"):
        TransformerLayer(config, [*weights[:5], outer, outer, vector[1]], biases)
    with pytest.raises(ConfigError, match=r"initial_biases has 7 tensors; expected 8"):
        TransformerLayer(config, weights, biases[:7])


def test_configs_from_dicts_and_files(tmp_path):
    assert TransformerConfig.from_dict({**GIVEN, "fp16": True}) == TransformerConfig(**GIVEN, fp16=True)
    file = tmp_path / "ä.json"
    file.write_text(json.dumps(GIVEN), encoding="utf-8")
    assert TransformerConfig.from_json_file(file) == TransformerConfig(**GIVEN)
    assert TransformerConfig.from_json_file(str(file)) == TransformerConfig(**GIVEN)
    with pytest.raises(ConfigError, match=r'"hiden_size" is no key .* Did you mean "hidden_size"'):
        TransformerConfig.from_dict({"hiden_size": 3})
    file.write_text("[1]")
    with pytest.raises(ConfigError, match="has a list; expected a JSON object"):
        TransformerConfig.from_json_file(file)
    file.write_bytes(json.dumps(GIVEN).encode("utf-16"))
    with pytest.raises(ConfigError, match="expected JSON in UTF-8"):
        TransformerConfig.from_json_file(file)
    with pytest.raises(ConfigError, match="No such file"):
        TransformerConfig.from_json_file(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": -1}, '"hidden_size" of a transformer layer is -1; set it to the model'),
        ({"heads": 0}, '"heads" of a transformer layer is 0; set it'),
        ({"heads": 7}, '"hidden_size" of a transformer layer is 256; it has to be a multiple of "heads" = 7'),
        ({"heads": 4.0}, '"heads" of a transformer layer is 4.0; expected a whole number'),
        ({"heads": True}, '"heads" of a transformer layer is True; expected a whole number'),
        ({"attn_dropout_ratio": 1.0}, '"attn_dropout_ratio" .* is 1.0; expected a number at least 0 and below 1'),
        ({"hidden_dropout_ratio": "0.1"}, "\"hidden_dropout_ratio\" .* is '0.1'; expected a number"),
        ({"hidden_dropout_ratio": math.nan}, '"hidden_dropout_ratio" .* is nan; expected a number'),
        ({"layer_norm_eps": -1.0}, '"layer_norm_eps" .* is -1.0; expected a small number'),
        ({"initializer_range": -1}, '"initializer_range" .* is -1; set it to the deviation'),
        ({"num_hidden_layers": -1}, '"num_hidden_layers" .* is -1; set it .* or "adjust_init_range" to false'),
        ({"return_tuple": 1}, '"return_tuple" .* is 1; expected true or false'),
        ({"attention": "flash"}, "\"attention\" .* is 'flash'; expected one of auto, sdpa, explicit"),
    ],
)
def test_a_wrong_value_is_named_with_its_cure(changes, message):
    with pytest.raises(ConfigError, match=message):
        layer(**changes)


def test_keys_may_be_set_after_the_construction_and_the_layer_keeps_a_copy():
    config = TransformerConfig()
    for name, value in GIVEN.items():
        setattr(config, name, value)
    made = TransformerLayer(config)
    config.heads = 3
    assert made.config.heads == 4
    assert "hidden_size=256, heads=4, intermediate_size=1024, pre_layer_norm" in repr(made)


def test_ratios_that_were_not_given_drop_nothing():
    made = layer(hidden_size=16)
    x = torch.randn(1, 3, 16)
    assert torch.equal(made(x), made(x))
