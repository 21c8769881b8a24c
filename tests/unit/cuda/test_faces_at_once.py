"""Faces that go to kernels at once give the bits of those that go through their operators, by the same launches."""

import pytest
import torch

from mpispeed.base.errors import UsageError
from mpispeed.kernels import bias_dropout_residual, bias_gelu, layer_norm, masked_softmax
from mpispeed.native import drop_norm, softmax, transformer
from mpispeed.native.cuda import launcher, philox
from mpispeed.native.drop_norm import bias_dropout_layer_norm
from tests.helpers.cuda_host import HostLauncher
from tests.zoo import same_bits

ROWS, COLS = 5, 24
CALLS = {
    "gelu": lambda x, bias, *_: bias_gelu(x, bias),
    "exact gelu": lambda x, bias, *_: bias_gelu(x, bias, "none"),
    "drop": lambda x, bias, residual, *_: bias_dropout_residual(x, bias, residual, 0.3),
    "drop norm": lambda x, bias, residual, *rest: bias_dropout_layer_norm(x, bias, residual, *rest, 0.3),
    "softmax": lambda x, *_: masked_softmax(x, scale=0.5),
    "causal softmax": lambda x, *_: masked_softmax(x[:, :8].contiguous(), is_causal=True),
}
MODULES = (drop_norm, softmax, transformer)


@pytest.fixture
def host():
    """Kernels on the host."""
    running = HostLauncher()
    with launcher.standing_in(running):
        yield running


def inputs(dtype=torch.float32, shift=0):
    """x, its bias, residual, weight and bias of a norm; `shift` elements into larger tensors."""
    generator = torch.Generator().manual_seed(2)
    sizes = (ROWS * COLS, COLS, ROWS * COLS, COLS, COLS)
    made = [torch.randn(size + shift, generator=generator).to(dtype)[shift:] for size in sizes]
    return [x.view(ROWS, COLS) if x.numel() > COLS else x for x in made]


def outcome(name, given, frozen=(), used=(0, 1)):
    """Results, and gradients of what is not frozen from the results that are used."""
    torch.manual_seed(3)
    leaves = [x.detach().requires_grad_(at not in frozen) for at, x in enumerate(given)]
    results = CALLS[name](*leaves)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum((results[at].float() ** 2).mul(torch.arange(results[at].shape[-1])).sum() for at in used[: len(results)])
    wanted = [x for x in leaves if x.requires_grad]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else []
    assert not frozen or all(grad is None or grad.shape == x.shape for x, grad in zip(wanted, grads, strict=True))
    return [*(x.detach() for x in results), *(x for x in grads if x is not None)]


def by_operators(monkeypatch):
    """From now on faces go through their operators."""
    for module in MODULES:
        monkeypatch.setattr(module, "faces", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_bits_and_launches_are_those_of_operators(name, dtype, host, monkeypatch):
    got = outcome(name, inputs(dtype))
    launched, host.launched = host.launched, []
    by_operators(monkeypatch)
    same_bits(outcome(name, inputs(dtype)), got)
    assert launched
    assert sorted(launched) == sorted(host.launched)


@pytest.mark.parametrize("name", ["gelu", "drop", "drop norm"])
@pytest.mark.parametrize("frozen", [(0,), (1,), (2, 3), (0, 2, 4), (0, 1, 2, 3, 4)], ids=str)
def test_frozen_inputs(name, frozen, host, monkeypatch):
    if name == "gelu" and {0, 1} <= set(frozen):
        frozen = (0, 1, 2, 3, 4)
    got = outcome(name, inputs(), frozen)
    by_operators(monkeypatch)
    same_bits(outcome(name, inputs(), frozen), got)


@pytest.mark.parametrize("used", [(0,), (1,)], ids=["sum", "norm"])
def test_one_of_two_results_is_used(used, host, monkeypatch):
    got = outcome("drop norm", inputs(), used=used)
    by_operators(monkeypatch)
    same_bits(outcome("drop norm", inputs(), used=used), got)


@pytest.mark.parametrize("name", ["drop", "drop norm"])
def test_seeds_that_kernels_read_from_memory(name, host):
    """On the host both kinds of seeds come from one generator."""
    want = outcome(name, inputs())
    with philox.seeds_in_memory():
        same_bits(want, outcome(name, inputs()))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", ["unaligned", "gaps", "two dtypes", "autocast"])
def test_what_kernels_do_not_take_as_it_is(kind, name, host, monkeypatch):
    given = inputs(shift=1 if kind == "unaligned" else 0)
    if kind == "gaps":
        given[0] = torch.stack((given[0], given[0]), dim=2)[..., 0]
    elif kind == "two dtypes":
        given[1] = given[1].double()

    def found():
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
                return outcome(name, given)
        except ValueError as error:
            return str(error)

    got = found()
    assert isinstance(got, str) == (kind == "two dtypes" and not name.endswith("softmax"))
    by_operators(monkeypatch)
    same_bits(found(), got)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_with_gaps(name, host, monkeypatch):
    def found():
        torch.manual_seed(3)
        leaves = [x.requires_grad_() for x in inputs()]
        result = CALLS[name](*leaves)
        result = result[1] if isinstance(result, tuple) else result
        grad = torch.linspace(-1, 1, 2 * result.numel()).view(*result.shape, 2)[..., 0]
        return list(torch.autograd.grad(result, leaves[:1], grad))

    got = found()
    by_operators(monkeypatch)
    same_bits(found(), got)


@pytest.mark.parametrize("name", CALLS)
def test_a_second_derivative_is_refused(name, host):
    x, *others = (each.requires_grad_() for each in inputs())
    result = CALLS[name](x, *others)
    result = result[0] if isinstance(result, tuple) else result
    with pytest.raises(UsageError, match="no second derivative"):
        torch.autograd.grad(result.square().sum(), x, create_graph=True)


def test_sizes_take_turns(host):
    """More of them than are kept at once, twice; each result is that of torch."""
    weight = torch.ones(256)
    for cols in [*range(1, 100), *range(1, 100)]:
        x = torch.linspace(-1, 2, 2 * cols).view(2, cols)
        got = layer_norm(x, weight[:cols], None, 1e-2)
        torch.testing.assert_close(got, torch.nn.functional.layer_norm(x, (cols,), None, None, 1e-2))
