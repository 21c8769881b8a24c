"""A model in Megatron's style: its own column- and row-cut layers, its own sums between ranks, its own mpu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.models import VOCABULARY

WIDTH, HEADS = 24, 4
Sum = Callable[[torch.Tensor], None]


class Mpu:
    """Neighbouring ranks share a layer, the others are data ranks; groups are mpi4py's, or those of torch."""

    def __init__(self, model: int, *, is_torch: bool = False) -> None:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        self._model = world.Split(world.rank // model, world.rank)
        self._data = world.Split(world.rank % model, world.rank)
        self._groups: tuple[Any, Any] = self._model, self._data
        if is_torch:
            made = [torch.distributed.new_group(ranks) for ranks in self._lists(world.size, model)]
            rows = world.size // model
            self._groups = made[world.rank // model], made[rows + world.rank % model]
        self.is_torch = is_torch

    @staticmethod
    def _lists(size: int, model: int) -> list[list[int]]:
        rows = [list(range(start, start + model)) for start in range(0, size, model)]
        return rows + [list(range(place, size, model)) for place in range(model)]

    def sum(self, x: torch.Tensor) -> None:
        """Add up over the ranks that share layers, in place."""
        from mpi4py import MPI

        if self.is_torch:
            torch.distributed.all_reduce(x, group=self._groups[0])
        else:
            self._model.Allreduce(MPI.IN_PLACE, x.numpy())

    def free(self) -> None:
        """Give the communicators back."""
        self._model.Free()
        self._data.Free()

    def get_model_parallel_rank(self) -> int:
        return self._model.rank

    def get_model_parallel_world_size(self) -> int:
        return self._model.size

    def get_model_parallel_group(self) -> Any:
        return self._groups[0]

    def get_data_parallel_rank(self) -> int:
        return self._data.rank

    def get_data_parallel_world_size(self) -> int:
        return self._data.size

    def get_data_parallel_group(self) -> Any:
        return self._groups[1]


class Enter(torch.autograd.Function):
    """Identity; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, add: Sum) -> torch.Tensor:
        ctx.add = add
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.clone(memory_format=torch.contiguous_format)
        ctx.add(grad)
        return grad, None


class Leave(torch.autograd.Function):
    """Sum; gradients pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, add: Sum) -> torch.Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        add(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class Cut(nn.Module):
    """A linear layer of which this rank has a part, marked as Megatron marks it.

    `dim` 0 cuts outputs, and the bias with them; `dim` 1 cuts inputs, sums outputs, and every rank has the bias.
    """

    def __init__(self, inputs: int, outputs: int, dim: int, mpu: Mpu | None, *, marks: bool) -> None:
        super().__init__()
        rank, size = (mpu.get_model_parallel_rank(), mpu.get_model_parallel_world_size()) if mpu else (0, 1)
        whole = nn.Linear(inputs, outputs)
        self.weight = nn.Parameter(whole.weight.detach().tensor_split(size, dim)[rank].clone())
        bias = whole.bias.detach()
        self.bias = nn.Parameter((bias if dim else bias.tensor_split(size)[rank]).clone())
        self.dim, self.add = dim, mpu.sum if mpu else None
        for param, cut in ((self.weight, dim), (self.bias, 0)) if marks else ():
            if param is self.weight or not dim:
                param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, cut, 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.dim:
            y = F.linear(x, self.weight)
            return (Leave.apply(y, self.add) if self.add else y) + self.bias
        return F.linear(Enter.apply(x, self.add) if self.add else x, self.weight, self.bias)


class Layer(nn.Module):
    """Attention over this rank's heads and an MLP of this rank's inner width, with norms that every rank has."""

    def __init__(self, mpu: Mpu | None, *, inner: int, marks: bool) -> None:
        super().__init__()
        self.head = WIDTH // HEADS
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query = Cut(WIDTH, WIDTH, 0, mpu, marks=marks)
        self.key = Cut(WIDTH, WIDTH, 0, mpu, marks=marks)
        self.value = Cut(WIDTH, WIDTH, 0, mpu, marks=marks)
        self.dense = Cut(WIDTH, WIDTH, 1, mpu, marks=marks)
        self.up = Cut(WIDTH, inner, 0, mpu, marks=marks)
        self.down = Cut(inner, WIDTH, 1, mpu, marks=marks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        heads = [part(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.dense(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class OwnCut(nn.Module):
    """Predicts the next token; without an mpu the whole model. Returns the mean loss."""

    def __init__(self, mpu: Mpu | None = None, *, depth: int = 2, inner: int = 48, marks: bool = True) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.layers = nn.ModuleList(Layer(mpu, inner=inner, marks=marks) for _ in range(depth))
            self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("place", torch.full((2,), float(mpu.get_model_parallel_rank() if mpu else 0)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
