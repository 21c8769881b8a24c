"""Students take over what the section says, and nothing else; Conv1D layers become Linear layers."""

import copy
import json

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from mpispeed.base.errors import ConfigError
from mpispeed.compression import init_compression
from mpispeed.compression.student import convert_conv1d_to_linear, student_initialization

OTHERS = ["bert.pooler", "bert.embeddings", "classifier"]
LAYERS = {"keep_number_layer": 2, "module_name_prefix": "bert.encoder.layer", "teacher_layer": [1, 3]}


def bert(layers, seed, width=24):
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 32, "num_attention_heads": 3, "vocab_size": 50}
    config = transformers.BertConfig(**sizes, num_hidden_layers=layers, max_position_embeddings=16, num_labels=3)
    return transformers.BertForSequenceClassification(config)


def section(**keys):
    return {"compression_training": {"layer_reduction": {"enabled": True, **keys}}}


def expected(teacher, student, layers):
    """The state dict of the student as the section wants it."""
    state = dict(student.state_dict())
    for name, value in teacher.state_dict().items():
        for own, other in enumerate(layers):
            if name.startswith(f"bert.encoder.layer.{other}."):
                state[name.replace(f"layer.{other}.", f"layer.{own}.", 1)] = value
        if name.startswith(tuple(OTHERS)):
            state[name] = value
    return state


def require_state(model, state):
    found = model.state_dict()
    assert found.keys() == state.keys()
    assert not [name for name in state if not torch.equal(found[name], state[name])]


NAMED = [*OTHERS, "bert.encoder.layer.1", "bert.encoder.layer.3"]


@pytest.mark.parametrize(
    "keys", [{**LAYERS, "other_module_name": OTHERS}, {"other_module_name": NAMED}], ids=["prefix", "names of layers"]
)
def test_layers_and_other_modules_are_copied(keys):
    teacher, student = bert(4, 1), bert(2, 2)
    wanted = copy.deepcopy(expected(teacher, student, [1, 3]))
    before = copy.deepcopy(teacher.state_dict())
    assert student_initialization(student, teacher, section(**keys)) is student
    require_state(student, wanted)
    require_state(teacher, before)


def test_one_named_layer_is_the_first_of_a_student_with_fewer():
    teacher, student = bert(4, 1), bert(2, 2)
    student_initialization(student, teacher, section(other_module_name=["bert.encoder.layer.3"]))
    ours, theirs = student.bert.encoder.layer, teacher.bert.encoder.layer
    assert torch.equal(ours[0].output.dense.weight, theirs[3].output.dense.weight)
    assert not torch.equal(ours[1].output.dense.weight, theirs[3].output.dense.weight)


def test_modules_of_lists_of_equal_length_keep_their_numbers():
    def net(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    teacher, student = net(1), net(2)
    teacher(torch.randn(5, 4))  # moves the running mean
    student_initialization(student, teacher, section(other_module_name=["2", "1"]))
    require_state(student[1:], teacher[1:].state_dict())
    assert not torch.equal(student[0].weight, teacher[0].weight)


def test_the_config_may_be_a_file_and_models_may_be_wrapped(tmp_path):
    teacher, student = bert(4, 1), bert(2, 2)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(section(**LAYERS, other_module_name=OTHERS)))

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    wanted = copy.deepcopy(expected(teacher, student, [1, 3]))
    student_initialization(Wrapper(student), Wrapper(teacher), path)
    require_state(student, wanted)


def test_what_is_not_enabled_copies_nothing():
    teacher, student = bert(4, 1), bert(2, 2)
    before = copy.deepcopy(student.state_dict())
    student_initialization(student, teacher, section(**LAYERS, other_module_name=OTHERS) | section(enabled=False))
    student_initialization(student, teacher, {})
    init_compression(student, {}, teacher_model=teacher)
    require_state(student, before)


