"""What a tiny BERT has learned survives each technique of compression at the settings of DeepSpeedExamples.

The long comparison is benchmarks/step/compression_accuracy.py.
"""

import copy

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from mpispeed.compression import redundancy_clean
from tests.helpers.entailment import WORDS, label_of, make_pairs
from tests.helpers.paper_compression import TECHNIQUES, section_of
from tests.zoo.training import config, start

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1)]

STEPS, MORE_STEPS, BATCH = 260, 60, 32
EASY = {"nouns": 2, "verbs": 2}
LOSS = 4  # percent; weights of 1 bit, which need longer, lose 12
BERT = BertConfig(
    vocab_size=len(WORDS), hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
    max_position_embeddings=16, num_labels=3, initializer_range=0.15, hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)  # fmt: skip


def train(model, rate, steps, seed, section=None):
    """Train with an engine, with compression if there is a section."""
    more = {"optimizer": {"type": "AdamW", "params": {"lr": rate}}, "gradient_clipping": 1.0}
    schedule = {
        "total_num_steps": steps,
        "warmup_num_steps": steps // 10,
        "warmup_max_lr": rate,
        "warmup_type": "linear",
    }
    more["scheduler"] = {"type": "WarmupDecayLR", "params": schedule}
    if section:
        more["compression_training"] = section
    engine = start(config(batch=BATCH, **more), model)
    for batch in make_pairs(steps * BATCH, seed, **EASY).batches(BATCH):
        engine.backward(engine(**batch).loss)
        engine.step()
    engine.destroy()


@torch.no_grad()
def accuracy(model):
    """In percent, on fresh examples."""
    model.eval()
    (batch,) = make_pairs(1500, 1, **EASY).batches(1500)
    right = (model(**batch).logits.argmax(-1) == batch["labels"]).float().mean()
    model.train()
    return 100 * right.item()


@pytest.fixture(scope="module")
def trained():
    """A trained model."""
    torch.manual_seed(1)
    model = BertForSequenceClassification(BERT)
    train(model, 3e-3, STEPS, 7)
    return model


@pytest.fixture(scope="module")
def full(trained):
    """The accuracy of the model that is trained on without compression."""
    model = copy.deepcopy(trained)
    train(model, 1e-3, MORE_STEPS, 8)
    found = accuracy(model)
    assert found > 95
    return found


@pytest.mark.parametrize("name", TECHNIQUES)
def test_accuracy_stays(name, trained, full):
    """Also when the compression becomes permanent."""
    model, section = copy.deepcopy(trained), section_of(name, MORE_STEPS, 4, 16)
    train(model, 1e-3, MORE_STEPS, 8, section)
    found = accuracy(model)
    assert found > full - LOSS
    cleaned = redundancy_clean(model, {"compression_training": section})
    assert accuracy(cleaned) == pytest.approx(found, abs=0.2)  # 3 examples, whose logits may be almost equal


@pytest.mark.parametrize(
    ("premise", "hypothesis", "label"),
    [
        ("all dogs walk", "some animals move", "follows"),
        ("all animals walk", "some dogs walk", "neither"),
        ("all animals walk", "all dogs run", "contradicts"),
        ("all animals walk", "no dogs run", "follows"),
        ("no animals move", "no dogs walk", "follows"),
        ("no dogs move", "no animals move", "neither"),
        ("some cats run", "no cats move", "contradicts"),
        ("no cats run", "all artists speak", "neither"),
    ],
)
def test_labels_are_those_of_logic(premise, hypothesis, label):
    assert label_of(premise, hypothesis) == label
