"""`mpispeed plan` of models whose experts are shared out: each rank's part, and what is not counted."""

import json

import pytest
from click.testing import CliRunner
from torch import nn

from mpispeed.cli.main import cli
from mpispeed.moe import MoE
from mpispeed.nn.expert import RoutedExperts, Router, SwiGLUExperts

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
