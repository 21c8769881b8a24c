"""The fused transformer layer against a plain one of torch: results, gradients, dropout, what is kept."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mpispeed import checkpointing
from mpispeed.base.errors import UsageError
from mpispeed.native.cuda import launcher
from mpispeed.nn.block import TransformerConfig, TransformerLayer
from tests.helpers.cuda_host import HostLauncher

HIDDEN, HEADS, INNER, LAYERS = 32, 4, 64, 3
NORMS = pytest.mark.parametrize("is_pre", [True, False], ids=["pre", "post"])


class PlainLayer(nn.Module):
    """A BERT layer as one writes it down: separate projections, softmax and dropout of torch."""

    def __init__(self, is_pre):
        super().__init__()
        self.is_pre = is_pre
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.attn_norm, self.norm = (nn.LayerNorm(HIDDEN, eps=1e-12) for _ in range(2))
        self.inter, self.output = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)
        for linear in (self.q, self.k, self.v):
            nn.init.zeros_(linear.bias)

    def attend(self, n, mask):
        q, k, v = (p(n).view(*n.shape[:2], HEADS, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = q @ k.transpose(2, 3) / math.sqrt(HIDDEN // HEADS) + mask
        return self.o((torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(n.shape))

    def forward(self, x, mask):
        a = x + self.attend(self.norm(x) if self.is_pre else x, mask)
        f = self.attn_norm(a)
        y = self.output(F.gelu(self.inter(f), approximate="tanh"))
        return a + y if self.is_pre else self.norm(f + y)

    def modules_in_order(self):
        return [self.q, self.k, self.v, self.o, self.attn_norm, self.inter, self.output, self.norm]

    def grads(self):
        """Gradients by the names of the fused layer."""
        named = {
            "attn_qkv": [m for m in (self.q, self.k, self.v)], "attn_o": [self.o], "attn_n": [self.attn_norm],
            "inter_": [self.inter], "output_": [self.output], "norm_": [self.norm],
        }  # fmt: skip
        found = {f"{name}w": torch.cat([m.weight.grad for m in ms]) for name, ms in named.items()}
        return found | {f"{name}b": torch.cat([m.bias.grad for m in ms]) for name, ms in named.items()}


def config(**changes):
    given = {
        "batch_size": 8, "hidden_size": HIDDEN, "intermediate_size": INNER, "heads": HEADS, "num_hidden_layers": LAYERS,
        "initializer_range": 0.02, "attn_dropout_ratio": 0.0, "hidden_dropout_ratio": 0.0,
    }  # fmt: skip
    return TransformerConfig(**{**given, **changes})


def plain_and_fused(is_pre, dtype=torch.float64, **changes):
    torch.manual_seed(0)
    plain = [PlainLayer(is_pre).to(dtype) for _ in range(LAYERS)]
    for layer in plain:
        for norm in (layer.norm, layer.attn_norm):  # ones and zeros would hide mistakes
            nn.init.normal_(norm.weight, 1.0, 0.1)
            nn.init.normal_(norm.bias, 0.0, 0.1)
    fused = []
    for layer in plain:
        weights = [m.weight for m in layer.modules_in_order()]
        biases = [m.bias for m in layer.modules_in_order()]
        fused.append(TransformerLayer(config(pre_layer_norm=is_pre, **changes), weights, biases))
    return plain, fused


def batch(size, length, dtype=torch.float64):
    generator = torch.Generator().manual_seed(size * 1000 + length)
    x = torch.randn(size, length, HIDDEN, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, length + 1, (size,), generator=generator)
    mask = torch.where(torch.arange(length) < lengths[:, None], 0.0, -10000.0)[:, None, None, :]
    return x.to(dtype), mask.to(dtype)


def run(layers, x, mask):
    """Output, gradient of the input; gradients of the layers are in place. Loss as in DeepSpeed's tests."""
    for layer in layers:
        layer.zero_grad()
    x = x.clone().requires_grad_()
    out = x
    for layer in layers:
        out = layer(out, mask)
    (out.double() - torch.linspace(-1, 1, HIDDEN)).square().sum().div(64).backward()
    return out.detach(), x.grad


def compare(plain, fused, x, mask, bound):
    """All errors relative to the largest number of each tensor."""
    want, dx_want = run(plain, x, mask)
    got, dx_got = run(fused, x, mask)
    pairs = {"output": (got, want), "input": (dx_got, dx_want)}
    for i, (a, b) in enumerate(zip(fused, plain, strict=True)):
        grads = b.grads()
        assert set(grads) == {name for name, _ in a.named_parameters()}
        pairs |= {f"{i}.{name}": (p.grad, grads[name]) for name, p in a.named_parameters()}
    for name, (a, b) in pairs.items():
        # A bias of keys has no influence at all: its gradient is rounding.
        largest = b.abs().max().clamp(min=1e-2 * dx_want.abs().max())
        assert (a - b).abs().max() <= bound * largest, name


