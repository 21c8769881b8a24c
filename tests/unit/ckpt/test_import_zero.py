"""DeepSpeed folders of every kind become checkpoints with the same tensors and counters."""

import json

import pytest
import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.foreign.found import ReadOptions
from mpispeed.ckpt.format.errors import CorruptCheckpoint, IncompleteCheckpoint
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.ckpt.tools.importing import import_checkpoint
from tests.unit.ckpt import foreign_folders as folders
from tests.zoo import has_same_bits
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, start, train_averaged, weights

TAG = folders.TAG


def written(kind, root, known, ranks):
    if kind == "grouped":
        folders.write_grouped(root, known, ranks)
    elif kind == "padded":
        folders.write_grouped(root, known, ranks, keeps_padding=True)
    elif kind == "cut":
        folders.write_cut(root, known, ranks)
    elif kind == "universal":
        folders.write_universal(root, known)
    else:
        folders.write_whole(root, known)


def check_params(source, known, frozen_slot="weight16"):
    assert source.names() == sorted((*known.names, *known.frozen))
    for (name, slot), tensor in known.slots.items():
        assert has_same_bits(source.read_whole(name, slot), tensor), (name, slot)
    for index, group in enumerate(known.groups):
        for name in group:
            info = source.info(name)
            assert (info.kind, info.param_group, info.step) == ("trainable", index, known.steps)
    for name, tensor in known.frozen.items():
        assert has_same_bits(source.read_whole(name, frozen_slot), tensor)
        assert (source.info(name).kind, source.info(name).param_group) == ("frozen", -1)
    assert source.buffers() == sorted(known.buffers)
    for name, tensor in known.buffers.items():
        assert has_same_bits(source.read_whole(name, "buffer"), tensor)
    assert source.aliases() == known.shared


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("grouped", 1), ("grouped", 3), ("padded", 3), ("cut", 1), ("cut", 3), ("universal", 2), ("whole", 2)],
)
def test_every_kind_of_folder_keeps_its_tensors_and_counters(tmp_path, kind, ranks):
    known = folders.Known()
    written(kind, tmp_path / "from", known, ranks)
    # without partitions nothing says what is trained
    options = ReadOptions(frozen="^frozen", buffers=r"running_mean|count") if kind == "whole" else None
    report = import_checkpoint(tmp_path / "from", tmp_path / "to", options=options)
    assert (report.saved.tag, report.slots[0], report.left_out) == (TAG, "master", ())
    with open_checkpoint(tmp_path / "to") as source:
        check_params(source, known)
        state = source.state()
        assert json.loads(source.config())["train_batch_size"] == 8
    assert {key: state["engine"][key] for key in ("global_steps", "global_samples", "skipped_steps")} == {
        "global_steps": 5,
        "global_samples": 40,
        "skipped_steps": 1,
    }
    if kind in ("grouped", "padded", "cut"):
        scale = {"dynamic_loss_scale": True, "cur_scale": 1024.0, "cur_iter": 7, "last_overflow_iter": 3, "credit": 2}
        assert state["engine"]["loss_scaler"] == scale
    assert state["client"] == {"note": "hello"}
    assert state["lr_scheduler"] == {"last_batch_iteration": 4}
    optimizer = state["optimizer"]
    assert (optimizer["name"], optimizer["slots"]) == ("AdamW", ["exp_avg", "exp_avg_sq"])
    for row, hyper, group in zip(optimizer["param_groups"], known.hyper, known.groups, strict=True):
        assert row == {**hyper, "params": list(group)}


def test_a_sub_folder_of_a_tag_can_be_named_and_weights_taken_alone(tmp_path):
    known = folders.Known()
    folders.write_grouped(tmp_path / "from", known, 2)
    options = ReadOptions(weights_only=True)
    import_checkpoint(tmp_path / "from" / TAG, tmp_path / "to", tag="first", options=options)
    rows = [(r"^a\.", "layer.")]
    import_checkpoint(tmp_path / "from", tmp_path / "to", tag="second", source_tag=TAG, prefix_map=rows)
    with open_checkpoint(tmp_path / "to", "first") as source:
        assert source.slots("a.weight") == ["master"]
    with open_checkpoint(tmp_path / "to") as source:
        assert has_same_bits(source.read_whole("layer.weight", "exp_avg"), known.slots["a.weight", "exp_avg"])
        assert "layer.bias" in source.state()["optimizer"]["param_groups"][1]["params"]


def remove(folder, name):
    (folder / name).unlink()


def cut_short(folder, name):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])


def change(folder, name, edit):
    with folders.deepspeed_classes():
        content = torch.load(folder / name, weights_only=False)
        edit(content)
        torch.save(content, folder / name)


