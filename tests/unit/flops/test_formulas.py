"""Operations of single calls: torch's counter where it counts, and the plain form of everything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mpispeed.flops.by_module import ModuleCounter
from mpispeed.flops.formulas import count
from mpispeed.native import attention, gelu_linear, host_layer, thin_product, weight_codes
from mpispeed.native.cuda import ops


class Calls(nn.Module):
    """A model that calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def counts(function: Callable[..., Any], *args: Any) -> tuple[int, int, dict[str, int]]:
    """Operations of the call, of its backward pass, and what has no formula."""
    model = Calls(function)
    counter = ModuleCounter(model, deepspeed=False)
    counter.start()
    out = model(*args)
    out = out[0] if isinstance(out, (tuple, list)) else out
    if isinstance(out, Tensor) and out.requires_grad:
        out.backward(torch.ones_like(out))
    counter.stop()
    total = counter.total()
    assert total.recompute == 0
    assert counter.outside == 0
    return total.forward, total.backward, counter.unknown


def counts_of_torch(function: Callable[..., Any], *args: Any) -> tuple[int, int]:
    with FlopCounterMode(display=False) as counter:
        out = function(*args)
        forward = counter.get_total_flops()
        if out.requires_grad:
            out.backward(torch.ones_like(out))
    return forward, counter.get_total_flops() - forward


def drawn(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*sizes, dtype=dtype, requires_grad=True)


CALLS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "mm": (torch.mm, [(3, 5), (5, 7)]),
    "addmm": (torch.addmm, [(7,), (3, 5), (5, 7)]),
    "bmm": (torch.bmm, [(2, 3, 5), (2, 5, 7)]),
    "baddbmm": (torch.baddbmm, [(2, 1, 7), (2, 3, 5), (2, 5, 7)]),
    "matmul of four dims": (torch.matmul, [(2, 4, 3, 5), (2, 4, 5, 7)]),
    "linear": (F.linear, [(2, 3, 5), (7, 5), (7,)]),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), [(2, 3, 5), (2, 5, 7)]),
    "conv1d": (F.conv1d, [(2, 3, 9), (4, 3, 3), (4,)]),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2, padding=1, dilation=2), [(2, 3, 9, 8), (4, 3, 3, 2)]),
    "conv3d": (F.conv3d, [(1, 2, 4, 5, 6), (3, 2, 2, 2, 2)]),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2), [(2, 3, 5, 4), (3, 4, 3, 3)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_products_and_convolutions_count_as_in_torch(name: str) -> None:
    function, sizes = CALLS[name]
    forward, backward, unknown = counts(function, *(drawn(*size) for size in sizes))
    assert (forward, backward) == counts_of_torch(function, *(drawn(*size) for size in sizes))
    assert forward > 0
    assert not unknown


def test_convolutions_in_groups_have_gradients_that_cost_what_they_cost() -> None:
    """One group after the other; torch counts the weight's gradient once too often for each group."""
    x, weight = drawn(2, 6, 9, 9), drawn(8, 3, 3, 3)
    found = counts(lambda x, w: F.conv2d(x, w, groups=2), x, weight)

    def in_turn(x: Tensor, weight: Tensor) -> Tensor:
        pairs = zip(x.chunk(2, 1), weight.chunk(2, 0), strict=True)
        return torch.cat([F.conv2d(*pair) for pair in pairs], 1)

    assert found == counts(in_turn, x, weight)


def test_a_vector_is_a_matrix_of_one_column() -> None:
    matrix, vector = drawn(3, 5), drawn(5)
    assert counts(torch.mv, matrix, vector)[0] == counts(torch.mm, matrix, vector[:, None].detach())[0]
    assert counts(torch.dot, vector, vector.detach())[0] == 10
    assert counts(torch.addmv, drawn(3), matrix, vector)[0] == 30


def test_bilinear_layers_count_as_two_products() -> None:
    x, weight, y = drawn(3, 4), drawn(6, 4, 5), drawn(3, 5)
    plain = lambda x, y, weight: torch.einsum("bi,oij,bj->bo", x, weight, y)  # noqa: E731
    forward, backward, unknown = counts(F.bilinear, x, y, weight)
    assert forward == counts(plain, x, y, weight)[0]
    assert not unknown
    assert backward > forward  # three more of its kind, which share nothing


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_matrices_count_their_elements() -> None:
    x = torch.randn(4, 5)
    for layout in (torch.sparse_coo, torch.sparse_csr):
        for call in (torch.mm, torch.sparse.mm, lambda a, x: a @ x):
            matrix = torch.eye(4).to_sparse(layout=layout)
            assert counts(call, matrix, x) == (2 * 4 * 5, 0, {})


# -- attention ---------------------------------------------------------------------------------------------------------


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[-3] // k.shape[-3]
    k, v = (each.repeat_interleave(groups, -3) for each in (k, v))
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


@pytest.mark.parametrize("backend", ["MATH", "FLASH_ATTENTION"])
@pytest.mark.parametrize("options", ["plain", "causal", "mask", "shared keys", "no heads shared in bf16", "short"])
def test_attention_counts_as_its_products(backend: str, options: str) -> None:
    kind = getattr(nn.attention.SDPBackend, backend)
    heads, queries = 2 if options == "shared keys" else 4, 3 if options == "short" else 6
    dtype = torch.bfloat16 if "bf16" in options else torch.float32
    q, k, v = (
        drawn(2, 4, queries, 8, dtype=dtype),
        drawn(2, heads, 6, 8, dtype=dtype),
        drawn(2, heads, 6, 8, dtype=dtype),
    )
    mask = torch.ones(queries, 6, dtype=torch.bool).tril() if options == "mask" else None

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with nn.attention.sdpa_kernel([kind, nn.attention.SDPBackend.MATH]):
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=options == "causal", enable_gqa=heads != 4
            )

    assert counts(fused, q, k, v) == counts(eager, q, k, v)
    with torch.inference_mode():
        assert counts(fused, q, k, v) == counts(eager, q, k, v)


