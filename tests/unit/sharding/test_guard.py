"""Sharded parameters by themselves: who is asked, what comes back, and what ends with whom."""

import gc
import weakref

import pytest
import torch
from torch import nn

from mpispeed.base.errors import UsageError
from mpispeed.sharding import sharded_param


class Shelf:
    """Keeps the data of parameters; gives them out while it is open."""

    rests_cut, is_of_init = True, True

    def __init__(self, *, is_open=True):
        self.data, self.is_open, self.calls = {}, is_open, []

    def left(self, param):
        self.calls.append(("left", 1))

    def put(self, *params):
        for param in params:
            self.data[id(param)] = param.data
            sharded_param.to_sharded(param, param.dtype)
            sharded_param.watch(param, self)

    def describe(self, param):
        return f"on a shelf of {len(self.data)}"

    def open(self, params, reader):
        self.calls.append(("open", reader, len(params)))
        if not self.is_open:
            return False
        for param in params:
            if sharded_param.is_sharded(param):
                sharded_param.to_unsharded(param, self.data[id(param)])
        return True

    def close(self, params):
        self.calls.append(("close", len(params)))
        for param in params:
            sharded_param.to_sharded(param, param.dtype)
            sharded_param.watch(param, self)


def parameter(*shape):
    return nn.Parameter(torch.randn(shape))


def test_sealing_lets_go_of_the_data_and_unsealing_gives_them_back():
    param, shelf = parameter(3, 4), Shelf()
    data = param.data.clone()
    memory = weakref.ref(param.untyped_storage())
    cls = type(param)
    shelf.put(param)
    del shelf.data[id(param)]
    gc.collect()
    assert memory() is None
    assert sharded_param.is_sharded(param)
    assert isinstance(param, cls)
    assert param.shape == (3, 4)
    sharded_param.to_unsharded(param, data)
    assert type(param) is cls
    assert torch.equal(param, data)
    assert param.is_leaf
    assert param.requires_grad


def test_a_read_opens_all_that_it_needs_at_once_and_closes_it():
    one, two, shelf = parameter(2, 3), parameter(3, 2), Shelf()
    expected = one.detach() @ two.detach()
    shelf.put(one, two)
    assert torch.equal((one @ two).detach(), expected)
    assert shelf.calls == [("open", "torch function 'matmul'", 2), ("close", 2)]
    assert sharded_param.is_sharded(one)
    assert sharded_param.is_sharded(two)


def test_reads_in_nested_containers_are_found():
    params, shelf = [parameter(2) for _ in range(3)], Shelf()
    expected = torch.cat([p.detach() for p in params])
    shelf.put(*params)
    assert torch.equal(torch.cat((params[0], *params[1:])).detach(), expected)
    assert shelf.calls[0][2] == 3
    out = torch.add(input=torch.zeros(2), other=params[1])
    assert torch.equal(out.detach(), expected[2:4])


def test_two_keepers_are_both_asked_and_what_was_opened_is_closed_when_one_refuses():
    one, two, given, refused = parameter(2), parameter(2), Shelf(), Shelf(is_open=False)
    given.put(one)
    refused.put(two)
    with pytest.raises(UsageError, match="on a shelf of 1"):
        one + two
    assert given.calls == [("open", "torch function 'add'", 1), ("close", 1)]
    assert sharded_param.is_sharded(one)


def test_a_failing_read_closes_too():
    param, shelf = parameter(2, 3), Shelf()
    shelf.put(param)
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|size mismatch"):
        param @ torch.zeros(5)
    assert shelf.calls[-1] == ("close", 1)
    assert sharded_param.is_sharded(param)


def test_gradients_reach_a_parameter_that_is_sealed_again():
    param, shelf = parameter(2), Shelf()
    shelf.put(param)
    (param * torch.tensor([2.0, 3.0])).sum().backward()
    assert param.grad.tolist() == [2.0, 3.0]
    param.grad = None
    assert param.grad is None