OPTIMIZER = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"
FAULTS = {
    "a rank in the middle is missing": (lambda f: remove(f, OPTIMIZER), IncompleteCheckpoint, "rank 1"),
    "the last rank is missing": (
        lambda f: remove(f, OPTIMIZER.replace("_1_", "_2_")),
        IncompleteCheckpoint,
        "one of 3",
    ),
    "a rank too many": (
        lambda f: (f / OPTIMIZER.replace("_1_", "_3_")).write_bytes((f / OPTIMIZER).read_bytes()),
        IncompleteCheckpoint,
        "there are 4",
    ),
    "optimizer half-written": (lambda f: cut_short(f, OPTIMIZER), CorruptCheckpoint, "half-written"),
    "weights half-written": (lambda f: cut_short(f, MODEL), CorruptCheckpoint, "half-written"),
    "weights missing": (lambda f: remove(f, MODEL), FileNotFoundError, "model_states"),
    "no list of buffers": (lambda f: change(f, MODEL, lambda c: c.pop("buffer_names")), ValueError, "buffers"),
    "of another model": (
        lambda f: change(f, MODEL, lambda c: c["param_shapes"][0].update({"more": torch.Size([50])})),
        ValueError,
        "sizes do not fit",
    ),
    "kind unknown": (
        lambda f: change(
            f, OPTIMIZER, lambda c: c["optimizer_state_dict"].pop("single_partition_of_fp32_groups", None)
        ),
        ValueError,
        "unknown kind",
    ),
    "two saves": (
        lambda f: (f / f"bf16_{OPTIMIZER}").write_bytes((f / OPTIMIZER).read_bytes()),
        ValueError,
        "two saves",
    ),
    "no latest": (lambda f: remove(f.parent, "latest"), ValueError, "latest"),
    "latest names nothing": (lambda f: (f.parent / "latest").write_text("other"), FileNotFoundError, "other"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_told_and_nothing_is_written(tmp_path, fault):
    folders.write_grouped(tmp_path / "from", folders.Known(), 3)
    break_it, error, text = FAULTS[fault]
    break_it(tmp_path / "from" / TAG)
    with pytest.raises(error, match=text) as caught:
        import_checkpoint(tmp_path / "from", tmp_path / "to")
    assert isinstance(caught.value, CheckpointError)
    assert not (tmp_path / "to").exists()


def test_parts_of_other_sizes_are_told(tmp_path):
    folders.write_cut(tmp_path / "from", folders.Known(), 2)

    def shorten(content):
        content["optimizer_state_dict"]["fp32_flat_groups"][1] = torch.zeros(3)

    change(tmp_path / "from" / TAG, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", shorten)
    with pytest.raises(ValueError, match="other sizes"):
        import_checkpoint(tmp_path / "from", tmp_path / "to")


def test_a_universal_folder_that_lacks_a_parameter_is_told(tmp_path):
    folders.write_universal(tmp_path / "from", folders.Known())
    (tmp_path / "from" / TAG / "zero" / "a.bias" / "fp32.pt").unlink()
    with pytest.raises(IncompleteCheckpoint, match=r"a\.bias"):
        import_checkpoint(tmp_path / "from", tmp_path / "to")


def test_parameters_that_an_optimizer_only_numbers_are_refused_where_shapes_leave_a_choice(tmp_path):
    known = folders.Known()
    known.frozen["other.bias"] = torch.zeros(5)
    folders.write_whole(tmp_path / "from", known)
    options = ReadOptions(buffers="running_mean|count")
    with pytest.raises(ValueError, match=r"a\.bias, other\.bias"):
        import_checkpoint(tmp_path / "from", tmp_path / "to", options=options)


class Training:
    """An engine after three steps, as a folder of DeepSpeed with the same tensors."""

    def __init__(self, root, stage):
        self.settings = config(stage, 4, 1, **WARM)
        self.data = batches(5, 4)
        self.engine = start(self.settings, TinyLM())
        train_averaged(self.engine, self.data[:3])
        self.engine.save_checkpoint(str(root / "own"))
        known = folders.Known()
        known.steps, known.frozen, known.buffers = 3, {}, {}
        with open_checkpoint(root / "own") as source:
            saved = source.state()
            known.shared = source.aliases()
            known.groups = [{name: torch.Size(source.info(name).shape) for name in source.names()}]
            known.slots = {(t.name, t.slot): source.read_whole(t.name, t.slot) for t in source.tensors()}
        known.hyper = [{k: v for k, v in saved["optimizer"]["param_groups"][0].items() if k != "params"}]
        counters = {key: saved["engine"][key] for key in ("global_steps", "global_samples", "skipped_steps")}
        folders.write_grouped(root / "theirs", known, 3, lr_scheduler=saved["lr_scheduler"], **counters)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_goes_on_from_an_imported_folder_as_if_it_had_been_its_own(tmp_path, stage):
    first = Training(tmp_path, stage)
    report = import_checkpoint(tmp_path / "theirs", tmp_path / "imported")
    assert report.left_out == ()
    second = start(first.settings, TinyLM(seed=8))
    path, client = second.load_checkpoint(str(tmp_path / "imported"))
    assert path is not None
    assert client == {"note": "hello"}
    assert second.global_steps == 3
    losses = [train_averaged(engine, first.data[3:]) for engine in (first.engine, second)]
    assert losses[0] == losses[1]
    found = [weights(engine) for engine in (first.engine, second)]
    for name, tensor in found[0].items():
        assert has_same_bits(tensor, found[1][name]), name
