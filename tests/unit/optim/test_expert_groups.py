"""Groups of parameters with experts apart: DeepSpeed's rules, and where ours differ."""

import pytest
import torch
from torch import nn

from mpispeed.optim.expert_groups import (
    configure_moe_param_groups,
    has_moe_layers,
    is_moe_param,
    is_moe_param_group,
    split_params_grads_into_shared_and_expert_params,
    split_params_into_different_moe_groups_for_optimizer,
    split_params_into_shared_and_expert_params,
)


def dense(count=4):
    return nn.Parameter(torch.zeros(count))


def expert(count=4, name="ep_size_2"):
    param = dense(count)
    param.allreduce, param.group_name = False, name
    return param


def outline(groups):
    """Name, sizes and options of every group."""
    rest = [{key: value for key, value in group.items() if key not in ("name", "params")} for group in groups]
    sizes = [[param.numel() for param in group["params"]] for group in groups]
    return [(group["name"], size, options) for group, size, options in zip(groups, sizes, rest, strict=True)]


def test_marks_of_parameters_and_groups():
    assert is_moe_param(expert())
    assert not is_moe_param(dense())
    shared = dense()
    shared.allreduce = True
    assert not is_moe_param(shared)
    assert is_moe_param_group({"moe": True})
    assert not is_moe_param_group({"moe": False})
    assert not is_moe_param_group({})


def test_experts_go_to_groups_of_their_own_with_all_options():
    first, second, third, fourth = dense(1), expert(2), expert(3, "ep_size_4"), expert(4)
    group = {"name": "decayed", "params": [first, second, third, fourth], "lr": 0.1, "betas": (0.9, 0.95)}
    found = split_params_into_different_moe_groups_for_optimizer(group)
    options = {"lr": 0.1, "betas": (0.9, 0.95)}
    assert outline(found) == [
        ("decayed", [1], options),
        ("ep_size_2", [2, 4], {**options, "moe": True}),
        ("ep_size_4", [3], {**options, "moe": True}),
    ]
    assert found[1]["params"][1] is fourth
    torch.optim.AdamW(found)


@pytest.mark.parametrize("kind", [list, tuple])
def test_groups_of_experts_follow_all_others(kind):
    groups = kind(
        {"name": name, "params": [dense(), expert(size)], "weight_decay": decay}
        for name, size, decay in (("a", 5, 0.1), ("b", 6, 0.0))
    )
    found = split_params_into_different_moe_groups_for_optimizer(groups)
    assert outline(found) == [
        ("a", [4], {"weight_decay": 0.1}),
        ("b", [4], {"weight_decay": 0.0}),
        ("ep_size_2", [5], {"weight_decay": 0.1, "moe": True}),
        ("ep_size_2", [6], {"weight_decay": 0.0, "moe": True}),
    ]


def test_groups_of_the_caller_stay_as_they_are():
    params = [dense(), expert()]
    group = {"name": "all", "params": params}
    split_params_into_different_moe_groups_for_optimizer(group)
    assert group == {"name": "all", "params": params}
    assert len(params) == 2
    assert len(configure_moe_param_groups(params)) == 2
    assert len(params) == 2


def test_names_come_in_the_order_of_their_first_parameters():
    """Ranks have to agree on it; an order by hash differs from process to process."""
    names = [f"ep_size_{2**i}" for i in (5, 1, 4, 0, 3, 2)]
    group = {"name": "all", "params": [expert(1, name) for name in [*names, *reversed(names)]]}
    found = split_params_into_different_moe_groups_for_optimizer(group)
    assert [each["name"] for each in found] == ["all", *names]


def test_a_group_of_experts_alone_stays_empty_and_one_without_makes_none():
    groups = [{"name": "experts", "params": [expert()]}, {"name": "rest", "params": [dense()]}]
    for most in (None, 100):
        found = split_params_into_different_moe_groups_for_optimizer(groups, max_group_size=most)
        assert [(name, sizes) for name, sizes, _ in outline(found)] == [
            ("experts", []),
            ("rest", [4]),
            ("ep_size_2", [4]),
        ]


@pytest.mark.parametrize(
    ("most", "pieces"),
    [
        (None, [[5, 3, 9, 1, 1]]),
        (19, [[5, 3, 9, 1, 1]]),
        (18, [[5, 3, 9, 1], [1]]),
        (8, [[5, 3], [9], [1, 1]]),  # nine elements are a piece by themselves
        (1, [[5], [3], [9], [1], [1]]),
    ],
)
def test_long_groups_are_cut_between_parameters(most, pieces):
    group = {"name": "all", "params": [expert(size) for size in (5, 3, 9, 1, 1)]}
    found = split_params_into_different_moe_groups_for_optimizer(group, max_group_size=most)
    assert [sizes for _, sizes, _ in outline(found)[1:]] == pieces


