"""Every row of the table of verbs: bit by bit what one process computes, and what gloo gives."""

import pytest
import torch

from tests.helpers import verbs
from tests.helpers.torch_verbs import GLOO_TAKES, IS_GLOO_OLD, TABLE, Data, cases

pytestmark = pytest.mark.mpi(min_size=1)

# What gloo says of dtypes and reductions that it does not have.
REFUSALS = ("Invalid scalar type", "PREMUL_SUM")


def differences(found, wanted, name, is_same):
    if len(found) != len(wanted):
        return [f"{name}: {len(found)} tensors instead of {len(wanted)}"]
    return [f"{name}: {x} instead of {y}" for x, y in zip(found, wanted, strict=True) if not is_same(x, y)]


def same(x, y):
    """Bit by bit; gloo's sums of booleans have other bytes than 1 for True."""
    return torch.equal(x, y) if x.dtype == torch.bool else verbs.same(x, y)


def close(x, y):
    """Quotients of complex numbers: torch rounds them by their parts in one verb, and as a whole in another."""
    return torch.allclose(x, y, rtol=2 * torch.finfo(x.dtype).eps, atol=0)


def attempt(run, *args):
    """What it returns, and why it refuses: a rank that fails alone has to go on to what the others do."""
    try:
        return run(*args), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("verb", TABLE, ids=lambda verb: verb.name)
def test_a_row(verb, both):
    problems = []
    is_compared = not (IS_GLOO_OLD and (verb.name == "all_to_all" or verb.name.startswith("reduce_scatter")))
    for case in cases(verb.is_sum, len(both["world"].ranks)):
        groups = both[case.group]
        if groups.me < 0:
            continue
        data = Data(case, len(groups.ranks), groups.me)
        found, trouble = attempt(verb.run, groups.ours, data)
        # Gloo's reductions take the memory of a strided tensor as if it had no gaps.
        dense = data if case.layout != "strided" else Data(case._replace(layout="contiguous"), data.size, data.me)
        theirs, refusal = attempt(verb.run, groups.gloo, dense) if is_compared else (None, "")
        is_taken = case.dtype in GLOO_TAKES and case.op != "premul"
        if refusal and (is_taken or not any(text in refusal for text in REFUSALS)):
            problems.append(f"{case}: gloo: {refusal}")
        if found is None:
            problems.append(f"{case}: {trouble}")
            continue
        is_quotient = case.op == "avg" and case.dtype.is_complex
        found_problems = differences(found, verb.wanted(data), "one process", close if is_quotient else same)
        if theirs is not None:
            found_problems += differences(found, theirs, "gloo", same)
        problems += [f"{case}: {text}" for text in found_problems]
    assert not problems, "\n".join(problems[:10])
