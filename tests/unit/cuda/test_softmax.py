"""Softmax kernels, compiled for the host, and their references: against float64, autograd and each other."""

import pytest
import torch

from mpispeed.native import softmax
from mpispeed.native.attention import attention
from mpispeed.native.cuda import launcher, philox
from mpispeed.native.softmax import causal_softmax, masked_softmax
from tests.helpers.cuda_host import HostLauncher

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Rows of one lane, of parts of a warp, a warp, a block, a block in several tiles; with and without wide accesses.
COLUMNS = [1, 3, 8, 31, 32, 33, 128, 200, 257, 512, 513, 1000, 1032]
SEED = torch.tensor(1 << 61 | 12345)


def bound(dtype, columns):
    """Of a probability: half a unit of storage, and fp32 sums of `columns` terms below 1 with exponentials."""
    return torch.finfo(dtype).eps + 4 * columns**0.5 * torch.finfo(torch.float32).eps


@pytest.fixture(params=[False, True], ids=["in order", "in reverse"])
def host(request):
    """Every kernel has to give the same in both orders of warps."""
    running = HostLauncher(is_reversed=request.param)
    with launcher.standing_in(running):
        yield running


def masks(batch, queries, keys, dtype):
    generator = torch.Generator().manual_seed(keys)
    holes = torch.rand(batch, 1, 1, keys, generator=generator) < 0.3
    return {
        "none": None,
        "row": torch.where(holes, -10000.0, 0.0).to(dtype),
        "float": torch.randn(batch, 1, queries, keys, generator=generator),
        "bool": ~holes,
        "column": torch.randn(queries, 1, generator=generator).to(dtype),
    }


def reference(x, mask, scale, is_causal):
    z = x.double() * scale
    if mask is not None:
        z = z.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else z + mask.double()
    if is_causal:
        q, k = x.shape[-2:]
        z = z.masked_fill(torch.ones(q, k, dtype=torch.bool).triu(1 + k - q), -torch.inf)
    return torch.softmax(z, -1).nan_to_num(0.0)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_are_within_rounding_of_float64(host, dtype, columns):
    torch.manual_seed(columns)
    kinds = ["none", "row", "float", "bool", "column"]
    kind, is_causal = kinds[columns % 5], columns % 2 == 0
    x = (3 * torch.randn(2, 3, 5, columns)).to(dtype)
    mask = masks(2, 5, columns, dtype)[kind]
    got = masked_softmax(x, mask, scale=0.7, is_causal=is_causal)
    want = reference(x, mask, 0.7, is_causal)
    assert got.dtype == dtype
    assert (got.double() - want).abs().max() <= bound(dtype, columns)
    assert host.launched == [f"softmax_{team(columns, dtype)}_{tag(dtype)}"]


@pytest.mark.parametrize("columns", [7, 128, 384, 520, 1031])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_with_dropout_keep_what_the_twin_keeps(host, dtype, columns):
    torch.manual_seed(columns)
    x = torch.randn(2, 2, 3, columns).to(dtype)
    got, probs = softmax.run_softmax(x, None, SEED, 0.5, False, 0.3)
    kept = philox.kept(int(SEED), x.numel(), 0.3).view(x.shape)
    assert torch.equal(got != 0, kept & (probs != 0))
    assert torch.equal(got, softmax.dropout_reference(probs, SEED, 0.3))  # from stored probabilities: the same bits
    assert torch.equal(got, softmax.run_dropout(probs, SEED, 0.3))
    assert (probs.double() - reference(x, None, 0.5, False)).abs().max() <= bound(dtype, columns)
    assert len(host.launched) == 2


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_kernels_are_within_rounding_of_float64(host, dtype, columns):
    torch.manual_seed(columns)
    is_causal, ratio = columns % 3 == 0, 0.2 if columns % 2 else 0.0
    probs = reference(torch.randn(2, 2, 4, columns), None, 1.0, is_causal).to(dtype)
    grad = torch.randn(probs.shape).to(dtype)
    got = softmax.run_softmax_backward(grad, probs, SEED, 0.7, is_causal, ratio)
    want = softmax.softmax_backward_reference(grad.double(), probs.double(), SEED, 0.7, is_causal, ratio)
    largest = grad.abs().max().double() / (1 - ratio)
    assert (got.double() - want).abs().max() <= bound(dtype, columns) * largest
    assert host.launched == [f"softmax_grad_{'drop_' if ratio else ''}{team(columns, dtype)}_{tag(dtype)}"]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("ratio", "columns"), [(0.0, 9000), (0.4, 9000), (0.3, 8201)])
