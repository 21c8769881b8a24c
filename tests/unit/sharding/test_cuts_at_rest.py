"""Cuts around borders of groups: what lies between them can be updated as it rests."""

import random

from mpispeed.sharding.update_windows import cuts_at_rest
from mpispeed.store.layout import Span


def test_a_border_takes_one_block_out():
    assert cuts_at_rest(1000, [], 256) == [Span(0, 1000)]
    assert cuts_at_rest(1000, [0, 512, 1000], 256) == [Span(0, 512), Span(512, 1000)]
    assert cuts_at_rest(1000, [300, 310], 256) == [Span(0, 256), Span(256, 512), Span(512, 1000)]
    assert cuts_at_rest(1000, [900], 256) == [Span(0, 768), Span(768, 1000)]
    assert cuts_at_rest(0, [], 256) == []


def test_cuts_cover_all_and_begin_at_blocks():
    source = random.Random(3)
    for _ in range(200):
        numel = source.randrange(1, 5000)
        borders = [source.randrange(numel + 1) for _ in range(source.randrange(4))]
        cuts = cuts_at_rest(numel, borders, 256)
        assert [cut.start for cut in cuts] == [0, *(cut.stop for cut in cuts[:-1])]
        assert cuts[-1].stop == numel
        assert all(cut.start % 256 == 0 and cut.numel > 0 for cut in cuts)
        mixed = [cut for cut in cuts if any(cut.start < at < cut.stop for at in borders)]
        assert all(cut.numel <= 256 for cut in mixed)
