"""DeepSpeed's files of experts: every layout becomes the same whole model, and files that lie end in a sentence."""

import click.testing
import pytest
import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.foreign.found import ReadOptions
from mpispeed.ckpt.format.errors import CorruptCheckpoint, IncompleteCheckpoint
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.ckpt.tools.importing import import_checkpoint
from mpispeed.cli.ckpt import ckpt
from mpispeed.compat import fp32
from tests.unit.ckpt import foreign_experts as writing
from tests.unit.ckpt.foreign_experts import COUNTS, PREFIX, Mixture
from tests.unit.ckpt.foreign_folders import TAG, save
from tests.unit.ckpt.test_import_zero import change
from tests.zoo import has_same_bits

WRITERS = {
    "2 ranks, 1 for experts": lambda root, known: writing.write_partitioned(root, known, 2, 1),
    "2 ranks, 2 for experts": lambda root, known: writing.write_partitioned(root, known, 2, 2),
    "4 ranks, 2 for experts": lambda root, known: writing.write_partitioned(root, known, 4, 2),
    "6 ranks, 2 for experts": lambda root, known: writing.write_partitioned(root, known, 6, 2),
    "4 ranks, data first": lambda root, known: writing.write_partitioned(root, known, 4, 2, is_data_first=True),
    "fp32 copies": lambda root, known: writing.write_whole(root, known, 2, "copies"),
    "flat fp32 copies": lambda root, known: writing.write_whole(root, known, 2, "flat"),
    "torch's optimizer": lambda root, known: writing.write_whole(root, known, 2, "plain"),
    "torch's optimizer, one group": lambda root, known: writing.write_whole(root, known, 2, "mixed"),
}


def imported(tmp_path, known, writer, **more):
    writer(tmp_path / "from", known)
    return import_checkpoint(tmp_path / "from", tmp_path / "to", **more)


def number_of(name):
    """(number, experts of the layer) by the name."""
    if "deepspeed_experts" not in name:
        return None
    layer, _, rest = name.partition(".deepspeed_moe.experts.deepspeed_experts.")
    return int(rest.partition(".")[0]), COUNTS[layer]


@pytest.mark.parametrize("kind", WRITERS)
def test_experts_of_every_layout_come_with_their_states_and_numbers(tmp_path, kind):
    known = Mixture(torch.float32 if "torch" in kind else torch.bfloat16)
    report = imported(tmp_path, known, WRITERS[kind])
    assert (report.params, report.left_out) == (len(known.shapes), ())
    with open_checkpoint(tmp_path / "to") as source:
        assert source.names() == sorted(known.shapes)
        for (name, slot), tensor in known.slots.items():
            assert has_same_bits(source.read_whole(name, slot), tensor), (name, slot)
        for name in known.shapes:
            info = source.info(name)
            assert (info.kind, info.step, info.expert) == ("trainable", known.steps, number_of(name))
            assert str(info.train_dtype).endswith(str(known.dtype).rpartition(".")[2])
        rows = source.state()["optimizer"]["param_groups"]
    if "one group" in kind:
        assert [row["params"] for row in rows] == [list(known.shapes)]
    else:
        assert [row["params"] for row in rows] == [known.dense, known.experts]


def test_weights_alone_frozen_experts_and_fp32_state_dicts(tmp_path):
    frozen = {PREFIX.format("m1", number) + "bias" for number in range(2)}
    known = Mixture(frozen=frozen)
    imported(tmp_path, known, WRITERS["4 ranks, 2 for experts"], options=ReadOptions(weights_only=True))
    with open_checkpoint(tmp_path / "to") as source:
        for name in known.shapes:
            kind, slots = ("frozen", ["weight16"]) if name in frozen else ("trainable", ["master"])
            assert (source.info(name).kind, source.slots(name)) == (kind, slots)
    state = fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "from")
    for name in known.shapes:
        wanted = known.weight(name).float() if name in frozen else known.slots[name, "master"]
        assert has_same_bits(state[name], wanted), name


