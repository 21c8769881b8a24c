"""Slices of tensor parallelism and pipelines become whole parameters."""

import time

import pytest
import torch

from mpispeed.ckpt.foreign.faults import ForeignMismatch
from mpispeed.ckpt.foreign.found import FoundParam, ReadOptions
from mpispeed.ckpt.foreign.slices import Merger
from mpispeed.ckpt.format.errors import IncompleteCheckpoint
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.ckpt.tools.importing import import_checkpoint
from tests.unit.ckpt import foreign_folders as folders
from tests.zoo import has_same_bits

WHOLE = {
    "layers.0.q_proj.weight": (6, 4),
    "layers.0.o_proj.weight": (4, 6),
    "layers.0.input_layernorm.weight": (4,),
    "layers.0.gate_up.weight": (8, 3),
    "noise": (5,),
}


def slices(name, tensor, rank):
    """What one of two tensor-parallel ranks has."""
    if "q_proj" in name:
        return tensor.chunk(2, 0)[rank]
    if "o_proj" in name:
        return tensor.chunk(2, 1)[rank]
    if "gate_up" in name:
        return torch.cat([half.chunk(2)[rank] for half in tensor.chunk(2)])
    return tensor + rank if name == "noise" else tensor


def part_of(tensors, names, rank, frozen=False):
    """A rank's parameters as what a folder is written from."""
    known = folders.Known()
    known.frozen, known.buffers, known.shared, known.hyper = {}, {}, {}, known.hyper[:1]
    cut = {(name, slot): slices(name, tensors[name, slot], rank) for name in names for slot in folders.SLOTS}
    known.slots = cut
    known.groups = [{name: cut[name, "master"].shape for name in names}]
    return known


def tensors():
    make = torch.Generator().manual_seed(2)
    return {(name, slot): torch.rand(shape, generator=make) for name, shape in WHOLE.items() for slot in folders.SLOTS}


PATTERNS = (("halves", "gate_up"), ("average", "noise"))


def test_slices_are_merged_by_names_and_patterns(tmp_path):
    made = tensors()
    for rank in range(2):
        folders.write_grouped(tmp_path / "from", part_of(made, WHOLE, rank), 2, mp=rank)
    import_checkpoint(tmp_path / "from", tmp_path / "to", options=ReadOptions(tp_patterns=PATTERNS))
    with open_checkpoint(tmp_path / "to") as source:
        for (name, slot), tensor in made.items():
            wanted = tensor + 0.5 if name == "noise" else tensor
            assert torch.allclose(source.read_whole(name, slot), wanted, atol=1e-6), (name, slot)
            if name != "noise":
                assert has_same_bits(source.read_whole(name, slot), tensor)
        assert (source.info("layers.0.o_proj.weight").tp_kind, source.info("layers.0.o_proj.weight").tp_dim) == (
            "row",
            1,
        )


def test_patterns_of_the_checkpoint_itself_are_used(tmp_path):
    made = tensors()
    info = {
        "tp_replicated_parameter_patterns": [r".*layernorm"],
        "parameter_to_average_patterns": ["noise"],
        "parameter_with_row_parallelism_patterns": [r".*o_proj"],
        "parameter_with_sub_params": [{"patterns": [r".*gate_up"], "shape": [[4, 4], 3], "partition_dim": 0}],
    }
    for rank in range(2):
        part = part_of(made, WHOLE, rank)
        folders.write_grouped(tmp_path / "from", part, 1, mp=rank, universal_checkpoint_info=info)
    import_checkpoint(tmp_path / "from", tmp_path / "to")
    with open_checkpoint(tmp_path / "to") as source:
        for (name, slot), tensor in made.items():
            if name != "noise":
                assert has_same_bits(source.read_whole(name, slot), tensor), (name, slot)


@pytest.mark.parametrize(("patterns", "text"), [((), "gate_up"), (PATTERNS[:1], "noise")])
def test_slices_that_could_be_anything_are_refused_by_name(tmp_path, patterns, text):
    for rank in range(2):
        folders.write_grouped(tmp_path / "from", part_of(tensors(), WHOLE, rank), 1, mp=rank)
    with pytest.raises(ValueError, match=rf"{text}.*--tp-pattern"):
        import_checkpoint(tmp_path / "from", tmp_path / "to", options=ReadOptions(tp_patterns=patterns))


