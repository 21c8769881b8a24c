"""Any names, shapes and dtypes, cut anyhow over one to five ranks, come back bit for bit."""

import math
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.ckpt.format.logical import LogicalTensor, ParamInfo, Piece
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.ckpt.write.save import save
from mpispeed.mesh import sim

NAMES = st.text(st.sampled_from("ab./%2Fü_ "), max_size=8) | st.sampled_from([".", "..", "", "%", "%kind", "a/b/c"])
SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64])
BITS = {4: torch.int32, 2: torch.int16, 8: torch.int64}


@st.composite
def states(draw):
    """(number of ranks, {name: (whole tensor, cut positions, owners of the parts)})."""
    size = draw(st.integers(1, 5))
    state = {}
    for name in draw(st.lists(NAMES, unique=True, max_size=5)):
        shape, dtype = draw(SHAPES), draw(DTYPES)
        numel = math.prod(shape)
        make = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        bits = BITS[dtype.itemsize]
        # every bit pattern, NaN payloads too
        whole = torch.randint(torch.iinfo(bits).min, torch.iinfo(bits).max, (numel,), dtype=bits, generator=make)
        cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=6))})
        owners = draw(st.lists(st.integers(0, size - 1), min_size=len(cuts), max_size=len(cuts)))
        state[name] = (whole.view(dtype).reshape(shape), cuts, owners)
    return size, state


def pieces_of(rank, whole, cuts, owners):
    flat = whole.reshape(-1)
    parts = zip(cuts[:-1], cuts[1:], owners, strict=False)
    return [Piece(start, flat[start:stop]) for start, stop, owner in parts if owner == rank]


def save_state(folder, size, state):
    def work(world):
        tensors = [
            LogicalTensor(name, "master", tuple(whole.shape), whole.dtype, pieces_of(world.rank, whole, cuts, owners))
            for name, (whole, cuts, owners) in state.items()
        ]
        params = [ParamInfo(name, tuple(whole.shape)) for name, (whole, _, _) in state.items()]
        return save(world.comm, folder, "t", params=params, tensors=tensors)

    return sim.run(size, work)


@settings(max_examples=40)
@given(states(), st.randoms(use_true_random=False))
def test_any_state_comes_back(drawn, random):
    size, state = drawn
    with tempfile.TemporaryDirectory() as name:
        save_state(Path(name), size, state)
        with open_checkpoint(name) as checkpoint:
            assert checkpoint.names() == sorted(state)
            for key, (whole, _, _) in state.items():
                found = checkpoint.read_whole(key, "master")
                assert (found.shape, found.dtype) == (whole.shape, whole.dtype)
                bits = BITS[whole.dtype.itemsize]
                flat = whole.reshape(-1).view(bits)
                assert torch.equal(found.reshape(-1).view(bits), flat)
                start, stop = sorted(random.randint(0, whole.numel()) for _ in range(2))
                part = torch.empty(stop - start, dtype=whole.dtype)
                checkpoint.read(key, "master", start, part)
                assert torch.equal(part.view(bits), flat[start:stop])


@settings(max_examples=15)
@given(states())
def test_the_bytes_do_not_depend_on_the_ranks(drawn):
    size, state = drawn
    alone = {key: (whole, [0, whole.numel()], [0]) for key, (whole, _, _) in state.items()}
    with tempfile.TemporaryDirectory() as name:
        save_state(Path(name, "many"), size, state)
        save_state(Path(name, "one"), 1, alone)
        many, one = (Path(name, which, "t", "model.h5").read_bytes() for which in ("many", "one"))
        assert many == one