@NORMS
@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@pytest.mark.parametrize(("size", "length"), [(8, 21), (3, 51), (7, 52), (1, 56), (2, 119), (4, 1)])
def test_three_layers_are_those_of_torch(is_pre, attention, size, length):
    plain, fused = plain_and_fused(is_pre, attention=attention)
    compare(plain, fused, *batch(size, length), bound=1e-10)


@NORMS
@pytest.mark.parametrize("length", [53, 54, 55, 128])
def test_fp32_is_within_its_rounding(is_pre, length):
    # Sums of up to 6 * 128 terms in another order, through three layers; plain torch is as far from fp64.
    plain, fused = plain_and_fused(is_pre, torch.float32, attention="explicit")
    compare(plain, fused, *batch(2, length, torch.float32), bound=500 * torch.finfo(torch.float32).eps)


@NORMS
def test_bf16_is_as_close_to_fp64_as_plain_torch(is_pre):
    plain, fused = plain_and_fused(is_pre)
    exact = run(plain, *batch(4, 24))
    low = torch.bfloat16
    errors = [
        [(a.double() - b).abs().mean() for a, b in zip(run(layers, *batch(4, 24, low)), exact, strict=True)]
        for layers in ([layer.to(low) for layer in plain], [layer.to(low) for layer in fused])
    ]
    for theirs, ours in zip(*errors, strict=True):
        assert ours <= 1.1 * theirs  # fewer roundings between the products; the tenth is chance


@NORMS
@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("changes", [{}, {"gelu_checkpoint": True, "attn_dropout_checkpoint": True}], ids=["", "again"])
def test_kernels_give_what_the_twins_give(is_pre, is_reversed, changes):
    _, fused = plain_and_fused(is_pre, torch.float32, attention="explicit", **changes)
    fused = [dropping(layer) for layer in fused]
    x, mask = batch(2, 21, torch.float32)
    torch.manual_seed(5)
    want = run(fused[:1], x, mask), [p.grad for p in fused[0].parameters()]
    running = HostLauncher(is_reversed=is_reversed)
    with launcher.standing_in(running):
        torch.manual_seed(5)
        got = run(fused[:1], x, mask), [p.grad for p in fused[0].parameters()]
    assert {name.partition("_")[0] for name in running.launched} >= {"drop", "gelu", "softmax", "split"}
    for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]], strict=True):
        assert (a - b).abs().max() <= 200 * torch.finfo(torch.float32).eps * b.abs().max().clamp(min=1.0)


def dropping(layer, ratio=0.2):
    layer.config.attn_dropout_ratio = layer.config.hidden_dropout_ratio = ratio
    return layer


def outcome(layer, x, mask, seed=1, call=None):
    torch.manual_seed(seed)
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = (layer if call is None else call)(x, mask)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@NORMS
@pytest.mark.parametrize("attention", ["auto", "sdpa", "explicit"])
class TestDropout:
    @pytest.fixture
    def layer(self, is_pre, attention):
        return dropping(plain_and_fused(is_pre, torch.float32, attention=attention)[1][0])

    def test_a_seed_of_torch_repeats_it(self, layer):
        x, mask = batch(2, 21, torch.float32)
        first = outcome(layer, x, mask)
        assert same(first, outcome(layer, x, mask))
        assert not torch.equal(first[0], outcome(layer, x, mask, seed=2)[0])

    def test_a_checkpointed_call_repeats_it(self, layer):
        x, mask = batch(2, 21, torch.float32)
        want = outcome(layer, x, mask)
        assert same(want, outcome(layer, x, mask, call=lambda *args: checkpointing.checkpoint(layer, *args)))
        again = outcome(
            layer, x, mask, call=lambda *args: torch.utils.checkpoint.checkpoint(layer, *args, use_reentrant=False)
        )
        assert same(want, again)

    def test_there_is_none_in_evaluation(self, layer):
        x, mask = batch(2, 21, torch.float32)
        layer.eval()
        first = outcome(layer, x, mask)
        assert same(first, outcome(layer, x, mask, seed=2))
        assert same(first, outcome(dropping(layer, 0.0), x, mask))

    def test_gradients_are_those_of_differences(self, layer):
        layer.double()
        x, mask = batch(1, 4)
        direction = torch.randn_like(x)

        def loss(x):
            torch.manual_seed(3)
            return layer(x, mask).square().sum()

        x.requires_grad_()
        (grad,) = torch.autograd.grad(loss(x), x)
        with torch.no_grad():
            difference = (loss(x + 1e-6 * direction) - loss(x - 1e-6 * direction)) / 2e-6
        torch.testing.assert_close((grad * direction).sum(), difference, rtol=1e-6, atol=1e-6)


FLAGS = ["normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint", "stochastic_mode"]


@NORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["auto", "sdpa", "explicit"])
def test_flags_of_memory_change_no_bit(is_pre, dtype, attention):
    layer = dropping(plain_and_fused(is_pre, dtype, attention=attention)[1][0])
    x, mask = batch(2, 21, dtype)
    want = outcome(layer, x, mask)
    for flag in FLAGS:
        setattr(layer.config, flag, True)
        assert same(want, outcome(layer, x, mask)), flag


