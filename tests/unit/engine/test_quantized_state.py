"""Errors of quantized gradients in checkpoints, on simulated ranks: the same bits, the same sums, damaged files."""

from __future__ import annotations

import logging

import h5py
import pytest
import torch
from click.testing import CliRunner

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.cli.main import cli
from mpispeed.engine.state.global_layout import GlobalLayout, exchanging_run
from mpispeed.exchange.quantized_sums import NODE_ERROR, RANK_ERROR
from mpispeed.exchange.saved import Loading
from mpispeed.mesh import sim
from tests.unit.engine.simulated import engine_on
from tests.zoo.models import Net, samples
from tests.zoo.training import ADAM, config, train

DATA = samples(12)
LOCO = {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.5, "reset_T": 9}}
EVERYWHERE = LOCO | {"zero_quantized_in_node": True}


def settings(stage=2, dtype="fp32", loco=EVERYWHERE, **more):
    return config(stage, dtype=dtype, zero=loco, **ADAM, reduction="ordered", **more)


def on_ranks(ranks, node, job, source, seed=11):
    models = [Net(seed=seed) for _ in range(ranks)]

    def run(world):
        engine = engine_on(world, source, models[world.rank])
        found = job(engine)
        engine.destroy()
        return found

    return sim.run(ranks, run, ranks_per_node=node)


def feedbacks(engine):
    return dict(engine.parts.optimization.exchange.reducer._feedbacks)


def kept(engine):
    """Codes and scales of all errors of this rank, and their age."""
    return {
        (index, hop): (feedback.uses, *(x.clone() for x in coded))
        for index, feedback in feedbacks(engine).items()
        for hop, (_, coded) in feedback._errors.items()
    }


def is_same(ours, theirs):
    return ours.keys() == theirs.keys() and all(
        a[0] == b[0] and all(map(torch.equal, a[1:], b[1:])) for a, b in ((ours[k], theirs[k]) for k in ours)
    )


@pytest.mark.parametrize(
    ("ranks", "node", "stage", "dtype", "is_async", "loco"),
    [
        (4, 2, 2, "fp32", False, EVERYWHERE), (4, 2, 3, "bf16", False, LOCO), (2, 1, 3, "bf16", False, LOCO),
        (3, 1, 1, "fp16", True, EVERYWHERE), (2, 2, 1, "fp32", False, EVERYWHERE),
    ],
)  # fmt: skip
def test_12_steps_equal_7_a_restart_and_5(ranks, node, stage, dtype, is_async, loco, tmp_path):
    """Errors are forgotten after 9 sums: their age comes back too."""
    source = settings(stage, dtype, loco)

    def unbroken(engine):
        return train(engine, DATA), kept(engine)

    def first(engine):
        losses = train(engine, DATA[:7])
        engine.save_checkpoint(str(tmp_path), async_save=is_async)
        found = kept(engine)
        train(engine, DATA[7:9])  # a background save has copied its errors
        engine.wait_checkpoint()
        return losses, found

    def second(engine):
        engine.load_checkpoint(str(tmp_path))
        found = kept(engine)
        return train(engine, DATA[7:]), found, kept(engine)

    whole, begun = on_ranks(ranks, node, unbroken, source), on_ranks(ranks, node, first, source)
    ended = on_ranks(ranks, node, second, source, seed=90)
    for (losses, errors), (before, saved), (after, loaded, last) in zip(whole, begun, ended, strict=True):
        assert before + after == losses
        assert is_same(loaded, saved)
        assert is_same(last, errors)


@pytest.mark.parametrize("stage", [0, 1])
def test_the_warm_up_of_1_bit_optimizers_on_nodes_is_not_quantized(stage):
    """Its states are not cut over nodes, as the two hops of quantized sums need."""
    found = []
    for loco in ({}, LOCO):
        more = {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 50}}}
        source = config(stage, zero=loco, reduction="ordered", **more)
        found.append(on_ranks(4, 2, lambda engine: train(engine, DATA[:3]), source))
    assert found[0] == found[1]


def shares(engine):
    """Of each parameter what errors of this rank add to the mean gradient, and the most that 8 bits may miss of it."""
    parts, found = engine.parts, {}
    optimization, inner = parts.optimization, parts.mesh["data.inner"]
    factor = optimization.grads.sums.averaging.after / parts.scaler.scale
    for unit in parts.table.units:
        feedback = feedbacks(engine).get(unit.index)
        if feedback is None or not feedback._errors:
            continue
        total, miss = torch.zeros(unit.layout.padded, dtype=torch.float64), 0.0
        for hop, (grid, _) in feedback._errors.items():
            values = feedback.values(hop, 0, grid.numel).double()
            start = 0 if hop == "first" else inner.rank * grid.numel
            weight = 1.0 if hop == "first" else 1.0 / inner.size  # each rank of a node has a part of its errors
            miss += factor * weight * float(values.abs().max()) / 254
            total[start : start + grid.numel] += factor * values
        for entry in unit.layout.entries:
            found[entry.name] = total[entry.span.slice], miss * max(1, inner.size)
    return found


def added_up(rows):
    """Sums over ranks of what `shares` found."""
    return {name: (sum(row[name][0] for row in rows), sum(row[name][1] for row in rows)) for name in rows[0]}


LAYOUTS = [
    (4, 2, EVERYWHERE), (2, 1, EVERYWHERE), (3, 1, EVERYWHERE), (4, 1, LOCO), (6, 2, EVERYWHERE), (4, 2, LOCO),
    (2, 2, EVERYWHERE),
]  # fmt: skip


