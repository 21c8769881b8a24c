"""The example model: causal, reproducible, and able to learn."""

from __future__ import annotations

import math

import pytest
import torch
from gpt import GPT, VOCABULARY, Shape

TINY = Shape(layers=2, heads=2, width=16, block=12)


def tiny(shape: Shape = TINY) -> GPT:
    torch.manual_seed(0)
    return GPT(shape)


def test_an_untrained_model_guesses_evenly() -> None:
    x = torch.randint(0, VOCABULARY, (4, 12))
    assert float(tiny()(x, x).detach()) == pytest.approx(math.log(VOCABULARY), abs=0.05)


def test_no_position_sees_later_ones() -> None:
    model, x = tiny().eval(), torch.randint(0, VOCABULARY, (1, 12))
    changed = x.clone()
    changed[0, 7] = (changed[0, 7] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = model(x), model(changed)
    assert torch.equal(before[0, :7], after[0, :7])
    assert not torch.allclose(before[0, 7:], after[0, 7:])


def test_order_of_earlier_bytes_matters() -> None:
    model = tiny().eval()
    with torch.no_grad():
        one, other = model(torch.tensor([[1, 2, 3]])), model(torch.tensor([[2, 1, 3]]))
    assert not torch.allclose(one[0, -1], other[0, -1])


def test_it_learns_a_sentence() -> None:
    model = tiny()
    text = torch.stack([torch.tensor(list(b"so it goes. ") * 2).roll(shift) for shift in range(12)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(text[:, :12], text[:, 1:13])
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.2
    assert model.generate(b"so it", 19, temperature=0.1) == b"so it goes. so it goes. "


def test_generation_is_repeatable_and_leaves_the_mode() -> None:
    model = tiny(Shape(layers=1, heads=2, width=16, block=8, dropout=0.5)).train()
    state = torch.get_rng_state()
    first = model.generate(b"abc", 20, seed=1)
    assert first == model.generate(b"abc", 20, seed=1)
    assert first != model.generate(b"abc", 20, seed=2)
    assert len(first) == 23
    assert model.training
    assert torch.equal(state, torch.get_rng_state())


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"width 20 .* 4"):
        GPT(Shape(width=20, heads=4))
