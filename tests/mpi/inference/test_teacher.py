"""Teachers in shards: a student learns the same from them, and takes over the same layers, as from a whole teacher."""

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

import mpispeed
from mpispeed.base.errors import UsageError
from mpispeed.compression.distillation import DistillationLoss, Teacher
from mpispeed.compression.student import convert_conv1d_to_linear, student_initialization
from mpispeed.sharding.sharded_init import find_init_shard
from tests.helpers.covering import in_turn

SECTION = {
    "compression_training": {
        "layer_reduction": {
            "enabled": True, "module_name_prefix": "transformer.h", "teacher_layer": [0, 2],
            "other_module_name": ["transformer.wte", "transformer.wpe", "transformer.ln_f"],
        }
    }
}  # fmt: skip
STEPS, BATCH = 3, 12


def gpt2(layers, seed, width=24):
    torch.manual_seed(seed)
    sizes = {"n_embd": width, "n_layer": layers, "n_head": 3, "n_positions": 16, "vocab_size": 40}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))


def zero(kind, folder):
    """The section of a teacher in shards; of a whole one none."""
    if kind == "whole":
        return {}
    tier = {"offload_param": {"device": kind, "nvme_path": folder, "max_in_cpu": 0}} if kind != "none" else {}
    return {"zero": {"stage": 3, "stage3_param_persistence_threshold": 0, **tier}}


@pytest.fixture
def folder(comm, tmp_path):
    return comm.share(str(tmp_path))


def batches(comm):
    """This rank's tokens of each step, [batch, length]."""
    tokens = torch.randint(2, 40, (STEPS, BATCH, 8), generator=torch.Generator().manual_seed(7))
    return tokens[:, comm.rank * BATCH // comm.size : (comm.rank + 1) * BATCH // comm.size]


def learn(comm, teacher):
    """Losses and the weights of a student after some steps; it is narrower than the teacher."""
    student = gpt2(2, 2, width=12)
    student.distillation = DistillationLoss(logits=1.0, hidden=0.5, temperature=2.0, widths=(12, 24))
    config = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine = mpispeed.initialize(model=student, config=config)[0]
    losses = []
    for tokens in batches(comm):
        taught = teacher(tokens, output_hidden_states=True)
        loss = engine.module.distillation(engine(tokens, output_hidden_states=True), taught)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses, {name: param.detach().clone() for name, param in student.named_parameters()}


@pytest.mark.ranks(1, 3)
def test_a_student_learns_the_same_from_any_teacher(comm, folder):
    found = {}
    for kind in ("whole", "none", "nvme"):
        teacher = Teacher(gpt2(3, 1), **zero(kind, folder))
        torch.manual_seed(10)  # of the projection
        found[kind] = learn(comm, teacher)
        teacher.destroy()
    losses, weights = found["whole"]
    assert losses[-1] < losses[0]
    for kind in ("none", "nvme"):
        assert found[kind][0] == losses, kind
        assert not [name for name in weights if not torch.equal(found[kind][1][name], weights[name])], kind


@pytest.mark.ranks(2, 3)
def test_a_teacher_in_shards_is_held_once(comm):
    model = gpt2(3, 1).train()
    count = sum(param.numel() for param in model.parameters())
    teacher = Teacher(model, **zero("none", ""))
    outputs = teacher(torch.arange(8)[None])
    shares = comm.gather_objects(sum(param.ds_tensor.numel() for param in model.parameters()))
    assert sum(shares) == count
    assert max(shares) <= 1.2 * count / comm.size  # each unit's last shard may be shorter
    assert not outputs.logits.requires_grad and not teacher.module.training
    assert outputs.logits.dtype == torch.float32
    teacher.destroy()


def copied(student):
    """All weights of a student, whole."""
    with mpispeed.zero.GatheredParameters(list(student.parameters())):
        return {name: param.detach().clone() for name, param in student.named_parameters()}


@pytest.mark.parametrize(
    ("of_teacher", "of_student"), in_turn([("init", "whole"), ("init", "init"), ("nvme", "engine")], (2, 4, 3, 1))
)
def test_layers_are_copied_between_shards(of_teacher, of_student, folder):
    wanted = student_initialization(gpt2(2, 2), gpt2(3, 1), SECTION).state_dict()
    if of_teacher == "init":
        with mpispeed.zero.Init():
            teacher = gpt2(3, 1)
    else:
        teacher = Teacher(gpt2(3, 1), **zero("nvme", folder))
    if of_student == "init":
        with mpispeed.zero.Init():
            student = gpt2(2, 2)
    else:
        student = gpt2(2, 2)
    engine = None
    if of_student == "engine":
        config = {"train_batch_size": BATCH, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 3}}
        engine = mpispeed.initialize(model=student, config=config)[0]
    student_initialization(student if engine is None else engine, teacher, SECTION)
    found = copied(student)
    assert not [name for name, value in found.items() if not torch.equal(value, wanted[name])]
    if engine is not None:
        masters = {name: mpispeed.zero.safe_get_full_fp32_param(param) for name, param in student.named_parameters()}
        assert not [name for name, value in masters.items() if not torch.equal(value, wanted[name])]
        with pytest.raises(UsageError, match="convert its layers before initialize"):
            convert_conv1d_to_linear(student, Conv1D)
        engine.destroy()
    if of_teacher == "nvme":
        teacher.destroy()


@pytest.mark.ranks(3)
def test_layers_in_shards_become_linear(comm):
    wanted = convert_conv1d_to_linear(gpt2(1, 1), Conv1D).state_dict()
    with mpispeed.zero.Init():
        model = gpt2(1, 1)
    convert_conv1d_to_linear(model, Conv1D)
    layer = model.transformer.h[0].attn.c_attn
    assert isinstance(layer, nn.Linear) and layer.weight.shape == (72, 24)
    assert find_init_shard(layer.weight).shard.numel() == 72 * 24 // comm.size
    assert not [name for name, value in copied(model).items() if not torch.equal(value, wanted[name])]
