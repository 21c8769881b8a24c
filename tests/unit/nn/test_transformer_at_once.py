"""A transformer layer as two functions on kernels gives the bits of the one that is composed of faces."""

import pytest
import torch

from mpispeed import checkpointing
from mpispeed.base.errors import UsageError
from mpispeed.native.cuda import launcher, philox
from mpispeed.nn.block import TransformerConfig, TransformerLayer
from tests.helpers.cuda_host import HostLauncher
from tests.zoo import same_bits

HIDDEN, INNER, HEADS = 32, 64, 4
FORMS = [
    {"pre_layer_norm": is_pre, "attention": attention, "attn_dropout_ratio": ratio, "hidden_dropout_ratio": ratio}
    for is_pre in (True, False)
    for attention, ratio in (("sdpa", 0.0), ("sdpa", 0.2), ("explicit", 0.2))
]


def name_of(form):
    return f"{'pre' if form['pre_layer_norm'] else 'post'}-{form['attention']}-{form['hidden_dropout_ratio']}"


@pytest.fixture
def host():
    """Kernels on the host."""
    running = HostLauncher()
    with launcher.standing_in(running):
        yield running


def layer_of(dtype=torch.float32, **changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "heads": HEADS, "intermediate_size": INNER, "num_hidden_layers": 2}
    layer = TransformerLayer(TransformerConfig(**sizes, initializer_range=0.2, **changes))
    for parameter in layer.parameters():  # ones and zeros would hide mistakes
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return layer.to(dtype)


def batch(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    mask = torch.zeros(2, 1, 1, 21)
    mask[..., 15:] = -10000.0
    return torch.randn(2, 21, HIDDEN, generator=generator).to(dtype), mask.to(dtype)


def outcome(layer, x, mask, call=None):
    """Result and all gradients, of the leaves that want one."""
    torch.manual_seed(7)
    x = x.detach().clone().requires_grad_()
    out = (call or layer)(x, mask)
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    weights = torch.linspace(-1, 1, HIDDEN).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * out * weights).sum(), leaves)]


def composed(layer, monkeypatch):
    """The layer, which from now on finds no launches and calls its faces."""
    monkeypatch.setattr("mpispeed.nn.block.at_once.passes_for", lambda *args, **options: None)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("again", [False, True], ids=["", "again"])
@pytest.mark.parametrize("form", FORMS, ids=name_of)
def test_bits_and_launches_are_those_of_the_faces(form, again, dtype, host, monkeypatch):
    layer = layer_of(dtype, **form, gelu_checkpoint=again, attn_dropout_checkpoint=again)
    got = outcome(layer, *batch(dtype))
    launched, host.launched = host.launched, []
    same_bits(outcome(composed(layer, monkeypatch), *batch(dtype)), got)
    assert sorted(launched) == sorted(host.launched)


@pytest.mark.parametrize("is_composed", [False, True], ids=["at once", "faces"])
@pytest.mark.parametrize("form", [FORMS[1], FORMS[2], FORMS[4], FORMS[5]], ids=name_of)
def test_seeds_that_kernels_read_from_memory(form, is_composed, host, monkeypatch):
    """As in a captured graph; on the host both seeds come from one generator."""
    layer = layer_of(**form, attn_dropout_checkpoint=True)
    if is_composed:
        composed(layer, monkeypatch)
    want = outcome(layer, *batch())
    prepared = set(host.kept)
    with philox.seeds_in_memory():
        same_bits(want, outcome(layer, *batch()))
    assert len(set(host.kept) - prepared) >= 2  # those of dropouts are others


@pytest.mark.parametrize("form", FORMS[:2] + FORMS[3:5], ids=name_of)
def test_frozen_parameters(form, host, monkeypatch):
    layer = layer_of(**form)
    for name in ("attn_qkvw", "attn_ob", "norm_w", "inter_w", "output_b"):
        getattr(layer, name).requires_grad_(requires_grad=False)
    got = outcome(layer, *batch())
    same_bits(outcome(composed(layer, monkeypatch), *batch()), got)


@pytest.mark.parametrize("form", [FORMS[1], FORMS[5]], ids=name_of)
def test_recomputed_and_called_twice(form, host):
    layer = layer_of(**form)
    want = outcome(layer, *batch())
    same_bits(want, outcome(layer, *batch(), call=lambda *args: checkpointing.checkpoint(layer, *args)))
    again = lambda *args: torch.utils.checkpoint.checkpoint(layer, *args, use_reentrant=False)  # noqa: E731
    same_bits(want, outcome(layer, *batch(), call=again))
    x, mask = batch()
    out = layer(x, mask)
    first, second = (torch.autograd.grad(out.sum(), layer.output_w, retain_graph=True) for _ in range(2))
    same_bits(first, second)


def ordinary(x):
    """As compression of numbers in the range of activations may do: nothing but they survives."""
    return torch.where(x.abs() < 1e-30, 0, x).clamp(-1e30, 1e30) if x.is_floating_point() else x


@pytest.mark.parametrize("form", [FORMS[1], FORMS[4]], ids=name_of)
def test_hooks_that_convert_what_is_saved(form, host):
    """Statistics of norms are kept behind sums of 16 bits; taken for such numbers they would be noise."""
    layer = layer_of(torch.bfloat16, **form)
    want = outcome(layer, *batch(torch.bfloat16))
    for hooks in (torch.autograd.graph.saved_tensors_hooks(ordinary, ordinary), torch.autograd.graph.save_on_cpu()):
        with hooks:
            same_bits(want, outcome(layer, *batch(torch.bfloat16)))


def test_without_gradients_nothing_is_kept(host):
    layer = layer_of(**FORMS[1]).eval()
    x, mask = batch()
    with torch.no_grad():
        quiet = layer(x, mask)
    assert quiet.grad_fn is None
    assert torch.equal(quiet, layer(x, mask))


def test_a_second_derivative_is_refused(host):
    layer = layer_of(**FORMS[0])
    x, mask = batch()
    x.requires_grad_()
    with pytest.raises(UsageError, match="no second derivative"):
        torch.autograd.grad(layer(x, mask).square().sum(), x, create_graph=True)


@pytest.mark.parametrize("kind", ["gaps", "two dtypes", "width", "autocast"])
def test_what_kernels_do_not_take_as_it_is_goes_through_faces(kind, host):
    layer = layer_of(**FORMS[0])
    x, mask = batch()
    want = layer(x, mask)
    if kind == "gaps":
        x = torch.stack((x, x), dim=3)[..., 0]
    elif kind == "two dtypes":
        layer.attn_nb.data = layer.attn_nb.data.double()
        with pytest.raises(ValueError, match=r"bias is torch\.float64"):
            layer(x, mask)
        return
    elif kind == "width":
        layer = TransformerLayer(TransformerConfig(hidden_size=6, heads=2, initializer_range=0.1, num_hidden_layers=1))
        assert layer(x[..., :6], mask).shape == (2, 21, 6)
        return
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.allclose(layer(x, mask).float(), want, atol=0.2, rtol=0.1)
        return
    assert torch.equal(layer(x, mask), want)
