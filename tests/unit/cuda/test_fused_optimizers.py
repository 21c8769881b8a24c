"""FusedAdam and its siblings: on the host by the compiled loops, on a device by kernels, which here run on the host."""

from __future__ import annotations

import copy
import io
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import mpispeed
from mpispeed.base.errors import ConfigError, UnsupportedOption, UsageError
from mpispeed.native.cuda import launcher
from mpispeed.native.device_optim import DeviceTable
from mpispeed.native.multi_tensor_host import HostTable
from mpispeed.optim import CPUAdam, CPULamb
from mpispeed.optim.fused import FusedAdagrad, FusedAdam, FusedLamb, FusedLion
from mpispeed.optim.lamb import Lamb
from mpispeed.optim.lion import Lion
from mpispeed.optim.onebit_lamb import OnebitLamb
from mpispeed.optim.rule import Window
from tests.helpers.cuda_host import HostLauncher
from tests.zoo import same_bits

ALL = [FusedAdam, FusedLamb, FusedAdagrad, FusedLion]
HALVES = [torch.bfloat16, torch.float16]
SHAPES = [(3, 5), (7,), (), (40, 30), (0,), (1000,)]


@pytest.fixture(params=["loops", "kernels"])
def way(request):
    """How parameters in host memory are updated: as always, or as if they were on a device."""
    with launcher.standing_in(HostLauncher()) if request.param == "kernels" else nullcontext():
        yield request.param


def make_params(dtype=torch.float32, shapes=SHAPES):
    source = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=source).to(dtype)) for shape in shapes]


def give_grads(params, seed, factor=1.0):
    source = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=source) * factor).to(param.dtype)


def train(optimizer, params, seeds, **options):
    for seed in seeds:
        give_grads(params, seed)
        optimizer.step(**options)


def test_public_names():
    assert mpispeed.FusedAdam is FusedAdam
    assert mpispeed.FusedLamb is FusedLamb


