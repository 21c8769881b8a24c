"""Optimizers and the global norm on a GPU: the bits of the host loops, streams, sizes beyond 2^31."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mpispeed.native.device_norm import norm_and_finite, norm_and_finite_reference
from mpispeed.native.device_optim import CHUNK, DeviceTable, update_row
from mpispeed.native.multi_tensor_host import STATE_NAMES, HostTable, Row
from mpispeed.optim import FusedAdagrad, FusedAdam, FusedLamb, FusedLion
from mpispeed.optim.adagrad import adagrad_terms
from mpispeed.optim.adam import adam_terms
from mpispeed.optim.lamb import lamb_terms
from mpispeed.optim.lion import lion_terms
from mpispeed.optim.onebit_params import onebit_terms
from tests.zoo import has_same_bits

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# (parameter, state, gradient, copy)
WIDE = [(F32, F32, grad, out) for grad in (F32, BF16, FP16) for out in (None, BF16, FP16)]
LOW = [(low, state, grad, None) for low in (BF16, FP16) for state in (F32, low) for grad in (F32, low)]
SIZES = [(1027, 0), (61, 3), (0, 0), (1, 1), (2 * CHUNK + 5, 0), (CHUNK + 2, 1), (1 << 20, 0)]


def terms_of(rule, decoupled=True, step=7, weight_decay=0.1):
    hyper = {"lr": 1e-2, "weight_decay": weight_decay, "decoupled": decoupled, "grad_scale": 0.25}
    if rule == "lion":
        return lion_terms(betas=(0.9, 0.95), **hyper)
    hyper |= {"step": step, "eps": 1e-6}
    if rule == "adagrad":
        return adagrad_terms(**hyper)
    return (adam_terms if rule == "adam" else lamb_terms)(betas=(0.9, 0.95), **hyper)


def make_rows(rule, dtypes, sizes=SIZES):
    source, rows = torch.Generator().manual_seed(0), []
    param, state, grad, out = dtypes
    for at, (count, offset) in enumerate(sizes):

        def made(dtype, factor, count=count, offset=offset):
            return (torch.randn(count + offset, generator=source) * factor).to(dtype)[offset:]

        states = [made(state, 0.1) for _ in STATE_NAMES[rule]]
        if rule != "lion":
            states[-1].abs_()
        low = None if out is None else torch.zeros(count + offset, dtype=out)[offset:]
        rows.append(Row(made(param, 1.0), tuple(states), made(grad, 8.0), low, at % 2))
    return rows


def moved(x, device):
    """A copy on the device that is as far from alignment as `x`."""
    if x is None:
        return None
    buffer = torch.zeros(x.storage_offset() + x.numel(), dtype=x.dtype, device=device)[x.storage_offset() :]
    return buffer.copy_(x)


def on_device(rows, device):
    return [
        Row(
            moved(row.param, device),
            tuple(moved(state, device) for state in row.states),
            moved(row.grad, device),
            moved(row.out, device),
            row.lot,
        )
        for row in rows
    ]


def assert_same(row, other):
    for a, b in zip((row.param, *row.states, row.out), (other.param, *other.states, other.out), strict=True):
        if a is not None:
            assert has_same_bits(a.cpu(), b.cpu())


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtypes", WIDE + LOW, ids=str)
@pytest.mark.parametrize("rule", ["adam", "adagrad", "lion"])
def test_the_bits_of_the_host_loops(device, rule, dtypes, decoupled):
    host = make_rows(rule, dtypes)
    rows = on_device(host, device)
    terms = [terms_of(rule, decoupled), terms_of(rule, decoupled, weight_decay=0.0)]
    table = DeviceTable(rule, rows)
    assert table.is_compiled
    table.run(terms)
    HostTable(rule, host).run(terms)
    for row, other in zip(rows, host, strict=True):
        assert_same(row, other)


@pytest.mark.parametrize("out", [F32, BF16, FP16])
@pytest.mark.parametrize(
    "rule", ["onebit_adam", "zero_one_coded", "zero_one_local", "zero_one_drift", "zero_one_settle"]
)
def test_the_bits_of_the_rules_of_one_bit(device, rule, out):
    out = None if out == F32 and rule != "zero_one_local" else out
    host = make_rows(rule, (F32, F32, F32, out))
    for row in host:
        variance = row.grad if rule in ("onebit_adam", "zero_one_drift") else row.states[-1]
        variance.abs_()[::3] = 0.0  # where nothing was seen yet
    rows = on_device(host, device)
    terms = [onebit_terms(lr=0.01, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, grad_scale=0.25, rate_sum=0.3)] * 2
    table = DeviceTable(rule, rows)
    assert table.is_compiled
    table.run(terms)
    HostTable(rule, host).run(terms)
    for row, other in zip(rows, host, strict=True):
        assert_same(row, other)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtypes", WIDE + LOW, ids=str)
def test_lamb(device, dtypes, decoupled):
    host = make_rows("lamb", dtypes, SIZES[:6])
    rows, ends = on_device(host, device), make_rows("lamb", dtypes, SIZES[:6])
    terms = [terms_of("lamb", decoupled), terms_of("lamb", decoupled, weight_decay=0.0)]
    ratios = DeviceTable("lamb", rows).run(terms).tolist()
    wanted = HostTable("lamb", host).run(terms)
    # Sums in fp64, each addition rounded once; then, with the ratio given, everything has the bits of the host.
    for ratio, other, row, end in zip(ratios, wanted, rows, ends, strict=True):
        assert math.isclose(ratio, other, rel_tol=max(row.param.numel(), 1) * 2.0**-53)
        HostTable("lamb", [end._replace(lot=0)]).run([terms[row.lot]._replace(least=ratio, most=ratio)])
        assert_same(row, end)


@pytest.mark.parametrize("dtype", [F32, BF16, FP16])
def test_norm(device, dtype):
    tensors = [row.grad for row in make_rows("adam", (F32, F32, dtype, None))]
    there = [moved(x, device) for x in tensors]
    squares, is_finite = norm_and_finite(there)
    assert squares.device == is_finite.device == device
    exact = math.fsum(value * value for x in tensors for value in x.double().tolist())
    assert bool(is_finite)
    assert math.isclose(float(squares), exact, rel_tol=sum(x.numel() for x in tensors) * 2.0**-53)
    assert float(norm_and_finite(there)[0]) == float(squares)
    there[4][CHUNK] = math.inf
    assert not bool(norm_and_finite(there)[1])
    assert not bool(norm_and_finite_reference(there)[1])


def test_more_elements_than_32_bits_count(device):
    count = 2**31 + 5
    if torch.cuda.mem_get_info()[0] < 10 * count:
        pytest.skip("needs 21 GB of free device memory")
    x = torch.ones(count, dtype=BF16, device=device)
    assert float(norm_and_finite([x])[0]) == count
    lion = Row(x, (torch.zeros_like(x),), x.clone())
    DeviceTable("lion", [lion]).run([lion_terms(lr=0.5, betas=(0.9, 0.9), weight_decay=0.0)])
    assert bool((x == 0.5).all())


@pytest.mark.parametrize("is_side", [False, True])
def test_order_on_the_current_stream(device, is_side):
    stream = torch.cuda.Stream() if is_side else torch.cuda.current_stream()
    param, states = torch.zeros(1 << 22, device=device), [torch.zeros(1 << 22, device=device) for _ in range(2)]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(1, 6):
            # The gradient is made on the stream just before, and its memory is used again just after.
            torch.cuda._sleep(1_000_000)
            grad = torch.full((1 << 22,), float(step), device=device)
            terms = adam_terms(step=step, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, decoupled=True)
            update_row("adam", Row(param, tuple(states), grad), terms)
            del grad
            torch.full((1 << 22,), math.nan, device=device)
    stream.synchronize()
    host = [torch.zeros(1) for _ in range(3)]
    for step in range(1, 6):
        terms = adam_terms(step=step, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, decoupled=True)
        HostTable("adam", [Row(host[0], (host[1], host[2]), torch.tensor([float(step)]))]).run([terms])
    assert bool((param == float(host[0])).all())


def test_fused_adam_is_that_of_torch(device):
    params = [nn.Parameter(torch.randn(count, device=device)) for count in (3, 1000, 100_000, 0)]
    plain = [nn.Parameter(param.detach().clone()) for param in params]
    ours = FusedAdam(params, lr=1e-2, weight_decay=0.1)
    theirs = torch.optim.AdamW(plain, lr=1e-2, weight_decay=0.1, fused=True)
    for _ in range(5):
        for param, other in zip(params, plain, strict=True):
            param.grad = torch.randn_like(param)
            other.grad = param.grad.clone()
        ours.step()
        theirs.step()
    for param, other in zip(params, plain, strict=True):  # five steps of 0.01 in fp32
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("cls", [FusedAdam, FusedLamb, FusedAdagrad, FusedLion])
def test_a_step_does_not_wait_for_the_device(device, cls):
    params = [nn.Parameter(torch.randn(1000, device=device)) for _ in range(3)]
    optimizer = cls(params, lr=1e-2, **({"max_grad_norm": 1.0} if cls is FusedLamb else {}))
    copies = [torch.zeros(1000, dtype=BF16, device=device) for _ in params]
    scale = torch.tensor(0.5, device=device)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step(lowp_out=copies, grad_scale=scale)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step(lowp_out=copies, grad_scale=scale)
        norm_and_finite([param.grad for param in params])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for param, copied in zip(params, copies, strict=True):
        assert torch.equal(copied, param.detach().bfloat16())
