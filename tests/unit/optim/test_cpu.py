"""CPUAdam, CPUAdagrad, CPULion and CPULamb on models in host memory."""

from __future__ import annotations

import copy
import io
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.native import status
from mpispeed.native.host_optim import adam, lamb
from mpispeed.optim import CPUAdagrad, CPUAdam, CPULamb, CPULion
from tests.zoo import same_bits

ALL = [CPUAdam, CPUAdagrad, CPULion, CPULamb]
HALVES = [torch.bfloat16, torch.float16]
LENGTHS = [(3, 5), (7,), (), (40, 30), (0,), (1000,)]


def make_params(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=source).to(dtype)) for shape in LENGTHS]


def give_grads(params: list[nn.Parameter], seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=source).to(param.dtype)


def train(optimizer: Any, params: list[nn.Parameter], seeds: range, **options: Any) -> None:
    for seed in seeds:
        give_grads(params, seed)
        optimizer.step(**options)


@pytest.fixture(params=["as torch offers", "without exchange", "twin"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ways in which a table learns about tensors and runs."""
    if request.param == "without exchange":
        monkeypatch.setattr(Tensor, "__dlpack_c_exchange_api__", None, raising=False)
    elif request.param == "twin":
        monkeypatch.setattr(status, "compiled", lambda name: None)
    return str(request.param)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("is_decoupled", "reference"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_adam_is_that_of_torch(
    way: str, threads: int, weight_decay: float, is_decoupled: bool, reference: type[torch.optim.Optimizer]
) -> None:
    params, plain = make_params(), make_params()
    hyper = {"lr": 1e-2, "weight_decay": weight_decay}
    train(CPUAdam(params, adamw_mode=is_decoupled, threads=threads, **hyper), params, range(10))
    train(reference(plain, **hyper), plain, range(10))  # type: ignore[call-arg]
    for got, expected in zip(params, plain, strict=True):  # ten steps of 0.01 in fp32
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "hyper", [{}, {"weight_decay": 0.1, "lr_decay": 0.2}, {"initial_accumulator_value": 0.5, "maximize": True}]
)
def test_adagrad_is_that_of_torch(hyper: dict[str, Any]) -> None:
    params, plain = make_params(), make_params()
    train(CPUAdagrad(params, lr=0.05, **hyper), params, range(10))
    reference = torch.optim.Adagrad(plain, lr=0.05, **hyper)
    train(reference, plain, range(10))
    for got, expected in zip(params, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_lion_written_out() -> None:
    params, plain = make_params(), make_params()
    train(CPULion(params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1), params, range(5))
    momenta = [torch.zeros_like(param, dtype=torch.float64) for param in plain]
    wide = [param.detach().double() for param in plain]
    for seed in range(5):
        give_grads(plain, seed)
        for index, param in enumerate(plain):
            grad = param.grad.double()  # type: ignore[union-attr]
            sign = torch.sign(0.9 * momenta[index] + 0.1 * grad)
            wide[index] = wide[index] * (1 - 0.01 * 0.1) - 0.01 * sign
            momenta[index] = 0.99 * momenta[index] + 0.01 * grad
    for got, expected in zip(params, wide, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)


def test_lamb_takes_every_tensor_by_itself() -> None:
    params, plain = make_params(), [param.detach().clone() for param in make_params()]
    optimizer = CPULamb(params, lr=0.01, weight_decay=0.1, max_coeff=3.0)
    states = [[torch.zeros_like(param) for _ in range(2)] for param in plain]
    for seed in range(3):
        give_grads(params, seed)
        optimizer.step()
        ratios = [
            lamb(
                value, *state, param.grad, step=seed + 1, lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1,
                max_coeff=3.0,
            )
            for value, state, param in zip(plain, states, params, strict=True)
        ]  # fmt: skip
        assert optimizer.get_lamb_coeffs() == ratios
    same_bits(params, plain)
    assert len(set(ratios)) > 3
    assert max(ratios) <= 3.0


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("has_fp32_states", [True, False])
def test_low_precision_parameters(cls: Any, dtype: torch.dtype, has_fp32_states: bool) -> None:
    params, wide = make_params(dtype), make_params(dtype)
    optimizer = cls(params, lr=0.01, fp32_optimizer_states=has_fp32_states)
    wide = [nn.Parameter(param.detach().float()) for param in wide]
    reference = cls(wide, lr=0.01)
    give_grads(params, 1)
    for param, other in zip(params, wide, strict=True):
        other.grad = param.grad.float()  # type: ignore[union-attr]
    optimizer.step()
    reference.step()
    for param, other in zip(params, wide, strict=True):
        state, expected = optimizer.state[param], reference.state[other]
        for name in (name for name in state if name != "step"):
            assert state[name].dtype == (torch.float32 if has_fp32_states else dtype)
            assert torch.equal(state[name], expected[name].to(state[name].dtype))
        if cls is not CPULamb or has_fp32_states:  # LAMB's direction is that of the moments as stored
            assert torch.equal(param, other.to(dtype))


def test_dtypes_without_an_update_are_named() -> None:
    with pytest.raises(TypeError, match=r"parameter 0 of group 0.* dtype torch\.float64 .*torch\.float32"):
        CPUAdam([nn.Parameter(torch.zeros(3, dtype=torch.float64))])
    params = make_params(torch.bfloat16)
    optimizer = CPUAdam(params, fp32_optimizer_states=False)
    train(optimizer, params, range(1))
    params[0].data = params[0].data.float()
    params[0].grad = torch.zeros(3, 5)
    with pytest.raises(TypeError, match=r"dtype torch\.float32 and exp_avg has dtype torch\.bfloat16"):
        optimizer.step()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("cls", ALL)
def test_low_precision_copies(cls: Any, dtype: torch.dtype) -> None:
    params = make_params()
    optimizer = cls(params)
    outs = [torch.full((param.numel(),), 7.0, dtype=dtype) for param in params]
    give_grads(params, 1)
    params[3].grad = None
    for _ in range(3):
        optimizer.step(lowp_out=outs)
        same_bits(outs, [param.detach().view(-1).to(dtype) for param in params])
    before = [out.clone() for out in outs]
    optimizer.step()  # no longer written
    same_bits(outs, before)
    others = [torch.empty_like(out) for out in outs]
    optimizer.step(lowp_out=others)
    same_bits(others, [param.detach().view(-1).to(dtype) for param in params])
    same_bits(outs, before)


def test_low_precision_copies_that_do_not_fit_are_refused() -> None:
    params = make_params()
    optimizer = CPUAdam(params)
    give_grads(params, 0)
    outs = [torch.empty(param.shape, dtype=torch.bfloat16) for param in params]
    with pytest.raises(ValueError, match="lowp_out has 5 buffers for 6 parameters"):
        optimizer.step(lowp_out=outs[:5])
    wrong = [torch.empty(16, dtype=torch.bfloat16), torch.empty(15), torch.empty(30, dtype=torch.bfloat16)[::2]]
    for out in wrong:
        with pytest.raises(ValueError, match=r"lowp_out\[0\] is a"):
            optimizer.step(lowp_out=[out, *outs[1:]])
    assert not optimizer.state


def test_grad_scale_is_applied_in_the_pass() -> None:
    params, scaled = make_params(), make_params()
    first, second = CPUAdam(params), CPUAdam(scaled)
    for seed in range(3):
        give_grads(params, seed)
        give_grads(scaled, seed)
        for param in params:
            param.grad *= 0.25  # type: ignore[operator]
        kept = [param.grad.clone() for param in scaled]  # type: ignore[union-attr]
        first.step()
        second.step(grad_scale=0.25)
        same_bits(kept, [param.grad for param in scaled])
    same_bits(params, scaled)


def test_groups_and_schedulers() -> None:
    params, plain = make_params(), make_params()

    def groups(values: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": values[:3], "betas": (0.5, 0.6)}, {"params": values[3:], "lr": 0.5, "weight_decay": 0.3}]

    ours, theirs = CPUAdam(groups(params), lr=0.1), torch.optim.AdamW(groups(plain), lr=0.1, weight_decay=0.0)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (ours, theirs)]
    for seed in range(4):
        train(ours, params, range(seed, seed + 1))
        train(theirs, plain, range(seed, seed + 1))
        for scheduler in schedulers:
            scheduler.step()
    for got, expected in zip(params, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("cls", ALL)
def test_steps_are_counted_for_every_parameter(cls: Any, way: str) -> None:
    params, alone = make_params(), make_params()
    optimizer, others = cls(params, lr=0.01), [cls([param], lr=0.01) for param in alone]
    for seed in range(6):
        give_grads(params, seed)
        give_grads(alone, seed)
        for index in range(len(params)):
            if (seed + index) % 3 == 0 or seed == 4 > index:
                params[index].grad = alone[index].grad = None
        optimizer.step()
        for other in others:
            other.step()
    same_bits(params, alone)
    steps = [optimizer.state[param]["step"] for param in params]
    assert steps == [other.state[param]["step"] for param, other in zip(alone, others, strict=True)]
    assert len(set(steps)) == 2


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_round_trip(cls: Any, dtype: torch.dtype) -> None:
    params, resumed = make_params(dtype), make_params(dtype)
    optimizer = cls(params, lr=0.01)
    train(optimizer, params, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    for param, other in zip(params, resumed, strict=True):
        other.data.copy_(param.data)
    again = cls(resumed, lr=7.0)
    train(again, resumed[:1], range(1))  # a table that loading has to throw away
    resumed[0].data.copy_(params[0].data)
    again.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(2):
        train(optimizer, params, range(3, 5))
        train(again, resumed, range(3, 5))
    same_bits(params, resumed)
    for param, other in zip(params, resumed, strict=True):
        assert again.state[other]["step"] == 7
        for name in set(optimizer.state[param]) - {"step"}:
            assert again.state[other][name].dtype == torch.float32
            assert torch.equal(again.state[other][name], optimizer.state[param][name])


def test_a_state_of_another_shape_is_refused() -> None:
    params = make_params()
    optimizer = CPUAdam(params)
    train(optimizer, params, range(1))
    saved = optimizer.state_dict()
    saved["state"][3]["exp_avg"] = torch.zeros(7)
    with pytest.raises(ValueError, match=r"exp_avg of parameter 3 has shape \(7,\), not \(40, 30\)"):
        optimizer.load_state_dict(saved)


def test_step_restored_at_a_thousand() -> None:
    param = nn.Parameter(torch.ones(5))
    optimizer = CPUAdam([param], lr=0.1)
    param.grad = torch.ones(5)
    optimizer.step()
    moments = [optimizer.state[param][name].clone() for name in ("exp_avg", "exp_avg_sq")]
    value = param.detach().clone()
    optimizer.state[param]["step"] = 999
    optimizer.step()
    adam(
        value, *moments, torch.ones(5), step=1000, lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, decoupled=True
    )
    assert torch.equal(param, value)
    assert optimizer.state[param]["step"] == 1000


def test_what_moved_is_noticed(way: str) -> None:
    params, plain = make_params(), make_params()
    optimizer, reference = CPUAdam(params), CPUAdam(plain)
    for seed in range(8):
        give_grads(params, seed)
        give_grads(plain, seed)
        if seed == 2:
            params[0].data = params[0].data.clone()
        elif seed == 3:
            optimizer.state[params[1]]["exp_avg"] = optimizer.state[params[1]]["exp_avg"].clone()
        elif seed == 4:
            optimizer.state[params[3]] = copy.deepcopy(optimizer.state[params[3]])
        elif seed == 5:
            optimizer = copy.deepcopy(optimizer)
            params = optimizer.param_groups[0]["params"]
            give_grads(params, seed)  # copies have none
        elif seed == 6:
            params[3].grad = params[3].grad.t().contiguous().t()  # type: ignore[union-attr]
            with pytest.raises(UsageError, match="gradient of parameter 3 of group 0 of CPUAdam has strides"):
                optimizer.step()
            params[3].grad = params[3].grad.contiguous()
        optimizer.step()
        reference.step()
        same_bits(params, plain, str(seed))


def test_deep_copies_keep_their_options() -> None:
    optimizer = CPULion([nn.Parameter(torch.ones(3))], fp32_optimizer_states=False, threads=5)
    again = copy.deepcopy(optimizer)
    assert (again.fp32_optimizer_states, again.threads) == (False, 5)


def test_gradients_are_not_kept(way: str) -> None:
    params = make_params()
    optimizer = CPUAdam(params)
    for seed in range(3):
        give_grads(params, seed)
        refs = [weakref.ref(param.grad) for param in params]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert not any(ref() is not None for ref in refs), seed


def test_closure_runs_with_grad_and_its_loss_is_returned() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = CPUAdam([param], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    torch.testing.assert_close(param.detach(), torch.full((3,), 0.9))


@pytest.mark.parametrize("cls", ALL)
def test_nothing_to_do(cls: Any) -> None:
    params = make_params()
    before = [param.detach().clone() for param in params]
    optimizer = cls(params)
    assert optimizer.step() is None
    same_bits(params, before)
    assert not optimizer.state
    give_grads(params[:1], 0)
    optimizer.step()
    assert list(optimizer.state) == params[:1]


@pytest.mark.parametrize("cls", ALL)
def test_nan_and_infinity_propagate(cls: Any) -> None:
    params = make_params()
    optimizer = cls(params)
    give_grads(params, 0)
    params[3].grad[0, 0], params[5].grad[999] = math.nan, math.inf  # type: ignore[index]
    optimizer.step()
    assert params[3].isnan().sum() == (1200 if cls is CPULamb else 1)
    assert all(param.isfinite().all() for param in params[:3])
    if cls is not CPULion:
        assert params[5][999].isnan()


@pytest.mark.parametrize("cls", ALL)
def test_parameters_elsewhere_are_refused(cls: Any) -> None:
    elsewhere = nn.Parameter(torch.empty(3, device="meta"))
    optimizer = cls([nn.Parameter(torch.ones(3)), elsewhere])
    elsewhere.grad = torch.empty(3, device="meta")
    with pytest.raises(AssertionError, match=r"parameter 1 of group 0 of \w+ is on meta.*offload_optimizer"):
        optimizer.step()
    with pytest.raises(UsageError, match=r"parameter 0 of group 0 of \w+ has strides \(1, 2\) for shape \(2, 2\)"):
        cls([nn.Parameter(torch.ones(2, 2).t())])
    param = nn.Parameter(torch.ones(2, 2))
    optimizer = cls([("weight", param)])
    param.data = param.data.t()
    param.grad = torch.ones(2, 2)
    with pytest.raises(UsageError, match=r"parameter weight of \w+ has strides"):
        optimizer.step()


def test_sparse_gradients_are_refused_by_name(way: str) -> None:
    model = nn.ModuleDict({"words": nn.Embedding(10, 4, sparse=True), "out": nn.Linear(4, 1)})
    optimizer = CPUAdam(model.named_parameters())
    for is_sparse in (False, True):
        model["words"].sparse = is_sparse
        optimizer.zero_grad()
        model["out"](model["words"](torch.tensor([1, 2]))).sum().backward()
        if is_sparse:
            with pytest.raises(UsageError, match=r"gradient of parameter words\.weight .* sparse=False"):
                optimizer.step()
        else:
            optimizer.step()


@pytest.mark.deepspeed_row("a15")
@pytest.mark.parametrize("hyper", [{}, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}, {"weight_decay": 0.1}])
def test_adagrad_takes_sparse_gradients(hyper) -> None:
    """Row by row, with the bits of the dense gradient."""
    models = []
    for is_sparse in (False, True):
        torch.manual_seed(3)
        model = nn.ModuleDict({"words": nn.Embedding(50, 4, sparse=is_sparse), "out": nn.Linear(4, 1)})
        optimizer = CPUAdagrad(model.parameters(), lr=0.1, **hyper)
        for tokens in ([1, 2, 1], [7], [2, 49]):
            optimizer.zero_grad()
            model["out"](model["words"](torch.tensor(tokens))).square().sum().backward()
            outs = [torch.empty(param.numel(), dtype=torch.bfloat16) for param in model.parameters()]
            optimizer.step(lowp_out=outs)
            for out, param in zip(outs, model.parameters(), strict=True):
                assert torch.equal(out, param.detach().bfloat16().view(-1))
        models.append((model.state_dict(), [state["sum"] for state in optimizer.state.values()]))
        assert {state["step"] for state in optimizer.state.values()} == {3}
    for key, value in models[0][0].items():
        torch.testing.assert_close(models[1][0][key], value, rtol=1e-6, atol=0)  # rows that come twice are added up
    assert len(models[0][1]) == len(models[1][1])


@pytest.mark.parametrize(
    ("cls", "hyper"),
    [
        (CPUAdam, {"lr": -1}),
        (CPUAdam, {"betas": (0.9, 1.0)}),
        (CPUAdam, {"eps": float("nan")}),
        (CPUAdam, {"amsgrad": True}),
        (CPUAdagrad, {"weight_decay": "much"}),
        (CPULion, {"betas": 0.9}),
        (CPULamb, {"min_coeff": 2.0, "max_coeff": 1.0}),
    ],
)
def test_impossible_hyper_parameters_are_refused(cls: Any, hyper: dict[str, Any]) -> None:
    param = nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigError, match=rf"{cls.__name__}|amsgrad"):
        cls([param], **hyper)
    optimizer = cls([param])
    with pytest.raises(ConfigError):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], **hyper})
    with pytest.raises(UsageError):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2).t())]})
    assert len(optimizer.param_groups) == 1
    param.grad = torch.ones(2)
    optimizer.step()
    assert not torch.equal(param, torch.ones(2))


def test_threads_do_not_change_bits() -> None:
    runs = []
    for threads in (1, 2, 5):
        params = [nn.Parameter(torch.linspace(-1, 1, n)) for n in (100_003, 3, 50_000)]
        train(CPUAdam(params, threads=threads, weight_decay=0.1), params, range(3))
        runs.append(params)
    same_bits(runs[0], runs[1])
    same_bits(runs[0], runs[2])
