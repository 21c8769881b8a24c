"""Layers in tiles at stage 3: the same training, and less that is whole at once."""

import pytest
import torch
from torch import nn

from mpispeed.nn import TiledLinear
from tests.zoo import same_bits
from tests.zoo.training import WARM, config, start, weights

WIDTH, HEIGHT, BATCH, STEPS = 48, 96, 24, 4


class Block(nn.Module):
    def __init__(self, outs: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up, down = nn.Linear(WIDTH, HEIGHT), nn.Linear(HEIGHT, WIDTH)
        self.down = TiledLinear(HEIGHT, WIDTH, out_splits=outs, init_linear=down) if outs else down
        self.up = TiledLinear(WIDTH, HEIGHT, out_splits=outs, init_linear=self.up) if outs else self.up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    def __init__(self, outs: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(outs) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def train(outs, stage):
    """Losses, dense weights of the first layer, most elements whole at once (stage 3)."""
    tight = {f"stage3_{name}": 0 for name in ("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")}
    settings = config(stage, BATCH, 1, reduction="ordered", zero=tight if stage == 3 else {}, **WARM)
    engine = start(settings, Net(outs))
    share = BATCH // engine.mesh["data"].size
    losses = []
    for step in range(STEPS):
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = engine(batch[engine.mesh.rank * share :][:share])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    prefetcher = engine.parts.params.prefetcher
    peak = prefetcher.tally.peak_elements if prefetcher is not None else 0
    found = weights(engine)
    engine.destroy()
    return losses, found, peak


@pytest.mark.mpi(min_size=2)
def test_one_tile_is_whole_at_a_time(comm):
    losses, weights, _ = train(4, 0)
    tiled_losses, tiled_weights, tiled_peak = train(4, 3)
    assert tiled_losses == losses
    same_bits(tiled_weights, weights)
    dense_losses, _, dense_peak = train(0, 3)
    assert torch.allclose(torch.tensor(dense_losses), torch.tensor(losses), rtol=1e-5)  # order of summation only
    layer = WIDTH * HEIGHT
    assert dense_peak >= 2 * layer  # a block is fetched as one
    # a tile and its bias, padded to equal cuts; another may still be on its way out
    assert tiled_peak <= 2 * (layer // 4 + 24 + 256 * comm.size)