def test_the_layout_before_layers_had_numbers(tmp_path):
    known = Mixture()
    known.counts = {"m2": 4}
    known.shapes = {name: shape for name, shape in known.shapes.items() if not name.startswith("m1.")}
    writing.write_partitioned(tmp_path / "from", known, 2, 2, num_experts=4)
    for path in (tmp_path / "from" / TAG).glob("layer_*"):
        path.rename(path.parent / path.name.partition("_")[2].partition("_")[2])
    import_checkpoint(tmp_path / "from", tmp_path / "to")
    with open_checkpoint(tmp_path / "to") as source:
        for name in known.shapes:
            assert has_same_bits(source.read_whole(name, "exp_avg"), known.slots[name, "exp_avg"])


def test_tensor_parallel_ranks_with_copies_of_the_experts(tmp_path):
    known = Mixture()
    for mp in range(2):
        writing.write_partitioned(tmp_path / "from", known, 2, 2, mp=mp)
    options = ReadOptions(tp_patterns=(("replicated", "."),))
    import_checkpoint(tmp_path / "from", tmp_path / "to", options=options)
    with open_checkpoint(tmp_path / "to") as source:
        for name in known.shapes:
            assert has_same_bits(source.read_whole(name, "exp_avg"), known.slots[name, "exp_avg"])
            assert source.info(name).expert == number_of(name)


