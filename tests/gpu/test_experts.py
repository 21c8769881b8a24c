"""Layers of experts on a GPU: against the host, how often the host waits for them, and under engines."""

import copy
import json
import os
import subprocess
import sys
import warnings

import pytest
import torch

import mpispeed
from mpispeed.launch import plan_launch
from mpispeed.moe import MoE
from mpispeed.native.permute import combine_rows, dot_rows, spread_rows
from mpispeed.nn.expert import ExpertModules, MLPExperts, RoutedExperts, Router, RouterOptions, SwiGLUExperts
from mpispeed.nn.expert.experts import serves_grouped
from tests.helpers.expert_nets import HIDDEN, INNER, ExpertNet, Perceptron, expert_batches
from tests.helpers.system import CHECKOUT
from tests.helpers.tensor import assert_near
from tests.zoo.training import WARM, config, train_averaged, zero_section

EXPERTS, TOKENS, BATCH = 6, 301, 24
CPU = {"device": "cpu"}
KINDS = {
    "modules": lambda: ExpertModules(Perceptron(), EXPERTS),
    "swiglu": lambda: SwiGLUExperts(HIDDEN, INNER, EXPERTS),
    "mlp": lambda: MLPExperts(HIDDEN, INNER, EXPERTS),
}
ROUTERS = {
    "k2": {"k": 2},
    "full": {"k": 2, "capacity_factor": 0.5, "priority": "score"},
    "groups": {"k": 3, "score": "sigmoid", "groups": 3, "kept_groups": 2, "bias_rate": 0.01, "sequence_loss": True},
}
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2**-5}
"""Of the largest element: sums in another order, and in bf16 some roundings of intermediate values."""
SECTIONS = [
    zero_section(0), zero_section(1), zero_section(2), zero_section(3),
    zero_section(2, offload_optimizer=CPU),
    zero_section(3, offload_optimizer={"device": "cpu", "pin_memory": True}, offload_param=CPU),
]  # fmt: skip


def layer_of(kind, dtype, **options):
    torch.manual_seed(3)
    layer = RoutedExperts(Router(HIDDEN, EXPERTS, RouterOptions(z_loss=True, **options)), KINDS[kind]())
    with torch.no_grad():
        for param in layer.parameters():
            param.uniform_(-0.3, 0.3)
    return layer.to(dtype)


def passed(layer, x):
    """Output, gradients by name, and choices, on the host."""
    x = x.clone().requires_grad_()
    y, routing = layer(x)
    loss = (y.float().sin() * 3).sum() + routing.balance_loss + 0.1 * routing.z_loss + 0.1 * routing.sequence_loss
    loss.backward()
    grads = {"x": x.grad} | {name: param.grad for name, param in layer.named_parameters()}
    return y.detach().cpu(), {name: grad.cpu() for name, grad in grads.items()}, routing.experts.cpu()


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("compute", ["auto", "loop"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_those_of_the_host(device, kind, dtype, compute, router):
    layer, x = layer_of(kind, dtype, **ROUTERS[router]), torch.randn(TOKENS, HIDDEN).to(dtype)
    there = copy.deepcopy(layer).to(device)
    there.experts.compute = compute
    y, grads, choices = passed(layer, x)
    found, found_grads, found_choices = passed(there, x.to(device))
    assert torch.equal(found_choices, choices)
    assert_near(found, y, BOUNDS[dtype], "output")
    for name, grad in grads.items():
        assert_near(found_grads[name], grad, BOUNDS[dtype], name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_experts_without_rows_have_gradients_of_zeros(device, kind, dtype):
    """All tokens choose one expert; then there are no tokens."""
    layer = layer_of(kind, dtype, k=1).to(device)
    with torch.no_grad():
        layer.gate.wg.weight.zero_()
    for count in (TOKENS, 0):
        _, grads, choices = passed(layer, torch.randn(count, HIDDEN, device=device, dtype=dtype))
        assert not choices.any()
        for name, grad in grads.items():
            if name.startswith("experts.deepspeed_experts."):
                assert bool(grad.any()) == (count > 0 and ".0." in name), name
            elif name.startswith("experts."):
                assert not grad[1:].any()
                assert bool(grad[0].any()) == (count > 0), name
        layer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "choices", "width"), [(1, 1, 1), (301, 2, 1024), (77, 6, 136), (50, 3, 1031)])
def test_rows_have_the_bits_of_the_host(device, dtype, tokens, choices, width):
    source = torch.Generator().manual_seed(0)
    count = tokens * choices + 3
    index = torch.randperm(count, generator=source)[: tokens * choices].view(tokens, choices)
    index = index.masked_fill(torch.rand(index.shape, generator=source) < 0.2, -1)
    x, rows = (torch.randn(n, width, generator=source).to(dtype) for n in (tokens, count))
    weights = torch.randn(tokens, choices, generator=source)
    there = [one.to(device) for one in (x, rows, index, weights)]
    found = []
    for x_, rows_, index_, weights_ in ((x, rows, index, weights), there):
        outs = [
            torch.full_like(x_, 7),
            torch.full_like(rows_, 7),
            torch.full_like(rows_, 7),
            torch.full_like(weights_, 7),
        ]
        combine_rows(outs[0], rows_, index_, weights_)
        spread_rows(outs[1], x_, index_, weights_)
        spread_rows(outs[2], x_, index_)
        dot_rows(outs[3], x_, rows_, index_)
        found.append([out.cpu() for out in outs])
    assert all(map(torch.equal, found[0][:3], found[1][:3]))
    exact = found[0][3].double()  # of fp64 sums; those of the device are in fp32
    size = (x.double().abs() @ rows.double().abs().t()).gather(1, index.clamp(min=0))
    assert ((found[1][3].double() - exact).abs() <= width * 2**-24 * size).all()


def test_results_repeat_to_the_bit(device):
    layer, x = layer_of("swiglu", torch.bfloat16, k=2).to(device), torch.randn(TOKENS, HIDDEN, device=device).bfloat16()
    first = passed(layer, x)
    layer.zero_grad()
    again = passed(layer, x)
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(grad, again[1][name]) for name, grad in first[1].items())


