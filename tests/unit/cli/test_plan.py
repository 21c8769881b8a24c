"""`mpispeed plan`: verdicts, exit codes, one clear message for everything that can be wrong, no allocation."""

import json
import resource
import subprocess
import sys

import pytest
from click.testing import CliRunner

from mpispeed.cli.main import cli
from mpispeed.config import unavailable
from tests.helpers.onebit_training import FREEZE, NAMES, settings

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
}
MODELS = """
import torch
from torch import nn

class Big(nn.Sequential):
    def __init__(self, width, depth=2):
        super().__init__(*(nn.Linear(width, width, bias=False) for _ in range(depth)))

def broken(): raise RuntimeError("no such weights")
def reads(): return nn.Linear(2, 2).weight.sum().item()
def text(): return "a model"
def placed(): return nn.Linear(2, 2, device="cpu")
def empty(): return nn.Sequential()
def uneven(): return [nn.Linear(64, size, bias=False) for size in (64, 64, 64, 512)]
def one(): return nn.Linear(4, 4)
NUMBER = 5
"""
SIZE = ("--params", "7e9", "--largest-layer", "2e8")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    (tmp_path / "planned_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("planned_models", None)


def call(*words):
    return CliRunner().invoke(cli, ["plan", *map(str, words)])


def asked(*words):
    done = call(*words, "--json")
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout)


def test_go_and_no_go_by_exit_code(folder):
    good = call("ds.json", *SIZE, "-n", 8, "--memory", "1Ti")
    assert good.exit_code == 0, good.output
    assert "\nGO: 8 ranks x " in good.stdout
    bad = call("ds.json", *SIZE, "-n", 8, "--memory", "64Gi")
    assert bad.exit_code == 1
    assert "\nNO-GO: 8 ranks x " in bad.stdout
    assert "\nwould fit: " in bad.stdout


def test_the_change_that_is_named_does_fit(folder):
    lean = {**CONFIG, "zero_optimization": {"overlap_comm": False}}
    need = {stage: asked(write(folder, lean, stage), *SIZE, "-n", 8, "--zero-init")["node"] for stage in (2, 3)}
    assert need[3]["need_bytes"] < need[2]["need_bytes"]
    size = need[2]["need_bytes"] - 1
    answer = asked(write(folder, lean, 2), *SIZE, "-n", 8, "--zero-init", "--memory", size)
    assert not answer["go"]
    assert '"stage": 3' in answer["change"]
    assert asked(write(folder, lean, 3), *SIZE, "-n", 8, "--zero-init", "--memory", size)["go"]


def write(folder, config, stage):
    path = folder / f"stage{stage}.json"
    path.write_text(json.dumps({**config, "zero_optimization": {**config["zero_optimization"], "stage": stage}}))
    return path.name


def test_numbers_of_a_model_are_its_own(folder):
    answer = asked("ds.json", "--model", "planned_models:Big", "--model-args", '{"width": 1024}', "-n", 4)
    psi = 2 * 1024 * 1024
    held = {row["what"]: row["bytes"] for row in answer["held"]}
    assert answer["params"] == psi
    assert held["parameters"] == 2 * psi
    assert held["masters"] == held["gradients"] == psi
    assert held["optimizer state"] == 2 * psi
    sent = {(row["what"], row["verb"]): row["bytes"] for row in answer["sent"]}
    assert sent["gradients", "reduce_scatter"] == 3 * 2 * psi * 3 // 4
    assert sent["updated parameters", "all_gather"] == 2 * psi * 3 // 4
    assert answer["meaning"]["gradients"] == "cut over 4 ranks"
    assert answer["tiers"] == {"device": sum(held.values())}
    assert answer["node"]["need_bytes"] == 4 * max(answer["train_bytes"], answer["build_bytes"])
    assert (
        asked("ds.json", "--model", "planned_models:Big", "--model-args", "[1024, 3]", "-n", 4)["params"]
        == 3 * psi // 2
    )


def test_a_size_alone_gives_equal_layers(folder):
    by_size = asked("ds.json", "--params", 3 * 2**20, "--largest-layer", 2**20, "-n", 4)
    model = ("--model", "planned_models:Big", "--model-args", '{"width": 1024, "depth": 3}')
    by_model = asked("ds.json", *model, "-n", 4)
    for part in ("params", "held", "sent", "build_bytes"):
        assert by_size[part] == by_model[part]


