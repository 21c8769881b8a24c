"""Kernels of the optimizers, run on the host: the bits of the host loops, LAMB's ratios, tables that are kept."""

from __future__ import annotations

import math

import pytest
import torch

from mpispeed.base.errors import UsageError
from mpispeed.native.cuda import launcher
from mpispeed.native.device_optim import CHUNK, DeviceTable, kernels_of, pack_terms, update_row
from mpispeed.native.flat import Terms
from mpispeed.native.multi_tensor_host import STATE_NAMES, HostTable, Row
from mpispeed.optim.adagrad import adagrad_terms
from mpispeed.optim.adam import adam_terms
from mpispeed.optim.lamb import lamb_terms
from mpispeed.optim.lion import lion_terms
from mpispeed.optim.onebit_params import onebit_terms
from tests.helpers.cuda_host import HostLauncher
from tests.zoo import has_same_bits

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# (parameter, state, gradient, copy)
WIDE = [(F32, F32, grad, out) for grad in (F32, BF16, FP16) for out in (None, BF16, FP16)]
LOW = [(low, state, grad, None) for low in (BF16, FP16) for state in (F32, low) for grad in (F32, low)]
BETAS = (0.9, 0.95)
DECAYS = {"plain": (0.0, True), "decoupled": (0.1, True), "l2": (0.1, False)}
SIZES = [(1027, 0), (61, 3), (0, 0), (1, 1), (2 * CHUNK + 5, 0), (CHUNK + 2, 1)]  # (elements, elements before them)


def terms_of(rule, decay, step=7, grad_scale=0.25, **more):
    weight_decay, decoupled = DECAYS[decay]
    hyper = {"lr": 1e-2, "weight_decay": weight_decay, "decoupled": decoupled, "grad_scale": grad_scale, **more}
    if rule == "lion":
        return lion_terms(betas=BETAS, **hyper)
    hyper = {"step": step, "eps": 1e-6, **hyper}
    if rule == "adagrad":
        return adagrad_terms(**hyper)
    return (adam_terms if rule == "adam" else lamb_terms)(betas=BETAS, **hyper)


def make_row(rule, count, offset, dtypes, lot=0, seed=0):
    """Tensors that start `offset` elements into their storage, so that some are not aligned."""
    source = torch.Generator().manual_seed(seed + count)
    param, state, grad, out = dtypes

    def made(dtype, factor=1.0):
        return (torch.randn(count + offset, generator=source) * factor).to(dtype)[offset:]

    states = tuple(
        made(state, 0.1).square() if name in ("exp_avg_sq", "sum") else made(state, 0.1) for name in STATE_NAMES[rule]
    )
    states = tuple(torch.cat([torch.zeros(offset, dtype=state), x])[offset:] for x in states)
    low = None if out is None else torch.zeros(count + offset, dtype=out)[offset:]
    return Row(made(param), states, made(grad, 8.0), low, lot)


def clone(row):
    return row._replace(
        param=row.param.clone(),
        states=tuple(state.clone() for state in row.states),
        out=None if row.out is None else row.out.clone(),
    )


def assert_same(first, second):
    pairs = {"param": (first.param, second.param), "out": (first.out, second.out)}
    pairs |= {f"state {n}": pair for n, pair in enumerate(zip(first.states, second.states, strict=True))}
    for name, (a, b) in pairs.items():
        if a is not None:
            assert has_same_bits(a, b), f"{name} of {a.numel()} elements"


