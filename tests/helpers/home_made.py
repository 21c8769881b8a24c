"""Transformers that nobody knows, each written in a way that a rule has to get right or leave alone."""

import torch
from torch import nn
from torch.nn import functional


def attend(q, k, v, heads, width):
    """Attention of [batch, length, heads * width] tensors; k and v may have fewer heads."""
    batch, length = q.shape[:2]
    q, k, v = (x.view(batch, length, -1, width).transpose(1, 2) for x in (q, k, v))
    if k.shape[1] != heads:
        k, v = (x.repeat_interleave(heads // max(k.shape[1], 1), 1) for x in (k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).reshape(batch, length, -1)


class Separate(nn.Module):
    """Separate layers, grouped queries."""

    def __init__(self, dim, heads, kv_heads=None):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.width = heads, kv_heads or heads, dim // heads
        self.wq, self.wo = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.wk, self.wv = (nn.Linear(dim, self.n_kv_heads * self.width) for _ in range(2))

    def forward(self, x):
        return self.wo(attend(self.wq(x), self.wk(x), self.wv(x), self.n_heads, self.width))


class Fused(nn.Module):
    """Query, key and value in one layer, split by a width that it keeps."""

    def __init__(self, dim, heads, drop=0.0):
        super().__init__()
        self.num_heads, self.dim, self.width = heads, dim, dim // heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        q, k, v = self.qkv(x).split(self.dim, -1)
        return self.drop(self.proj(self.drop(attend(q, k, v, self.num_heads, self.width))))


class FromInput(Fused):
    """Takes the width of heads from its input, so it cannot be cut in place."""

    def forward(self, x):
        batch, length, dim = x.shape
        q, k, v = (
            y.view(batch, length, self.num_heads, dim // self.num_heads).transpose(1, 2)
            for y in self.qkv(x).split(self.dim, -1)
        )
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(batch, length, dim))


class Normed(Separate):
    """Norms of single heads, and a gain that is no norm."""

    def __init__(self, dim, heads):
        super().__init__(dim, heads)
        self.inner_norm = nn.LayerNorm(self.width)

    def forward(self, x):
        q = self.inner_norm(self.wq(x).unflatten(-1, (-1, self.width))).flatten(-2)
        return self.wo(attend(q, self.wk(x), self.wv(x), self.n_heads, self.width))


class Mixed(nn.Module):
    """An MLP with a norm of the inner width: that needs all of it."""

    def __init__(self, dim, inner):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(dim, inner), nn.LayerNorm(inner), nn.Linear(inner, dim)

    def forward(self, x):
        return self.fc2(self.norm(self.fc1(x)).relu())


class Numbered(nn.Module):
    """An MLP that drops by a number: nobody knows where."""

    def __init__(self, dim, inner, drop):
        super().__init__()
        self.fc1, self.fc2, self.dropout_p = nn.Linear(dim, inner), nn.Linear(inner, dim), drop

    def forward(self, x):
        return self.fc2(functional.dropout(self.fc1(x).relu(), self.dropout_p, self.training))


class Block(nn.Module):
    """Attention and MLP with residuals."""

    def __init__(self, dim, attention, mlp):
        super().__init__()
        self.attention, self.mlp = attention, mlp
        self.first, self.second = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, hidden_states):
        x = hidden_states + self.attention(self.first(hidden_states))
        return x + self.mlp(self.second(x))


class Model(nn.Module):
    """Tokens to logits."""

    @staticmethod
    def call(block, x):
        return block(x)

    def __init__(self, attention, mlp, layers=2, dim=12, vocab=19):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, attention(), mlp()) for _ in range(layers))
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.call(block, x)
        return functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def sequential(dim=12, inner=20):
    return nn.Sequential(nn.Linear(dim, inner), nn.GELU(), nn.Linear(inner, dim))


def build(attention, mlp=sequential, seed=3, **options):
    torch.manual_seed(seed)
    return Model(attention, mlp, **options)


def tokens(length=12, seed=1):
    return torch.randint(19, (2, length), generator=torch.Generator().manual_seed(seed))