def test_layers_of_a_size_have_coded_gradients(folder):
    zero = {"stage": 3, "zero_quantized_gradients": True, "zero_quantized_in_node": True}
    name = write(folder, CONFIG | {"zero_optimization": zero}, 3)
    by_size = asked(name, "--params", 3 * 2**20, "--largest-layer", 2**20, "-n", 4)
    by_model = asked(name, "--model", "planned_models:Big", "--model-args", '{"width": 1024, "depth": 3}', "-n", 4)
    assert by_size["sent"] == by_model["sent"]


def test_ranks_of_a_node_share_its_memory(folder):
    one, two = (asked("ds.json", *SIZE, "-n", 8, "--nodes", nodes)["node"]["need_bytes"] for nodes in (1, 2))
    assert one == 2 * two


def test_tables_name_everything(folder):
    done = call("ds.json", *SIZE, "-n", 8, "--activations", "1Gi")
    for word in ("7G parameters", "cut over 8 ranks", "reduce_scatter", "masters", "gradient buckets", "--activations"):
        assert word in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 200


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stage", [0, 1])
def test_1_bit_optimizers_have_a_table_for_each_phase(folder, name, stage):
    (folder / "onebit.json").write_text(json.dumps({**settings(name, stage), "train_batch_size": 8}))
    words = ("onebit.json", *SIZE, "-n", 8, "--nodes", 2, "--memory", "10Ti")
    done, answer = call(*words), asked(*words)
    assert done.exit_code == 0, done.output
    held = {row["what"]: row["bytes"] for row in answer["held"]}
    assert held["1-bit errors"] > 0
    assert "1-bit errors" in done.stdout
    assert ("1-bit momentum" in done.stdout) == ("1-bit momentum" in held) == (name == "OneBitAdam" and stage == 1)
    for phase in answer["phases"]:
        assert f"\n{phase['name']} ({phase['when']}):\none rank sends in a step" in done.stdout
        assert phase["bytes"] == sum(row["bytes"] for row in phase["sent"])
    assert answer["phases"][0]["sent"] == answer["sent"]
    last = 8 if name == "ZeroOneAdam" else FREEZE
    assert f"update {last + 1}" in answer["phases"][-1]["when"]


def test_other_optimizers_have_one_table(folder):
    done = call("ds.json", *SIZE, "-n", 8)
    assert done.stdout.count("one rank sends in a step") == 1
    assert asked("ds.json", *SIZE, "-n", 8)["phases"] == []


def test_tiers_have_rows_of_their_own(folder):
    files = {"device": "nvme", "nvme_path": "disk"}
    zero = {"stage": 3, "offload_param": {**files, "max_in_cpu": 300_000}, "offload_optimizer": {**files, "ratio": 0.5}}
    zero |= {"overlap_comm": False, "stage3_max_reuse_distance": 0}
    (folder / "tiers.json").write_text(json.dumps({**CONFIG, "zero_optimization": zero}))
    words = ("tiers.json", "--model", "planned_models:Big", "--model-args", "[1024, 4]", "-n", 4, "--nodes", 2)
    answer = asked(*words)
    part = 1024 * 1024 // 4  # of each of four units
    held = {(row["what"], row["tier"]): row["bytes"] for row in answer["held"]}
    assert held["parameters", "host"] == 2 * part
    assert held["parameters", "nvme"] == 6 * part
    assert held["masters", "nvme"] == held["masters", "device"] == 8 * part
    assert answer["files"] == {"rank_bytes": answer["tiers"]["nvme"], "node_bytes": 2 * answer["tiers"]["nvme"]}
    moved = {(row["what"], row["from"], row["to"]): row["bytes"] for row in answer["moved"]}
    assert moved["masters", "nvme", "host"] == moved["masters", "host", "nvme"] == 8 * part
    assert moved["parameters", "nvme", "host"] == 3 * 2 * 6 * part
    assert answer["train_bytes"] == answer["tiers"]["device"] + answer["tiers"]["host"]
    assert answer["meaning"]["parameters"] == "cut over 4 ranks, in files beyond the first 300k elements of each rank"
    assert answer["meaning"]["gradients"] == "cut over 4 ranks, in files (the first 0.5 of the elements)"
    text = call(*words).stdout
    for word in (
        "update buffers",
        "swap files of a rank",
        "swap files on a node",
        "one rank moves in a step",
        "sum in",
    ):
        assert word in text


def test_a_limit_of_memory_in_the_config_is_no_go(folder):
    (folder / "limit.json").write_text(json.dumps({**CONFIG, "host_memory_limit": "1GiB"}))
    done = call("limit.json", *SIZE, "-n", 8, "--memory", "1Ti")
    assert done.exit_code == 1, done.output
    assert "\nNO-GO: each rank needs " in done.stdout
    assert "host_memory_limit is 1 GiB" in done.stdout