@pytest.fixture(params=[False, True], ids=["", "reversed"])
def host(request):
    found = HostLauncher(is_reversed=request.param)
    with launcher.standing_in(found):
        yield found


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dtypes", WIDE + LOW, ids=str)
@pytest.mark.parametrize("rule", ["adam", "adagrad", "lion"])
def test_kernels_give_the_bits_of_the_host_loops(rule, dtypes, decay):
    rows = [make_row(rule, count, offset, dtypes, lot=at % 2) for at, (count, offset) in enumerate(SIZES)]
    expected, before = [clone(row) for row in rows], [row.param.clone() for row in rows]
    terms = [terms_of(rule, decay), terms_of(rule, decay, step=1, grad_scale=3.0)]
    HostTable(rule, expected).run(terms)
    host = HostLauncher()
    with launcher.standing_in(host):
        table = DeviceTable(rule, rows)
        assert table.is_compiled
        assert table.run(terms) == []
    assert host.launched == [*kernels_of(rule, rows[0])] * 2  # one launch for each lot
    for row, other, old in zip(rows, expected, before, strict=True):
        assert not row.param.numel() or not torch.equal(row.param, old)
        assert_same(row, other)


@pytest.mark.parametrize("is_inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dtypes", WIDE + LOW, ids=str)
def test_lamb_is_that_of_the_host(dtypes, decay, is_inside):
    rows = [make_row("lamb", count, offset, dtypes) for count, offset in SIZES[:4]]
    expected, ends = [clone(row) for row in rows], [clone(row) for row in rows]
    terms = terms_of("lamb", decay, is_eps_inside=is_inside)
    wanted = HostTable("lamb", expected).run([terms])
    host = HostLauncher()
    with launcher.standing_in(host):
        ratios = DeviceTable("lamb", rows).run([terms]).tolist()
    first, last = kernels_of("lamb", rows[0])
    assert host.launched == [first, "lamb_ratios", last]
    assert ratios[2] == 1.0  # of an empty tensor
    assert len(set(wanted)) > 2
    # Sums of squares of fp32 numbers in fp64, each addition rounded once: relatively below elements * 2^-53.
    for ratio, other, row in zip(ratios, wanted, rows, strict=True):
        assert math.isclose(ratio, other, rel_tol=max(row.param.numel(), 1) * 2.0**-53)
    # With the ratio given, everything else has the bits of the host.
    for ratio, row, end in zip(ratios, rows, ends, strict=True):
        HostTable("lamb", [end]).run([terms._replace(least=ratio, most=ratio)])
        assert_same(row, end)


@pytest.mark.parametrize("dtypes", [(F32, F32, BF16, BF16), (BF16, BF16, BF16, None)], ids=str)
def test_sums_depend_neither_on_the_order_of_warps_nor_on_alignment(host, dtypes):
    count = CHUNK + 1029
    rows = [make_row("lamb", count, 0, dtypes)]
    moved = []
    for offset in (1, 3):
        buffers = [torch.zeros(count + offset, dtype=x.dtype) for x in (rows[0].param, *rows[0].states, rows[0].grad)]
        for buffer, x in zip(buffers, (rows[0].param, *rows[0].states, rows[0].grad), strict=True):
            buffer[offset:] = x
        param, first, second, grad = (buffer[offset:] for buffer in buffers)
        moved.append(Row(param, (first, second), grad, None))
    rows = [rows[0]._replace(out=None), *moved]
    ratios = DeviceTable("lamb", rows).run([terms_of("lamb", "decoupled")]).tolist()
    assert ratios[0] == ratios[1] == ratios[2]
    assert_same(rows[0], rows[1])
    assert_same(rows[0], rows[2])
    for row in rows[:1]:  # a table of its own: the bits do not depend on what else is in it
        again = make_row("lamb", count, 0, dtypes)._replace(out=None)
        assert DeviceTable("lamb", [again]).run([terms_of("lamb", "decoupled")]).tolist() == ratios[:1]
        assert_same(again, row)