def kept_bytes(layer, x, mask):
    """Bytes that autograd keeps, besides parameters and arguments; each storage once."""
    outside = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), x, mask)}
    kept = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in outside:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = layer(x, mask)
    assert out.grad_fn is not None
    return sum(kept.values())


@NORMS
@pytest.mark.parametrize("ratio", [0.0, 0.2])
def test_flags_save_the_memory_they_name(is_pre, ratio):
    layer = dropping(plain_and_fused(is_pre, torch.float32, attention="explicit")[1][0], ratio)
    size, length = 2, 48
    x, mask = batch(size, length, torch.float32)
    x.requires_grad_()
    sizes = [kept_bytes(layer, x, mask)]
    for flag in ("gelu_checkpoint", "attn_dropout_checkpoint"):
        setattr(layer.config, flag, True)
        sizes.append(kept_bytes(layer, x, mask))
    assert sizes[0] - sizes[1] == 4 * size * length * INNER
    assert sizes[1] - sizes[2] == (4 * size * HEADS * length**2 if ratio else 0)


class TestUse:
    @pytest.fixture
    def layer(self):
        torch.manual_seed(0)
        return TransformerLayer(config())

    def test_masked_tokens_have_no_influence(self, layer):
        x, _ = batch(2, 12, torch.float32)
        mask = torch.zeros(2, 1, 1, 12)
        mask[..., 9:] = -10000.0
        changed = x.clone()
        changed[:, 9:] = 7.0
        for attention in ("sdpa", "explicit"):
            layer.config.attention = attention
            torch.testing.assert_close(layer(x, mask)[:, :9], layer(changed, mask)[:, :9], rtol=0, atol=0)
            torch.testing.assert_close(layer(x, mask)[:, :9], layer(x[:, :9])[:, :9], rtol=1e-5, atol=1e-6)

    def test_masks_of_truth_values_and_other_dtypes(self, layer):
        x, mask = batch(3, 12, torch.float32)
        want = layer(x, mask)
        for attention in ("sdpa", "explicit"):
            layer.config.attention = attention
            lowest = mask.double().masked_fill(mask < 0, torch.finfo(torch.float64).min)
            for other in (mask == 0, mask.double(), lowest):
                torch.testing.assert_close(layer(x, other), want)

    def test_the_mask_gets_no_gradient(self, layer):
        x, mask = batch(2, 12, torch.float32)
        mask.requires_grad_()
        layer(x, mask).sum().backward()
        assert mask.grad is None

    def test_a_tuple_if_wanted(self, layer):
        x, mask = batch(2, 12, torch.float32)
        layer.config.return_tuple = True
        out = layer(x, mask)
        assert isinstance(out, tuple)
        assert len(out) == 1

    def test_copies_are_equal_and_apart(self, layer):
        x, mask = batch(2, 12, torch.float32)
        reference = copy.deepcopy(layer)
        assert reference.layer_id == layer.layer_id
        assert torch.equal(reference(x, mask), layer(x, mask))
        with torch.no_grad():
            reference.output_b.add_(1.0)
        assert not torch.equal(reference(x, mask), layer(x, mask))
        other = TransformerLayer(config())
        assert other.layer_id == layer.layer_id + 1
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other(x, mask), layer(x, mask))

    @pytest.mark.parametrize("flags", [{}, {"gelu_checkpoint": True, "attention": "explicit"}], ids=["", "again"])
    def test_autocast_computes_products_in_16_bits(self, layer, flags):
        for name, value in flags.items():
            setattr(layer.config, name, value)
        x, mask = batch(2, 12, torch.float32)
        want = layer(x, mask)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(x, mask)
        assert out.dtype == torch.float32  # of the residual
        assert 0 < (out - want).abs().max() <= 0.05
        out.sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in layer.parameters())

    @pytest.mark.parametrize("attention", ["sdpa", "explicit"])
    def test_the_compiler_takes_it_whole(self, layer, attention):
        layer.config.attention = attention
        layer.config.gelu_checkpoint = True
        dropping(layer)
        x, mask = batch(2, 12, torch.float32)
        torch.compiler.reset()
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        want, got = (outcome(layer, x, mask, call=call) for call in (layer, compiled))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

    def test_an_empty_batch_works(self, layer):
        layer.config.attention = "explicit"
        layer(torch.randn(0, 12, HIDDEN), torch.zeros(0, 1, 1, 12)).sum().backward()
        assert not layer.attn_qkvw.grad.any()

    def test_what_is_not_supported_is_said(self, layer):
        x, mask = batch(2, 12, torch.float32)
        with pytest.raises(UsageError, match="head masks, encoder states"):
            layer(x, mask, torch.ones(HEADS))
        with pytest.raises(UsageError, match="output_attentions"):
            layer(x, mask, output_attentions=True)
        with pytest.raises(UsageError, match=r"hidden_size = 32\], found \(2, 12, 31\)"):
            layer(x[..., :31], mask)
        with pytest.raises(UsageError, match=r"expected \[batch, 1, 1, sequence\]"):
            layer(x, mask[:, 0, 0])
        assert layer(x, mask, None, None, None, None, None, False).shape == x.shape
