"""Checkpointed calls compute what the calls themselves compute, whatever goes in and comes out."""

import pytest
import torch
from torch import nn

from mpispeed import checkpointing
from mpispeed.base.errors import UsageError

FORMS = [checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint]


@pytest.fixture(autouse=True)
def defaults():
    checkpointing.configure()
    yield
    checkpointing.configure()
    assert checkpointing.kept_bytes() == 0


@pytest.fixture(params=FORMS, ids=lambda form: form.__name__)
def form(request):
    return request.param


def block(seed=0, width=8):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, width), nn.Dropout(0.2))


def tensor(*shape, seed=1, grad=True):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def leaves(tree):
    if isinstance(tree, (tuple, list)):
        return [leaf for item in tree for leaf in leaves(item)]
    return [tree]


def outcome(call, function, args, modules=()):
    """Outputs, and gradients of all tensors and parameters."""
    torch.manual_seed(7)
    fresh = [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
    for module in modules:
        module.zero_grad(set_to_none=True)
    out = call(function, *fresh)
    total = sum(o.double().square().sum() for o in leaves(out) if isinstance(o, torch.Tensor) and o.requires_grad)
    if isinstance(total, torch.Tensor):
        total.backward()
    grads = [a.grad for a in fresh if isinstance(a, torch.Tensor)]
    return out, [*grads, *(p.grad for module in modules for p in module.parameters())]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        if isinstance(b, torch.Tensor):
            assert a.dtype == b.dtype
            assert a.requires_grad == b.requires_grad
            assert torch.equal(a, b)
        else:
            assert type(a) is type(b)
            assert a == b


def check(form, function, *args, modules=()):
    """With and without a checkpoint: the same bits everywhere, and random numbers go on alike."""
    plain_out, plain = outcome(lambda fn, *a: fn(*a), function, args, modules)
    after = torch.get_rng_state()
    out, grads = outcome(form, function, args, modules)
    assert torch.equal(after, torch.get_rng_state())
    assert type(out) is type(plain_out)
    assert_same(leaves(out), leaves(plain_out))
    assert_same(grads, plain)
    assert any(g is not None for g in plain)


# -- what goes in and comes out --------------------------------------------------------------------------------------


def test_one_input_one_output(form):
    layer = block()
    check(form, layer, tensor(4, 8), modules=[layer])


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize(
    "shape_of_outputs",
    [
        lambda y, x, mask: y,
        lambda y, x, mask: (y, mask),
        lambda y, x, mask: (mask, y),
        lambda y, x, mask: (y, y.detach(), x * 2),
        lambda y, x, mask: (x, mask, y, y.argmax(-1)),
        lambda y, x, mask: [y, x],
    ],
)
def test_masks_and_several_outputs(form, dtype, shape_of_outputs):
    layer = block()
    mask = (tensor(4, 8, seed=2, grad=False) > 0).to(dtype)

    def function(x, mask):
        return shape_of_outputs(layer(x * mask), x, mask)

    check(form, function, tensor(4, 8), mask, modules=[layer])


VALUES = [None, 2, True, (None, 2.5), (None, True, torch.tensor([1.0, 2.0])), "text", [1, 2], {"a": 1}]


@pytest.mark.parametrize("value", VALUES, ids=str)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_other_arguments_at_every_position(form, value, position):
    layer, seen = block(), []

    def function(*args):
        seen.append([type(a) for a in args])
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        assert_same(leaves(args[position]), leaves(value))
        return layer(tensors[0]) + tensors[1]

    args = [tensor(4, 8), tensor(4, 8, seed=3)]
    args.insert(position, value)
    check(form, function, *args, modules=[layer])
    assert len(seen) == 3  # plain, checkpointed, again
    assert all(types == seen[0] for types in seen)


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_other_outputs_keep_their_order(form, value):
    layer = block()
    check(form, lambda x: (value, layer(x), value), tensor(4, 8), modules=[layer])


@pytest.mark.parametrize(
    "value", [None, (None, 2.5), (None, True, torch.tensor([1.0, 2.0]))], ids=["none", "pair", "with tensor"]
)
def test_which_outputs_are_tensors(form, value):
    layer = block()
    out = form(lambda x: (layer(x), value, x.sum(), 3), tensor(4, 8))
    assert [isinstance(o, torch.Tensor) for o in out] == [True, False, True, False]


def test_no_input_needs_a_gradient(form):
    layer = block()
    check(form, layer, tensor(4, 8, grad=False), modules=[layer])


def test_no_input_at_all(form):
    layer, x = block(), tensor(4, 8)
    check(form, lambda: layer(x), modules=[layer])


def test_tensors_in_containers_get_gradients(form):
    layer, x, y = block(), tensor(4, 8), tensor(4, 8, seed=4)
    form(lambda pair, table: layer(pair[0]) * table["y"][0], (x, 1), {"y": [y]}).sum().backward()
    assert x.grad is not None
    assert y.grad is not None


def test_a_list_that_the_function_fills_is_filled_once(form):
    layer, notes = block(), []
    form(lambda x, notes: (notes.append("call"), layer(x))[1], tensor(4, 8), notes).sum().backward()
    assert notes == ["call"]


def test_the_same_tensor_twice(form):
    layer = block()
    x = tensor(4, 8)
    seen = []

    def function(a, b):
        seen.append(a is b)
        return layer(a) * b

    torch.manual_seed(7)
    form(function, x, x).sum().backward()
    assert seen == [True, True]
    y = x.detach().clone().requires_grad_()
    torch.manual_seed(7)
    function(y, y).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_outputs_that_are_inputs(form):
    layer = block()
    check(form, lambda x: (x, layer(x), x.view(8, 4), x.detach()), tensor(4, 8), modules=[layer])


def test_outputs_may_be_changed_in_place(form):
    layer, x = block(), tensor(4, 8)
    torch.manual_seed(7)
    out = form(layer, x)
    out.mul_(2)
    out.sum().backward()
    y = x.detach().clone().requires_grad_()
    torch.manual_seed(7)
    (2 * layer(y)).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_parameters_as_arguments(form):
    weight = nn.Parameter(tensor(8, 8).detach())
    check(form, lambda x, w: torch.tanh(x @ w), tensor(4, 8), weight)


def test_strides_stay(form):
    strides = []

    def function(x):
        strides.append(x.stride())
        return (x @ x.t()).relu()

    form(function, tensor(8, 4).t()).sum().backward()
    assert strides == [(1, 4), (1, 4)]


def test_without_gradients_nothing_is_kept(form):
    layer = block()
    with torch.no_grad():
        out = form(layer, tensor(4, 8))
    assert not out.requires_grad
    assert checkpointing.kept_bytes() == 0


def test_what_is_kept_is_the_input(form):
    x = tensor(4, 8)
    out = form(block(), x)
    assert checkpointing.kept_bytes() == x.nbytes == checkpointing.kept_bytes("cpu")
    out.sum().backward()
    assert checkpointing.kept_bytes() == 0


# -- nesting and graphs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [2, 3])
def test_nested(form, depth):
    inner, outer = block(1), block(2)

    def wrap(level):
        return (lambda x: outer(form(wrap(level - 1), x) + x)) if level else inner

    check(form, wrap(depth), tensor(4, 8), modules=[inner, outer])


def test_what_is_inside_is_kept_by_the_outer_call(form):
    layer, x = block(), tensor(4, 8)
    out = form(lambda a: form(layer, layer(a)), x)
    assert checkpointing.kept_bytes() == x.nbytes
    out.sum().backward()


def test_backward_twice_is_an_error(form):
    loss = form(block(), tensor(4, 8)).square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_graph_that_is_kept_gives_the_same_gradients_again(form):
    x, layer = tensor(4, 8), block()
    loss = form(layer, x).square().sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    x.grad = None
    loss.backward()
    assert torch.equal(x.grad, first)


def test_part_of_a_graph(form):
    """`torch.autograd.grad`, which a reentrant form cannot serve."""
    layer, x = block(), tensor(4, 8)
    torch.manual_seed(7)
    (found,) = torch.autograd.grad(form(layer, x).square().sum(), x)
    torch.manual_seed(7)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    assert torch.equal(found, expected)
    assert all(p.grad is None for p in layer.parameters())


def test_gradients_of_gradients(form):
    def penalty(call):
        x = tensor(4, 8).double().detach().requires_grad_()
        out = call(lambda a: torch.tanh(a).pow(3), x).sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        grad.square().sum().backward()
        return x.grad

    assert torch.allclose(penalty(form), penalty(lambda fn, x: fn(x)), rtol=1e-12)


def test_gradients_inside_of_the_function(form):
    """Forces: the function itself asks for gradients, in both runs."""

    def function(x):
        (force,) = torch.autograd.grad(torch.tanh(x).pow(3).sum(), x, create_graph=True)
        return force

    check(form, lambda x: function(x * 1.0), tensor(4, 8))


def test_a_function_that_looks_twice_at_what_it_saved(form):
    runs = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            assert torch.equal(ctx.saved_tensors[0], ctx.saved_tensors[0])
            return 2 * grad * ctx.saved_tensors[0]

    def function(x):
        runs.append(1)
        for _ in range(4):
            x = Twice.apply(x)
        return x

    check(form, function, tensor(4, 8).double().detach().requires_grad_())
    assert len(runs) <= 4  # plain, first, and twice again at most


def test_nothing_after_the_last_saved_tensor_is_computed_again(form):
    ends = []

    def function(x):
        y = torch.tanh(x)
        ends.append("saved")
        out = y + 1
        ends.append("end")
        return out

    form(function, tensor(4, 8)).sum().backward()
    assert ends.count("end") == 1


def test_automatic_casts_are_those_of_the_forward_pass(form):
    layer = nn.Linear(8, 8)

    def run(call):
        x = tensor(4, 8)
        layer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = call(lambda a: torch.relu(layer(a)), x)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        return [x.grad, layer.weight.grad]

    assert_same(run(form), run(lambda fn, x: fn(x)))


# -- misuse ------------------------------------------------------------------------------------------------------------


def test_a_function_that_changes_its_argument(form):
    x = tensor(4, 8) * 1
    with pytest.raises(UsageError, match=r"changed an argument in place, a tensor of shape \(4, 8\)"):
        form(lambda a: nn.functional.relu(a, inplace=True), x)


def test_an_argument_that_is_changed_before_backward(form):
    mask = torch.ones(4, 8)
    loss = form(lambda x, m: torch.tanh(x * m), tensor(4, 8), mask).sum()
    mask.zero_()
    with pytest.raises(UsageError, match=r"changed in place before backward.*work on a copy"):
        loss.backward()
    del loss


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (lambda x: torch.tanh(x), r"saved 2 tensors for backward in its forward pass and 1 when"),
        (lambda x: torch.tanh(torch.tanh(x.double())), r"of torch.float32 on cpu .* and \(4, 8\) of torch.float64"),
    ],
)
def test_a_function_that_does_something_else_the_second_time(form, second, told):
    runs = []

    def function(x):
        runs.append(1)
        return torch.tanh(torch.tanh(x)) if len(runs) == 1 else second(x)

    loss = form(function, tensor(4, 8)).sum()
    with pytest.raises(UsageError, match=told):
        loss.backward()
    del loss


def test_an_error_inside_passes_through_and_leaves_no_trace(form):
    def function(x):
        msg = "planted"
        raise ValueError(msg)

    with pytest.raises(ValueError, match="planted"):
        form(function, tensor(4, 8))
    layer = block()
    check(form, layer, tensor(4, 8), modules=[layer])


def test_an_error_when_run_again_restores_random_numbers(form):
    runs = []

    def function(x):
        runs.append(1)
        if len(runs) > 1:
            torch.rand(5)
            msg = "planted"
            raise ValueError(msg)
        return torch.tanh(x)

    loss = form(function, tensor(4, 8)).sum()
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="planted"):
        loss.backward()
    assert torch.equal(torch.get_rng_state(), before)
    del loss


def test_the_autograd_function_of_deepspeed():
    outputs, layer = [], block()
    found = checkpointing.CheckpointFunction.apply(lambda x: (layer(x), 3), outputs, tensor(4, 8))
    assert found[0] is outputs[0]
    assert outputs[1] == 3