@pytest.mark.parametrize("rule", ["adam", "adagrad", "lion", "lamb"])
def test_steps_stay_close_to_fp64(host, rule):
    row = make_row(rule, 3000, 1, (F32, F32, F32, None))
    p, states, g = row.param.double(), [x.double() for x in row.states], 0.25 * row.grad.double()
    with_decay = p - 1e-3 * p
    if rule == "adagrad":
        states = [states[0] + g * g]
        p = with_decay - 1e-2 * g / (states[0].sqrt() + 1e-6)
    elif rule == "lion":
        p = with_decay - 1e-2 * torch.sign(0.9 * states[0] + 0.1 * g)
        states = [0.95 * states[0] + 0.05 * g]
    else:
        states = [0.9 * states[0] + 0.1 * g, 0.95 * states[1] + 0.05 * g * g]
        first, second = 1 - 0.9**7, 1 - 0.95**7
        if rule == "adam":
            p = with_decay - 1e-2 * (states[0] / first) / ((states[1] / second).sqrt() + 1e-6)
        else:
            q = states[0] / (states[1].sqrt() + 1e-6) + 0.1 * p
            p = p - 1e-2 * second**0.5 / first * (p.norm() / q.norm()).clamp(0.01, 10.0) * q
    DeviceTable(rule, [row]).run([terms_of(rule, "decoupled")])
    # One rounding of a parameter below 8, and 1e-6 of a step of at most 0.1.
    torch.testing.assert_close(row.param.double(), p, rtol=1e-6, atol=2e-6)
    for got, wanted in zip(row.states, states, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-6)


ONEBIT = ["onebit_adam", "zero_one_coded", "zero_one_local", "zero_one_drift", "zero_one_settle"]


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("rule", "out"),
    [(rule, out) for rule in ONEBIT for out in (F32 if rule == "zero_one_local" else None, BF16, FP16)],
    ids=str,
)
def test_rules_of_one_bit_give_the_bits_of_the_host_loops(rule, out, decay):
    rows = [make_row(rule, count, offset, (F32, F32, F32, out)) for count, offset in SIZES]
    for row in rows:
        # Where the variance is 0 nothing was seen yet.
        variance = row.grad if rule in ("onebit_adam", "zero_one_drift") else row.states[-1]
        if rule in ("onebit_adam", "zero_one_drift"):
            variance.abs_()
        variance[::3] = 0.0
    expected = [clone(row) for row in rows]
    terms = onebit_terms(lr=0.01, betas=BETAS, eps=1e-6, weight_decay=decay, grad_scale=0.25, rate_sum=0.3)
    HostTable(rule, expected).run([terms])
    host = HostLauncher()
    with launcher.standing_in(host):
        table = DeviceTable(rule, rows)
        assert table.is_compiled
        table.run([terms])
    assert len(host.launched) == 1
    for row, other in zip(rows, expected, strict=True):
        assert_same(row, other)


def test_thousands_of_small_tensors_and_a_large_one_are_one_launch():
    # The large one is the third, so that every row after it begins in the middle of the table of chunks.
    counts = [3, 5, 4 * CHUNK + 1, *range(1000)]
    rows = [make_row("adam", count, 0, (F32, F32, F32, None), seed=1) for count in counts]
    expected = [clone(row) for row in rows]
    HostTable("adam", expected).run([terms_of("adam", "decoupled")])
    host = HostLauncher()
    with launcher.standing_in(host):
        DeviceTable("adam", rows).run([terms_of("adam", "decoupled")])
    assert host.launched == ["adam_f32"]
    for row, other in zip(rows, expected, strict=True):
        assert_same(row, other)


@pytest.mark.parametrize("rule", ["adam", "lamb"])
def test_rows_of_all_dtypes_in_one_table(rule):
    every = [*WIDE[:2], *LOW[:3], (torch.float64, torch.float64, torch.float64, None), (F32, F32, F32, F32)]
    rows = [make_row(rule, 100 + at, at, dtypes, lot=at % 2) for at, dtypes in enumerate(every)]
    expected = [clone(row) for row in rows]
    terms = [terms_of(rule, "l2"), terms_of(rule, "plain", step=2)]
    wanted = HostTable(rule, expected).run(terms)
    with launcher.standing_in(HostLauncher()):
        table = DeviceTable(rule, rows)
        assert not table.is_compiled  # there is no kernel for the last two
        ratios = table.run(terms)
    if rule == "lamb":
        assert torch.allclose(ratios, torch.tensor(wanted, dtype=torch.float64), rtol=1e-13, atol=0)
        return
    assert ratios == []
    for row, other in zip(rows, expected, strict=True):
        assert_same(row, other)


