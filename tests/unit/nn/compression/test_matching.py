"""Groups and the modules that they are for; and what is refused."""

import json

import pytest
from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.compression import compression_scheduler, init_compression
from mpispeed.nn.compression import Pruning, WeightQuantization, compress, compression_of, read_groups, state_of


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.dense = (nn.Linear(8, 8) for _ in range(4))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.up, self.down, self.norm = Attention(), nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)


def network():
    return nn.ModuleDict({"embed": nn.Embedding(5, 8), "layers": nn.ModuleList([Layer(), Layer()])})


BITS, KEPT = {"start_bits": 8, "target_bits": 8}, {"dense_ratio": 0.5}


def settings(technique, groups, **shared):
    shared = {"enabled": True, "quantize_weight_in_forward": True, **shared}
    if technique != "weight_quantization":
        del shared["quantize_weight_in_forward"]
    return {"compression_training": {technique: {"shared_parameters": shared, "different_groups": groups}}}


def compressed(technique, groups, **shared):
    model = network()
    init_compression(model, settings(technique, groups, **shared))
    return list(compression_of(model).layers)


def test_expressions_are_searched_for_in_names_of_layers():
    assert compressed("weight_quantization", {"a": {"params": BITS, "modules": ["1.*dense", "embed"]}}) == [
        "embed", "layers.1.attention.dense",
    ]  # fmt: skip
    everything = compressed("weight_quantization", {"a": {"params": BITS}})
    assert len(everything) == 12
    assert "embed" not in everything  # the default is Linear and Conv2d
    assert compressed("row_pruning", {"a": {"params": KEPT, "modules": [r"layers\.\d+\.up$"]}}) == [
        "layers.0.up", "layers.1.up",
    ]  # fmt: skip


def test_related_modules_are_paired_in_the_order_of_layers():
    model = network()
    group = {"params": KEPT, "modules": ["dense"], "related_modules": [["query", "key", "value"]]}
    init_compression(model, settings("head_pruning", {"a": group}, num_heads=2))
    names = ("query", "key", "value")
    for number, layer in enumerate(model["layers"]):
        state = state_of(layer.attention.dense)
        assert state.related == {"head_pruning": tuple(f"layers.{number}.attention.{name}" for name in names)}
        assert state_of(layer.attention.query) is None
    model = network()
    group = {"params": KEPT, "modules": [r"\.up"], "related_modules": [["down"]]}
    init_compression(model, settings("row_pruning", {"a": group}))
    for layer in model["layers"]:
        assert state_of(layer.down).follows == [state_of(layer.up)]


@pytest.mark.parametrize(
    ("technique", "groups", "shared", "said"),
    [
        (
            "weight_quantization",
            {"a": {"params": BITS, "modules": ["up"]}, "b": {"params": BITS, "modules": ["layers.0"]}},
            {},
            "different_groups.b.modules: layers.0.up was already added by the group a",
        ),
        (
            "row_pruning",
            {"a": {"params": KEPT, "modules": ["up", "u"]}},
            {},
            "layers.0.up was already added by the group a",
        ),
        (
            "weight_quantization",
            {"a": {"params": BITS, "modules": ["nothing"]}},
            {},
            "'nothing' matches no linear or conv",
        ),
        ("channel_pruning", {"a": {"params": KEPT, "modules": ["up"]}}, {}, "'up' matches no conv layer"),
        ("row_pruning", {"a": {"params": KEPT, "modules": ["(up"]}}, {}, "'(up' is no regular expression"),
        (
            "row_pruning",
            {"a": {"params": KEPT, "modules": ["up"], "related_modules": [["1.down"]]}},
            {},
            "'1.down' matches 1 layers, and 'up' 2",
        ),
        (
            "row_pruning",
            {"a": {"params": KEPT, "modules": ["up"], "related_modules": [["dense"]]}},
            {},
            "layers.0.attention.dense has 8 entries where layers.0.up has 16",
        ),
        (
            "row_pruning",
            {"a": {"params": KEPT, "modules": ["up"], "related_modules": [["down"], ["down"]]}},
            {},
            "2 lists for 1 entries of modules",
        ),
        (
            "weight_quantization",
            {"a": {"params": {"start_bits": 40, "target_bits": 32}}},
            {},
            "params.target_bits: 32 bits; use 1 to 16",
        ),
        (
            "weight_quantization",
            {"a": {"params": {"start_bits": 4, "target_bits": 2}}},
            {"quantization_type": "asymmetric"},
            "params.target_bits: 2 with asymmetric values and nearest rounding; 1 and 2 bits are symmetric",
        ),
        (
            "weight_quantization",
            {"a": {"params": BITS, "modules": ["up"]}},
            {"quantize_groups": 3},
            "quantize_groups 3 does not divide the 128 elements of layers.0.up",
        ),
    ],
)
def test_what_does_not_fit_is_said(technique, groups, shared, said):
    with pytest.raises(ConfigError) as found:
        compressed(technique, groups, **shared)
    assert said in str(found.value)


def test_names_of_other_stages_count_as_found():
    groups = read_groups(settings("sparse_pruning", {"a": {"params": KEPT, "modules": ["layers.7"]}}, method="l1",
                                  schedule_offset=3)["compression_training"])  # fmt: skip
    assert compress(network(), groups, elsewhere=["layers.7.up"]).layers == {}
    assert groups[0].technique == Pruning("sparse", 0.5, "l1", 3)
    with pytest.raises(ConfigError, match="matches no"):
        compress(network(), groups)


def test_settings_may_be_a_file(tmp_path):
    model, path = network(), tmp_path / "ds_config.json"
    values = settings("weight_quantization", {"a": {"params": BITS}}, schedule_offset=7, quantize_groups=2)
    path.write_text(json.dumps(values))
    init_compression(model, str(path))
    (technique,) = state_of(model["layers"][0].up).techniques.values()
    assert isinstance(technique, WeightQuantization)
    assert (technique.offset, technique.quantizer.groups) == (7, 2)
    scheduler = compression_scheduler(model, values)
    assert scheduler.compression is compression_of(model)
    other = settings("weight_quantization", {"a": {"params": BITS}})
    with pytest.raises(ConfigError, match="differs from that of init_compression"):
        compression_scheduler(model, other)
