"""Updates over states at rest: bits of the fused loop beside passes over whole tensors; refusals."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from mpispeed.native import coded_update as cu
from mpispeed.native import state_codes as sc
from mpispeed.native import status
from mpispeed.native.multi_tensor_host import STATE_NAMES
from mpispeed.optim.adagrad import adagrad_terms
from mpispeed.optim.adam import adam_terms
from mpispeed.optim.lion import lion_terms
from tests.helpers.codes import plain, same

BETAS = {"betas": (0.9, 0.99)}
COMMON = {"lr": 1e-2, "weight_decay": 0.1, "grad_scale": 0.5}
TERMS = {
    "adam": adam_terms(step=2, eps=1e-8, decoupled=True, **BETAS, **COMMON),
    "adagrad": adagrad_terms(step=2, eps=1e-8, lr_decay=0.0, decoupled=False, **COMMON),
    "lion": lion_terms(decoupled=True, **BETAS, **COMMON),
}
FORMS = {
    "fp32": lambda x, signed: x.clone(),
    "codes": lambda x, signed: coded(x, signed=signed),
    "drawn": lambda x, signed: coded(x, signed=signed, seed=4 + signed),
    "bf16": lambda x, signed: cu.Halves(x.bfloat16()),
    "fp16 drawn": lambda x, signed: cu.Halves(x.half(), 9 + signed),
    "pairs": lambda x, signed: paired(x),
}


def coded(x, *, signed, seed=None):
    codes = torch.empty(x.numel(), dtype=torch.uint8)
    scales = torch.empty(sc.scale_count(x.numel()))
    sc.encode8(codes, scales, x, signed=signed)
    return cu.Codes(codes, scales, signed, seed)


def paired(x):
    high, low = torch.empty(x.numel(), dtype=torch.bfloat16), torch.empty(x.numel(), dtype=torch.bfloat16)
    sc.split(high, low, x)
    return cu.Pairs(high, low)


def tensors(rest):
    return [rest] if isinstance(rest, torch.Tensor) else [x for x in rest if isinstance(x, torch.Tensor)]


def made(rule, forms, count):
    signs = [name != "exp_avg_sq" and name != "sum" for name in STATE_NAMES[rule]]
    values = [plain(count, seed=k) if signed else plain(count, seed=k) ** 2 for k, signed in enumerate([True, *signs])]
    return [FORMS[form](x, signed) for form, x, signed in zip(forms, values, [True, *signs], strict=False)]


def test_the_compiled_module_is_the_one_under_test():
    assert status.compiled("coded_optim") is not None


@pytest.mark.parametrize("rule", cu.RULES)
def test_the_bits_are_those_of_passes_over_whole_tensors(rule):
    cases = [("fp32", "codes", "drawn"), ("pairs", "bf16", "codes"), ("fp16 drawn", "drawn", "bf16"),
             ("bf16", "fp32", "drawn"), ("pairs", "codes", "fp32")]  # fmt: skip
    for i, (forms, count) in enumerate(product(cases, (1, 1023, 40_001))):
        grad = plain(count, (torch.float32, torch.bfloat16, torch.float16)[i % 3], seed=7)
        how = {"step": 5, "start": 256 * i}
        outs = [None if i % 4 == 3 else torch.zeros(count, dtype=(torch.bfloat16, torch.float32)[i % 2])] * 2
        ours, theirs = made(rule, forms, count), made(rule, forms, count)
        outs = [None if out is None else out.clone() for out in outs]
        cu.update(rule, ours[0], ours[1:], grad, outs[0], TERMS[rule], threads=3, **how)
        cu.update_reference(rule, theirs[0], theirs[1:], grad, outs[1], TERMS[rule], **how)
        before = made(rule, forms, count)
        for a, b, old in zip(ours, theirs, before, strict=True):
            for x, y in zip(tensors(a), tensors(b), strict=True):
                assert torch.equal(x, y) if x.dtype == torch.uint8 else same(x, y), (forms, count)
            assert count == 1 or not all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(old), strict=True))
        assert outs[0] is None or same(outs[0], outs[1])


def test_a_coded_parameter_is_published_as_it_is_kept():
    param, out = cu.Halves(plain(3000).bfloat16(), 3), torch.empty(3000)
    states = [coded(torch.zeros(3000), signed=signed) for signed in (True, False)]
    cu.update("adam", param, states, plain(3000, seed=1), out, TERMS["adam"], step=1)
    assert same(out, param.values.float())


def test_cuts_at_whole_blocks_change_no_bit():
    count, cut = 4096, 1280
    whole, parts = (made("adam", ("fp16 drawn", "codes", "drawn"), count) for _ in range(2))
    grad = plain(count, seed=7)
    cu.update("adam", whole[0], whole[1:], grad, None, TERMS["adam"], step=1)
    for part in (slice(0, cut), slice(cut, count)):
        scales = slice(part.start // 256, part.stop // 256)
        pieces = [
            rest._replace(codes=rest.codes[part], scales=rest.scales[scales]) if isinstance(rest, cu.Codes)
            else rest._replace(values=rest.values[part])
            for rest in parts
        ]  # fmt: skip
        cu.update("adam", pieces[0], pieces[1:], grad[part], None, TERMS["adam"], step=1, start=part.start)
    for a, b in zip(whole, parts, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


def test_without_the_compiled_module_the_reference_runs(monkeypatch):
    ours, theirs = (made("lion", ("pairs", "drawn"), 700) for _ in range(2))
    cu.update("lion", theirs[0], theirs[1:], plain(700), None, TERMS["lion"], step=1)
    monkeypatch.setattr(status, "compiled", lambda name: None)
    cu.update("lion", ours[0], ours[1:], plain(700), None, TERMS["lion"], step=1)
    for a, b in zip(ours, theirs, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


def test_what_does_not_fit_is_refused():
    grad, (param, *states) = plain(300), made("adam", ("fp32", "codes", "codes"), 300)
    how = {"step": 1}
    for wrong, message in (
        (("lamb", param, states, grad, None), "lamb with 2 states"),
        (("adam", param, states[:1], grad, None), "adam with 1 states"),
        (("adam", param, states, grad[:299], None), "elements"),
        (("adam", param, [states[0]._replace(scales=torch.zeros(1)), states[1]], grad, None), "1 scales for 300"),
        (("adam", param, states, param, None), "share memory"),
    ):
        with pytest.raises(ValueError, match=message):
            cu.update(*wrong, TERMS["adam"], **how)
    with pytest.raises(ValueError, match="start -1"):
        cu.update("adam", param, states, grad, None, TERMS["adam"], step=1, start=-1)
    for wrong, message in (
        (("adam", param.half(), states, grad, None), "param is Tensor of torch.float16"),
        (("adam", cu.Halves(param), states, grad, None), "param is Halves"),
        (("adam", param, states, grad.double(), None), "float64"),
    ):
        with pytest.raises(TypeError, match=message):
            cu.update(*wrong, TERMS["adam"], **how)