@pytest.mark.parametrize("rule", ["adam", "lamb"])
@pytest.mark.parametrize("has_kernels", [True, False])
def test_a_scale_that_is_on_the_device(rule, has_kernels):
    rows = [make_row(rule, 50, 0, (F32, F32, F32, None), lot=lot) for lot in (0, 1)]
    expected = [clone(row) for row in rows]
    terms = [terms_of(rule, "l2"), terms_of(rule, "l2")]
    # 0.25 * 0.375 is exact, so both ways round alike.
    wanted = HostTable(rule, expected).run([terms[0]._replace(grad_scale=0.09375), terms[1]])
    scales = [torch.tensor([0.375]), None]
    if has_kernels:
        with launcher.standing_in(HostLauncher()):
            ratios = DeviceTable(rule, rows).run(terms, scales=scales)
    else:
        ratios = DeviceTable(rule, rows).run(terms, scales=scales)
    assert list(map(float, ratios)) == pytest.approx(wanted, rel=1e-14)
    for row, other in zip(rows, expected, strict=True):
        torch.testing.assert_close(row.param, other.param, rtol=1e-7, atol=0)
        assert torch.equal(row.states[1], other.states[1])
    with pytest.raises(ValueError, match=r"scale of gradients is a torch\.float64 tensor of 1 elements on cpu"):
        DeviceTable(rule, rows).run(terms, scales=[torch.tensor(1.0, dtype=torch.float64), None])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e38])
@pytest.mark.parametrize("rule", ["adam", "adagrad", "lion", "lamb"])
def test_what_is_not_finite_gets_through(rule, value):
    row = make_row(rule, 40, 0, (F32, F32, F32, BF16))
    row.grad[7] = value
    expected = clone(row)
    HostTable(rule, [expected]).run([terms_of(rule, "decoupled")])
    with launcher.standing_in(HostLauncher()):
        DeviceTable(rule, [row]).run([terms_of(rule, "decoupled")])
    for got, wanted in zip((row.param, *row.states), (expected.param, *expected.states), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0, equal_nan=True)


def test_what_is_beyond_the_end_counts_for_nothing(host):
    # Without eps the direction of an element that is not there would be 0 / 0.
    for count in (1, 2, 3, 4 * 256 + 1, CHUNK + 3):
        row = make_row("lamb", count, 0, (F32, F32, F32, None))
        expected = clone(row)
        terms = terms_of("lamb", "decoupled", eps=0.0)
        ratios = DeviceTable("lamb", [row]).run([terms])
        assert ratios.tolist() == pytest.approx(HostTable("lamb", [expected]).run([terms]), rel=1e-11)


def test_out_may_be_the_memory_of_the_gradient():
    row = make_row("adam", CHUNK + 7, 0, (F32, F32, BF16, None))
    expected = clone(row._replace(out=torch.zeros_like(row.grad)))
    HostTable("adam", [expected]).run([terms_of("adam", "decoupled")])
    with launcher.standing_in(HostLauncher()):
        shared = row._replace(out=row.grad)
        DeviceTable("adam", [shared]).run([terms_of("adam", "decoupled")])
    assert_same(shared, expected)