def test_rows_longer_than_a_block_are_walked_over(host, is_causal, ratio, columns):
    torch.manual_seed(0)
    x = torch.randn(2, columns, dtype=torch.bfloat16)
    mask = torch.where(torch.rand(columns) < 0.5, -torch.inf, 0.0)
    got, probs = softmax.run_softmax(x, mask, SEED, 1.0, is_causal, ratio)
    probs = probs if ratio else got
    assert (probs.double() - reference(x, mask, 1.0, is_causal)).abs().max() <= bound(torch.bfloat16, columns)
    grad = torch.randn_like(x)
    dx = softmax.run_softmax_backward(grad, probs, SEED, 1.0, is_causal, ratio)
    want = softmax.softmax_backward_reference(grad.double(), probs.double(), SEED, 1.0, is_causal, ratio)
    assert (dx.double() - want).abs().max() <= bound(torch.bfloat16, columns) * 10
    assert all("long" in name for name in host.launched)


def test_a_factor_divides_as_a_division():
    for by in [1, 2, 3, 5, 7, 16, 119, 128, 16384, 2**30 + 1, 2**31 - 1]:
        _, factor, shift = softmax._divisor(by)
        assert factor < 2**32
        for n in (0, 1, by - 1, by, 3 * by - 1, 3 * by, 2**31 - 1, (2**31 - 1) // by * by - 1):
            assert n >= 2**31 or n < 0 or (2 * n * factor >> 32) >> shift == n // by


def team(columns, dtype):
    single = "" if columns * dtype.itemsize % 16 == 0 else "single_"
    share = "8" if single or dtype.itemsize > 2 else "16"  # of short rows
    return single + (share if columns <= 256 else "16" if columns <= 512 and not single else "block")


def tag(dtype):
    return {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


@pytest.mark.parametrize("on_kernel", [False, True])
class TestMasking:
    @pytest.fixture(autouse=True)
    def where(self, on_kernel):
        if not on_kernel:
            yield
            return
        with launcher.standing_in(HostLauncher()):
            yield

    @pytest.mark.parametrize("mask", [torch.zeros(1, 1, 1, 40, dtype=torch.bool), torch.full((40,), -torch.inf)])
    def test_a_row_in_which_all_is_masked_is_zero(self, mask):
        x = torch.randn(2, 2, 3, 40, requires_grad=True)
        out = masked_softmax(x, mask)
        assert torch.equal(out, torch.zeros_like(out))
        out.sum().backward()
        assert torch.equal(x.grad, torch.zeros_like(x))

    def test_large_negative_numbers_in_the_mask_attend_evenly(self):
        out = masked_softmax(torch.zeros(1, 1, 2, 8), torch.full((8,), -10000.0))
        assert torch.equal(out, torch.full_like(out, 1 / 8))

    @pytest.mark.parametrize("shape", [(2, 3, 5, 24), (6, 5, 24), (5, 24)])
    def test_masks_of_every_shape_that_broadcasts(self, shape):
        x = torch.randn(shape)
        for kept in range(1 << len(shape)):
            mask = torch.randn([size if kept >> i & 1 else 1 for i, size in enumerate(shape)])
            for other in (mask, mask[0] if mask.shape[0] == 1 else mask, mask.double(), mask > -0.5):
                got = masked_softmax(x, other)
                assert (got.double() - reference(x, other, 1.0, False)).abs().max() <= bound(torch.float32, 24)

    def test_the_upper_triangle_is_zero_whatever_stands_there(self):
        x = torch.randn(2, 6, 600)
        upper = torch.ones(6, 600, dtype=torch.bool).triu(595)
        clean = causal_softmax(x)
        dirty = causal_softmax(x.masked_fill(upper, torch.nan))
        assert torch.equal(clean, dirty)
        assert not clean[:, upper].any()
        grad = torch.randn(2, 6, 600)
        want = softmax.run_softmax_backward(grad, clean, None, 1.0, True, 0.0)
        got = softmax.run_softmax_backward(grad.masked_fill(upper, torch.inf), clean, None, 1.0, True, 0.0)
        assert torch.equal(got, want)

    def test_first_queries_without_any_key_are_zero(self):
        out = causal_softmax(torch.randn(5, 3))
        assert not out[:2].any()
        torch.testing.assert_close(out[2:].sum(-1), torch.ones(3))

    def test_not_a_number_stays_in_its_row(self):
        x = torch.randn(3, 300)
        x[1, 5] = torch.nan
        assert masked_softmax(x).isnan().all(-1).tolist() == [False, True, False]
        assert masked_softmax(torch.full((2, 33), torch.nan)).isnan().all()

    def test_large_scores_do_not_overflow(self):
        x = torch.tensor([[60000.0, 59999.0, -60000.0, 0.0]])
        torch.testing.assert_close(masked_softmax(x), torch.softmax(x, -1))

    @pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (2, 3, 0)])
    def test_empty_scores_work(self, shape):
        x = torch.randn(shape, requires_grad=True)
        masked_softmax(x, ratio=0.1).sum().backward()
        assert x.grad.shape == shape

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_slices_that_begin_anywhere_give_the_same(self, dtype):
        flat = torch.randn(2 * 3 * 64 + 1).to(dtype)
        x, mask = flat[1:].view(2, 3, 64), torch.randn(65).to(dtype)[1:]
        torch.testing.assert_close(masked_softmax(x, mask), masked_softmax(x.clone(), mask.clone()))
        strided = flat[:-1].view(2, 64, 3).transpose(1, 2)
        torch.testing.assert_close(masked_softmax(strided), masked_softmax(strided.contiguous()))


