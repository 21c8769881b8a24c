"""`mpispeed plan` of models whose experts are shared out: each rank's part, and rows that travel."""

import json

import pytest
from click.testing import CliRunner
from torch import nn

from mpispeed.cli.main import cli
from mpispeed.moe import MoE
from mpispeed.nn.expert import RoutedExperts, Router, SwiGLUExperts
from tests.helpers.hub_experts import model_of

WIDTH, EXPERTS = 16, 8


def fused(ep_size):
    return RoutedExperts(Router(WIDTH, EXPERTS), SwiGLUExperts(WIDTH, WIDTH, EXPERTS), ep_size=ep_size)


def modules(ep_size):
    return MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=EXPERTS, ep_size=ep_size)


@pytest.mark.parametrize("make", ["fused", "modules"])
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_a_rank_has_its_experts(tmp_path, make, ep_size):
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}))
    words = ["plan", str(config), "-n", "4", "--model", f"{__name__}:{make}", "--model-args", f"[{ep_size}]", "--json"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    experts = EXPERTS // ep_size * (3 * WIDTH * WIDTH if make == "fused" else WIDTH * WIDTH + WIDTH)
    assert answer["params"] == experts + WIDTH * EXPERTS
    told = any("rows of tokens to experts" in text for text in answer["not_exact"])
    assert told is (ep_size > 1)
    text = CliRunner().invoke(cli, words[:-1]).stdout
    assert ("parameters, of experts those of one rank" in text) is (ep_size > 1)


def uneven():
    return RoutedExperts(Router(WIDTH, 6), SwiGLUExperts(WIDTH, WIDTH, 6), ep_size=4)


def test_experts_that_do_not_divide_are_counted_for_the_rank_with_most(tmp_path):
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}))
    done = CliRunner().invoke(cli, ["plan", str(config), "-n", "4", "--model", f"{__name__}:uneven", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["params"] == 2 * 3 * WIDTH * WIDTH + WIDTH * 6


def late():
    return [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), fused(2), fused(2)]


def test_experts_of_a_later_stage_are_named(tmp_path):
    config = tmp_path / "ds.json"
    settings = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    config.write_text(json.dumps(settings | {"pipeline": {"stages": 2, "partition": "uniform"}}))
    words = ["plan", str(config), "-n", "4", "--model", f"{__name__}:late", "--json"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    assert any("rows of tokens to experts" in text for text in json.loads(done.stdout)["not_exact"])


LENGTH = 8


def rows_sent(path, *words, length=LENGTH, **settings):
    """Bytes of exchanges of one rank in a step by their names, and the sentences beside."""
    config = {"train_batch_size": 8, "gradient_accumulation_steps": 2, "optimizer": {"type": "Adam"}} | settings
    path.write_text(json.dumps(config))
    done = CliRunner().invoke(cli, ["plan", str(path), *words, "--sequence-length", str(length), "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    found = {}
    for row in answer["sent"]:
        if row["verb"] == "all_to_all":
            found.setdefault(row["what"], {})[" ".join(row["axes"])] = row["bytes"]
    return found, answer["not_exact"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("ep_size", "nodes"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_rows_under_equal_loads(tmp_path, ep_size, nodes, dtype):
    words = ["-n", "4", "--nodes", str(nodes), "--model", f"{__name__}:fused", "--model-args", f"[{ep_size}]"]
    found, told = rows_sent(tmp_path / "ds.json", *words, bf16={"enabled": dtype == "bf16"})
    assert any("assumed for rows to experts" in text for text in told) is (ep_size > 1)
    assert not any("not counted: rows" in text for text in told)
    if ep_size == 1:
        assert not found
        return
    everything = 4 * 2 * LENGTH * WIDTH * (2 if dtype == "bf16" else 4)  # 4 ways of 2 micro-batches of 1 sample
    counts = 2 * 8 * (EXPERTS // ep_size + 1)
    rows, told = found["rows to experts and back"], found["counts of rows"]
    if nodes == 1:
        assert sum(told.values()) == (ep_size - 1) * counts
        assert sum(rows.values()) == everything * (ep_size - 1) // ep_size
    else:
        assert len(rows) == len(told) == 2
        assert set(rows.values()) == {everything // 2}  # half of the rows inside of nodes, half of all between them


def test_six_tokens_go_to_the_first_six_experts(tmp_path):
    words = ["-n", "4", "--model", f"{__name__}:fused", "--model-args", "[4]"]
    found, _ = rows_sent(tmp_path / "ds.json", *words, length=6)
    row = WIDTH * 4
    there, back = 4 * row, 3 * 2 * row  # of 6 rows 2 stay on rank 0, and 2 come from each of the others
    assert sum(found["rows to experts and back"].values()) == 2 * 2 * (there + back)


def mixtral():
    return model_of("mixtral")


def test_rows_of_a_block_of_transformers(tmp_path):
    section = {"enabled": True, "autoep_size": 2}
    found, told = rows_sent(tmp_path / "ds.json", "-n", "2", "--model", f"{__name__}:mixtral", expert_parallel=section)
    assert sum(found["rows to experts and back"].values()) > 0
    assert any("assumed for rows to experts" in text for text in told)