def test_multi_head_attention_counts_as_its_products() -> None:
    x = torch.randn(2, 6, 8)
    for layer in (
        nn.MultiheadAttention(8, 2, batch_first=True),
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0),
    ):
        inputs = (x, x, x) if isinstance(layer, nn.MultiheadAttention) else (x,)
        slow = counts(lambda *args, layer=layer: layer(*args), *inputs)[0]
        layer.eval()
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                assert counts(lambda *args, layer=layer: layer(*args), *inputs) == (slow, 0, {})
        if isinstance(layer, nn.MultiheadAttention):
            with torch.no_grad():
                assert counts(lambda *args, layer=layer: layer(*args, need_weights=False), *inputs) == (slow, 0, {})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padded_sequences_of_an_encoder_count_what_is_left_of_them() -> None:
    layer = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    x, padding = torch.randn(2, 6, 8), torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    with torch.no_grad():
        found, _, unknown = counts(lambda x: layer(x, src_key_padding_mask=padding), x)
        apart = sum(counts(layer, each[None])[0] for each in (x[0], x[1, :4]))
    assert not unknown
    assert found == apart


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_counts_as_its_products() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    with torch.no_grad():
        assert counts(flex.flex_attention, q, k, v) == counts(eager, q, k, v)


# -- recurrent layers, experts -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"bidirectional": True, "bias": False}])
def test_recurrent_layers_count_both_matrices_for_every_token(kind: str, options: dict[str, Any]) -> None:
    layer = getattr(nn, kind)(4, 5, batch_first=True, **options)
    x = drawn(2, 3, 4)
    state = drawn(len(list(layer.all_weights)), 2, 5)
    first = (state, drawn(*state.shape)) if kind == "LSTM" else state
    matrices = sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)
    once = 2 * x.shape[0] * x.shape[1] * matrices
    assert counts(layer, x, first) == (once, 2 * once, {})
    with torch.backends.mkldnn.flags(enabled=False):
        assert counts(layer, x, first) == (once, 2 * once, {})
    with torch.inference_mode():
        assert counts(layer, x) == (once, 0, {})


def test_packed_sequences_count_their_tokens() -> None:
    layer = nn.LSTM(4, 5)
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    matrices = sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)
    with torch.no_grad():
        assert counts(lambda x: layer(x)[0].data, packed) == (2 * 5 * matrices, 0, {})


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped products")
@pytest.mark.parametrize("last", [16, 12])
def test_grouped_products_count_as_a_loop(last: int) -> None:
    rows, weights = drawn(16, 8, dtype=torch.bfloat16), drawn(2, 8, 16, dtype=torch.bfloat16)
    ends = torch.tensor([8, last], dtype=torch.int32)
    grouped = lambda rows, weights: F.grouped_mm(rows, weights, offs=ends) * 1.0  # noqa: E731
    loop = lambda rows, weights: torch.cat([rows[:8] @ weights[0], rows[8:last] @ weights[1]])  # noqa: E731
    assert counts(grouped, rows, weights) == counts(loop, rows, weights)


# -- operators of devices, by the shapes of their tensors --------------------------------------------------------------


def of_device(name: str, *args: Any, out: Any = None) -> int | None:
    return count(getattr(torch.ops.aten, name).default, args, {}, out)


def meta(*sizes: int) -> Tensor:
    return torch.empty(*sizes, device="meta")


def test_fused_attention_of_devices_is_two_products_and_four() -> None:
    q, k, v = meta(2, 4, 6, 8), meta(2, 2, 5, 8), meta(2, 2, 5, 3)
    once = 2 * (2 * 4 * 6 * 5) * (8 + 3)
    for kind in ("flash", "efficient", "cudnn"):
        name = f"_scaled_dot_product_{kind}_attention"
        assert of_device(name, q, k, v) == once
        assert of_device(f"{name}_backward", meta(2, 4, 6, 3), q, k, v) == 2 * once


