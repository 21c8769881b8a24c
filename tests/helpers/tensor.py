"""Whole tensors from what the ranks of a slicing group hold, and how near they are to the unsplit model's."""

import torch

from mpispeed.nn.tensor import cuts, partial_gradients

CLOSE = 1e-6  # of the largest element, fp32


def joined(comm, cut, part):
    """The whole tensor; all ranks have to hold equal copies of what is not cut."""
    parts = comm.gather_objects(part.detach().clone())
    if cut is None or cut.kind == "replicated":
        assert all(torch.equal(other, parts[0]) for other in parts)
        return parts[0]
    return cut.join(parts)


def assert_near(found, expected, bound=CLOSE, what=""):
    assert found.shape == expected.shape, what
    scale = expected.abs().max().item() if expected.numel() else 0.0
    worst = (found - expected).abs().max().item() if expected.numel() else 0.0
    assert worst <= bound * max(scale, 1e-3), f"{what}: {worst} of {scale}"


def whole_gradients(comm, model):
    """Name -> gradient of the whole parameter, as the engine would have it: partial ones summed."""
    found, partial = {}, set(partial_gradients(model))
    known = cuts(model)
    for name, param in model.named_parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad.clone()
        if name in partial:
            grad = grad.contiguous()
            comm.all_reduce(grad)
        found[name] = joined(comm, known.get(name), grad)
    return found


def whole_parameters(comm, model):
    """Name -> whole parameter."""
    known = cuts(model)
    return {name: joined(comm, known.get(name), param) for name, param in model.named_parameters()}
