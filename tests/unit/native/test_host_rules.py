"""All host rules against fp64, against their references, and at every vector level: the same bits everywhere."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from mpispeed.native import status
from mpispeed.native.multi_tensor_host import PAIRS, STATE_NAMES, HostTable, Row
from mpispeed.native.reference_updates import run_reference, trust_ratio
from mpispeed.optim.adagrad import adagrad_terms
from mpispeed.optim.adam import adam_terms
from mpispeed.optim.lamb import lamb_terms
from mpispeed.optim.lion import lion_terms
from tests.helpers.host_updates import adagrad, adam, lamb, lion
from tests.zoo import has_same_bits

SIZES = [0, 1, 7, 15, 16, 17, 55, 1025, 2**20 + 3]
HALF_PAIRS = sorted((pair for pair in PAIRS if torch.float64 not in pair), key=str)
BETAS = (0.9, 0.99)
MODES = {
    "adam, no decay": ("adam", {"eps": 1e-8, "weight_decay": 0.0, "decoupled": True}),
    "adam, decoupled": ("adam", {"eps": 1e-8, "weight_decay": 0.1, "decoupled": True}),
    "adam, L2": ("adam", {"eps": 1e-8, "weight_decay": 0.1, "decoupled": False}),
    "adam, uncorrected": ("adam", {"eps": 1e-8, "weight_decay": 0.1, "decoupled": True, "bias_correction": False}),
    "adagrad, no decay": ("adagrad", {"eps": 1e-10, "weight_decay": 0.0}),
    "adagrad, L2": ("adagrad", {"eps": 1e-10, "weight_decay": 0.1}),
    "adagrad, decoupled": ("adagrad", {"eps": 1e-10, "weight_decay": 0.1, "decoupled": True, "lr_decay": 0.1}),
    "lion, no decay": ("lion", {"weight_decay": 0.0}),
    "lion, decoupled": ("lion", {"weight_decay": 0.1}),
    "lion, L2": ("lion", {"weight_decay": 0.1, "decoupled": False}),
    "lamb, no decay": ("lamb", {"eps": 1e-6, "weight_decay": 0.0}),
    "lamb, decoupled": ("lamb", {"eps": 1e-6, "weight_decay": 0.1}),
    "lamb, L2": ("lamb", {"eps": 1e-6, "weight_decay": 0.1, "decoupled": False}),
    "lamb, inside": ("lamb", {"eps": 1e-6, "weight_decay": 0.1, "is_eps_inside": True, "bias_correction": False}),
    "lamb, inside, no decay": ("lamb", {"eps": 1e-6, "weight_decay": 0.0, "is_eps_inside": True}),
}
BUILDERS = {"adam": adam_terms, "adagrad": adagrad_terms, "lion": lion_terms, "lamb": lamb_terms}
LR = 1e-2


def terms_of(mode, step, grad_scale=1.0):
    rule, hyper = MODES[mode]
    more = {} if rule == "lion" else {"step": step}
    betas = {} if rule == "adagrad" else {"betas": BETAS}
    return BUILDERS[rule](lr=LR, grad_scale=grad_scale, **betas, **more, **hyper)


def start(rule, count, seed=0, dtype=torch.float32, state_dtype=torch.float32):
    """A parameter and the states of a rule in the middle of training."""
    source = torch.Generator().manual_seed(seed)
    param = torch.randn(count, generator=source).to(dtype)
    states = [
        torch.rand(count, generator=source).mul_(0.01) if name in ("exp_avg_sq", "sum")
        else torch.randn(count, generator=source).mul_(0.1)
        for name in STATE_NAMES[rule]
    ]  # fmt: skip
    return [param, *(state.to(state_dtype) for state in states)], source


def all_same(first, second):
    return all(has_same_bits(a, b) for a, b in zip(first, second, strict=True))


def in_double(mode, step, p, states, g):
    """The formulas of the rules written out in fp64, independent of the code under test."""
    rule, hyper = MODES[mode]
    decay, decoupled = hyper["weight_decay"], hyper.get("decoupled", rule != "adagrad")
    g = g if decoupled else g + decay * p
    lr = LR / (1 + (step - 1) * hyper.get("lr_decay", 0.0))
    if decoupled and rule != "lamb":
        p = p - lr * decay * p
    if rule == "adagrad":
        s = states[0] + g**2
        return p - lr * g / (torch.sqrt(s) + hyper["eps"]), [s]
    if rule == "lion":
        u = BETAS[0] * states[0] + (1 - BETAS[0]) * g
        return p - lr * torch.sign(u), [BETAS[1] * states[0] + (1 - BETAS[1]) * g]
    m = BETAS[0] * states[0] + (1 - BETAS[0]) * g
    v = BETAS[1] * states[1] + (1 - BETAS[1]) * g**2
    is_corrected = hyper.get("bias_correction", True)
    first, second = (1 - beta**step if is_corrected else 1.0 for beta in BETAS)
    if rule == "adam":
        return p - lr / first * m / (torch.sqrt(v) / math.sqrt(second) + hyper["eps"]), [m, v]
    eps = hyper["eps"]
    q = m / (torch.sqrt(v + eps) if hyper.get("is_eps_inside") else torch.sqrt(v) + eps)
    q = q + (decay if decoupled else 0.0) * p
    ratio = min(max(float(p.norm() / q.norm()), 0.01), 10.0) if p.norm() and q.norm() else 1.0
    return p - lr * math.sqrt(second) / first * ratio * q, [m, v]


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_steps_stay_close_to_fp64(mode, count):
    rule = MODES[mode][0]
    (param, *states), source = start(rule, count)
    wide, wide_states = param.double(), [state.double() for state in states]
    first_step = 1000  # as restored from a checkpoint
    for step in range(first_step, first_step + (2 if count > 10_000 else 5)):
        grad = torch.randn(count, generator=source)
        HostTable(rule, [Row(param, tuple(states), grad)]).run([terms_of(mode, step)], threads=2)
        wide, wide_states = in_double(mode, step, wide, wide_states, grad.double())
    # The bound: per update one rounding of a parameter below 8 (2.4e-7), and 1e-6 of a step of at most 0.1 (10 lr).
    torch.testing.assert_close(param.double(), wide, rtol=1e-6, atol=2e-6)
    for got, expected in zip(states, wide_states, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtypes", HALF_PAIRS, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_levels_threads_and_twin_have_the_same_bits(mode, dtypes, grad_dtype, every_level):
    rule = MODES[mode][0]
    for count in (0, 1, 7, 15, 16, 17, 55, 1100):
        buffers, source = start(rule, count + 3, 0, *dtypes)
        grad = torch.randn(count + 3, generator=source).to(grad_dtype)
        for out_dtype in (None, torch.bfloat16, torch.float16):
            results = []
            for level in (None, *every_level.levels):
                copies = [x.clone()[3:] for x in buffers]  # unaligned views
                out = None if out_dtype is None else torch.empty(count + 3, dtype=out_dtype)[3:]
                if level is None:
                    run_reference(rule, copies[0], copies[1:], grad[3:], out, terms_of(mode, 3, 1 / 3))
                else:
                    every_level.set(level)
                    table = HostTable(rule, [Row(copies[0], tuple(copies[1:]), grad[3:], out)])
                    assert table.is_compiled
                    table.run([terms_of(mode, 3, 1 / 3)])
                results.append([*copies, *([] if out is None else [out])])
            assert all(all_same(results[0], other) for other in results[1:]), (count, out_dtype)


@pytest.mark.parametrize("mode", ["adam, decoupled", "adagrad, L2", "lion, decoupled", "lamb, decoupled"])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)], ids=str)
def test_large_tensors_at_every_level_and_with_many_threads(mode, dtypes, every_level):
    rule = MODES[mode][0]
    buffers, source = start(rule, 2**20 + 3, 0, *dtypes)
    grad = torch.randn(2**20 + 3, generator=source).to(dtypes[0])
    results = []
    for level in every_level.levels:
        for threads in (1, 2, 5):
            every_level.set(level)
            copies = [x.clone() for x in buffers]
            out = torch.empty(2**20 + 3, dtype=torch.float16)
            HostTable(rule, [Row(copies[0], tuple(copies[1:]), grad, out)]).run([terms_of(mode, 3)], threads=threads)
            results.append([*copies, out])
    copies, out = [x.clone() for x in buffers], torch.empty(2**20 + 3, dtype=torch.float16)
    run_reference(rule, copies[0], copies[1:], grad, out, terms_of(mode, 3))
    assert all(all_same(result, [*copies, out]) for result in results)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.startswith("lamb")])
def test_two_halves_of_lamb_are_the_whole(mode, threads, monkeypatch):
    sizes, terms = [1, 40_000, 0, 1025], [terms_of(mode, 3, 1 / 3)]
    results = []
    for half in ("whole", "halves", "halves by the twin"):
        if half.endswith("twin"):
            monkeypatch.setattr(status, "compiled", lambda name: None)
        rows = []
        for index, size in enumerate(sizes):
            buffers, source = start("lamb", size, index)
            rows.append(Row(buffers[0], tuple(buffers[1:]), torch.randn(size, generator=source), torch.zeros(size)))
        table = HostTable("lamb", rows)
        if half == "whole":
            ratios = table.run(terms, threads=threads)
        else:
            before = [row.param.clone() for row in rows]
            sums = table.run_first(terms, threads=threads)
            assert all_same([row.param for row in rows], before)
            ratios = [trust_ratio(*pair, terms[0]) for pair in sums]
            table.run_second(terms, ratios, threads=threads)
        results.append((ratios, [x for row in rows for x in (row.param, *row.states, row.out)]))
    for ratios, tensors in results[1:]:
        assert ratios == results[0][0]
        assert all_same(tensors, results[0][1])


class Levels:
    def __init__(self):
        self.module = status.require("cpu_optim")
        self.before = self.module.vector_level()
        self.levels = [level for level in (1, 3, 4) if level <= self.module.best_vector_level()]

    def set(self, level):
        self.module.set_vector_level(level)
        assert self.module.vector_level() == level


@pytest.fixture
def every_level():
    """The vector levels of this processor, and a way to choose one."""
    levels = Levels()
    yield levels
    levels.set(levels.before)


def test_levels_that_are_not_there_are_refused():
    module = status.require("cpu_optim")
    for level in (0, 2, 5):
        with pytest.raises(ValueError, match=f"vector level {level} is not there"):
            module.set_vector_level(level)


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("mode", ["adam, L2", "adagrad, no decay", "lion, L2", "lamb, decoupled"])
def test_many_tensors_in_one_call_are_each_as_alone(mode, threads):
    rule = MODES[mode][0]
    sizes = [1, 40_000, 0, 17, 1024, 1025, 30_001, 3, 2048, 70_000]
    rows, alone = [], []
    for index, size in enumerate(sizes):
        dtypes = HALF_PAIRS[index % len(HALF_PAIRS)]
        buffers, source = start(rule, size, index, *dtypes)
        grad = torch.randn(size, generator=source).to(dtypes[0])
        alone.append([x.clone() for x in buffers])
        lot = index % 2
        ratio = run_reference(rule, alone[-1][0], alone[-1][1:], grad, None, terms_of(mode, 1 + 5 * lot))
        rows.append((Row(buffers[0], tuple(buffers[1:]), grad, None, lot), ratio))
    table = HostTable(rule, [row for row, _ in rows])
    ratios = table.run([terms_of(mode, 1), terms_of(mode, 6)], threads=threads)
    for (row, _), expected in zip(rows, alone, strict=True):
        assert all_same([row.param, *row.states], expected)
    assert ratios == ([ratio for _, ratio in rows] if rule == "lamb" else [])


@pytest.mark.parametrize("mode", [mode for mode in MODES if not mode.startswith("lamb")])
def test_nan_and_infinity_stay_where_they_are(mode):
    rule = MODES[mode][0]
    buffers, source = start(rule, 200)
    clean = [x.clone() for x in buffers]
    grad = torch.randn(200, generator=source)
    bad = grad.clone()
    bad[3], bad[190] = math.nan, math.inf
    for tensors, g in ((buffers, bad), (clean, grad)):
        HostTable(rule, [Row(tensors[0], tuple(tensors[1:]), g)]).run([terms_of(mode, 1)])
    kept = torch.ones(200, dtype=torch.bool)
    kept[[3, 190]] = False
    assert all(has_same_bits(got[kept], expected[kept]) for got, expected in zip(buffers, clean, strict=True))
    assert all(x[3].isnan() for x in buffers)
    assert all(state[190] == math.inf for state in buffers[1:])
    assert buffers[0][190].isfinite() if rule == "lion" else buffers[0][190].isnan()


def test_nan_spreads_over_the_tensor_with_lamb():
    (param, *states), source = start("lamb", 5000)
    grad = torch.randn(5000, generator=source)
    grad[77] = math.nan
    ratio = lamb(param, *states, grad, step=1, lr=LR, betas=BETAS, eps=1e-6, weight_decay=0.0)
    assert math.isnan(ratio)
    assert param.isnan().all()
    assert states[0].isnan().sum() == 1


def test_lion_does_not_move_where_the_sign_is_zero():
    param, exp_avg = torch.ones(4), torch.zeros(4)
    lion(param, exp_avg, torch.tensor([0.0, -0.0, 1.0, -1.0]), lr=0.5, betas=BETAS, weight_decay=0.0)
    assert param.tolist() == [1.0, 1.0, 0.5, 1.5]


@pytest.mark.parametrize(("scale", "expected"), [(1e-9, 0.01), (1e9, 10.0), (0.0, 1.0)])
def test_trust_ratio_is_clamped_and_one_for_zero_weights(scale, expected):
    param = torch.full((3000,), scale)
    states = [torch.zeros(3000) for _ in range(2)]
    ratio = lamb(param, *states, torch.ones(3000), step=1, lr=LR, betas=BETAS, eps=1e-6, weight_decay=0.0)
    assert ratio == expected


def test_trust_ratio_of_zero_gradients_is_one():
    states = [torch.zeros(10) for _ in range(2)]
    param = torch.ones(10)
    assert lamb(param, *states, torch.zeros(10), step=1, lr=LR, betas=BETAS, eps=1e-6, weight_decay=0.0) == 1.0
    assert torch.equal(param, torch.ones(10))


@pytest.mark.parametrize(
    ("param", "state"),
    [(torch.float32, torch.float16), (torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16)],
)
def test_dtypes_that_do_not_go_together_are_named(param, state):
    tensors = [torch.zeros(8, dtype=param), *(torch.zeros(8, dtype=state) for _ in range(2))]
    with pytest.raises(TypeError, match=f"parameter has dtype {param} and exp_avg has dtype {state}"):
        adam(*tensors, torch.zeros(8), step=1, lr=LR, betas=BETAS, eps=1e-8, weight_decay=0.0, decoupled=True)


def test_wrong_arguments_are_refused():
    p, s, g = (torch.zeros(8) for _ in range(3))
    with pytest.raises(ValueError, match="grad has 7 elements but master has 8"):
        lion(p, s, g[:7], lr=LR, betas=BETAS, weight_decay=0.0)
    with pytest.raises(ValueError, match="step is 0"):
        adagrad(p, s, g, step=0, lr=LR, eps=1e-8, weight_decay=0.0)
    with pytest.raises(ValueError, match="min_coeff is 2"):
        lamb(p, s, s.clone(), g, step=1, lr=LR, betas=BETAS, eps=1e-8, weight_decay=0.0, min_coeff=2, max_coeff=1)
    with pytest.raises(ValueError, match="share memory"):
        lion(p, p, g, lr=LR, betas=BETAS, weight_decay=0.0)


@pytest.mark.parametrize("mode", MODES)
def test_fp64_is_updated_in_fp64(mode):
    rule = MODES[mode][0]
    buffers, source = start(rule, 1100, 0, torch.float64, torch.float64)
    grad = torch.randn(1100, generator=source, dtype=torch.float64)
    wide, wide_states = in_double(mode, 4, buffers[0].clone(), [x.clone() for x in buffers[1:]], grad)
    HostTable(rule, [Row(buffers[0], tuple(buffers[1:]), grad)]).run([terms_of(mode, 4)])
    for got, expected in zip(buffers, [wide, *wide_states], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-15)


def test_tables_come_and_go_without_a_trace():
    module = status.require("cpu_optim")
    before = resident_bytes()
    row = (0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0)
    for _ in range(300):
        module.Table([row] * 5000)  # 400 kB each
        with pytest.raises(ValueError, match="kinds"):
            module.Table([row] * 5000 + [(0, 0, 0, 0, 0, 0, 0, 9, 1, 1, 0, 0)])
    assert resident_bytes() - before < 50e6


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
