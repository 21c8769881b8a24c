"""A small language model whose attention is that of cut sequences, or, as a reference, torch's with a whole mask."""

from __future__ import annotations

import torch
from torch import nn

from mpispeed import sequence
from mpispeed.nn.sequence.cut import documents
from tests.zoo.models import built

CLASSES, WIDTH = 37, 24


class Attention(nn.Module):
    """Rotary attention of 6 heads to 2 of keys."""

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, heads * 4) for heads in (6, 2, 2))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.num_heads, self.num_key_value_heads = 6, 2  # of the whole layer, for slices
        self.is_causal = is_causal

    def forward(self, x, positions, mask=None):
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        angles = (positions[:, None, :, None] * torch.tensor([1.0, 0.1])).to(x.dtype)
        q, k = (torch.cat([y[..., :2] * angles.cos() - y[..., 2:] * angles.sin(),
                           y[..., 2:] * angles.cos() + y[..., :2] * angles.sin()], -1) for y in (q, k))  # fmt: skip
        if mask is None:
            out = sequence.attention(q, k, v, causal=self.is_causal)
        else:
            out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            out = out.nan_to_num(0.0)  # padding sees nothing
        return self.out(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a perceptron."""

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(is_causal)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, positions, mask=None):
        x = x + self.attention(self.norm(x), positions, mask)
        return x + sequence.tiled_mlp(lambda y: self.down(torch.tanh(self.up(y))), x, 2)


class LongLM(nn.Module):
    """The mean loss of a batch; labels are shifted already."""

    def __init__(self, *, is_causal: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Layer(is_causal) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.is_causal, self.is_reference = is_causal, False

    def forward(self, input_ids, labels, position_ids=None, attention_mask=None):
        x, mask = self.embed(input_ids), None
        if self.is_reference:
            mask = whole_mask(*input_ids.shape, position_ids, attention_mask, is_causal=self.is_causal)
            position_ids = torch.arange(x.shape[1])[None] if position_ids is None else position_ids
        for layer in self.layers:
            x = layer(x, position_ids, mask)
        if self.is_reference:
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return sequence.tiled_loss(self.head, x, labels, 3)


def whole_mask(rows, length, position_ids=None, attention_mask=None, *, is_causal=True):
    """What each token sees, [rows, 1, length, length]."""
    spans = documents(rows, length, position_ids, attention_mask) or [[(0, length)]] * rows
    mask = torch.zeros(rows, 1, length, length, dtype=torch.bool)
    for row, ranges in enumerate(spans):
        for start, end in ranges:
            mask[row, 0, start:end, start:end] = True
    return mask.tril() if is_causal else mask


def model(**options):
    """Always the same weights."""
    return built(lambda: LongLM(**options))


def data(kind, rows, length=13, steps=2):
    """Batches as keyword arguments: "plain", "padding" or "packed"."""
    dice = torch.Generator().manual_seed(11)
    found = []
    for _ in range(steps):
        ids = torch.randint(CLASSES, (rows, length + 1), generator=dice)
        batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:].clone()}
        if kind == "padding":
            lengths = torch.randint(1, length + 1, (rows, 1), generator=dice)
            batch["attention_mask"] = (torch.arange(length) < lengths).long()
            batch["labels"][batch["attention_mask"] == 0] = -100
        if kind == "packed":
            starts = (torch.rand((rows, length), generator=dice) < 0.3) | (torch.arange(length) == 0)
            places = torch.arange(length).expand(rows, -1)
            batch["position_ids"] = places - torch.where(starts, places, 0).cummax(1).values
            batch["labels"][:, :-1][starts[:, 1:]] = -100  # no document predicts the next one
        found.append(batch)
    return found