def test_an_oversized_first_parameter_makes_no_empty_group():
    group = {"name": "all", "params": [expert(9), expert(1)]}
    found = split_params_into_different_moe_groups_for_optimizer(group, max_group_size=4)
    assert [sizes for _, sizes, _ in outline(found)] == [[], [9], [1]]


def test_parameters_may_come_from_a_generator_or_be_one_tensor():
    model = nn.Linear(2, 3)
    found = split_params_into_different_moe_groups_for_optimizer({"name": "all", "params": model.parameters()})
    assert outline(found) == [("all", [6, 3], {})]
    found = split_params_into_different_moe_groups_for_optimizer({"name": "one", "params": expert(3)})
    assert [sizes for _, sizes, _ in outline(found)] == [[], [3]]


def test_wrong_groups_are_refused():
    split = split_params_into_different_moe_groups_for_optimizer
    with pytest.raises(ValueError, match="param_groups is a set; pass a dict"):
        split({1})
    with pytest.raises(TypeError, match=r"param_groups\[0\] is a Parameter; pass a dict with 'name'"):
        split([dense()])
    with pytest.raises(KeyError, match=r"param_groups\[1\] has no 'name'; it has 'params', 'lr'"):
        split([{"name": "a", "params": []}, {"params": [dense()], "lr": 1}])
    with pytest.raises(KeyError, match="has no 'params'; it has 'name'"):
        split({"name": "a"})
    with pytest.raises(ValueError, match="max_group_size is 0"):
        split({"name": "a", "params": []}, max_group_size=0)
    nameless = dense()
    nameless.allreduce = False
    with pytest.raises(KeyError, match=r"shape \(4,\) has allreduce = False.*but no group_name"):
        split({"name": "a", "params": [nameless]})


def test_a_list_of_parameters_becomes_dense_params_and_experts():
    found = configure_moe_param_groups([dense(1), expert(2), dense(3)])
    assert outline(found) == [("dense-params", [1, 3], {}), ("ep_size_2", [2], {"moe": True})]
    assert configure_moe_param_groups([]) == []


def test_groups_are_split_unless_that_was_done():
    groups = [{"name": "a", "params": [dense(), expert()]}]
    split = configure_moe_param_groups(groups)
    assert [name for name, _, _ in outline(split)] == ["a", "ep_size_2"]
    assert configure_moe_param_groups(split) is split
    by_hand = [{"params": [dense(), expert()], "moe": False}]
    assert configure_moe_param_groups(by_hand) is by_hand


@pytest.mark.parametrize("wrong", [{"params": []}, "x", None])
def test_lists_of_anything_else_are_refused(wrong):
    with pytest.raises(TypeError, match=rf"model_parameters\[1\] is a {type(wrong).__name__}"):
        configure_moe_param_groups([dense(), wrong])
    with pytest.raises(TypeError, match="model_parameters is a generator"):
        configure_moe_param_groups(nn.Linear(1, 1).parameters())


def test_shared_and_expert_parameters_keep_their_order():
    params = [dense(), expert(), dense(), expert()]
    shared, experts = split_params_into_shared_and_expert_params(iter(params))
    assert [id(param) for param in shared] == [id(params[0]), id(params[2])]
    assert [id(param) for param in experts] == [id(params[1]), id(params[3])]


def test_gradients_come_in_the_dtype_of_their_parameters():
    params = [dense(), expert(), dense(), expert()]
    for param in params[:2]:
        param.grad = torch.full_like(param, 1 / 3)
        param.data = param.data.half()  # as where weights were cast after backward
    params[3].grad = torch.ones(4)
    shared, experts = split_params_grads_into_shared_and_expert_params(params)
    assert [grad.dtype for grad in shared] == [torch.float16]
    assert [grad.dtype for grad in experts] == [torch.float16, torch.float32]
    assert torch.equal(experts[0], torch.full((4,), 1 / 3).half())
    assert experts[1] is params[3].grad


def test_layers_of_experts_are_found_by_their_marks():
    class Layer(nn.Module):
        def __init__(self, num_experts):
            super().__init__()
            self.num_experts, self.expert_group_name = num_experts, "ep_size_1"

    assert has_moe_layers(nn.Sequential(nn.Linear(1, 1), Layer(8), Layer(16))) == (True, 8)
    assert has_moe_layers(nn.Sequential(nn.Linear(1, 1))) == (False, 0)