@pytest.mark.parametrize("saved", [(4, 2, EVERYWHERE), (3, 1, EVERYWHERE), (4, 2, LOCO)])
def test_the_sum_of_errors_in_the_mean_gradient_stays_at_other_numbers_of_ranks(saved, tmp_path):
    """Also between errors of ranks and of nodes, and where nodes have one rank or have plain sums."""

    def first(engine):
        train(engine, DATA[:5])
        engine.save_checkpoint(str(tmp_path))
        return shares(engine)

    def load(engine):
        engine.load_checkpoint(str(tmp_path))
        return shares(engine)

    expected = added_up(on_ranks(*saved[:2], first, settings(loco=saved[2])))
    assert any(float(total.abs().max()) > 0 for total, _ in expected.values())
    for layout in LAYOUTS:
        found = added_up(on_ranks(*layout[:2], load, settings(loco=layout[2]), seed=90))
        assert found.keys() == expected.keys()
        for name, (total, miss) in found.items():
            worst = float((total - expected[name][0]).abs().max())
            assert worst <= miss * 1.01, (layout, name)


def test_what_is_in_the_file_and_what_tools_say(tmp_path):
    def job(engine):
        train(engine, DATA[:3])
        engine.save_checkpoint(str(tmp_path), tag="a")
        train(engine, DATA[3:4])
        engine.save_checkpoint(str(tmp_path), tag="b")
        unit = next(u for u in engine.parts.table.units if u.index in feedbacks(engine))
        return kept(engine), unit.layout.entries, unit.index

    found = on_ranks(4, 2, job, settings())
    assert found
    with open_checkpoint(tmp_path, "b") as source:
        names = [name for name in source.names() if RANK_ERROR in source.slots(name)]
        assert names
        for name in names:
            assert source.stored(name, RANK_ERROR).shape == (4, *source.info(name).shape)
            assert source.stored(name, NODE_ERROR).shape == (2, *source.info(name).shape)
    folder = str(tmp_path)
    for command in (
        ["show", folder],
        ["verify", folder],
        ["stats", folder, "--slots", "all"],
        ["diff", f"{folder}/a", f"{folder}/b"],
    ):
        result = CliRunner().invoke(cli, ["ckpt", *command])
        assert result.exit_code in ((0, 1) if command[0] == "diff" else (0,)), result.output
        assert command[0] == "verify" or RANK_ERROR in result.output, command


@pytest.mark.parametrize("case", ["without", "in a step", "states left out"])
def test_a_load_without_errors_begins_at_zero(case, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("mpispeed"), "propagate", True)
    plain = settings(loco={"zero_quantized_gradients": True})
    source = plain if case == "without" else settings(gradient_accumulation_steps=3)

    def first(engine):
        train(engine, DATA[:3])
        if case == "in a step":
            engine.backward(engine(*(x[:2] for x in DATA[3])))
        engine.save_checkpoint(str(tmp_path))

    def second(engine):
        train(engine, DATA[:1])
        engine.load_checkpoint(str(tmp_path), load_optimizer_states=case != "states left out")
        return [feedback.uses for feedback in feedbacks(engine).values()], shares(engine)

    on_ranks(2, 1, first, source)
    with caplog.at_level("INFO", logger="mpispeed"):
        for uses, errors in on_ranks(2, 1, second, settings()):
            assert set(uses) == {0}
            assert all(float(total.abs().max()) == 0 for total, _ in errors.values())
    # By record: handlers of earlier tests may pass the same one on twice.
    shown = {id(record): record.getMessage() for record in caplog.records if record.levelno >= logging.INFO}
    said = [text for text in shown.values() if "no errors of quantized gradients" in text]
    assert len(said) == (case != "states left out")


def damaged(folder, change):
    for file in folder.glob("*.h5"):
        with h5py.File(file, "r+") as found:
            names: list[str] = []
            found.visit(lambda name, names=names: names.append(name) if name.endswith(RANK_ERROR) else None)
            for name in names:
                values, attributes = found[name][()], dict(found[name].attrs)
                del found[name]
                found[name] = change(values)
                found[name].attrs.update(attributes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("errors")

    def job(engine):
        train(engine, DATA[:2])
        engine.save_checkpoint(str(folder), tag="a")

    on_ranks(2, 1, job, settings())
    return folder


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("change", [
    lambda x: x[:0], lambda x: x[..., :0], lambda x: x.reshape(-1), lambda x: x.repeat(40, 0),
    lambda x: x + float("inf"),
], ids=["no rows", "no elements", "flat", "many rows", "not finite"])  # fmt: skip
def test_errors_that_cannot_be_are_refused_on_every_rank(change, ranks, saved, tmp_path):
    (tmp_path / "a").mkdir()
    for file in (saved / "a").iterdir():
        (tmp_path / "a" / file.name).write_bytes(file.read_bytes())
    damaged(tmp_path / "a", change)

    def load(engine):
        with pytest.raises(CheckpointError):
            engine.load_checkpoint(str(tmp_path), "a")

    on_ranks(ranks, 1, load, settings(checkpoint={"load_verify": "off"}))


@pytest.mark.parametrize("key", ["uses", "after", "loss_scale"])
@pytest.mark.parametrize("value", [None, -1, "1", float("nan"), 0.0])
def test_impossible_numbers_beside_errors_are_refused(key, value, saved):
    def load(engine):
        with open_checkpoint(saved, "a") as source:
            optimizer = source.state()["optimizer"]
            optimizer["gradient_errors"][key] = value
            loading = Loading(exchanging_run(engine.parts, GlobalLayout.of(engine.parts)), source, optimizer, 1)
            with pytest.raises(CheckpointError, match="gradient_errors in the state of"):
                engine.parts.optimization.exchange.read_scaled(loading)

    on_ranks(2, 1, load, settings())