MOMENTS_8 = 2 * (1 + 4 / 256)


@pytest.mark.parametrize(
    ("more", "words", "masters", "moments"),
    [
        ({"data_types": {"optimizer_states": "int8"}}, "masters fp32, optimizer states int8", 4, MOMENTS_8),
        (
            {"data_types": {"master_dtype": "bf16", "master_rounding": "kahan", "optimizer_states": "int8"}},
            "masters bf16 (kahan), optimizer states int8", 2, MOMENTS_8,
        ),
        (
            {"data_types": {"master_dtype": "bf16", "optimizer_states": {"exp_avg": "bf16"}}},
            "masters bf16, optimizer states exp_avg bf16", 0, 6,
        ),
        (
            {"bf16": {"enabled": False}, "amp": {"enabled": True, "opt_level": "O3", "cast_model_type": "bf16"}},
            "masters bf16, optimizer states fp32", 0, 8,
        ),
    ],
)  # fmt: skip
def test_states_rest_in_the_bytes_of_their_codes(folder, more, words, masters, moments):
    (folder / "ds.json").write_text(json.dumps(CONFIG | more))
    said = call("ds.json", "-n", 4, *SIZE)
    assert f"at rest {words}" in " ".join(said.output.split())
    found = asked("ds.json", "-n", 4, *SIZE)
    held = {row["what"]: row["bytes"] for row in found["held"]}
    assert held.get("masters", 0) == pytest.approx(7e9 / 4 * masters, rel=1e-3)
    assert held["optimizer state"] == pytest.approx(7e9 / 4 * moments, rel=1e-3)


def test_buffers_that_are_too_short_are_a_wrong_question(folder):
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "disk", "max_in_cpu": 0, "buffer_size": 1000}}
    (folder / "short.json").write_text(json.dumps({**CONFIG, "zero_optimization": zero}))
    done = call("short.json", *SIZE, "-n", 8)
    assert done.exit_code == 2
    assert "buffer_size 1000 is less than the" in done.stderr


def test_settings_without_a_part_are_told_and_planned(folder, monkeypatch):
    row = unavailable.Row("gradient_clipping", lambda limit: limit > 0, "clipping is not available; use 0")
    monkeypatch.setattr(unavailable, "UNAVAILABLE", (row,))
    (folder / "later.json").write_text(json.dumps({**CONFIG, "gradient_clipping": 1.0}))
    done = call("later.json", *SIZE, "-n", 8, "--memory", "1Ti")
    assert done.exit_code == 0, done.output
    assert "later.json: a run would refuse this: gradient_clipping: clipping is not available; use 0" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("none.json", *SIZE), "none.json: there is no such configuration file"),
        (("broken.json", *SIZE), "stage: must be at most 3"),
        (("ds.json",), "--model MODULE:CALLABLE or by its size"),
        (("ds.json", "--params", "7e9"), "--largest-layer 1e8"),
        (("ds.json", *SIZE, "--model", "planned_models:Big"), "either as --model"),
        (("ds.json", "--params", "10", "--largest-layer", "20"), "--largest-layer 20 of --params 10"),
        (("ds.json", "--params", "7e9", "--largest-layer", "1"), "--largest-layer 1 of"),
        (("ds.json", "--params", "7x", "--largest-layer", "1"), "expected a number"),
        (("ds.json", *SIZE, "--nodes", "9"), "--nodes 9 is more than the 8 ranks"),
        (("batch.json", *SIZE), "train_batch_size 7"),
        (("ds.json", "--model", "planned_models"), "expected MODULE:CALLABLE"),
        (("ds.json", "--model", "no_such_module:Big"), "'no_such_module' cannot be imported"),
        (("ds.json", "--model", "planned_models:Small"), "has no 'Small'"),
        (("ds.json", "--model", "planned_models:NUMBER"), "is a int"),
        (("ds.json", "--model", "planned_models:broken"), "RuntimeError: no such weights"),
        (("ds.json", "--model", "planned_models:reads"), "cannot be built on torch's meta device"),
        (("ds.json", "--model", "planned_models:text"), "gave a str"),
        (("ds.json", "--model", "planned_models:placed"), "the first is 'weight'"),
        (("ds.json", "--model", "planned_models:empty"), "has no parameters"),
        (("ds.json", "--model", "planned_models:Big"), "missing 1 required positional argument: 'width'"),
        (("ds.json", "--model", "planned_models:Big", "--model-args", "{"), "is no JSON"),
        (("ds.json", "--model", "planned_models:Big", "--model-args", "7"), "an object of keywords"),
        (("optimizer.json", *SIZE), "Adamm"),
    ],
)
def test_one_message_for_what_is_wrong(folder, words, message):
    (folder / "broken.json").write_text('{"zero_optimization": {"stage": 4}, "train_batch_size": 8}')
    (folder / "batch.json").write_text('{"train_batch_size": 7}')
    (folder / "optimizer.json").write_text(json.dumps({**CONFIG, "optimizer": {"type": "Adamm"}}))
    done = call(*words, "-n", "8")
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert "Traceback" not in done.output
    assert done.stdout == ""


