"""Tokens are drawn from the distribution that is asked for, by numbers that belong to the request."""

import warnings

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mpispeed.generation.requests import Options, Prompt
from mpispeed.generation.sampling import Row, Sampler, noise, noise_at, nucleus_bounds, philox, row_of, stream_key

VOCABULARY = 50


def keys(count, seed=1):
    return torch.tensor([stream_key(seed, str(number), 0) for number in range(count)])


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_philox(counter, key, words):
    """Known answers of Random123, the library of the paper's authors."""
    found = philox([torch.tensor([each]) for each in counter], [torch.tensor([each]) for each in key])
    assert tuple(int(each) for each in found) == words


def test_the_noise_of_one_token_is_that_of_all():
    rows, tokens = torch.arange(9).repeat_interleave(40), torch.randint(0, 1003, (360,))
    whole = noise(keys(9), 17, 1003)
    assert torch.equal(noise_at(keys(9)[rows], 17, tokens), whole[rows, tokens])
    assert torch.equal(noise(keys(9)[4:5], 17, 1003)[0], whole[4])
    assert torch.equal(noise(keys(9), 17, 60), whole[:, :60])


def test_noise_is_of_gumbel_and_differs_by_key_and_position():
    found = torch.stack([noise(keys(20), position, 5000) for position in range(5)]).double()
    assert found.isfinite().all()
    # 500 000 values: four standard errors of mean (sd 1.283) and variance (kurtosis 5.4)
    assert abs(found.mean() - np.euler_gamma) < 4 * 1.283 / 500_000**0.5
    assert abs(found.var() - np.pi**2 / 6) < 4 * 1.645 * (4.4 / 500_000) ** 0.5
    flat = (found - found.mean()).flatten(0, 1)
    correlations = (flat @ flat.T / 5000 / found.var()).fill_diagonal_(0)
    assert correlations.abs().max() < 5.5 / 5000**0.5  # 4950 pairs


def drawn(rows, scores, position=0, width=1):
    """Tokens that are drawn for rows with these scores."""
    ids = torch.zeros(len(rows), width + position, dtype=torch.int64)
    return Sampler(rows, [width] * len(rows))(ids, scores).argmax(1)


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 6}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.7}, {"temperature": 0.6}]
)
def test_frequencies_are_those_of_the_distribution(options):
    """Chi-square of 8 000 draws over the tokens that can be drawn."""
    row = {"temperature": 1.3, **options}
    scores = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 1.5
    warpers = LogitsProcessorList([TemperatureLogitsWarper(row["temperature"])])
    if "top_k" in row:
        warpers.append(TopKLogitsWarper(row["top_k"]))
    if "top_p" in row:
        warpers.append(TopPLogitsWarper(row["top_p"]))
    expected = warpers(torch.zeros(1, 1, dtype=torch.int64), scores).softmax(1)[0].double() * 8000
    rows = [Row(stream_key(5, str(number), 0), **row) for number in range(200)]
    tokens = torch.cat([drawn(rows, scores.expand(200, -1), position) for position in range(40)])
    counts = torch.bincount(tokens, minlength=VOCABULARY).double()
    assert counts[expected == 0].sum() == 0
    is_frequent = expected >= 5
    rest = expected[~is_frequent].sum()
    parts = (counts - expected)[is_frequent].square() / expected[is_frequent]
    chi_square = float(parts.sum() + ((counts[~is_frequent].sum() - rest) ** 2 / rest if rest > 0 else 0.0))
    freedom = int(is_frequent.sum())
    # five standard deviations above its mean; the numbers are fixed, so this holds or does not
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_a_row_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(6, VOCABULARY, generator=generator)
    ids = torch.randint(0, VOCABULARY, (6, 4), generator=generator)
    kinds = [
        {"temperature": 1.0},
        {"temperature": 0.5, "top_k": 4},
        {},
        {"temperature": 2.0, "top_p": 0.6, "repetition_penalty": 1.3},
        {"repetition_penalty": 1.8},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    ]
    rows = [Row(stream_key(2, str(number), 0), **kind) for number, kind in enumerate(kinds)]
    lengths = [4, 1, 2, 3, 2, 4]
    together = Sampler(rows, lengths)(ids, scores)
    for place, row in enumerate(rows):
        own = ids[place : place + 1, 4 - lengths[place] :]
        alone = Sampler([row], lengths[place : place + 1])(own, scores[place : place + 1])
        assert torch.equal(alone[0], together[place]), place
    chosen = [3, 0, 5]
    part = Sampler([rows[place] for place in chosen], [lengths[place] for place in chosen])(ids[chosen], scores[chosen])
    assert torch.equal(part, together[chosen])


