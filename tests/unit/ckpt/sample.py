"""A small model state, cut over ranks in many ways, and saves of it by ranks that are threads."""

import torch

from mpispeed.base.errors import MpispeedError
from mpispeed.ckpt.format.logical import LogicalTensor, ParamInfo, Piece
from mpispeed.ckpt.write.save import save
from mpispeed.mesh import sim

STATE = {
    "engine": {"global_steps": 7, "micro_steps": 14, "scaler": {"scale": 65536.0, "good_steps": 3}},
    "lr_scheduler": {"last_step": 7, "lrs": [1e-3, 1e-4]},
    "client": {"note": "läuft", "best": None},
}


def tensors_of(seed=0):
    """(name, slot) -> the whole tensor; two are larger than one checksum block."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=make)

    return {
        ("embed.weight", "master"): normal(1100, 1000),
        ("embed.weight", "exp_avg"): normal(1100, 1000),
        ("embed.weight", "momentum16"): normal(300, 400).bfloat16(),
        ("layers.0.weight", "master"): normal(33, 65),
        ("layers.0.weight", "exp_avg"): normal(33, 65),
        ("frozen/odd%name", "weight16"): normal(129).half(),
        ("scale", "master"): normal(),
        ("empty", "master"): normal(0, 3),
        ("mask", "buffer"): torch.arange(77).reshape(7, 11) % 3 == 0,
        ("counter", "buffer"): torch.tensor(12, dtype=torch.int64),
    }


def params_of(tensors):
    shapes = {}
    for (name, slot), value in tensors.items():
        if slot in ("master", "weight16"):
            shapes[name] = value.shape
    return [
        ParamInfo(name, tuple(shape), train_dtype=torch.bfloat16, param_group=0, step=7)
        for name, shape in shapes.items()
    ]


def cut(tensors, rank, size, *, grain=1, turn=0):
    """This rank's logical tensors: equal flat cuts in runs of `grain`, dealt from rank `turn` on."""
    made = []
    for (name, slot), value in tensors.items():
        flat = value.reshape(-1)
        per_rank = -(-flat.numel() // size)
        per_rank = -(-per_rank // grain) * grain
        place = (rank + turn) % size
        start, stop = min(place * per_rank, flat.numel()), min((place + 1) * per_rank, flat.numel())
        made.append(LogicalTensor(name, slot, tuple(value.shape), value.dtype, [Piece(start, flat[start:stop])]))
    return made


def outcomes(size, work):
    """`work(comm)` on every rank; an error it raises on purpose is its result."""

    def caught(world):
        try:
            return work(world.comm)
        except MpispeedError as failure:
            return failure

    return sim.run(size, caught)


def save_by(size, folder, tag="step7", *, tensors=None, grain=1, turn=0, **more):
    """Save by `size` ranks; returns their reports or errors."""
    tensors = tensors_of() if tensors is None else tensors
    more.setdefault("state", STATE)

    def work(comm):
        pieces = cut(tensors, comm.rank, comm.size, grain=grain, turn=turn)
        return save(comm, folder, tag, params=params_of(tensors), tensors=pieces, **more)

    return outcomes(size, work)


def saved(folder, tag="step7", size=1, **more):
    """Save and return the folder of the tag."""
    reports = save_by(size, folder, tag, **more)
    for report in reports:
        if isinstance(report, Exception):
            raise report
    return reports[0].path