def test_mistakes_are_json_too(folder):
    done = call("none.json", *SIZE, "-n", 8, "--json")
    assert done.exit_code == 2
    assert "there is no such configuration file" in json.loads(done.stdout)["error"]


STAGED = {**CONFIG, "pipeline": {"stages": 2, "partition": "uniform"}}
SLICED = {**CONFIG, "tensor_parallel": {"autotp_size": 2, "injection_policy_tuple": {"0": "column", "1": "row"}}}


def test_the_largest_stage_is_named(folder):
    (folder / "staged.json").write_text(json.dumps(STAGED))
    words = ("staged.json", "--model", "planned_models:uneven", "-n", 4, "--nodes", 2)
    answer = asked(*words, "--memory", "1Gi")
    first, second = answer["pipeline_stages"]
    assert [first["params"], second["params"]] == [2 * 64 * 64, 64 * 64 + 64 * 512]
    assert answer["pipeline_stage"] == 1
    assert answer["train_bytes"] == second["train_bytes"] > first["train_bytes"]
    assert answer["node"]["need_bytes"] == 2 * second["train_bytes"]  # both ranks of the second node have it
    assert answer["axes"]["data"] > answer["axes"]["pipe data"] == 2 * 72 * 8 * 3 // 4
    assert "stages send each other" in answer["not_exact"][0]
    text = call(*words, "--memory", "1Gi").stdout
    assert "at most" in text
    assert "(pipeline stage 1)" in text


def test_slices_are_planned(folder):
    (folder / "sliced.json").write_text(json.dumps(SLICED))
    words = ("--model", "planned_models:Big", "--model-args", '{"width": 64}')
    whole, cut = asked("ds.json", *words, "-n", 2), asked("sliced.json", *words, "-n", 4)
    assert 2 * cut["params"] == whole["params"]
    assert cut["build_bytes"] >= 4 * whole["params"]
    assert "slices of a layer" in cut["not_exact"][0]
    assert cut["meaning"]["masters and optimizer states"] == "cut over 2 ranks"


@pytest.mark.parametrize(
    ("config", "words", "text"),
    [
        (STAGED, ("--model", "planned_models:one"), "only layers in a row can be dealt to stages"),
        (
            STAGED,
            ("--model", "planned_models:uneven", "-n", 3),
            "2 pipeline stages of 1 slices do not divide the 3 ranks",
        ),
        (SLICED, SIZE, "'0' fits to no layer"),
        (CONFIG, ("--model", "planned_models:uneven"), "expected a torch.nn.Module, or layers and pipeline.stages"),
    ],
)
def test_stages_and_slices_that_are_not_possible(folder, config, words, text):
    (folder / "odd.json").write_text(json.dumps(config))
    done = call("odd.json", *words, *(() if "-n" in words else ("-n", 4)))
    assert done.exit_code == 2, done.output
    assert text in done.stderr


def test_ranks_are_asked_for(folder):
    done = call("ds.json", *SIZE)
    assert done.exit_code == 2
    assert "--ranks" in done.output


def test_a_model_larger_than_memory_is_planned_without_it(folder):
    words = ["plan", "ds.json", "--model", "planned_models:Big", "--model-args", '{"width": 400000}', "-n", "64"]
    limit = 8 << 30  # of address space; the model has 1.28 TB in fp32

    def confine():
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    done = subprocess.run(
        [sys.executable, "-m", "mpispeed.cli.main", *words],
        cwd=folder, capture_output=True, text=True, timeout=120, check=False, preexec_fn=confine,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "model                         320G parameters" in done.stdout


def test_nothing_heavy_is_imported_to_start():
    code = "import sys, mpispeed.cli.plan; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "pydantic", "h5py", "mpi4py", "rich"} & set(done.stdout.split())
