"""The profiler and the profile of a model alone, with documented arguments; a golden printout of both."""

import re

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from mpispeed.base.errors import UsageError
from mpispeed.flops.model_profile import get_model_profile
from mpispeed.flops.peak import measure_peak
from mpispeed.flops.profiler import FlopsProfiler, flops_of_step, prepare_file
from mpispeed.flops.tables import DETAILS, NOTATIONS

TIMES = re.compile(r"[0-9.]+ (?:s|ms|us)\b|[0-9.]+ [KMGT]?FLOPS\b|[0-9.]+%(?= latency)")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2)))


class Ignored(nn.Linear):
    """A layer to be ignored."""


class Generates(nn.Module):
    """Adds one number after the other."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4, bias=False), Ignored(4, 4, bias=False)

    def forward(self, x):
        return self.layer(x) + self.other(x)

    def generate(self, x, steps=3):
        for _ in range(steps):
            x = self(x)
        return x


def test_the_documented_steps_of_a_training_loop(capsys):
    model, x = net(), torch.randn(4, 8)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    assert profiler.started
    loss = model(x).sum()
    products = 4 * (8 * 16 + 16 * 16 + 16 * 2)
    assert profiler.get_total_macs() == products
    assert profiler.get_total_flops() == 2 * products + 4 * 16  # and the ReLU's
    assert profiler.get_total_flops(as_string=True) == "3.39 K"
    assert profiler.get_total_params() == sum(param.numel() for param in model.parameters())
    assert profiler.get_total_params(as_string=True) == "450"
    assert profiler.get_total_duration() > 0
    assert profiler.get_total_duration(as_string=True).endswith("s")
    profiler.print_model_profile(profile_step=5)
    profiler.end_profile()
    loss.backward()
    assert "Profile Summary at step 5:" in capsys.readouterr().out
    assert (profiler.flops, profiler.macs, profiler.started) == (2 * products + 64, products, False)


def test_numbers_add_up_until_they_are_reset():
    model, x = net(), torch.randn(4, 8)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(x)
    once = profiler.get_total_macs()
    model(x)
    assert profiler.get_total_macs() == 2 * once
    profiler.reset_profile()
    assert profiler.get_total_macs() == 0
    model(x)
    profiler.stop_profile()
    model(x)
    assert profiler.get_total_macs() == once
    profiler.end_profile()
    profiler.start_profile()
    assert profiler.get_total_macs() == 0
    profiler.end_profile()


def hooks_of(model):
    """All hooks on the modules of a model, those for all modules too."""
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    own = [hook for module in model.modules() for kind in kinds for hook in vars(module)[f"_{kind}_hooks"].values()]
    return own + [hook for kind in kinds for hook in vars(modules)[f"_global_{kind}_hooks"].values()]


def test_nothing_is_left_behind():
    model = net()
    attributes = [set(vars(module)) for module in model.modules()]
    profiler = FlopsProfiler(model)
    assert not hooks_of(model)
    profiler.start_profile()
    assert hooks_of(model)
    model(torch.randn(4, 8)).sum().backward()
    profiler.end_profile()
    assert not hooks_of(model)
    assert not _get_current_dispatch_mode_stack() and not _get_current_function_mode_stack()
    assert [set(vars(module)) for module in model.modules()] == attributes


@pytest.mark.parametrize("call", ["print_model_profile", "print_model_aggregated_profile"])
def test_nothing_is_printed_of_nothing(call):
    with pytest.raises(UsageError, match="nothing was counted"):
        getattr(FlopsProfiler(net()), call)()


def test_the_model_has_to_be_a_module():
    with pytest.raises(UsageError, match="found a function"):
        FlopsProfiler(net)


def test_top_modules_alone(capsys):
    model = net()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.randn(4, 8))
    profiler.end_profile()
    profiler.print_model_aggregated_profile(module_depth=1, top_modules=2)
    out = capsys.readouterr().out
    assert "{'Sequential': '306', 'Linear': '144'}" in out and "depth 2" not in out


@pytest.mark.parametrize("is_training", [True, False])
def test_a_model_alone(is_training, capsys):
    model = net().train(is_training)
    modes = []
    model[1].register_forward_hook(lambda module, *_: modes.append(module.training))
    flops, macs, params = get_model_profile(model, (4, 8), warm_up=2)
    assert (flops, macs, params) == ("3.39 K", "1.66 KMACs", "450")
    assert modes == [False] * 3 and all(module.training is is_training for module in model.modules())
    assert "Detailed Profile" in capsys.readouterr().out
    numbers = get_model_profile(model, args=[torch.randn(4, 8)], print_profile=False, as_string=False)
    assert numbers == get_model_profile(
        model, kwargs={"input": torch.randn(4, 8)}, print_profile=False, as_string=False
    )
    assert numbers == (3392, 1664, 450)
    assert capsys.readouterr().out == ""


def test_generation_counts_all_its_passes():
    model = Generates()
    for mode, passes in (("forward", 1), ("generate", 3)):
        _, macs, _ = get_model_profile(model, (2, 4), print_profile=False, as_string=False, mode=mode)
        assert macs == passes * 2 * 2 * 4 * 4
    _, macs, _ = get_model_profile(
        model, args=[torch.ones(2, 4)], kwargs={"steps": 5}, print_profile=False, as_string=False, mode="generate"
    )
    assert macs == 5 * 2 * 2 * 4 * 4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "has no inputs"),
        ({"input_shape": [4, 8]}, "a tuple of at least one length"),
        ({"input_shape": ()}, "a tuple of at least one length"),
        ({"input_shape": (4, "8")}, "a tuple of at least one length"),
        ({"input_shape": (4, 8), "args": [1]}, "leave one out"),
        ({"input_shape": (4, 8), "mode": "backward"}, "'forward' and 'generate' are known"),
        ({"input_shape": (4, 8), "mode": "generate"}, "Sequential has no method generate"),
    ],
)
def test_wrong_inputs_are_told(arguments, sentence):
    with pytest.raises(UsageError, match=sentence) as told:
        get_model_profile(net(), **arguments)
    assert isinstance(told.value, AssertionError)  # what DeepSpeed raises


def test_a_model_that_fails_is_left_as_it_was():
    model = net().train()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        get_model_profile(model, (4, 7), warm_up=0)
    assert model[0].training and not hooks_of(model) and not _get_current_dispatch_mode_stack()


def test_a_report_goes_to_a_file_in_a_new_folder(tmp_path, capsys):
    path = tmp_path / "new" / "report.txt"
    get_model_profile(net(), (4, 8), output_file=str(path))
    assert capsys.readouterr().out == "" and "Profile Summary" in path.read_text()


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    model = net()
    model.register_forward_hook(lambda *_: pytest.fail("the model was run before the file was looked at"))
    for path, reason in ((tmp_path, "it is a folder"), (tmp_path / "file" / "report.txt", "exists|Not a directory")):
        with pytest.raises(UsageError, match=f"cannot be written to output_file .*: .*({reason})"):
            get_model_profile(model, (4, 8), output_file=str(path))
        with pytest.raises(UsageError, match=reason):
            prepare_file(path)


REPORT = """\
Profile Summary at step 1:
world size: 1
data parallel size: 1
model parallel size: 1
params per GPU: 32
fwd MACs per GPU: 96 MACs
fwd flops per GPU: 192
fwd latency: *
fwd FLOPS per GPU = fwd flops per GPU / fwd latency: *
flops of operators, forward: 192
flops of operators, backward: 0
flops of operators, recomputation in backward: 0
Top modules in terms of params, MACs or fwd latency at different model depths:
depth 0:
params - {'Generates': '32'}
MACs - {'Generates': '96 MACs'}
fwd latency - {'Generates': '*'}
Generates(
32, 100.00% Params, 96 MACs, 100.00% MACs, *, * latency, *, 192 fwd, 0 bwd, 0 recompute
(layer): Linear(16, 50.00% Params, 96 MACs, 100.00% MACs, *, * latency, *, 192 fwd, 0 bwd, 0 recompute, \
in_features=4, out_features=4, bias=False)
(other): Ignored(16, 50.00% Params, 0 MACs, 0.00% MACs, *, * latency, *, 0 fwd, 0 bwd, 0 recompute, \
in_features=4, out_features=4, bias=False)
)
"""


def test_the_report_with_all_arguments(tmp_path):
    path = tmp_path / "report.txt"
    found = get_model_profile(
        Generates(), args=[torch.ones(2, 4)], kwargs={"steps": 3}, print_profile=True, detailed=True, module_depth=0,
        top_modules=2, warm_up=1, as_string=True, output_file=str(path), ignore_modules=[Ignored], mode="generate",
    )  # fmt: skip
    assert found == ("192", "96 MACs", "32")
    legends = {line.strip() for line in (NOTATIONS + DETAILS).splitlines()}
    lines = (re.sub(" +", " ", line.strip()) for line in TIMES.sub("*", path.read_text()).splitlines())
    shown = [line for line in lines if line not in legends and not line.startswith("---")]
    assert "\n".join(shown) + "\n" == REPORT


def test_flops_of_a_step():
    model = nn.Linear(8, 4, bias=False)
    with flops_of_step(model) as counts:
        model(torch.randn(2, 8, requires_grad=True)).sum().backward()
    assert (counts.forward, counts.backward, counts.recompute) == (128, 256, 0)
    assert not hooks_of(model) and not _get_current_dispatch_mode_stack()


def test_the_peak_is_above_what_a_small_product_reaches():
    peak = measure_peak(torch.float32, torch.device("cpu"))
    assert 1e8 < peak < 1e14
