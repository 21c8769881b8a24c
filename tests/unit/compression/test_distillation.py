"""Losses of distillation: values and gradients of the papers' formulas, masks, pairs of layers."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.nn import functional as F

from mpispeed.base.errors import UsageError
from mpispeed.compression.distillation import DistillationLoss, attention_loss, hidden_loss, logits_loss


def drawn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaf(*shape, seed=1):
    return drawn(*shape, seed=seed).float().requires_grad_()


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_soft_targets(temperature):
    student, teacher = leaf(5, 3, 7), leaf(5, 3, 7, seed=2)
    loss = logits_loss(student, teacher, temperature=temperature)
    own, soft = (x.detach().double().div(temperature).softmax(-1) for x in (student, teacher))
    wanted = temperature**2 * (soft * (soft / own).log()).sum(-1).mean()
    torch.testing.assert_close(loss.detach().double(), wanted, rtol=1e-5, atol=1e-7)
    loss.backward()
    # Hinton et al., equation 2: (q - p) / T for each row, times T ** 2.
    torch.testing.assert_close(student.grad.double(), temperature * (own - soft) / 15, rtol=1e-4, atol=1e-7)
    assert teacher.grad is None
    assert logits_loss(teacher, teacher).abs() < 1e-6


def test_one_class_is_a_regression():
    student, teacher = leaf(6, 1), leaf(6, 1, seed=2)
    torch.testing.assert_close(logits_loss(student, teacher, temperature=3.0), F.mse_loss(student, teacher))


def test_masked_tokens_do_not_count():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    student, teacher = leaf(2, 4, 6), leaf(2, 4, 6, seed=2)
    kept = mask.bool()
    torch.testing.assert_close(
        logits_loss(student, teacher, mask=mask), logits_loss(student[kept], teacher[kept]), rtol=1e-5, atol=1e-6
    )
    found = hidden_loss([student], [teacher], mask=mask)
    torch.testing.assert_close(found, F.mse_loss(student[kept], teacher[kept]))
    found.backward()
    assert not student.grad[~kept].any() and student.grad[kept].all()
    maps, others = leaf(2, 3, 4, 4), leaf(2, 3, 4, 4, seed=2)
    rows = kept[:, None].expand(2, 3, 4)
    torch.testing.assert_close(attention_loss([maps], [others], mask=mask), F.mse_loss(maps[rows], others[rows]))
    assert hidden_loss([student], [teacher], mask=torch.zeros(2, 4)) == 0


def test_masked_scores_count_as_zero():
    maps, others = leaf(1, 2, 3, 3), leaf(1, 2, 3, 3, seed=2)
    hidden = torch.tensor([[False, False, True]]).expand(3, 3)
    scores = maps.masked_fill(hidden, torch.finfo(torch.float32).min), others.masked_fill(hidden, -10000.0)
    found = attention_loss([scores[0]], [scores[1]])
    torch.testing.assert_close(found, F.mse_loss(maps.masked_fill(hidden, 0), others.masked_fill(hidden, 0)))


def bert(layers, seed, width=24, attention="eager"):
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 32, "num_attention_heads": 3, "vocab_size": 50}
    config = transformers.BertConfig(**sizes, num_hidden_layers=layers, max_position_embeddings=16, num_labels=3)
    config._attn_implementation = attention
    return transformers.BertForSequenceClassification(config).eval()


def run(model, **kwargs):
    return model(torch.arange(12).view(2, 6), output_hidden_states=True, output_attentions=True, **kwargs)


def test_the_sum_is_that_of_the_examples():
    own, other = run(bert(2, 1)), run(bert(4, 2))
    loss = DistillationLoss(logits=0.5, hidden=2.0, attention=3.0, temperature=2.0)(own, other)
    hidden = sum(F.mse_loss(own.hidden_states[i], other.hidden_states[2 * i]) for i in range(3))
    maps = sum(F.mse_loss(own.attentions[i], other.attentions[2 * i + 1]) for i in range(2))
    soft = F.softmax(other.logits / 2, -1)
    kl = F.kl_div(F.log_softmax(own.logits / 2, -1), soft, reduction="batchmean") * 4
    torch.testing.assert_close(loss, 0.5 * kl + 2 * hidden + 3 * maps, rtol=1e-5, atol=1e-6)


def test_layers_of_the_teacher_can_be_named():
    own, other = run(bert(2, 1)), run(bert(4, 2))
    terms = DistillationLoss(hidden=1.0, attention=1.0, teacher_layers=[0, 2]).terms(own, other)
    assert list(terms) == ["logits", "hidden_states", "attentions"]
    hidden = sum(F.mse_loss(own.hidden_states[i], other.hidden_states[j]) for i, j in ((0, 0), (1, 1), (2, 3)))
    maps = sum(F.mse_loss(own.attentions[i], other.attentions[j]) for i, j in ((0, 0), (1, 2)))
    torch.testing.assert_close(terms["hidden_states"], hidden)
    torch.testing.assert_close(terms["attentions"], maps)


def test_a_projection_joins_widths_and_is_trained():
    student, other = bert(2, 1, width=12), run(bert(4, 2))
    student.distillation = DistillationLoss(logits=0.0, hidden=1.0, widths=(12, 24))
    assert "distillation.projection.weight" in dict(student.named_parameters())
    adam, losses = torch.optim.Adam(student.parameters(), lr=1e-2), []
    for _ in range(20):
        loss = student.distillation(run(student), other)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert student.distillation.projection.weight.grad.any()
    assert losses[-1] < 0.7 * losses[0]


def test_logits_alone_and_mappings_will_do():
    own, other = drawn(2, 5), drawn(2, 5, seed=2)
    wanted = logits_loss(own, other)
    loss = DistillationLoss()
    assert torch.equal(loss(own, other), wanted)
    assert torch.equal(loss({"logits": own}, SimpleNamespace(logits=other)), wanted)


def test_misuse_is_told():
    own, other = run(bert(2, 1)), run(bert(4, 2))
    wrong = {
        "shapes [2, 6, 12] of the student, [2, 6, 24] of the teacher; give DistillationLoss both widths": (
            lambda: DistillationLoss(hidden=1.0)(run(bert(2, 1, width=12)), other)
        ),
        "teacher_layers [0, 1, 2] do not fit 2 layers of the student and 4": (
            lambda: DistillationLoss(hidden=1.0, teacher_layers=[0, 1, 2])(own, other)
        ),
        "teacher_layers [0, 4] do not fit": lambda: DistillationLoss(attention=1.0, teacher_layers=[0, 4])(own, other),
        "teacher_layers None do not fit 4 layers of the student and 2": (
            lambda: DistillationLoss(hidden=1.0)(other, own)
        ),
        "the student returns no hidden_states; call the model with output_hidden_states=True": (
            lambda: DistillationLoss(hidden=1.0)(own.logits, other)
        ),
        "the teacher returns no attentions; call the model with output_attentions=True, and attn_implementation": (
            lambda: DistillationLoss(attention=1.0)(own, run(bert(4, 2, attention="sdpa")))
        ),
        "all weights are 0": lambda: DistillationLoss(logits=0.0)(own, other),
        "1 hidden states of the student, 2": lambda: hidden_loss([own.logits], [own.logits] * 2),
        "the temperature is 0.0, which logits are divided by": lambda: DistillationLoss(temperature=0.0)(own, other),
        "a mask of shape [2, 5, 1] does not fit": lambda: DistillationLoss()(
            torch.ones(2, 6, 3), torch.ones(2, 6, 3), torch.ones(2, 5)
        ),
        "a mask of shape [2, 1, 5] does not fit": lambda: attention_loss(
            [torch.ones(2, 2, 6, 6)], [torch.ones(2, 2, 6, 6)], mask=torch.ones(2, 5)
        ),
        "numbers of heads": lambda: attention_loss([torch.ones(1, 2, 3, 3)], [torch.ones(1, 4, 3, 3)]),
    }
    for words, act in wrong.items():
        with pytest.raises(UsageError) as caught:
            act()
        assert words in str(caught.value)
