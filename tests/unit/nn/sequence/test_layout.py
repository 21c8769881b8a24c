"""Cuts of a sequence over ranks: every token has one rank, in balance, and cut and join are inverses."""

import pytest
import torch

from mpispeed.base.errors import UsageError
from mpispeed.nn.sequence import Layout

CUTS = [(1, 1), (2, 1), (3, 1), (1, 2), (1, 3), (2, 2), (3, 2), (1, 4)]


@pytest.mark.parametrize(("ulysses", "ring"), CUTS)
@pytest.mark.parametrize("length", [0, 1, 3, 8, 37, 64])
def test_every_token_has_one_rank_and_joins_at_its_place(length, ulysses, ring):
    layout = Layout(length, ulysses, ring)
    x = torch.arange(2 * length * 3).view(2, length, 3)
    parts = [layout.cut(x, rank) for rank in range(layout.size)]
    assert sorted(torch.cat([layout.positions(rank) for rank in range(layout.size)]).tolist()) == list(range(length))
    assert all(torch.equal(part, x[:, layout.positions(rank)]) for rank, part in enumerate(parts))
    assert [part.shape[1] for part in parts] == [layout.count(rank) for rank in range(layout.size)]
    assert torch.equal(layout.join(parts), x)


def test_a_zigzag_of_causal_pairs_is_balanced():
    layout = Layout(800, ulysses=1, ring=4)
    pairs = [int((layout.positions(rank) + 1).sum()) for rank in range(4)]
    assert max(pairs) == min(pairs)


def test_golden_ranges():
    assert Layout(10, 1, 2).ranges(0) == ((0, 3), (8, 10))
    assert Layout(10, 1, 2).ranges(1) == ((3, 8),)
    assert Layout(10, 2, 2).ranges(0) == ((0, 3),)
    assert Layout(10, 2, 2).ranges(1) == ((8, 10),)
    assert Layout(10, 4, 1).ranges(3) == ((8, 10),)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Layout(4, 0, 1), "4 tokens cannot be cut over 0 x 1"),
        (lambda: Layout(4, spans=(((0, 2), (1, 4)),)), r"row 0 of the batch has a document at \[1, 4\)"),
        (lambda: Layout(4, spans=(((0, 5),),)), "sequence of 4 tokens"),
        (lambda: Layout(4, 2).cut(torch.zeros(1, 5), 0), r"shape \(1, 5\) is not the sequence of 4"),
        (lambda: Layout(4, 2).join([torch.zeros(1, 2)]), "1 parts"),
        (lambda: Layout(5, 2).join([torch.zeros(1, 2), torch.zeros(1, 3)]), "rank 0 has 2 tokens"),
    ],
)
def test_refusals(make, said):
    with pytest.raises(UsageError, match=said):
        make()
