"""Small models that most tests train, and the data that they learn."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

BATCH = 12  # divides by 3 micro-batches on 1, 2 and 4 ranks, and by 1 micro-batch on 3 ranks
WIDTH = 5
VOCABULARY = 61
LENGTH = 9


def built(make: Callable[[], nn.Module], seed: int = 5) -> nn.Module:
    """A model of `make` with always the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


class Residual(nn.Module):
    """A residual block with a norm and two layers."""

    def __init__(
        self, width: int = 6, inner: int = 10, act: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Stack(nn.Module):
    """Residual blocks between two layers; the output has the shape of the input."""

    def __init__(self, depth: int = 3, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(depth))
        self.last = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Block(Residual):
    """Attention-free transformer block: enough to have norms, biases and a residual path."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 3 * width, nn.functional.gelu)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x.mean(1, keepdim=True)


class TinyLM(nn.Module):
    """Predicts the next token; returns the mean loss. Embedding and head are tied when asked for."""

    def __init__(
        self,
        width: int = 24,
        depth: int = 2,
        *,
        is_tied: bool = True,
        seed: int = 7,
        block: Callable[[int], nn.Module] = Block,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCABULARY, width)
            self.blocks = nn.ModuleList(block(width) for _ in range(depth))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, VOCABULARY, bias=False)
            self.scale = nn.Parameter(torch.ones(()))
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1]) * self.scale
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


class Net(nn.Module):
    """Two layers with a norm between; takes inputs and targets, returns the mean squared error."""

    def __init__(self, seed: int = 11) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(WIDTH, 19)
            self.norm = nn.LayerNorm(19)
            self.last = nn.Linear(19, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.last(self.norm(torch.tanh(self.first(x.to(self.first.weight.dtype)))))
        return nn.functional.mse_loss(out.float(), y)


class Mlp(nn.Module):
    """Three layers that form a unit each; takes inputs and targets, returns the mean squared error."""

    def __init__(self, seed: int = 11) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(8, 32)
            self.middle = nn.Linear(32, 31)
            self.last = nn.Linear(31, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.middle(torch.tanh(self.first(x.to(self.first.weight.dtype)))))
        return nn.functional.mse_loss(self.last(x), y.to(x.dtype))


class Branches(nn.Module):
    """Runs those of its layers that `order` names; returns the mean squared error, without targets of zeros."""

    def __init__(self, width: int = WIDTH, count: int = 4, seed: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.order = list(range(count))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        for index in self.order:
            x = torch.tanh(self.layers[index](x))
        return x.square().mean() if y is None else nn.functional.mse_loss(x[:, : y.shape[1]], y)


class Words(nn.Module):
    """A table, sparse when asked for, and a head that learns the tokens' remainders; returns the mean loss."""

    def __init__(self, rows: int = 12, width: int = 16, *, is_sparse: bool = False, seed: int = 4) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(rows, width, sparse=is_sparse)
            self.out = nn.Linear(width, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.out(self.embed(tokens)).float(), tokens % 5)


class Buffered(nn.Module):
    """Two layers with running statistics between, and buffers of all kinds; returns the mean square."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm1d, *, width: int = 6, seed: int = 1) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            # a bias before the norm has no gradient but rounding, which Adam would make steps of
            self.first, self.last = nn.Linear(width, 8, bias=False), nn.Linear(8, 2)
        self.norm = norm(8)
        self.register_buffer("table", torch.arange(5.0))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("ema", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(torch.tanh(self.norm(self.first(x))))
        if self.training:
            self.seen += len(x)
            self.cache = torch.full((len(x),), float(x[0, 0]))
            self.ema = 0.9 * self.ema + y.detach().double().mean(0)
        return y.square().mean()


def batches(steps: int, size: int, seed: int = 3) -> list[torch.Tensor]:
    """`steps` global batches of `size` rows of tokens with some structure to learn."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(0, VOCABULARY, (steps, size, 1), generator=generator)
    stride = torch.randint(1, 4, (steps, size, 1), generator=generator)
    return list((start + stride * torch.arange(LENGTH)) % VOCABULARY)


def samples(
    steps: int, size: int = BATCH, seed: int = 5, *, width: int = WIDTH, outs: int = 2
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`steps` global batches of `size` inputs and their up to four targets."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(steps, size, width, generator=generator)
    y = [x.sum(-1).sin(), x[..., 0] * x[..., 1], x[..., 2].abs(), x[..., 3] - x[..., 4]]
    return list(zip(x, torch.stack(y[:outs], -1), strict=True))