def test_greedy_rows_keep_their_scores():
    scores = torch.randn(2, VOCABULARY)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    assert Sampler([Row(stream_key(0, "a", 0))] * 2, [3, 3])(ids, scores) is scores
    rows = [Row(stream_key(0, "a", 0)), Row(stream_key(0, "b", 0), temperature=1.0)]
    found = Sampler(rows, [3, 3])(ids, scores)
    assert torch.equal(found[0], scores[0])
    assert not torch.equal(found[1], scores[1])


def test_the_penalty_is_that_of_transformers_without_padding():
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, VOCABULARY, (2, 5), generator=generator)
    ids[0, :3] = 7  # padding
    sampler = Sampler([Row(stream_key(0, "a", 0), repetition_penalty=1.7)] * 2, [2, 5])
    for _ in range(3):
        scores = torch.randn(2, VOCABULARY, generator=generator)
        found = sampler(ids, scores)
        for place, start in ((0, 3), (1, 0)):
            expected = RepetitionPenaltyLogitsProcessor(1.7)(ids[place : place + 1, start:], scores[place : place + 1])
            assert torch.equal(found[place], expected[0])
        ids = torch.cat([ids, found.argmax(1, keepdim=True)], 1)


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_top_p_keeps_the_tokens_that_transformers_keeps(spread):
    """Also where more than the first thousand tokens are needed."""
    scores = torch.randn(3, 20_000, generator=torch.Generator().manual_seed(6), dtype=torch.float64) * spread
    top_p = torch.tensor([[0.5], [0.9], [1.0]], dtype=torch.float64)
    bounds = nucleus_bounds(scores, top_p)
    assert bounds[2].isneginf().all()
    for row in range(2):
        kept = TopPLogitsWarper(float(top_p[row]))(torch.zeros(1, 1), scores[row : row + 1]) > -torch.inf
        assert torch.equal(scores[row] >= bounds[row], kept[0])


def test_equal_scores_are_in_or_out_together():
    scores = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    row = Row(stream_key(0, "a", 0), temperature=1.0, top_k=2)
    found = Sampler([row], [1])(torch.zeros(1, 1, dtype=torch.int64), scores)
    assert (found > -torch.inf).tolist() == [[False, True, True, True, True, False]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_first_position_with_nan_is_kept(temperature):
    sampler = Sampler([Row(stream_key(0, "a", 0), temperature)] * 3, [2, 2, 1])
    assert sampler.first_nan == [-1, -1, -1]
    for position in range(4):
        scores = torch.zeros(3, VOCABULARY)
        if position >= 1:
            scores[2, 7] = torch.nan
        if position == 3:
            scores[0] = torch.nan
        sampler(torch.zeros(3, 2 + position, dtype=torch.int64), scores)
    assert sampler.first_nan == [3, -1, 1]


def test_rows_of_requests():
    defaults = Options(temperature=0.7, top_k=5, seed=9)
    own = Prompt(0, "", "name", 2, "text", Options(top_k=0, top_p=0.5, seed=11))
    assert row_of(own, defaults) == Row(stream_key(11, "name", 2), 0.7, 0, 0.5, 1.0)
    assert row_of(Prompt(0, "", "name", 0, "text", Options()), Options()) == Row(stream_key(0, "name", 0))
    streams = {
        stream_key(seed, name, sample) for seed in (0, 1, 10) for name in ("a", "1", "10") for sample in (0, 1, 10)
    }
    assert len(streams) == 27


def generated(model, prompts, rows, width=None):
    """New tokens of `generate` for prompts that are padded on the left."""
    width = width or max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(each)) + each for each in prompts])
    mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=6,
            pad_token_id=0,
            eos_token_id=None,
            logits_processor=LogitsProcessorList([Sampler(rows, [len(each) for each in prompts])]),
        )
    return found[:, width:]


def test_generate_draws_the_same_for_a_prompt_in_any_batch():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=1, n_head=2, initializer_range=0.5)
    model = GPT2LMHeadModel(config).eval()
    prompts = [[3, 4, 5], [6], [7, 8, 9, 10], [11, 12]]
    rows = [Row(stream_key(1, str(number), 0), temperature=1.5) for number in range(4)]
    together = generated(model, prompts, rows)
    for part in ([0, 3], [2, 1]):
        found = generated(model, [prompts[place] for place in part], [rows[place] for place in part])
        assert torch.equal(found, together[part])
    others = [Row(stream_key(2, str(number), 0), temperature=1.5) for number in range(4)]
    assert not torch.equal(generated(model, prompts, others), together)