WRONG = {
    "no such layer of the teacher": (
        {"module_name_prefix": "bert.encoder.layer", "teacher_layer": [1, 7]},
        r"teacher .* no module 'bert.encoder.layer.7'; bert.encoder.layer has .*3",
    ),
    "more layers than the student has": (
        {"module_name_prefix": "bert.encoder.layer", "teacher_layer": [0, 1, 2]},
        r"student .* no module 'bert.encoder.layer.2'",
    ),
    "no such module": ({"other_module_name": ["bert.embeddings", "head"]}, r"no module 'head'; it has .*classifier"),
    "no prefix": ({"teacher_layer": [1, 3]}, r"module_name_prefix"),
    "no layers": ({"module_name_prefix": "bert.encoder.layer"}, r"teacher_layer"),
    "twice": (
        {**LAYERS, "other_module_name": ["bert.encoder.layer.2"]},
        r"bert.encoder.layer.0 of the student is to be copied from two",
    ),
    "another number": ({**LAYERS, "keep_number_layer": 3}, r"2 layers are named, keep_number_layer is 3"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_told_and_nothing_is_copied(case):
    keys, words = WRONG[case]
    teacher, student = bert(4, 1), bert(2, 2)
    before = copy.deepcopy(student.state_dict())
    with pytest.raises(ConfigError, match=words):
        student_initialization(student, teacher, section(**keys))
    require_state(student, before)


def test_init_compression_takes_the_teacher_too():
    teacher, student = bert(4, 1), bert(2, 2)
    config = section(**LAYERS, other_module_name=OTHERS)
    wanted = copy.deepcopy(expected(teacher, student, [1, 3]))
    with pytest.raises(ConfigError, match="there is no teacher; give teacher_model"):
        init_compression(student, config)
    assert init_compression(student, config, teacher_model=teacher) is student
    require_state(student, wanted)


def test_a_section_alone_will_do():
    """Whatever techniques it has."""
    config = section(**LAYERS, other_module_name=OTHERS)["compression_training"]
    with pytest.raises(ConfigError, match="there is no teacher; give teacher_model"):
        init_compression(bert(2, 2), config)


def test_other_shapes_and_empty_models_are_told():
    with pytest.raises(ConfigError, match=r"pooler.*shape \[36, 36\], that of the teacher \[24, 24\]"):
        student_initialization(bert(2, 2, width=36), bert(4, 1), section(other_module_name=["bert.pooler"]))
    with torch.device("meta"):
        empty = bert(4, 1)
    with pytest.raises(ConfigError, match="of the teacher is on torch's meta device"):
        student_initialization(bert(2, 2), empty, section(other_module_name=["bert.pooler"]))


def gpt2():
    torch.manual_seed(3)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=40, n_embd=24, n_layer=2, n_head=3)).eval()


def test_conv1d_layers_become_linear_layers_of_the_same_function():
    model, tokens = gpt2(), torch.arange(10)[None]
    with torch.no_grad():
        before, state = model(tokens).logits, copy.deepcopy(model.state_dict())
        bias = model.transformer.h[0].attn.c_attn.bias
        assert convert_conv1d_to_linear(model, Conv1D) is model
        # Sums may be in another order: a few times 2 ** -24 of logits near 1.
        torch.testing.assert_close(model(tokens).logits, before, rtol=1e-5, atol=1e-6)
    assert not [layer for layer in model.modules() if isinstance(layer, Conv1D)]
    found = model.transformer.h[0].attn.c_attn
    assert isinstance(found, nn.Linear) and found.bias is bias and not found.training
    for name, value in model.state_dict().items():
        is_turned = ".c_" in name and name.endswith("weight")
        assert torch.equal(value, state[name].t() if is_turned else state[name]), name
    assert model.lm_head.weight is model.transformer.wte.weight
    once = copy.deepcopy(model.state_dict())
    require_state(convert_conv1d_to_linear(model, Conv1D), once)


def test_a_layer_at_two_places_stays_one():
    layer = Conv1D(6, 4)
    layer.weight.requires_grad_(False)
    model = convert_conv1d_to_linear(nn.ModuleDict({"a": layer, "b": nn.Sequential(layer)}), Conv1D)
    assert model["a"] is model["b"][0]
    assert model["a"].weight.shape == (6, 4) and not model["a"].weight.requires_grad
    assert (model["a"].in_features, model["a"].out_features) == (4, 6)