class TestFace:
    def test_a_seed_repeats_the_dropout_and_torch_seeds_draw_it(self):
        x = torch.randn(4, 50)
        assert torch.equal(masked_softmax(x, ratio=0.5, seed=SEED), masked_softmax(x, ratio=0.5, seed=SEED))
        torch.manual_seed(3)
        first, second = masked_softmax(x, ratio=0.5), masked_softmax(x, ratio=0.5)
        assert not torch.equal(first, second)
        torch.manual_seed(3)
        assert torch.equal(first, masked_softmax(x, ratio=0.5))

    def test_no_random_numbers_without_dropout(self):
        before = torch.get_rng_state()
        masked_softmax(torch.randn(4, 50, generator=torch.Generator()), ratio=0.5, training=False)
        masked_softmax(torch.randn(4, 50, generator=torch.Generator()))
        assert torch.equal(before, torch.get_rng_state())

    def test_gradients_are_those_of_differences(self):
        x = torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True)
        mask = torch.randn(2, 1, 1, 4, dtype=torch.float64)
        for kwargs in ({"mask": mask}, {"ratio": 0.3, "seed": SEED}, {"is_causal": True, "scale": 0.3}):
            assert torch.autograd.gradcheck(lambda x, kwargs=kwargs: masked_softmax(x, **kwargs), (x,))

    def test_the_operators_hold_to_torchs_rules(self):
        x = torch.randn(2, 2, 3, 8, requires_grad=True)
        q, k, v = (torch.randn(2, 2, 3, 4, requires_grad=True) for _ in range(3))
        mask = torch.randn(2, 1, 1, 8)
        for ratio in (0.0, 0.3):
            torch.library.opcheck(torch.ops.mpispeed.masked_softmax.default, (x, mask, SEED, 0.5, False, ratio))
            for keeps in (True, False):
                args = (q, k, v, mask[..., :3], SEED, 0.5, False, ratio, keeps)
                torch.library.opcheck(torch.ops.mpispeed.attention.default, args)

    def test_the_compiler_takes_it_whole(self):
        x = torch.randn(2, 2, 8, 8, requires_grad=True)
        compiled = torch.compile(lambda x: causal_softmax(x, ratio=0.2, seed=SEED), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), causal_softmax(x, ratio=0.2, seed=SEED), rtol=0, atol=0)

    def test_what_does_not_fit_is_said(self):
        x = torch.randn(2, 3, 4, 5)
        with pytest.raises(ValueError, match=r"mask of shape \(2, 1, 1, 4\) does not broadcast"):
            masked_softmax(x, torch.zeros(2, 1, 1, 4))
        with pytest.raises(ValueError, match=r"the mask is torch.int64; expected floats"):
            masked_softmax(x, torch.zeros(5, dtype=torch.int64))
        with pytest.raises(ValueError, match="expected 2 to 4 dims"):
            masked_softmax(x[0, 0, 0])
        with pytest.raises(ValueError, match=r"a dropout ratio is 1.0"):
            masked_softmax(x, ratio=1.0)
        with pytest.raises(ValueError, match=r"expected .batch, heads, queries or keys, width"):
            attention(x, x, x[0])


class TestAttention:
    @pytest.mark.parametrize("keeps", [True, False])
    def test_gradients_are_those_of_differences(self, keeps):
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 5, 5))
        mask = torch.randn(2, 1, 1, 5, dtype=torch.float64)

        def of(q, k, v):
            return attention(q, k, v, mask, ratio=0.3, seed=SEED, keeps_dropped=keeps)

        assert torch.autograd.gradcheck(of, (q, k, v))

    def test_without_dropout_it_is_torchs(self):
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 2, 7, 4, dtype=torch.float64) for _ in range(3))
        mask = torch.randn(2, 1, 1, 7, dtype=torch.float64)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        torch.testing.assert_close(attention(q, k, v, mask), want, rtol=0, atol=1e-14)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.testing.assert_close(attention(q, k, v, is_causal=True), want, rtol=0, atol=1e-14)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_computing_the_dropout_again_changes_no_bit(self, host, dtype):
        found = []
        for keeps in (True, False):
            torch.manual_seed(0)
            q, k, v = (torch.randn(2, 2, 24, 8).to(dtype).requires_grad_() for _ in range(3))
            out = attention(q, k, v, ratio=0.3, seed=SEED, keeps_dropped=keeps)
            found.append([out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        assert any(name.startswith("dropout") for name in host.launched)

    def test_casts_come_before_it(self):
        q, k, v = (torch.randn(1, 1, 3, 4, dtype=d) for d in (torch.bfloat16, torch.float32, torch.bfloat16))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert attention(q, k, v).dtype == torch.float32
