"""The GPT of gpt.py as a list of layers, which a pipeline deals to its stages."""

from __future__ import annotations

from gpt import VOCABULARY, Block, Shape, initialise, rotation
from torch import Tensor, nn
from torch.nn import functional as F

from mpispeed.pipe import LayerSpec, TiedLayerSpec

# Which layers a slicing group shares, and how: heads of attention, and the inner width of the perceptron.
SLICES = {"attention.qkv": "qkv", "attention.out": "row", "mlp.0": "column", "mlp.2": "row"}


class Bytes(nn.Embedding):
    """Bytes to vectors; also vectors to scores of all bytes, where the two are tied."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(VOCABULARY, shape.width)
        initialise(self, shape)


class PipeBlock(Block):
    """A block with a table of rotations of its own, so that only the residual stream goes from stage to stage."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.register_buffer("rotation", rotation(shape.block, shape.width // shape.heads), persistent=False)
        initialise(self, shape)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """The residual stream after this block, (batch, length, width)."""
        return super().forward(x, self.rotation)


class Head(nn.Linear):
    """Vectors to scores of all bytes."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape.width, VOCABULARY, bias=False)
        initialise(self, shape)


def scores(embedding: Bytes, x: Tensor) -> Tensor:
    """What `Head` gives, of the weights of the embedding."""
    return F.linear(x, embedding.weight)


def layers(shape: Shape, *, is_tied: bool = False) -> list[LayerSpec]:
    """Embedding, blocks, norm and head. `is_tied`: the head has the embedding's weights, wherever its stage is."""
    blocks = [LayerSpec(PipeBlock, shape) for _ in range(shape.layers)]
    norm = LayerSpec(nn.LayerNorm, shape.width)
    if is_tied:
        ends = (TiedLayerSpec("bytes", Bytes, shape), TiedLayerSpec("bytes", Bytes, shape, forward_fn=scores))
    else:
        ends = (LayerSpec(Bytes, shape), LayerSpec(Head, shape))
    return [ends[0], *blocks, norm, ends[1]]


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Mean loss in nats per byte. Shapes: logits (batch, length, 256), y (batch, length)."""
    return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def as_gpt(weights: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """Weights of the layers, named by their places in the list, under the names that `gpt.GPT` has for them."""
    places = ["embedding", *(f"blocks.{index}" for index in range(shape.layers)), "norm", "head"]
    split = [(*name.partition("."), x) for name, x in weights.items()]
    return {f"{places[int(place)]}.{rest}": x for place, _, rest, x in split}
