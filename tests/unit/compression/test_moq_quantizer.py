"""DeepSpeed's quantizer of parameters: bits at their steps, values of the specification, what it leaves alone."""

import pytest
import torch

from mpispeed.compression import Quantizer
from mpispeed.nn.compression import Quantizer as Kind
from mpispeed.nn.compression import fake_quantize
from tests.zoo import same_bits


def parameter(*shape, bits=(6, 4), period=2):
    made = torch.nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(3)))
    made.start_bits, made.target_bits, made.q_period = *bits, period
    return made


@pytest.mark.parametrize(("q_type", "kind"), [(0, "symmetric"), (1, "asymmetric")])
def test_parameters_are_rounded_to_the_bits_of_their_step(q_type, kind):
    moq, param, vector = Quantizer(q_groups=2, q_type=q_type), parameter(4, 6), parameter(6)
    whole, plain = param.detach().clone(), vector.detach().clone()
    for bits in (6, 5, 5, 4, 4):
        with torch.no_grad():
            param.copy_(whole)  # as a step brings the master's value
        moq.quantize([[param, vector]], overflow=False, eigenvalue_enabled=False)
        assert param.start_bits == bits
        same_bits(param, fake_quantize(whole, bits, Kind(kind, groups=2)))
    assert param.q_period == 8 and not moq.any_precision_switch()
    same_bits(vector, plain)


def test_curvature_and_overflow():
    """The layer of the largest eigenvalue keeps its bits five times as long; a skipped step counts with eigenvalues."""
    moq, param = Quantizer(), parameter(4, 6, period=1)
    moq.quantize([[param]], overflow=True, eigenvalue_enabled=False)
    assert moq.qsteps == 0 and param.start_bits == 6
    moq.quantize([[param]], True, True, {id(param): (1.0, 0)})
    assert (param.start_bits, param.q_period) == (5, 10)


def test_a_mixture_fades():
    moq, param = Quantizer(q_mixed_fp16=True, q_change_ratio=0.5), parameter(4, 6, bits=(4, 4))
    whole = param.detach().clone()
    for part in (0.5, 0.0, 0.0):
        with torch.no_grad():
            param.copy_(whole)
        moq.quantize([[param]], overflow=False, eigenvalue_enabled=False)
        found = fake_quantize(whole, 4, Kind())
        same_bits(param, whole * part + found * (1 - part) if part else found)


def test_stochastic_rounding_repeats():
    outcomes = []
    for _ in range(2):
        moq, params = Quantizer(q_rounding=1), [parameter(4, 6), parameter(4, 6)]
        moq.quantize([params], overflow=False, eigenvalue_enabled=False)
        outcomes.append(torch.stack([param.detach() for param in params]))
    same_bits(*outcomes)
    assert not torch.equal(*outcomes[0])