def test_fused_experts_of_autoep_become_one_tensor(tmp_path):
    make = torch.Generator().manual_seed(3)
    whole = {(w, slot): torch.rand(4, 3, 2, generator=make) for w in ("w1", "w2", "w3") for slot in writing.SLOTS}
    folder, dense = tmp_path / "from" / TAG, {"x.router.gate.weight": torch.rand(4, 2, generator=make)}
    shapes = [
        {name: tensor.shape for name, tensor in dense.items()},
        {f"x.experts.{w}": torch.Size((2, 3, 2)) for w in ("w1", "w2", "w3")},
    ]
    model = writing.model_states(Mixture(), 2, 2, module=dense, param_shapes=shapes, num_experts=[4])
    save(folder / "mp_rank_00_model_states.pt", model)
    for number in range(4):
        content = {f"x.experts.{w}.{number}": whole[w, "master"][number] for w in ("w1", "w2", "w3")}
        save(folder / f"layer_0_expert_{number}_mp_rank_00_model_states.pt", content)
    gate = dense["x.router.gate.weight"].reshape(-1)
    for rank in range(2):
        held = {
            slot: torch.cat([whole[w, slot][2 * rank : 2 * rank + 2].reshape(-1) for w in ("w1", "w2", "w3")])
            for slot in writing.SLOTS
        }
        part = gate[4 * rank : 4 * rank + 4]
        states = [{"step": 4, "exp_avg": part, "exp_avg_sq": part}, {"step": 4, **held}]
        content = {
            "base_optimizer_state": {
                "state": dict(enumerate(states)),
                "param_groups": [{**group, "params": [i]} for i, group in enumerate(writing.groups())],
            },
            "single_partition_of_fp32_groups": [part, held["master"]],
            "zero_stage": 1,
            "partition_count": [2, 1],
        }
        save(folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", {"optimizer_state_dict": content})
    import_checkpoint(folder, tmp_path / "to")
    with open_checkpoint(tmp_path / "to") as source:
        assert source.names() == sorted(["x.router.gate.weight", *(f"x.experts.{w}" for w in ("w1", "w2", "w3"))])
        for (w, slot), tensor in whole.items():
            assert has_same_bits(source.read_whole(f"x.experts.{w}", slot), tensor)


def expert(layer, number):
    return f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt"


MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"


def rename(old, new):
    def edit(content):
        for key in [key for key in content if old in key]:
            content[key.replace(old, new)] = content.pop(key)

    return edit


def resized(content):
    content[PREFIX.format("m2", 2) + "0.weight"] = torch.zeros(3, 5)


def other_bias(content):
    content[PREFIX.format("m1", 0) + "bias"] = torch.ones(4).bfloat16()


def counted(number):
    return lambda content: content["optimizer_state_dict"].update(partition_count=[4, number])


def copy(folder, old, new):
    (folder / new).write_bytes((folder / old).read_bytes())


#: what is done to a folder of 4 ranks, 2 for experts; the error and a part of its sentence
FAULTS = {
    "an expert is missing": (lambda f: (f / expert(1, 2)).unlink(), IncompleteCheckpoint, "expert 2 of layer 1"),
    "the last one is missing": (lambda f: (f / expert(0, 1)).unlink(), IncompleteCheckpoint, "expert 1 of layer 0"),
    "a layer is missing": (
        lambda f: [path.unlink() for path in f.glob("layer_0_*")],
        IncompleteCheckpoint,
        "expert 0 of layer 0",
    ),
    "an expert too many": (lambda f: copy(f, expert(0, 1), expert(0, 2)), ValueError, "layer 0 has 2 experts"),
    "a layer too many": (lambda f: copy(f, expert(0, 0), expert(7, 0)), ValueError, "2 layers"),
    "a number that overflows": (
        lambda f: copy(f, expert(0, 0), expert(0, 10**40)),
        ValueError,
        "layer 0 has 2 experts",
    ),
    "a number twice": (lambda f: copy(f, expert(0, 1), expert(0, "01")), ValueError, "same expert"),
    "the file of another expert": (lambda f: copy(f, expert(1, 0), expert(1, 1)), ValueError, "is of expert 0"),
    "two layers of one name": (
        lambda f: [change(f, expert(1, n), rename("m2.", "m1.")) for n in range(4)],
        ValueError,
        "two layers",
    ),
    "two names in a layer": (lambda f: change(f, expert(1, 1), rename("m2.", "m3.")), ValueError, "layer 1 have"),
    "another shape": (lambda f: change(f, expert(1, 2), resized), ValueError, r"expert 2 .*3, 5"),
    "a number in a name that overflows": (
        lambda f: change(f, expert(1, 1), rename("experts.1.", f"experts.{10**30}.")),
        ValueError,
        "no tensor of an expert",
    ),
    "another name": (lambda f: change(f, expert(1, 1), rename("experts.1.", "x.")), ValueError, "no tensor of an"),
    "no dict": (lambda f: torch.save([1], f / expert(0, 0)), CorruptCheckpoint, "tensors of an expert"),
    "no tensors": (lambda f: torch.save({}, f / expert(0, 0)), CorruptCheckpoint, "tensors of an expert"),
    "half-written": (lambda f: (f / expert(0, 0)).write_bytes(b"PK\3\4"), CorruptCheckpoint, "half-written"),
    "experts without end": (
        lambda f: change(f, MODEL, lambda c: c.update(num_experts=[2, 10**18])),
        IncompleteCheckpoint,
        "expert 4 of layer 1",
    ),
    "no number of experts": (
        lambda f: change(f, MODEL, lambda c: c.update(num_experts=[2, -4])),
        ValueError,
        "num_experts",
    ),
    "a text as number of experts": (
        lambda f: change(f, MODEL, lambda c: c.update(num_experts="4")),
        ValueError,
        "num_experts",
    ),
    "files and no count": (lambda f: change(f, MODEL, lambda c: c.pop("num_experts")), ValueError, "num_experts"),
    "cut over no divisor": (lambda f: change(f, OPTIMIZER, counted(3)), ValueError, "partition_count"),
    "cut over none": (lambda f: change(f, OPTIMIZER, counted(0)), ValueError, "partition_count"),
    "cut over too many": (lambda f: change(f, OPTIMIZER, counted(10**18)), IncompleteCheckpoint, "one of"),
    "cut over more experts than there are": (
        lambda f: change(f, OPTIMIZER, counted(1)),
        ValueError,
        "sizes do not fit",
    ),
    "ranks in another order": (
        lambda f: change(f, MODEL, lambda c: c["ds_config"].update(use_data_before_expert_parallelism=True)),
        ValueError,
        "sizes do not fit",
    ),
    "weights of another save": (
        lambda f: change(
            f, expert(0, 0), lambda c: c.update({PREFIX.format("m1", 0) + "bias": torch.ones(4).bfloat16()})
        ),
        ValueError,
        "two saves",
    ),
    "dense ones cut as experts": (
        lambda f: change(f, OPTIMIZER, lambda c: c["optimizer_state_dict"].update(partition_count=[2, 4])),
        ValueError,
        "is of no expert",
    ),
    "stage 3": (
        lambda f: change(f, MODEL, lambda c: c.update(ds_autoep_layers=[{"checkpoint_format": "zero3_partitioned"}])),
        ValueError,
        "ds_to_universal",
    ),
    "a pipeline": (
        lambda f: torch.save({"w": torch.zeros(2)}, f / "layer_00-model_states.pt"),
        ValueError,
        "pipelines with experts",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_contradict_each_other_are_told_in_a_sentence(tmp_path, fault):
    break_it, error, text = FAULTS[fault]
    writing.write_partitioned(tmp_path / "from", Mixture(), 4, 2)
    break_it(tmp_path / "from" / TAG)
    with pytest.raises(error, match=text) as caught:
        import_checkpoint(tmp_path / "from", tmp_path / "to")
    assert isinstance(caught.value, CheckpointError)
    done = click.testing.CliRunner().invoke(ckpt, ["import", str(tmp_path / "from"), str(tmp_path / "to")])
    assert isinstance(done.exception, SystemExit)
    assert done.output.startswith("Error: ")
    assert done.output.count("\n") == 1
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_universal_folders_have_all_experts_or_are_refused(tmp_path, ranks):
    known = Mixture()
    folder = tmp_path / "from" / TAG
    save(folder / "mp_rank_00_model_states.pt", writing.model_states(known, 2, ranks))
    for name in [*known.dense, *(local for local, _ in known.of_rank(0, ranks))]:
        (folder / "zero" / name).mkdir(parents=True)
        is_fused = name == "b.weight"  # as if it were a tensor of all experts, of which a rank has a part
        content = {"param": known.slots[name, "master"].repeat(2, 1) if is_fused else known.slots[name, "master"]}
        torch.save(content | ({"is_expert_param": True} if is_fused else {}), folder / "zero" / name / "fp32.pt")
    writing.write_expert_files(folder, known)  # DeepSpeed's conversion copies them
    (tmp_path / "from" / "latest_universal").write_text(TAG)
    if ranks == 2:
        with pytest.raises(ValueError, match="1 of 2 experts"):
            import_checkpoint(tmp_path / "from", tmp_path / "to")
        return
    import_checkpoint(tmp_path / "from", tmp_path / "to")
    with open_checkpoint(tmp_path / "to") as source:
        assert source.names() == sorted(known.shapes)
        assert source.info(PREFIX.format("m2", 3) + "0.bias").expert == (3, 4)
        assert source.info("b.weight").shape == (6, 5)


def test_state_that_only_numbers_parameters_needs_its_files_and_one_kind_of_groups(tmp_path):
    writing.write_whole(tmp_path / "from", Mixture(torch.float32), 2, "plain")
    folder = tmp_path / "from" / TAG

    def named(content):
        content["optimizer"]["param_groups"] += [content["optimizer"]["param_groups"][1] | {"name": "ep_size_1"}]

    for rank in range(2):
        change(folder, f"expp_rank_{rank}_mp_rank_00_optim_states.pt", named)
    with pytest.raises(ValueError, match="one ep_size"):
        import_checkpoint(folder, tmp_path / "to")
    import_checkpoint(folder, tmp_path / "to", options=ReadOptions(weights_only=True))
    (folder / "expp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(IncompleteCheckpoint, match="expert-parallel rank 0"):
        import_checkpoint(folder, tmp_path / "to")
    (folder / "expp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(IncompleteCheckpoint, match="expp_rank"):
        import_checkpoint(folder, tmp_path / "to")
