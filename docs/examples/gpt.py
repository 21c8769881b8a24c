"""A small byte-level GPT in plain torch. It knows nothing of ranks, ZeRO or the library that trains it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # every byte is a token


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model."""

    layers: int = 4
    heads: int = 4
    width: int = 128
    block: int = 128  # longest context, in bytes
    dropout: float = 0.0


def rotation(block: int, size: int) -> Tensor:
    """Cosines and sines (1, block, 2, size / 2) of the angles that stand for positions."""
    speeds = 10000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(block), speeds)
    return torch.stack([angles.cos(), angles.sin()], dim=1)[None]


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn the pairs (i, i + size / 2) of the last dim of `x` by the angles of their positions."""
    cos, sin = rotation[:, None, : x.shape[-2]].unbind(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """What each position gathers from itself and the positions before it, (batch, length, width)."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            _rotate(q, rotation), _rotate(k, rotation), v, dropout_p=dropout, is_causal=True
        )
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(shape)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """The residual stream after this block, (batch, length, width)."""
        x = x + self.drop(self.attention(self.norm1(x), rotation))
        return x + self.drop(self.mlp(self.norm2(x)))


def initialise(model: nn.Module, shape: Shape) -> None:
    """Draw the weights of a whole GPT or of some of its layers."""
    model.apply(_initialise)
    for name, weight in model.named_parameters():
        if name.endswith(("attention.out.weight", "mlp.2.weight")):
            # The residual stream adds 2 * layers terms; keep its variance near one.
            nn.init.normal_(weight, std=0.02 / (2 * shape.layers) ** 0.5)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class GPT(nn.Module):
    """Predicts the next byte.

    Shapes:
        `x` and `y` are (batch, length) integers, length <= shape.block; `y` is `x` one byte later.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        if shape.width % (2 * shape.heads):
            msg = f"width {shape.width} must be a multiple of twice the number of heads, {shape.heads}"
            raise ValueError(msg)
        self.shape = shape
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.register_buffer("rotation", rotation(shape.block, shape.width // shape.heads), persistent=False)
        initialise(self, shape)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Mean cross entropy in nats per byte if `y` is given, else logits (batch, length, 256)."""
        hidden, rotation = self.embedding(x), self.rotation[:, : x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, rotation)
        logits = self.head(self.norm(hidden))
        return logits if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, temperature: float = 0.8, seed: int = 0) -> bytes:
        """The prompt continued by `count` sampled bytes."""
        was_training = self.training
        self.eval()
        device = self.embedding.weight.device
        dice = torch.Generator().manual_seed(seed)
        text = list(prompt)
        for _ in range(count):
            window = torch.tensor([text[-self.shape.block :]], device=device)
            logits = self(window)[0, -1].float().cpu() / temperature
            text.append(int(torch.multinomial(logits.softmax(-1), 1, generator=dice)))
        self.train(was_training)
        return bytes(text)