def test_attention_over_packed_sequences_counts_each_of_them() -> None:
    q, ends = torch.empty(5, 4, 8), torch.tensor([0, 3, 5])
    once = sum(2 * 4 * length * length * (8 + 8) for length in (3, 2))
    assert of_device("_flash_attention_forward", q, q, q, ends, ends, 3, 3) == once
    backward = (q, q, q, q, q, q[..., 0], ends, ends, 3, 3)
    assert of_device("_flash_attention_backward", *backward) == 2 * once
    batch = q[None]
    assert of_device("_efficient_attention_forward", batch, batch, batch, None, ends, ends, 3, 3) == once
    backward = (batch, batch, batch, batch, None, batch, ends, ends, 3, 3)
    assert of_device("_efficient_attention_backward", *backward) == 2 * once


def test_recurrent_layers_of_devices_count_all_matrices() -> None:
    weights = [meta(20, 4), meta(20, 5), meta(20), meta(20), meta(20, 5), meta(20, 5), meta(20), meta(20)]
    once = 2 * 6 * (20 * 4 + 3 * 20 * 5)
    assert of_device("_cudnn_rnn", meta(3, 2, 4), weights, 4) == once
    for mask, times in (([True, False, False, True], 2), ([True, True, True, False], 1)):
        assert of_device("_cudnn_rnn_backward", meta(3, 2, 4), weights, 4, mask) == times * once


def test_convolutions_of_devices() -> None:
    x, weight, out = meta(2, 6, 9, 9), meta(8, 3, 3, 3), meta(2, 8, 7, 7)
    once = 2 * 2 * 49 * weight.numel()
    settings = ([0, 0], [1, 1], [1, 1], 2, True, False, True)
    assert of_device("cudnn_convolution", x, weight, *settings, out=out) == once
    assert of_device("mkldnn_convolution", x, weight, None, *settings[:4], out=out) == once


# -- our own operators -------------------------------------------------------------------------------------------------


def test_our_attention_and_mlp_count_as_their_plain_forms() -> None:
    q, k, v = drawn(2, 2, 6, 8), drawn(2, 2, 5, 8), drawn(2, 2, 5, 4)
    assert counts(attention.attention, q, k, v) == counts(eager, q, k, v)
    x, bias, weight = drawn(3, 2, 8), drawn(8), drawn(5, 8)
    plain = lambda x, bias, weight: F.linear(F.gelu(x + bias, approximate="tanh"), weight)  # noqa: E731
    assert counts(gelu_linear.gelu_linear, x, bias, weight) == counts(plain, x, bias, weight)


@torch.no_grad()
def test_our_loops_count_as_the_products_they_are() -> None:
    x, weight = torch.randn(3, 2, 8), torch.randn(5, 8)
    assert counts(thin_product.thin_linear, x, weight) == counts(F.linear, x, weight)
    q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    assert counts(lambda q: host_layer.attend(q, k, v, None, 1.0), q[:, :, 0]) == counts(eager, q, k, v)
    codes, rows = weight_codes.encode(torch.randn(5, 32), 8, 16), torch.randn(3, 32)
    coded = counts(lambda x: weight_codes.multiply(torch.empty(3, 5), x, codes), rows)
    assert coded == counts(lambda x: weight_codes.linear(x, codes), rows) == counts(F.linear, rows, torch.randn(5, 32))


def test_every_operator_of_ours_is_known() -> None:
    from mpispeed.flops import formulas
    from mpispeed.native import drop_norm, norm, rotary, row_ops, softmax, token_drop, transformer  # noqa: F401

    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{ops.NAMESPACE}::")]
    assert len(names) >= 20
    for name in names:
        func = getattr(torch.ops.mpispeed, name.partition("::")[2]).default
        assert formulas.formula_of(func) is not None or formulas.is_free(func), name


def test_operators_without_a_formula_are_named() -> None:
    assert counts(torch.linalg.svdvals, torch.randn(4, 4))[2] == {"aten::_linalg_svd": 1}
    assert counts(lambda x: torch.fft.fft(torch.fft.fft(x)), torch.randn(4))[2] == {
        "aten::_fft_r2c": 1,
        "aten::_fft_c2c": 1,
    }
    with torch.library._scoped_library("mpispeed_test", "FRAGMENT") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", lambda x: x.clone(), "CompositeExplicitAutograd")
        assert counts(torch.ops.mpispeed_test.mystery, torch.randn(4))[2] == {"mpispeed_test::mystery": 1}


def test_element_wise_work_is_neither_counted_nor_named() -> None:
    def light(x: Tensor) -> Tensor:
        x = F.layer_norm(F.gelu(x) + x, x.shape[-1:])
        x = F.interpolate(x[:, None], scale_factor=2.0, mode="linear")[:, 0]
        x = torch.cat([x, x.sort(-1).values], -1).cumsum(-1).clamp(max=3.0)
        return F.glu(torch.where(x > 0, x, x.exp()), -1).softmax(-1).to(torch.bfloat16)

    assert counts(light, drawn(2, 8)) == (0, 0, {})
