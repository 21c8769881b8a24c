"""States that rest in codes: bytes, exact values, ranges, and independence of the cut."""

import pytest
import torch

from mpispeed.store.coded_tensor import WINDOW, draw_base
from mpispeed.store.layout import BLOCK
from mpispeed.store.state_code import SCALED, Draws, StateCode, StateCodes
from mpispeed.store.tiers import IN_MEMORY
from tests.zoo import same_bits

COUNT = 6 * BLOCK
CODES = [
    StateCode("int8"),
    StateCode("int8", is_signed=False),
    StateCode("int8", "stochastic", is_signed=False, seed=5),
    StateCode("bf16"),
    StateCode("fp16"),
    StateCode("bf16", "stochastic", seed=5),
    StateCode("bf16", "kahan"),
    StateCode("fp16", "kahan"),
]
BYTES = [1 + 4 / 256, 1 + 4 / 256, 1 + 4 / 256, 2, 2, 2, 4, 4]


def values(code):
    drawn = torch.randn(COUNT, generator=torch.Generator().manual_seed(1))
    return drawn if code.is_signed else drawn.square()


def coded(code, numel=COUNT, base=0):
    return IN_MEMORY.coded("exp_avg", 0, numel, code, base=base)


@pytest.mark.parametrize(("code", "nbytes"), list(zip(CODES, BYTES, strict=True)))
def test_a_code_has_the_bytes_of_its_parts_and_keeps_what_it_holds(code, nbytes):
    stored = coded(code)
    assert stored.memory_bytes == code.nbytes(COUNT) == nbytes * COUNT
    assert not stored.get().any()
    stored.put(values(code))
    held, parts = stored.get(), [part.get().clone() for part in stored.parts]
    assert (held - values(code)).abs().max() < 0.07 * values(code).abs().max()
    stored.put(held)
    same_bits([part.get() for part in stored.parts], parts)


def test_pairs_made_of_sums_are_the_same_pairs():
    """Also where what is left rounds up to half of a last place."""
    code = StateCode("bf16", "kahan")
    bits = torch.arange(0x3F800000, 0x3F800000 + (1 << 18), dtype=torch.int32)  # four bf16 numbers, all between them
    stored = coded(code, len(bits))
    stored.put(bits.view(torch.float32))
    parts = [part.get().clone() for part in stored.parts]
    same_bits(stored.get().bfloat16(), parts[0])  # what a load makes of the sum
    stored.put(stored.get())
    same_bits([part.get() for part in stored.parts], parts)


def test_a_range_is_decoded_and_encoded_alone():
    stored = coded(StateCode("int8"))
    stored.put(values(StateCode("int8")))
    before = stored.get()
    lease = stored.lend(300, 500)
    same_bits(lease.wait(), before[300:500])
    lease.wait().zero_()
    lease.give_back(changed=True)
    after = stored.get()
    assert not after[300:500].any()
    same_bits(after[:256], before[:256])
    same_bits(after[512:], before[512:])
    lease = stored.lend(0, 256)
    lease.wait().zero_()
    lease.give_back(changed=False)
    same_bits(stored.get(), after)


@pytest.mark.parametrize("code", CODES[-3:] + CODES[:3])
def test_bits_do_not_depend_on_the_cut(code):
    whole = coded(code, base=draw_base("a", 0))
    lease = whole.lend(0, COUNT)
    lease.wait().copy_(values(code))
    lease.settle(3)
    lease.give_back(changed=True)
    for start, stop in ((0, BLOCK), (BLOCK, 4 * BLOCK), (4 * BLOCK, COUNT)):
        part = coded(code, stop - start, draw_base("a", start))
        lease = part.lend(0, stop - start)
        lease.wait().copy_(values(code)[start:stop])
        lease.settle(3)
        lease.give_back(changed=True)
        same_bits(part.get(), whole.get()[start:stop])


def test_stochastic_rounding_is_right_on_average_and_differs_by_step_and_seed():
    x = torch.full((1 << 16,), 1 + 2**-10)
    found = []
    for seed, step in ((1, 1), (1, 2), (2, 1)):
        out = torch.empty(len(x), dtype=torch.bfloat16)
        StateCode("bf16", "stochastic", seed=seed).encode([out], x, Draws(step, 0))
        # 1/8 of the draws go up by 2**-7; five deviations of their mean
        assert abs(out.double().mean().item() - x[0].item()) < 5 * 2**-7 * (7 / 64 / len(x)) ** 0.5
        found.append(out)
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_second_moments_in_8_bits_move_by_less_than_a_step_and_loads_move_nothing():
    """Half of a step of 1/64 is lost by the nearest level, and is there on average of draws."""
    held = torch.full((1 << 16,), (200 / 255) ** 4)
    held[::SCALED] = 1.0  # the largest of each block, which sets its scale
    moved = held * (1 + 2**-10)
    moved[::SCALED] = 1.0
    is_other = torch.arange(len(held)) % SCALED > 0
    found = {}
    for rounding in ("nearest", "stochastic"):
        stored = coded(StateCode("int8", rounding, is_signed=False, seed=5), len(held))
        stored.put(held)
        first = stored.get()
        lease = stored.lend(0, len(held))
        lease.wait().copy_(moved)
        lease.settle(1)
        lease.give_back(changed=True)
        found[rounding] = ((stored.get() - first)[is_other].double().mean() / held[1]).item()
        parts = [part.get().clone() for part in stored.parts]
        for settle in ((), (2,)):  # as a load puts them; as another update that leaves them as they are
            lease = stored.lend(0, len(held))
            lease.wait()
            lease.settle(*settle)
            lease.give_back(changed=True)
            same_bits([part.get() for part in stored.parts], parts)
    assert found["nearest"] == 0
    # five deviations of the mean of draws of steps of 1/50
    assert abs(found["stochastic"] - 2**-10) < 5 * (2**-10 / 50 / len(held)) ** 0.5


def test_words_of_slots():
    codes = StateCodes(words=(("exp_avg", "bf16"),), word="int8")
    assert (codes.slot("exp_avg").word, codes.slot("exp_avg").rounding) == ("bf16", "stochastic")
    assert (codes.slot("exp_avg_sq").word, codes.slot("exp_avg_sq").is_signed) == ("int8", False)
    assert codes.slot("exp_avg_sq").rounding == codes.slot("sum").rounding == "stochastic"
    assert codes.slot("momentum_buffer").rounding == "nearest"
    assert StateCodes().slot("exp_avg") is None
    assert SCALED == BLOCK
    assert WINDOW % SCALED == 0