def write_pipeline(root):
    """Two ranks of a pipeline; an embedding is tied to the last layer, a layer has a buffer."""
    make = torch.Generator().manual_seed(3)
    shapes = {"tied_modules.emb.word.weight": (9, 4), "1.lin.weight": (4, 4), "2.lin.weight": (4, 4), "3.bias": (3,)}
    made = {(n, slot): torch.rand(shape, generator=make) for n, shape in shapes.items() for slot in folders.SLOTS}
    names = list(shapes)
    for rank, own in enumerate(([names[0], names[1]], [names[2], names[3], names[0]])):
        more = {"module": None, "buffer_names": ["2.count"]}
        folders.write_grouped(root, part_of(made, own, 0), 2, mp=rank, **more)
    layers = {
        0: {"word.weight": made[names[0], "master"].bfloat16()},
        1: {"lin.weight": made[names[1], "master"].bfloat16()},
        2: {"lin.weight": made[names[2], "master"].bfloat16(), "count": torch.ones(1)},
        3: {"bias": made[names[3], "master"].bfloat16(), "fixed": torch.ones(2).bfloat16()},
    }
    for layer, state in layers.items():
        torch.save(state, root / folders.TAG / f"layer_{layer:02d}-model_states.pt")
    return made


def test_a_pipeline(tmp_path):
    made = write_pipeline(tmp_path / "from")
    import_checkpoint(tmp_path / "from", tmp_path / "to")
    with open_checkpoint(tmp_path / "to") as source:
        assert source.names() == sorted({name for name, _ in made} | {"3.fixed"})
        for (name, slot), tensor in made.items():
            assert has_same_bits(source.read_whole(name, slot), tensor), (name, slot)
            assert source.info(name).train_dtype == "bfloat16"
        assert source.buffers() == ["2.count"]
        assert source.info("3.fixed").kind == "frozen"


def test_a_pipeline_without_one_of_its_ranks_is_told(tmp_path):
    write_pipeline(tmp_path / "from")
    (tmp_path / "from" / folders.TAG / "zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink()
    with pytest.raises(IncompleteCheckpoint, match="one of 2"):
        import_checkpoint(tmp_path / "from", tmp_path / "to")


SLOW = {
    "choices": ("a?" * 22 + "a" * 22, "a" * 22),
    "alternatives": ("(a|a)" * 22 + "b", "a" * 22),
    "repeats": (".*.*x", "a" * 200),
    "long": ("a" * 301, "a"),
    "long name": (".*x", "a" * 301),
    "group": ("(a+)+$", "a"),
}


@pytest.mark.parametrize("what", SLOW)
@pytest.mark.parametrize("is_sub", [True, False])
def test_patterns_of_a_checkpoint_that_may_take_long_are_refused(what, is_sub):
    pattern, name = SLOW[what]
    row = {"patterns": [pattern], "shape": [[4, 4], 3], "partition_dim": 0}
    info = {"parameter_with_sub_params": [row]} if is_sub else {"tp_replicated_parameter_patterns": [pattern]}
    start = time.process_time()
    with pytest.raises(ForeignMismatch, match="say it with --tp-pattern"):
        Merger([], info).merge([FoundParam(name, (2,), torch.float32, {}, False, 0, 1)] * 2)
    assert time.process_time() - start < 1


def test_patterns_as_megatron_writes_them_are_taken():
    patterns = [
        r"tied_modules.embed.position_embeddings.weight", r"\d+.self_attention.dense.bias",
        r"\d+.input_layernorm.weight",
        r".*\.(q|k|v|o)_proj\.(weight|bias)",
    ]  # fmt: skip
    one = FoundParam("7.self_attention.dense.bias", (2,), torch.float32, {}, False, 0, 1)
    assert Merger([], {"tp_replicated_parameter_patterns": patterns}).merge([one, one]).tp_kind == "replicated"
