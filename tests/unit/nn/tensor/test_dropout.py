"""Streams of random numbers of cut regions."""

import copy

import pytest
import torch
from torch import nn

from mpispeed.nn.tensor.dropout import Region, SplitDropout, give_own_stream, has_dropout, own_stream


def draw(rank, seed=1):
    torch.manual_seed(seed)
    with own_stream(rank):
        inside = torch.rand(4)
    return inside, torch.rand(4)


def test_ranks_differ_inside_and_agree_outside():
    (first, after), (second, later) = draw(0), draw(1)
    assert not torch.equal(first, second)
    assert torch.equal(after, later)
    assert torch.equal(draw(1)[0], second)
    assert not torch.equal(draw(1, seed=2)[0], second)


def test_regions_that_follow_each_other_differ():
    torch.manual_seed(1)
    with own_stream(0):
        first = torch.rand(4)
    with own_stream(0):
        assert not torch.equal(torch.rand(4), first)


def test_the_default_stream_comes_back_after_an_error():
    torch.manual_seed(1)
    with own_stream(0):
        pass
    expected = torch.rand(1)
    torch.manual_seed(1)
    with pytest.raises(ZeroDivisionError), own_stream(0):
        torch.rand(1)
        1 / 0  # noqa: B018
    assert torch.equal(torch.rand(1), expected)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.behind = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x):
        return self.behind(self.inside(x)), "weights"


def run(module, seed=3):
    torch.manual_seed(seed)
    return module(torch.ones(1000))[0]


def test_dropouts_behind_a_region_are_equal_on_all_ranks():
    heads = [Head() for _ in range(2)]
    for rank, head in enumerate(heads):
        give_own_stream(head, rank, ("behind",))
    outs = [run(head) for head in heads]
    kept = [out != 0 for out in outs]
    assert not torch.equal(*kept)
    # the ranks keep an element with 1/2 behind, alike, and with 1/4 inside, both: 1/8, not 1/16
    assert (kept[0] & kept[1]).sum() / 1000 == pytest.approx(1 / 8, abs=0.04)
    assert torch.equal(run(copy.deepcopy(heads[1])), outs[1])
    assert type(heads[0]).__name__ == "Head"
    assert isinstance(heads[0], Head)
    heads[0].eval()
    assert torch.equal(run(heads[0]), torch.ones(1000))


def test_a_dropout_that_serves_both():
    region = Region()
    drops = [SplitDropout(nn.Dropout(0.5), region, rank) for rank in range(2)]

    def masks():
        made = []
        for drop in drops:
            torch.manual_seed(1)
            made.append(drop(torch.ones(100)))
        return made

    assert torch.equal(*masks())
    region.enter()
    assert not torch.equal(*masks())
    region.leave()
    assert torch.equal(*masks())


def test_what_counts_as_dropout():
    assert has_dropout(nn.Sequential(nn.Dropout(0.1)))
    assert not has_dropout(nn.Sequential(nn.Dropout(0.0)))
    module = nn.Identity()
    module.attention_dropout = 0.1
    assert has_dropout(module)
    assert not has_dropout(Head(), ("inside", "behind"))
