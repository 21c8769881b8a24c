"""Which modules are fetched as one: marked by class, or chosen by granularity."""

import copy
import gc
import logging
import math

import pytest
import torch
from torch import nn

from mpispeed.base.errors import UsageError
from mpispeed.sharding import leaf
from tests.zoo.models import TinyLM


class Expert(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(self.up(x).relu())


class WideExpert(Expert):
    pass


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList([Expert(), Expert(), WideExpert()])
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(sum(self.experts[int(i)](x) for i in self.gate(x).argmax(-1)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.first, self.moe, self.last = nn.Linear(4, 4), Mixture(), nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.moe(self.first(x)))


EXPERT = 4 * 8 + 8 + 8 * 4 + 4  # 76
GATE, FIRST, LAST, SCALE = 15, 20, 5, 5
MOE = GATE + 3 * EXPERT


@pytest.mark.parametrize("classes", [[Expert], ["Expert"], [Expert, "Expert"]])
def test_modules_are_marked_by_class_or_name_but_not_subclasses(classes):
    model = Model()
    marked = leaf.set_z3_leaf_modules(model, classes)
    assert marked == [model.moe.experts[0], model.moe.experts[1]] == leaf.get_z3_leaf_modules(model)
    assert leaf.z3_leaf_module(marked[0])
    assert not leaf.is_automatic_leaf(marked[0])
    assert not leaf.z3_leaf_module(model.moe.experts[2])
    assert leaf.z3_leaf_parameter(marked[1].down.bias)
    assert not leaf.z3_leaf_parameter(model.moe.experts[2].down.bias)
    assert not leaf.z3_leaf_parameter(model.moe.gate.weight)


def test_marks_are_taken_off():
    model = Model()
    leaf.set_z3_leaf_modules(model, [Mixture, WideExpert])
    assert leaf.unset_z3_leaf_modules(model, ["Mixture", Expert]) == [model.moe]
    assert leaf.get_z3_leaf_modules(model) == [model.moe.experts[2]]


@pytest.mark.parametrize("call", [leaf.set_z3_leaf_modules, leaf.unset_z3_leaf_modules])
def test_classes_that_do_not_occur_are_a_value_error(call):
    with pytest.raises(ValueError, match=r"\[LSTM, Nothing\] is in Model; it has: .*Mixture"):
        call(Model(), [nn.LSTM, "Nothing"])
    with pytest.raises(ValueError, match="no module of the classes"):
        call(Model(), [])


@pytest.mark.parametrize("classes", [[Expert()], [3], "Expert"])
def test_other_things_than_classes_are_an_assertion(classes):
    with pytest.raises(AssertionError, match="list of classes or of their names, found"):
        leaf.set_z3_leaf_modules(Model(), classes)


def test_what_is_never_entered_cannot_be_a_leaf():
    model = Model()
    with pytest.raises(UsageError, match="ModuleList has no forward"):
        leaf.set_z3_leaf_modules(model, [Mixture, nn.ModuleList])
    assert leaf.get_z3_leaf_modules(model) == []


def test_marks_belong_to_objects_and_keep_none_alive():
    model = Model()
    leaf.set_z3_leaf_modules(model, [Mixture])
    assert leaf.get_z3_leaf_modules(copy.deepcopy(model)) == []
    count = len(leaf._marks)
    del model
    gc.collect()
    assert len(leaf._marks) == count - 1


def test_granularity_is_elements_for_each_fetch():
    sizes = leaf.granularities(Model())
    assert sizes["moe.experts.0"] == EXPERT // 3
    assert sizes["moe"] == MOE // (1 + 1 + 3 * 3)  # itself, the gate, experts with two layers each
    assert sizes[""] == (SCALE + FIRST + LAST + MOE) // (1 + 2 + 11)
    for name in ("first", "moe.experts", "moe.act", "moe.experts.0.up"):
        assert math.isinf(sizes[name])


def test_shared_parameters_and_modules_count_once():
    model = TinyLM()
    elements = sum(p.numel() for p in model.parameters())
    bearing = [m for m in model.modules() if list(m.parameters()) and not isinstance(m, nn.ModuleList)]
    assert leaf.granularities(model)[""] == elements // len(bearing)


def test_huge_modules_are_never_chosen():
    with torch.device("meta"):
        model = nn.ModuleDict({"huge": Expert(2**15), "small": Expert()})  # 4 * 2**30 elements and 76
    sizes = leaf.granularities(model)
    assert math.isinf(sizes["huge"])
    assert sizes["small"] == EXPERT // 3
    assert list(leaf.choose_leaves(model, 10**12)) == ["small"]


def test_cut_parameters_are_weighed_by_their_whole_size():
    model = Model()
    whole = {param: param.numel() for param in model.parameters()}
    expected = leaf.granularities(model)
    for param in model.parameters():
        param.data = torch.empty(0)
    assert leaf.granularities(model, whole.__getitem__) == expected


@pytest.mark.parametrize(
    ("threshold", "names"),
    [
        (0, []),
        (18, []),
        (19, [""]),  # the whole model has the smallest granularity
        (10**7, [""]),
    ],
)
def test_parents_are_preferred(threshold, names):
    assert list(leaf.choose_leaves(Model(), threshold)) == names


def test_where_the_parent_is_too_coarse_its_parts_are_chosen():
    model = nn.Sequential(Mixture(), nn.Linear(100, 100), Mixture())
    below = min(leaf.granularities(model).values())
    assert below == MOE // 11
    assert list(leaf.choose_leaves(model, int(below))) == ["0", "2"]
    wide = Model()
    wide.moe.gate = nn.Linear(4, 300)
    assert list(leaf.choose_leaves(wide, EXPERT // 3)) == ["moe.experts.0", "moe.experts.1", "moe.experts.2"]


def test_containers_with_a_forward_of_their_own_may_be_chosen():
    class Experts(nn.ModuleList):
        def forward(self, x):
            return sum(expert(x) for expert in self)

    assert list(leaf.choose_leaves(nn.Sequential(Experts([Expert(), Expert()])), EXPERT)) == ["0"]


def test_chosen_leaves_are_marked_as_automatic_and_the_users_marks_stay():
    model = nn.Sequential(Mixture(), nn.Linear(100, 100), Mixture())
    leaf.set_z3_leaf_modules(model[0], [Mixture])
    assert list(leaf.mark_leaves_by_threshold(model, MOE // 11)) == ["0", "2"]
    assert leaf.get_z3_leaf_modules(model) == [model[0], model[2]]
    assert [leaf.is_automatic_leaf(model[i]) for i in (0, 1, 2)] == [False, False, True]


def test_a_threshold_below_all_granularities_warns_with_the_smallest(caplog):
    model = Model()
    with caplog.at_level(logging.WARNING, leaf.__name__):
        assert leaf.mark_leaves_by_threshold(model, 5) == {}
        assert leaf.mark_leaves_by_threshold(nn.Linear(2, 2), 5) == {}
        assert leaf.mark_leaves_by_threshold(model, 0) == {}
    first, second = (record.getMessage() for record in caplog.records)
    assert "is 5, below the smallest granularity of this model, 19 of the whole model" in first
    assert "set it to 19 or more" in first
    assert "no module with children" in second
    assert leaf.get_z3_leaf_modules(model) == []