def test_questions_do_not_disturb_the_keeper():
    param, shelf = parameter(2, 3), Shelf()
    shelf.put(param)
    assert (param.numel(), param.dim(), tuple(param.size()), param.stride()) == (6, 2, (2, 3), (3, 1))
    assert "on a shelf of 1" in repr(param)
    assert torch.zeros_like(param).shape == (2, 3)
    param.requires_grad_(False)
    assert not param.requires_grad
    assert shelf.calls == []


def test_without_its_keeper_a_parameter_says_so():
    param, shelf = parameter(2), Shelf()
    shelf.put(param)
    del shelf
    gc.collect()
    assert "engine is gone" in repr(param)
    with pytest.raises(UsageError, match="engine is gone"):
        param.sum()


def test_the_record_of_keepers_ends_with_them_and_with_the_parameters():
    param, shelf = parameter(2), Shelf()
    before = len(sharded_param._OWNERS)
    shelf.put(param)
    assert sharded_param.owner_of(param) is shelf
    del shelf
    gc.collect()
    assert sharded_param.owner_of(param) is None
    assert len(sharded_param._OWNERS) == before + 1
    del param
    gc.collect()
    assert len(sharded_param._OWNERS) == before


def test_a_new_keeper_takes_over_and_the_end_of_the_old_one_changes_nothing():
    param, old, new = parameter(2), Shelf(), Shelf()
    data = param.data
    old.put(param)
    new.data[id(param)] = data
    sharded_param.watch(param, new)
    assert old.calls == [("left", 1)]
    del old
    gc.collect()
    assert sharded_param.owner_of(param) is new
    assert torch.equal((param * 1).detach(), data)
    sharded_param.forget(param)
    assert sharded_param.owner_of(param) is None


@pytest.mark.parametrize("first", [True, False])
def test_sealing_in_inference_mode_leaves_ordinary_parameters(first):
    param, shelf = parameter(2).half() if first else parameter(2), Shelf()
    param = nn.Parameter(param.detach())
    sharded_param._STAND_INS.clear()
    with torch.inference_mode():
        shelf.put(param)
        total = (param + 0).sum()
    assert total.is_inference()
    sharded_param.to_unsharded(param, shelf.data[id(param)])
    param.float().sum().backward()
    assert param.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (1, 1, 4)])
def test_strides_are_those_of_whole_data(shape):
    param, shelf = parameter(*shape), Shelf()
    expected = param.stride()
    shelf.put(param)
    assert param.stride() == expected
    for dim in range(param.dim()):
        assert param.stride(dim) == param.stride(dim - param.dim()) == expected[dim]


def test_a_new_parameter_in_the_place_of_a_dead_one_has_no_keeper():
    first, second = Shelf(), Shelf()
    param = parameter(3)
    sharded_param.watch(param, first)
    place = id(param)
    del param
    gc.collect()
    others = []
    for _ in range(10000):
        others.append(parameter(3))
        if id(others[-1]) == place:
            break
    assert sharded_param.owner_of(others[-1]) is None
    sharded_param.watch(others[-1], second)
    assert first.calls == []  # nobody tells it that a parameter left which it never had


def test_a_state_dict_of_what_cannot_be_read_names_it():
    """Libraries look at names and shapes before they gather; the values are refused as those of the parameter are."""
    module, shelf = torch.nn.Linear(2, 3), Shelf(is_open=False)
    shelf.put(*module.parameters())
    found = module.state_dict()
    assert {name: tuple(value.shape) for name, value in found.items()} == {"weight": (3, 2), "bias": (3,)}
    assert not found["weight"].requires_grad
    for read in (torch.sum, torch.clone, torch.Tensor.tolist):
        with pytest.raises(UsageError, match="reads a parameter whose data are cut over ranks"):
            read(found["weight"])
    shelf.is_open = True
    assert torch.equal(module.state_dict()["bias"], module.bias.detach())
