"""The router: choices, losses, biases, and what it does with numbers that are none."""

import copy
import logging

import pytest
import torch
from torch.testing import assert_close
from torch.utils import checkpoint as torch_checkpoint

from mpispeed.base import log
from mpispeed.base.errors import ConfigError
from mpispeed.mesh import sim
from mpispeed.nn.activation_checkpointing import Checkpointer
from mpispeed.nn.expert import RoutedExperts, Router, RouterOptions, SwiGLUExperts


def router(experts=4, hidden=6, **options):
    torch.manual_seed(1)
    return Router(hidden, experts, RouterOptions(**options))


def test_it_computes_in_fp32():
    half = router(k=2).to(torch.bfloat16)
    x = torch.randn(9, 6).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        routing = half(x)
    expected = (x.float() @ half.wg.weight.float().t()).softmax(-1)
    assert routing.weights.dtype == routing.balance_loss.dtype == torch.float32
    assert_close(
        routing.weights, expected.gather(1, routing.experts) / expected.gather(1, routing.experts).sum(1, True)
    )


def test_sigmoid_scores_and_groups_as_in_deepseek_v3():
    made = router(8, k=3, score="sigmoid", groups=4, kept_groups=2, weight_scale=2.5, bias_rate=0.001)
    made.bias.copy_(torch.linspace(0.0, 0.3, 8))
    x = torch.randn(50, 6)
    routing = made(x)
    scores = torch.sigmoid(x @ made.wg.weight.t())
    for token in range(50):
        by = scores[token] + made.bias
        groups = by.view(4, 2).sum(1).argsort(descending=True)[:2].tolist()
        allowed = sorted((-by[expert].item(), expert) for expert in range(8) if expert // 2 in groups)
        chosen = [expert for _, expert in allowed[:3]]
        assert routing.experts[token].tolist() == chosen
        picked = scores[token, chosen]  # without the bias
        assert_close(routing.weights[token], 2.5 * picked / picked.sum())


def test_equal_scores_go_by_number():
    made = router(6, k=3)
    with torch.no_grad():
        made.wg.weight.zero_()
    assert made(torch.randn(2, 6)).experts.tolist() == [[0, 1, 2]] * 2


def test_loss_of_sequences_is_the_mean_of_their_losses():
    made = router(4, k=2, sequence_loss=True)
    x = torch.randn(3 * 5, 6)
    found = made(x, sequences=3).sequence_loss
    expected = 0.0
    for part in x.split(5):
        shares = (part @ made.wg.weight.t()).softmax(-1)
        counts = torch.bincount(made(part).experts.reshape(-1), minlength=4)
        expected += (4 / (2 * 5) * counts * shares.mean(0)).sum() / 3
    assert_close(found, expected)
    assert made(torch.zeros(0, 6), sequences=3).sequence_loss == 0


def test_loss_of_large_logits():
    made = router(z_loss=True)
    x = torch.randn(7, 6)
    assert_close(made(x).z_loss, (x @ made.wg.weight.t()).logsumexp(-1).square().mean())
    assert made(torch.zeros(0, 6)).z_loss == 0


def test_balance_loss_reaches_the_weights_through_scores_only():
    made, x = router(k=3), torch.randn(11, 6)
    routing = made(x)
    routing.balance_loss.backward()
    weight = made.wg.weight.detach().clone().requires_grad_()
    shares = (x @ weight.t()).softmax(-1)
    (4 / 3 * (shares.mean(0) * routing.counts / 11).sum()).backward()
    assert_close(made.wg.weight.grad, weight.grad)


def test_jitter_is_for_training_only():
    made, x = router(noise="Jitter"), torch.randn(5, 6)
    plain = x @ made.wg.weight.t()
    noisy = made.logits(x)
    assert not torch.equal(noisy, plain)
    assert_close(noisy, plain, atol=0.2, rtol=0.02)
    assert_close(made.eval().logits(x), plain)


def test_noise_of_choices_is_for_training_only():
    for options in ({"noise": "RSample"}, {"k": 2, "sample_second": True}):
        made, x = router(8, **options), torch.randn(200, 6)
        clean = made.eval()(x).experts
        noisy = made.train()(x).experts
        assert not torch.equal(noisy, clean)
        assert torch.equal(made.eval()(x).experts, clean)
    assert torch.equal(noisy[:, 0], clean[:, 0])  # of two, only the second is sampled
    made.options = RouterOptions(k=2, sample_second=True, samples_in_eval=True)
    assert not torch.equal(made(x).experts, clean)


def test_noise_follows_gumbels_distribution():
    made = router(3, noise="RSample")
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(20000, 1)
    shares = made.route(logits).counts / 20000
    assert_close(shares, logits[0].softmax(-1), atol=0.02, rtol=0)  # 0.02 is more than five standard deviations


def test_forced_balance():
    counts = router(4, k=3, force_balance=True)(torch.randn(8, 6)).counts
    assert counts.tolist() == [6, 6, 6, 6]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{"k": 1}, {"k": 2}, {"k": 3, "score": "sigmoid"}])
def test_numbers_that_are_none_show_in_the_output_and_in_words(options, bad, caplog):
    log._seen.clear()
    layer = RoutedExperts(router(**options), SwiGLUExperts(6, 5, 4))
    x = torch.randn(5, 6)
    x[3] = bad
    with caplog.at_level(logging.WARNING):
        y, routing = layer(x)
    assert y[3].isnan().all()
    assert y[[0, 1, 2, 4]].isfinite().all()
    assert routing.experts[3].tolist() == list(range(options["k"]))
    assert "logits that are not finite" in caplog.text