def test_bf16_takes_grouped_products(device):
    experts = SwiGLUExperts(HIDDEN, INNER, EXPERTS).to(device, torch.bfloat16)
    rows = torch.randn(7, HIDDEN, device=device, dtype=torch.bfloat16)
    is_able = hasattr(torch.nn.functional, "grouped_mm") and torch.cuda.get_device_capability(device) >= (8, 0)
    assert serves_grouped(rows, experts.gate_up_proj) == is_able
    assert not serves_grouped(rows.float(), experts.gate_up_proj.float())


def waits_in(call):
    """What a call gives, and where it waited for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        found = call()
        torch.cuda.set_sync_debug_mode("default")
    return found, [f"{one.message} {one.filename}" for one in caught if "called a synchron" in str(one.message)]


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_waits_once(device, kind, used):
    """For the counts of rows, which the host needs; backward not at all."""
    layer = layer_of(kind, torch.bfloat16, k=2, capacity_factor=1.0).to(device)
    x = torch.randn(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    mask = (torch.arange(TOKENS, device=device) % 5 != 0) if used else None

    def forward():
        y, routing = layer(x, mask)
        return y.float().square().sum() + routing.balance_loss

    forward().backward()  # what is loaded at first use
    torch.cuda.synchronize()
    loss, there = waits_in(forward)
    _, back = waits_in(loss.backward)
    assert (len(there), len(back)) == (1, 0), (there, back)


def test_what_is_not_finite_is_said(device, caplog):
    layer, x = layer_of("swiglu", torch.float32, k=1).to(device), torch.randn(9, HIDDEN, device=device)
    x[4, 0] = torch.nan
    y, _ = layer(x)
    assert y[4].isnan().all()
    assert y[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()
    assert sum("not finite" in record.message for record in caplog.records) == 1


def test_deepspeeds_layer_drops_as_on_the_host(device):
    torch.manual_seed(0)
    layer = MoE(HIDDEN, Perceptron(), num_experts=EXPERTS, k=1, capacity_factor=0.6, use_rts=False)
    x = torch.randn(4, 50, HIDDEN)
    y, loss, counts = layer(x)
    found, found_loss, found_counts = copy.deepcopy(layer).to(device)(x.to(device))
    assert torch.equal(found_counts.cpu(), counts)
    assert torch.equal((found == 0).all(-1).cpu(), (y == 0).all(-1))
    assert_near(found.detach().cpu(), y.detach(), 1e-5, "output")
    assert float(found_loss.detach()) == pytest.approx(float(loss.detach()), rel=1e-5)


def start(section, dtype="fp32"):
    settings = config(0, BATCH, 1, dtype=dtype, reduction="ordered", **WARM) | {"zero_optimization": section}
    return mpispeed.initialize(model=ExpertNet(), config=settings)[0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_engines_follow_those_of_the_host(device, monkeypatch, section, dtype):
    """In bf16 a token may choose another expert after a rounding, which moves the mean of its batch a little."""
    losses = []
    for where, one in (("cuda", section), ("cpu", zero_section(0))):
        monkeypatch.setenv("MPISPEED_DEVICE", where)
        engine = start(one, dtype)
        assert engine.device.type == where
        losses.append(train_averaged(engine, expert_batches(8, BATCH)))
        engine.destroy()
    assert losses[0] == pytest.approx(losses[1], rel={"fp32": 1e-4, "bf16": 2**-5}[dtype])


def test_two_ranks_share_the_gpu_and_the_experts(device, monkeypatch, tmp_path):
    """At every stage the losses are those of one rank with all experts and the whole batch."""
    monkeypatch.setenv("MPISPEED_DEVICE", "cuda")
    engine = start(zero_section(0))
    expected = train_averaged(engine, expert_batches(6, BATCH))
    engine.destroy()
    script = tmp_path / "ranks.py"
    script.write_text(
        "import json, mpispeed\n"
        "from tests.helpers.expert_nets import ExpertNet, expert_batches\n"
        "from tests.zoo.training import WARM, config, train_averaged\n"
        f"for section in json.loads({json.dumps(json.dumps(SECTIONS))}):\n"
        f"    settings = config(0, {BATCH}, 1, reduction='ordered', **WARM) | {{'zero_optimization': section}}\n"
        "    engine = mpispeed.initialize(model=ExpertNet(ep_size=2), config=settings)[0]\n"
        "    assert engine.device.type == 'cuda', engine.device\n"
        f"    losses = train_averaged(engine, expert_batches(6, {BATCH}))\n"
        "    if engine.global_rank == 0:\n"
        "        print('losses', json.dumps(losses), flush=True)\n"
        "    engine.destroy()\n"
    )
    plan = plan_launch([sys.executable, str(script)], 2)
    environment = {**os.environ, **plan.added, "PYTHONPATH": CHECKOUT, "MPISPEED_DEVICE": "cuda"}
    found = subprocess.run(plan.argv, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    lines = [line.partition("losses ")[2] for line in found.stdout.splitlines() if "losses " in line]
    assert len(lines) == len(SECTIONS)
    for section, line in zip(SECTIONS, lines, strict=True):
        assert json.loads(line) == pytest.approx(expected, rel=1e-4), section
