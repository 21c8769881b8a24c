"""Experts that do not divide over their ranks: all ranks form units alike."""

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mpispeed.nn.expert import ExpertModules, RoutedExperts, Router, SwiGLUExperts
from mpispeed.nn.expert.experts import ranged
from mpispeed.plan.units import kinds_of, ties_of
from mpispeed.sharding.units import plan_units

WIDTH = 3


class Ranks:
    """A group, seen from one of its ranks."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def model_of(rank, ep_size, experts, *, is_fused, is_in_list, layers):
    made = []
    for _ in range(layers):
        body = SwiGLUExperts(WIDTH, 5, experts) if is_fused else ExpertModules(nn.Linear(WIDTH, 7), experts)
        layer = RoutedExperts(Router(WIDTH, experts), body, ep_size=ep_size)
        layer.experts.keep(ranged(experts, Ranks(rank, ep_size)))
        made += [layer, nn.Linear(WIDTH, WIDTH)]
    if is_in_list:
        return nn.Sequential(nn.Sequential(*made), nn.Linear(WIDTH, 2))
    model = nn.Module()
    for number, layer in enumerate(made):
        setattr(model, f"layer{number}", layer)
    return model


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 5).flatmap(lambda size: st.tuples(st.just(size), st.integers(size, 11))),
    st.booleans(),
    st.booleans(),
    st.integers(1, 2),
    st.integers(1, 400),
    st.sampled_from([0, 50, 10**6]),
    st.integers(1, 3),
)
def test_units_are_as_many_and_as_long_on_all_ranks(sizes, is_fused, is_in_list, layers, limit, merged, parts):
    ep_size, experts = sizes
    found = []
    for rank in range(ep_size):
        model = model_of(rank, ep_size, experts, is_fused=is_fused, is_in_list=is_in_list, layers=layers)
        groups = {id(param): 0 for param in model.parameters()}
        table = plan_units(
            model, groups, parts, limit, merge_elements=merged, kind_of=kinds_of(model, 1), ties=ties_of(model)
        )
        found.append([(unit.kind, unit.layout.padded, unit.layout.reckoned) for unit in table.units])
        assert all(unit.params for unit in table.units)
        assert sum(unit.layout.numel for unit in table.units) == sum(param.numel() for param in model.parameters())
        if rank == 0:  # the one with most
            assert all(unit.layout.reckoned == unit.layout.numel for unit in table.units)
    assert all(units == found[0] for units in found)
