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


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_waits_once(device, kind, used):
    """For the counts of rows, which the host needs; backward not at all."""
    layer = layer_of(kind, torch.bfloat16, k=2, capacity_factor=1.0).to(device)
    x = torch.randn(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    mask = (torch.arange(TOKENS, device=device) % 5 != 0) if used else None

    def run():
        y, routing = layer(x, mask)
        return (y.float().square().sum() + routing.balance_loss,)

    torch.autograd.backward(run())  # what is loaded at first use
    torch.cuda.synchronize()
    found = []
    for body in (run, lambda: torch.autograd.backward(loss)):
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = body()
        torch.cuda.set_sync_debug_mode("default")
        found.append([str(one.message) + one.filename for one in caught if "synchroniz" in str(one.message)])
    assert [len(each) for each in found] == [1, 0], found


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
    assert float(found_loss) == pytest.approx(float(loss), rel=1e-5)


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
