"""The documented blocks of `compression_training` train, on models with the layers that they name."""

import json

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from tests.zoo.models import built
from tests.zoo.training import ADAM, config, start

pytestmark = pytest.mark.mpi(min_size=1)

BERT = BertConfig(
    vocab_size=32, hidden_size=24, num_hidden_layers=2, num_attention_heads=12, intermediate_size=32,
    max_position_embeddings=16, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip

BLOCKS = {
    "weights": r"""
"weight_quantization": {
    "shared_parameters":{
      "enabled": true,
      "quantizer_kernel": false,
      "schedule_offset": 0,
      "quantize_groups": 1,
      "quantize_verbose": false,
      "quantization_type": "symmetric",
      "rounding": "nearest",
      "quantize_weight_in_forward": false,
      "fp16_mixed_quantize":{
        "enabled": false,
        "quantize_change_ratio": 0.001
      }
    },
    "different_groups":{
      "wq1": {
        "params": {
            "start_bits": 8,
            "target_bits": 8,
            "quantization_period": 50
        },
        "modules": [
          "attention.self",
          "intermediate"
        ]
      },
      "wq2": {
        "params": {
            "start_bits": 4,
            "target_bits": 4,
            "quantization_period": 50
        },
        "modules": [
          "attention.output"
        ]
      }
    }
}""",
    "activations": r"""
"activation_quantization": {
    "shared_parameters":{
      "enabled": true,
      "quantization_type": "asymmetric",
      "range_calibration": "dynamic",
      "schedule_offset": 50
    },
    "different_groups":{
      "aq1": {
        "params": {
            "bits": 8
        },
        "modules": [
          "attention.output"
        ]
      }
    }
}""",
    "blocks": r"""
"sparse_pruning":{
    "shared_parameters":{
      "enabled": true,
      "schedule_offset": 30,
      "schedule_offset_end": 90,
      "schedule_offset_stride": 15,
      "method": "snip_momentum",
      "block_pattern": "4x1",
      "dense_ratio": 0.4,
      "excluded_modules": ["classifier", "pooler"]
    },
    "different_groups":{
    }
}""",
    "rows": r"""
"row_pruning":{
    "shared_parameters":{
      "enabled": true,
      "schedule_offset": 20,
      "method": "topk"
    },
    "different_groups":{
      "rp1": {
        "params": {
            "dense_ratio": 0.5
        },
        "modules": [
          "intermediate.dense"
        ],
        "related_modules":[
          ["layer.\\w+.output.dense"]
        ]
      }
    }
}""",
    "heads": r"""
"head_pruning":{
    "shared_parameters":{
      "enabled": true,
      "schedule_offset": 10,
      "method": "topk",
      "num_heads": 12
    },
    "different_groups":{
      "rp1": {
        "params": {
            "dense_ratio": 0.5
        },
        "modules": [
          "attention.output.dense"
        ],
        "related_modules":[
          ["self.query", "self.key", "self.value"]
        ]
      }
    }
}""",
    "channels": r"""
"channel_pruning":{
    "shared_parameters":{
      "enabled": true,
      "schedule_offset": 0,
      "method": "topk"
    },
    "different_groups":{
      "cp1": {
        "params": {
            "dense_ratio": 0.5
        },
        "modules": [
          "layer....conv1"
        ],
        "related_modules": [
          ["layer....conv2", "layer....bn1"]
        ]
      }
    }
}""",
}
"""Offsets are made smaller below, so that a short run gets there."""


class Basic(nn.Module):
    """A residual block of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x):
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


class ResNet(nn.Module):
    """Two layers of one block, with the names of torchvision's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.layer1, self.layer2 = nn.Conv2d(3, 4, 3), nn.Sequential(Basic()), nn.Sequential(Basic())

    def forward(self, x):
        return self.layer2(self.layer1(self.conv1(x))).square().mean()


def trains(settings, model, *inputs, **named):
    """The losses of three steps, which fall."""
    engine = start(settings, model)
    losses = []
    for _ in range(3):
        found = engine(*inputs, **named)
        loss = found if isinstance(found, torch.Tensor) else found.loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    compressed = engine.compression
    engine.destroy()
    assert losses[2] < losses[0]
    return compressed


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", BLOCKS)
def test_the_blocks_train(name):
    section = json.loads("{" + BLOCKS[name] + "}")
    ((method, technique),) = section.items()
    shared = technique["shared_parameters"]
    shared |= {key: min(value, 1 + key.endswith("end")) for key, value in shared.items() if "schedule" in key}
    settings = config(3, 12, 1, **ADAM, compression_training=section)
    if name == "weights":
        settings["fp16"] = {"enabled": True, "initial_scale_power": 8}
    torch.manual_seed(2)  # all ranks have the same samples
    if name == "channels":
        compressed = trains(settings, built(ResNet), torch.randn(2, 3, 6, 6))
    else:
        ids = torch.randint(0, 32, (2, 8))
        compressed = trains(
            settings, built(lambda: BertForSequenceClassification(BERT)), input_ids=ids, labels=ids[:, 0] % 2
        )
    active = [state for state in compressed.layers.values() if method in state.active]
    assert len(active) == {"weights": 10, "blocks": 12}.get(name, 2)
