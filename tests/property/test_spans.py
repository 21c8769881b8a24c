"""For every placement the ranks' spans tile a buffer `replicas` times and their shares exactly once."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.mesh import sim
from mpispeed.store.layout import BLOCK, FlatLayout
from mpispeed.store.placement import Placement
from mpispeed.store.transfers import own_share, own_span
from tests.helpers.stores import DATA, INNER, NESTED, NODES, WHOLE, mesh_of


@st.composite
def divisions(draw):
    """Ranks, group and node sizes that divide each other."""
    local, across, outer = (draw(st.integers(1, 3)) for _ in range(3))
    return local * across * outer, local * across, local


tensors = st.lists(st.integers(0, 3000), min_size=1, max_size=5)


@given(divisions(), tensors)
@settings(max_examples=40, deadline=None)
def test_spans_and_shares(division, sizes):
    ranks, inner, local = division
    layout = FlatLayout([(str(i), (size,), 0) for i, size in enumerate(sizes)], ranks)

    def work(world):
        mesh = mesh_of(world, inner, local)
        found = {}
        for placement in (WHOLE, DATA, INNER, NESTED, NODES):
            span = own_span(mesh, placement, layout.padded)
            share = own_share(mesh, placement, layout.padded, "data")
            found[placement] = span, share, mesh.topology.group_size(placement.axes)
        # Parameters of which each rank of a group has its own: their shares tile a buffer once for each of these ranks.
        own = (own_share(mesh, at, layout.padded, ("data.outer",)) for at in (WHOLE, Placement(("data.outer",))))
        found["own"] = tuple(own)
        mesh.close()
        return found

    results = sim.run(ranks, work)
    for whole_or_cut in range(2):
        tiled = sum(found["own"][whole_or_cut].numel for found in results)
        assert tiled == inner * layout.padded
        assert len({found["own"][whole_or_cut] for found in results}) == ranks // inner
    for placement in (WHOLE, DATA, INNER, NESTED, NODES):
        covered, shared = [0] * (layout.padded // BLOCK), [0] * (layout.padded // BLOCK)
        for found in results:
            span, share, _ = found[placement]
            assert span.start <= share.start <= share.stop <= span.stop
            for range_, counts in ((span, covered), (share, shared)):
                assert range_.start % BLOCK == range_.stop % BLOCK == 0
                for block in range(range_.start // BLOCK, range_.stop // BLOCK):
                    counts[block] += 1
        assert set(covered) == {ranks // results[0][placement][2]}
        assert set(shared) == {1}


@given(st.integers(1, 9), st.lists(tensors, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_every_rank_has_an_equal_part_of_every_unit(ranks, units):
    """Why `round_robin_gradients` has nothing to do: no rank copies more of a bucket than another."""
    for sizes in units:
        layout = FlatLayout([(str(i), (size,), 0) for i, size in enumerate(sizes)], ranks)
        parts = [layout.cut(rank) for rank in range(ranks)]
        assert len({part.numel for part in parts}) == 1
        assert sum(part.numel for part in parts) == layout.padded
        assert sum(common.numel for part in parts for _, common in layout.overlaps(part)) == layout.numel
