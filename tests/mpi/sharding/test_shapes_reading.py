"""Parameters that are cut, read outside of forward: metadata are answered, data are refused with a helpful message."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from mpispeed.base.errors import UsageError
from tests.zoo.cut import WIDTH, check_all_cut, one_step, own_batches
from tests.zoo.models import Stack, built
from tests.zoo.training import ORDERED, config, start

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(2)]


@pytest.fixture(params=["before the first step", "after a step"])
def engine(request):
    made = start(config(3, **ORDERED), built(Stack))
    if "after" in request.param:
        one_step(made, own_batches(made, 1)[0], 0)
    yield made
    one_step(made, own_batches(made, 1)[0], 1)
    check_all_cut(made)
    made.destroy()


def test_metadata(engine):
    whole = built(Stack)
    for (name, ours), (_, theirs) in zip(engine.module.named_parameters(), whole.named_parameters(), strict=True):
        assert isinstance(ours, nn.Parameter)
        assert isinstance(ours, torch.Tensor)
        for attribute in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "nbytes", "grad"):
            assert getattr(ours, attribute) == getattr(theirs, attribute), (name, attribute)
        for method in ("size", "numel", "nelement", "dim", "stride", "element_size", "is_floating_point"):
            assert getattr(ours, method)() == getattr(theirs, method)(), (name, method)
        assert ours.is_contiguous()
        assert ours.size(0) == theirs.size(0)
        assert ours.stride(-1) == theirs.stride(-1)
        assert len(ours) == len(theirs)
        assert ours in {ours}
        assert ours.to(ours.dtype) is ours
        assert ours.cpu() is ours
        assert torch.is_tensor(ours)
        assert torch.is_floating_point(ours)
        assert torch.numel(ours) == theirs.numel()
        assert torch.zeros_like(ours).shape == theirs.shape
        assert torch.equal(torch.zeros_like(ours), torch.zeros_like(theirs))
        assert ours.new_zeros(2).tolist() == [0.0, 0.0]


def test_words(engine):
    param = engine.module.blocks[0].up.weight
    for text in (repr(param), str(param), f"{param}", f"{param:>5}", repr([param])):
        assert "sharded" in text
        assert "blocks.0.up.weight" in text
        assert "(10, 6)" in text
        assert "float32" in text
    assert "nan" not in repr(list(engine.module.parameters()))
    assert "LayerNorm" in repr(engine.module)
    assert "up" in repr(nn.ParameterList([param])) or "10x6" in repr(nn.ParameterList([param]))


READS = {
    "arithmetic": lambda p: p + 1,
    "arithmetic from the left": lambda p: 2.0 * p,
    "matmul": lambda p: torch.ones(1, 10) @ p,
    "comparison": lambda p: p == 0,
    "sum": lambda p: p.sum(),
    "function": torch.norm,
    "linear": lambda p: nn.functional.linear(torch.ones(1, WIDTH), p),
    "index": lambda p: p[0],
    "index assignment": lambda p: p.__setitem__(0, 1.0),
    "iteration": list,
    "data": lambda p: p.data,
    "data assignment": lambda p: setattr(p, "data", torch.zeros(10, WIDTH)),
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "view": lambda p: p.view(-1),
    "transpose": lambda p: p.t(),
    "T": lambda p: p.T,
    "in place": lambda p: p.zero_(),
    "in place without gradients": lambda p: torch.no_grad()(p.mul_)(2.0),
    "init": nn.init.zeros_,
    "copy_ from": lambda p: torch.zeros(10, WIDTH).copy_(p),
    "copy_ to": lambda p: torch.no_grad()(p.copy_)(torch.zeros(10, WIDTH)),
    "item": lambda p: p[0, 0].item(),
    "bool": lambda p: bool(p),
    "float": float,
    "numpy": lambda p: p.numpy(),
    "asarray": np.asarray,
    "tolist": lambda p: p.tolist(),
    "to": lambda p: p.to(torch.float64),
    "half": lambda p: p.half(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "save": lambda p: torch.save(p, io.BytesIO()),
    "storage": lambda p: p.untyped_storage(),
    "data_ptr": lambda p: p.data_ptr(),
    "dlpack": torch.from_dlpack,
    "as_subclass": lambda p: p.as_subclass(torch.Tensor),
    "stack": lambda p: torch.stack([p, p]),
    "cat in a dict of lists": lambda p: torch.cat([torch.zeros(10, WIDTH), p]),
    "out": lambda p: torch.no_grad()(torch.zeros)(10, WIDTH, out=p),
    "as_tensor of rows": lambda p: torch.as_tensor([p, p]),
    "new parameter": lambda p: nn.Parameter(p * 1),
    "parameter of a parameter": nn.Parameter,
    "backward": lambda p: p.backward(torch.ones(10, WIDTH)),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
}


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("how", READS)
def test_reading_data_is_refused(engine, how):
    for param in (engine.module.blocks[0].up.weight, next(p for p in engine.module.parameters() if p.shape == (10, 6))):
        with pytest.raises(UsageError, match=r"cut over \d+ ranks") as caught:
            READS[how](param)
        assert "blocks.0.up.weight" in str(caught.value)
        assert "GatheredParameters" in str(caught.value)


UNASKED = {
    "tensor": torch.tensor,
    "Tensor": torch.Tensor,
    "torch.func.grad": lambda p: torch.func.grad(lambda q: (q * q).sum())(p),
    "vmap": lambda p: torch.func.vmap(lambda q: q.sum())(p),
    "to_dlpack": lambda p: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(p)),
}
"""What torch does without asking the class of a tensor."""


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("how", UNASKED)
def test_what_cannot_be_refused_reads_nan_and_nothing_like_weights(engine, how):
    assert torch.isnan(UNASKED[how](engine.module.blocks[0].up.weight)).all()


WHOLE_MODEL = {
    "state_dict": lambda m: m.state_dict(),
    "to": lambda m: m.to(torch.float64),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda m: torch.save(m, io.BytesIO()),
    "load_state_dict": lambda m: m.load_state_dict(built(Stack).state_dict()),
    "apply init": lambda m: m.apply(lambda x: nn.init.ones_(x.weight) if isinstance(x, nn.Linear) else None),
    "functional_call": lambda m: torch.func.functional_call(
        m, {name: value * 2 for name, value in m.named_parameters()}, (torch.ones(1, WIDTH),)
    ),
    "stack_module_state": lambda m: torch.func.stack_module_state([m, m]),
    "share_memory": lambda m: m.share_memory(),
    "clip": lambda m: nn.utils.vector_to_parameters(torch.zeros(1000), m.parameters()),
}


@pytest.mark.parametrize("how", WHOLE_MODEL)
def test_treating_the_whole_model_is_refused(engine, how):
    # A state dict that does not fit is reported by torch as an error of its own, with ours inside.
    with pytest.raises((UsageError, RuntimeError), match=r"cut over \d+ ranks"):
        WHOLE_MODEL[how](engine.module)


def test_modes_and_walks_work(engine):
    model = engine.module
    model.eval()
    model.train()
    model.zero_grad()
    model.requires_grad_(True)
    assert len(list(model.parameters())) == len(set(model.parameters())) == 22
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == sum(
        p.numel() for p in built(Stack).parameters()
    )
    assert {id(p): name for name, p in model.named_parameters()}[id(model.first.weight)] == "first.weight"
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0