def global_losses(counts, k):
    """Losses and gradients of ranks with so many tokens each, and those of one process with all."""
    options = {"k": k, "global_balance": True}
    made = router(4, **options)
    inputs = [torch.randn(count, 6, generator=torch.Generator().manual_seed(count)) for count in counts]

    def work(world):
        own = copy.deepcopy(made)
        own.set_balance_group(world.comm)
        loss = own(inputs[world.rank]).balance_loss
        loss.backward()
        with torch.no_grad():
            alone = own.eval()(inputs[world.rank]).balance_loss  # no other rank is asked
        assert torch.equal(alone, made(inputs[world.rank]).balance_loss)
        return loss.detach(), own.wg.weight.grad

    found = sim.run(len(counts), work)
    whole = made(torch.cat(inputs)).balance_loss
    whole.backward()
    return found, whole.detach(), made.wg.weight.grad


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("counts", [(5, 5), (7, 0, 2)])
def test_the_global_balance_loss_is_that_of_one_process(counts, k):
    found, loss, grad = global_losses(counts, k)
    losses, grads = zip(*found, strict=True)
    torch.testing.assert_close(torch.stack(losses).mean(), loss)
    torch.testing.assert_close(torch.stack(grads).mean(0), grad)


def test_without_the_option_a_group_is_not_asked():
    made = router(4, k=2)
    made.set_balance_group(object())
    assert made.balance_group is None


# -- biases ----------------------------------------------------------------------------------------------------------


def test_biases_balance_loads():
    made = router(4, k=1, bias_rate=0.01)
    x = torch.randn(2000, 6) + 0.5
    before = made(x).counts
    for _ in range(200):
        counts = made(x).counts
        made.update_bias()
    assert before.max() > 700
    assert counts.max() < 600


def test_the_step_of_a_bias_is_the_sign_of_what_is_missing():
    made = router(4, k=2, bias_rate=0.25, force_balance=True)
    made._load = torch.tensor([[4, 1, 1, 2], [0, 0, 0, 0]])
    made.update_bias()
    assert made.bias.tolist() == [-0.25, 0.25, 0.25, 0.0]
    made.update_bias()
    assert made.bias.tolist() == [-0.25, 0.25, 0.25, 0.0]  # no pass since then


def test_loads_of_all_ranks_count():
    def work(world):
        made = Router(6, 2, RouterOptions(bias_rate=1.0))
        made._load = torch.tensor([[[5, 0], [1, 2], [0, 3]][world.rank], [0, 0]])
        made.update_bias(world.comm)
        return made.bias.tolist()

    assert sim.run(3, work) == [[-1.0, 1.0]] * 3


@pytest.mark.parametrize("how", ["own", "reentrant", "plain"])
def test_recomputed_passes_do_not_count(how):
    made = router(4, k=2, bias_rate=0.1)
    layer = RoutedExperts(made, SwiGLUExperts(6, 5, 4))
    x = torch.randn(8, 6, requires_grad=True)

    def run(x):
        return layer(x)[0]

    for _ in range(2):  # micro-batches
        if how == "own":
            y = Checkpointer().checkpoint(run, x)
        else:
            y = torch_checkpoint.checkpoint(run, x, use_reentrant=how == "reentrant")
        y.sum().backward()
    assert made._load[0].sum() == 2 * 8 * 2
    with torch.no_grad():
        made.eval()(x)
    assert made._load[0].sum() == 2 * 8 * 2


def test_a_bias_keeps_its_dtype_and_goes_into_state_dicts():
    made = router(bias_rate=0.001)
    made.bias.fill_(1 + 2**-20)
    made.to(torch.bfloat16)
    assert made.wg.weight.dtype == torch.bfloat16
    assert made.bias.tolist() == [1 + 2**-20] * 4
    assert "bias" in made.state_dict()
    other = router(bias_rate=0.001).half()
    other.load_state_dict(made.state_dict())
    assert torch.equal(other.bias, made.bias)
    assert copy.deepcopy(made).bias.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"k": 5}, "k = 5 of a router of experts: a token goes to 1 to 4 of 4 experts"),
        ({"k": 1.5}, "k of a router of experts = 1.5 is a float"),
        ({"bias_rate": "0.1"}, "bias_rate = '0.1' of a router of experts: give a number"),
        ({"k": 0}, "k = 0"),
        ({"score": "relu"}, "score = 'relu'"),
        ({"noise": "None"}, "noise = 'None'"),
        ({"priority": "last"}, "priority = 'last'"),
        ({"groups": 3}, "groups = 3"),
        ({"groups": 2, "kept_groups": 3}, "kept_groups = 3"),
        ({"min_capacity": -3}, "min_capacity = -3"),
        ({"k": 3, "groups": 2}, "kept_groups = 1 of a router of experts: their experts are fewer than k = 3"),
        ({"capacity_factor": 0.0}, "capacity_factor = 0.0"),
        ({"eval_capacity_factor": float("nan")}, "eval_capacity_factor = nan"),
    ],
)
def test_options_that_cannot_hold(options, text):
    with pytest.raises(ConfigError, match=text):
        router(**options)