def test_which_table_updates(way):
    params = make_params()
    optimizer = FusedAdam(params)
    train(optimizer, params, range(1))
    assert isinstance(optimizer._prepared.table, HostTable if way == "loops" else DeviceTable)
    assert optimizer._prepared.table.is_compiled


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("is_decoupled", "reference"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_adam_is_that_of_torch(way, weight_decay, is_decoupled, reference):
    params, plain = make_params(), make_params()
    hyper = {"lr": 1e-2, "weight_decay": weight_decay}
    train(FusedAdam(params, adam_w_mode=is_decoupled, **hyper), params, range(10))
    train(reference(plain, **hyper), plain, range(10))
    for got, expected in zip(params, plain, strict=True):  # ten steps of 0.01 in fp32
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("has_correction", [True, False])
@pytest.mark.parametrize("is_decoupled", [True, False])
def test_adam_written_out(way, is_decoupled, has_correction):
    params = make_params()
    wide = [param.detach().double() for param in params]
    states = [(torch.zeros_like(p), torch.zeros_like(p)) for p in wide]
    optimizer = FusedAdam(
        params, 0.01, has_correction, (0.8, 0.9), 1e-6, is_decoupled, 0.1
    )  # positions are those of DeepSpeed
    for step in range(1, 6):
        give_grads(params, step)
        c1, c2 = (1 - beta**step if has_correction else 1.0 for beta in (0.8, 0.9))
        for index, param in enumerate(params):
            p, (m, v), g = wide[index], states[index], param.grad.double()
            g = g if is_decoupled else g + 0.1 * p
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
            move = m / c1 / ((v / c2).sqrt() + 1e-6) + (0.1 * p if is_decoupled else 0.0)
            wide[index], states[index] = p - 0.01 * move, (m, v)
        optimizer.step()
    for param, p, (m, v) in zip(params, wide, states, strict=True):
        # Each step rounds a parameter below 8 once, and is itself right to about 1e-6.
        torch.testing.assert_close(param.double(), p, rtol=1e-6, atol=3e-6)
        torch.testing.assert_close(optimizer.state[param]["exp_avg"].double(), m, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(optimizer.state[param]["exp_avg_sq"].double(), v, rtol=1e-6, atol=1e-6)
        assert optimizer.state[param]["step"] == 5


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("max_norm", [0.0, 1.0, 1e6])
def test_lamb_written_out(way, is_inside, max_norm):
    params = make_params()
    wide = [param.detach().double() for param in params]
    states = [(torch.zeros_like(p), torch.zeros_like(p)) for p in wide]
    optimizer = FusedLamb(params, 0.01, True, (0.9, 0.99), 1e-6, is_inside, 0.1, max_norm, 5.0, 0.1)
    for step in range(1, 4):
        give_grads(params, step, factor=16.0)
        scale, ratios = 16.0, []
        norm = math.sqrt(sum(float(param.grad.double().square().sum()) for param in params))
        clip = (norm / scale + 1e-6) / max_norm if max_norm else 0.0
        divisor = clip * scale if clip > 1 else scale
        for index, param in enumerate(params):
            p, (m, v), g = wide[index], states[index], param.grad.double() / divisor
            m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
            q = m / ((v + 1e-6).sqrt() if is_inside else v.sqrt() + 1e-6) + 0.1 * p
            sizes = float(p.norm()), float(q.norm())
            ratios.append(min(max(sizes[0] / sizes[1], 0.1), 5.0) if all(sizes) else 1.0)
            wide[index] = p - 0.01 * math.sqrt(1 - 0.99**step) / (1 - 0.9**step) * ratios[-1] * q
            states[index] = (m, v)
        optimizer.step(scale=scale)
        assert optimizer.get_lamb_coeffs() == pytest.approx(ratios, rel=1e-5)
    assert len(set(ratios)) > 2
    for param, p in zip(params, wide, strict=True):
        torch.testing.assert_close(param.double(), p, rtol=1e-6, atol=3e-6)


def test_lamb_takes_gradients_copies_and_norms_from_outside(way):
    params, plain = make_params(), make_params()
    hyper = {"lr": 0.01, "weight_decay": 0.1}
    optimizer = FusedLamb([{"params": params[:2]}, {"params": params[2:]}], max_grad_norm=2.0, **hyper)
    reference = FusedLamb(plain, **hyper)
    give_grads(plain, 1)
    low = [param.grad.half() for param in plain]
    copies = [torch.zeros(param.numel(), dtype=torch.float16) for param in params]
    # A norm of 32 in units of the scale, 16, is 2, and 2 is the limit: not clipped but for the 1e-6. 64 is.
    optimizer.step(
        grads=[low[:2], low[2:]],
        output_params=[copies[:2], copies[2:]],
        scale=16.0,
        grad_norms=[torch.tensor(8.0), 64.0],
    )
    for index, param in enumerate(plain):
        param.grad = low[index].float() / (16.0 if index < 2 else 32.0)
    reference.step()
    for param, expected, copied in zip(params, plain, copies, strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(copied, param.detach().half().view(-1))
    assert all(param.grad is None for param in params)


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("has_fp32_states", [True, False])
def test_low_precision_parameters(way, cls, dtype, has_fp32_states):
    params = make_params(dtype)
    wide = [nn.Parameter(param.detach().float()) for param in params]
    optimizer, reference = cls(params, lr=0.01, fp32_optimizer_states=has_fp32_states), cls(wide, lr=0.01)
    give_grads(params, 1)
    for param, other in zip(params, wide, strict=True):
        other.grad = param.grad.float()
    optimizer.step()
    reference.step()
    for param, other in zip(params, wide, strict=True):
        state, expected = optimizer.state[param], reference.state[other]
        for name in (name for name in state if name != "step"):
            assert state[name].dtype == (torch.float32 if has_fp32_states else dtype)
            assert torch.equal(state[name], expected[name].to(state[name].dtype))
        if cls is not FusedLamb:  # LAMB's direction is that of the moments as stored
            assert torch.equal(param, other.to(dtype))


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dicts_go_round(way, cls, dtype):
    params, others = make_params(dtype), make_params(dtype)
    optimizer, reference = cls(params, lr=0.01, weight_decay=0.1), cls(others, lr=0.5)
    train(optimizer, params, range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    reference.load_state_dict(torch.load(file))
    for param, other in zip(params, others, strict=True):
        other.data.copy_(param.data)
    train(optimizer, params, range(2, 4))
    train(reference, others, range(2, 4))
    for param, other in zip(params, others, strict=True):
        assert torch.equal(param, other)
        assert optimizer.state[param]["step"] == reference.state[other]["step"] == 4
        assert all(x.dtype == dtype for name, x in reference.state[other].items() if name != "step")


def test_state_dict_is_that_of_the_host_class():
    params, others = make_params(), make_params()
    optimizer, host = FusedAdam(params), CPUAdam(others)
    train(optimizer, params, range(2))
    host.load_state_dict(optimizer.state_dict())
    for param, other in zip(params, others, strict=True):
        other.data.copy_(param.data)
    train(optimizer, params, range(2, 4))
    train(host, others, range(2, 4))
    same_bits(params, others)


def test_every_parameter_counts_its_own_updates(way):
    params, plain = make_params(), make_params()
    optimizer, reference = FusedAdam(params, lr=0.1), torch.optim.AdamW(plain, lr=0.1, weight_decay=0.0)
    for step in range(4):
        give_grads(params, step)
        give_grads(plain, step)
        for both in (params, plain):
            both[1].grad = both[1].grad if step % 2 else None
        optimizer.step()
        reference.step()
    assert [optimizer.state[param]["step"] for param in params[:3]] == [4, 2, 4]
    for got, expected in zip(params, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("factor", [0.125, torch.tensor(0.125, dtype=torch.float64), torch.tensor([0.125])])
def test_scale_of_gradients_and_copies(way, cls, factor):
    params, plain = make_params(), make_params()
    give_grads(params, 1)
    give_grads(plain, 1)
    for param in params:
        param.grad.mul_(8.0)
    copies = [torch.zeros(param.shape, dtype=torch.bfloat16) for param in params]
    cls(params, lr=0.01).step(lowp_out=copies, grad_scale=factor)
    cls(plain, lr=0.01).step()
    for param, expected, copied in zip(params, plain, copies, strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-6, atol=1e-7)
        assert torch.equal(copied, param.detach().bfloat16())


def test_zero_grad(way):
    params = make_params()
    give_grads(params, 0)
    FusedAdam(params).zero_grad()
    assert all(param.grad is None for param in params)
    give_grads(params, 0)
    keeping = FusedAdam(params, set_grad_none=False)
    keeping.zero_grad()
    assert all(not param.grad.any() for param in params)
    copy.deepcopy(keeping).zero_grad()
    keeping.zero_grad(set_to_none=True)
    assert all(param.grad is None for param in params)


def test_closure_runs_with_grad():
    param = nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([param], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) == 3.0
    assert float(FusedLamb([param], lr=0.1).step(closure)) < 3.0


def test_what_is_not_finite_is_not_skipped(way):
    params = make_params()
    optimizer = FusedAdam(params)
    give_grads(params, 0)
    params[3].grad[2, 2] = math.nan
    optimizer.step()
    assert params[3].isnan().sum() == 1


def test_errors():
    params = make_params()
    for cls in (FusedAdam, FusedLamb):
        with pytest.raises(UnsupportedOption, match=f"amsgrad is true in {cls.__name__}"):
            cls(params, amsgrad=True)
        with pytest.raises(TypeError, match=r"dtype torch\.complex64"):
            cls([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
        with pytest.raises(ConfigError, match="eps"):
            cls(params, eps=-1.0)
    give_grads(params, 0)
    for name in ("grads", "output_params", "scale", "grad_norms"):
        with pytest.raises(RuntimeError, match=f"step of FusedAdam was given {name}, which it does not take"):
            FusedAdam(params).step(**{name: [1.0]})
    with pytest.raises(ConfigError, match="max_grad_norm"):
        FusedLamb(params, max_grad_norm=-1.0)
    with pytest.raises(ConfigError, match="min_coeff"):
        FusedLamb(params, max_coeff=1.0, min_coeff=2.0)
    with pytest.raises(UsageError, match="2 grad_norms for 1 groups"):
        FusedLamb(params).step(grad_norms=[1.0, 1.0])
    with pytest.raises(UsageError, match="1 grads for 6 parameters"):
        FusedLamb(params).step(grads=[params[0].grad])
    with pytest.raises(UsageError, match="output_params and lowp_out"):
        FusedLamb(params).step(output_params=[], lowp_out=[])
    with pytest.raises(ValueError, match=r"lowp_out\[0\] .* of 15 elements on the host"):
        FusedAdam(params).step(lowp_out=[torch.zeros(2, dtype=torch.float16)] * 6)


@pytest.mark.parametrize("cls", ALL)
def test_sparse_gradients_are_refused(cls):
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = cls(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="only dense tensors can be updated"):
        optimizer.step()


def test_parameters_of_two_devices():
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, device="meta"))]
    optimizer = FusedAdam(params)
    for param in params:
        param.grad = torch.zeros_like(param)
    with pytest.raises(UsageError, match="are on cpu and meta; make one optimizer for each device"):
        optimizer.step()


def make_window(count, step=1):
    torch.manual_seed(count)
    state = {"exp_avg": torch.zeros(count), "exp_avg_sq": torch.zeros(count)}
    return Window(torch.randn(count), torch.randn(count), state, {"lr": 0.01}, step, key=(0, 0, count))


@pytest.mark.parametrize("rule", [Lamb, Lion])
def test_rules_update_windows_by_kernels(rule):
    windows, expected = ([make_window(count) for count in (1000, 37)] for _ in range(2))
    ours, reference, host = rule(), rule(), HostLauncher()
    with launcher.standing_in(host):
        for _ in range(2):
            ours.update(windows, grad_scale=0.5)
    for _ in range(2):
        reference.update(expected, grad_scale=0.5)
    assert len(host.launched) == 4 * (3 if rule is Lamb else 1)
    for window, other in zip(windows, expected, strict=True):
        torch.testing.assert_close(window.master, other.master, rtol=1e-6, atol=1e-7)
    if rule is Lamb:
        assert ours.get_lamb_coeffs() == pytest.approx(reference.get_lamb_coeffs(), rel=1e-12)
        assert all(isinstance(ratio, float) for ratio in ours.get_lamb_coeffs())


def test_the_warm_up_of_onebit_lamb_keeps_numbers():
    window = make_window(50)
    rule = OnebitLamb(freeze_step=5)
    window.state = {name: torch.zeros(50) for name in rule.state_names}
    with launcher.standing_in(HostLauncher()):
        rule.update([window])
    assert all(isinstance(value, (int, float, type(None))) for value in _leaves(rule.scalars()))


def _leaves(tree):
    return [leaf for value in tree.values() for leaf in (_leaves(value) if isinstance(value, dict) else [value])]


def test_host_lamb_is_fused_lamb_on_the_host():
    params, others = make_params(), make_params()
    train(FusedLamb(params, lr=0.01), params, range(2))
    train(CPULamb(others, lr=0.01), others, range(2))
    same_bits(params, others)