def test_a_table_goes_on_with_other_gradients(monkeypatch):
    uploads = []
    from mpispeed.native import device_optim

    real = device_optim.upload
    monkeypatch.setattr(device_optim, "upload", lambda array, device: uploads.append(len(array)) or real(array, device))
    rows = [make_row("adam", count, 0, (F32, F32, F32, None)) for count in (10, 200)]
    expected = [clone(row) for row in rows]
    params, grads = [row.param for row in rows], [row.grad for row in rows]
    with launcher.standing_in(HostLauncher()):
        table = DeviceTable("adam", rows)
        table.run([terms_of("adam", "plain")])
        with pytest.raises(UsageError, match="the table has no gradients"):
            table.run([terms_of("adam", "plain")])
        assert len(uploads) == 2  # rows and chunks
        assert table.take(params, grads, [])
        table.run([terms_of("adam", "plain", step=8)])
        assert len(uploads) == 2
        others = [torch.ones(10), torch.zeros(200)]
        assert table.take(params, others, [])
        table.run([terms_of("adam", "plain", step=9)])
        assert len(uploads) == 3  # rows only
        assert not table.take(params, [grads[0], grads[1].bfloat16()], [])
        assert not table.take(params, [grads[0], torch.zeros(400)[::2]], [])
        assert not table.take(params, grads[::-1], [])
        assert not table.take([params[0].clone(), params[1]], grads, [])
    for step, given in ((7, grads), (8, grads), (9, others)):
        rows_now = [row._replace(grad=grad) for row, grad in zip(expected, given, strict=True)]
        HostTable("adam", rows_now).run([terms_of("adam", "plain", step=step)])
    for row, other in zip(rows, expected, strict=True):
        assert_same(row, other)


def test_no_rows():
    assert DeviceTable("adam", []).run([]) == []
    assert DeviceTable("lamb", []).run([]).shape == (0,)


def test_tensors_that_cannot_be_updated_together():
    row = make_row("adam", 4, 0, (F32, F32, F32, None))
    with pytest.raises(ValueError, match="grad has 3 elements but master has 4"):
        DeviceTable("adam", [row._replace(grad=torch.zeros(3))])
    with pytest.raises(ValueError, match="grad is on meta"):
        DeviceTable("adam", [row._replace(grad=torch.zeros(4, device="meta"))])
    with pytest.raises(ValueError, match="master and exp_avg share memory"):
        DeviceTable("adam", [row._replace(states=(row.param, row.states[1]))])
    with pytest.raises(
        TypeError, match=r"the parameter has dtype torch\.float32 and exp_avg has dtype torch\.bfloat16"
    ):
        DeviceTable("adam", [row._replace(states=tuple(x.bfloat16() for x in row.states))])


@pytest.mark.parametrize("rule", ["adam", "adagrad", "lion", "lamb"])
def test_a_single_row(rule):
    row = make_row(rule, CHUNK + 3, 1, (F32, F32, BF16, FP16))
    expected = clone(row)
    host = HostLauncher()
    for step in (7, 8):
        terms = terms_of(rule, "decoupled", step=step)
        wanted = HostTable(rule, [expected]).run([terms]) or [1.0]
        with launcher.standing_in(host):
            ratio = float(update_row(rule, row, terms))
        assert math.isclose(ratio, wanted[0], rel_tol=1e-11)
        for got, other in zip((row.param, row.out), (expected.param, expected.out), strict=True):
            # LAMB's ratio may be another one in its last bits.
            assert torch.equal(got, other) or (rule == "lamb" and torch.allclose(got, other, rtol=1e-3))
    assert len(host.launched) == 2 * (3 if rule == "lamb" else 1)


def test_without_kernels_the_twin_runs():
    rows = [make_row("adam", count, offset, (F32, F32, BF16, BF16)) for count, offset in SIZES[:3]]
    single, expected = clone(rows[0]), [clone(row) for row in rows]
    HostTable("adam", expected).run([terms_of("adam", "l2")])
    table = DeviceTable("adam", rows)
    assert not table.is_compiled
    table.run([terms_of("adam", "l2")])
    update_row("adam", single, terms_of("adam", "l2"))
    for row, other in zip([*rows, single], [*expected, expected[0]], strict=True):
        assert_same(row, other)


def test_terms_round_as_in_the_host_loops():
    assert len(pack_terms(Terms())) == 72
    huge = Terms(step_size=1e300)  # infinite in fp32
    row = make_row("adam", 5, 0, (F32, F32, F32, None))
    with launcher.standing_in(HostLauncher()):
        DeviceTable("adam", [row]).run([huge._replace(beta1=0.9, beta2=0.9)])
    assert not row.param.isfinite().any()
