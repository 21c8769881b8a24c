"""Models of `transformers` with random weights: losses, logits and gradients of the cut model are the unsplit one's."""

import copy
import itertools

import pytest
import torch

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.nn.tensor import cross_entropy, cuts, inject, partial_gradients
from tests.helpers.hub_models import LENGTH, VOCAB, batch, build
from tests.helpers.tensor import assert_near, whole_gradients, whole_parameters

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.filterwarnings("ignore:.gradient_checkp:FutureWarning")]

KNOWN = ("gpt2", "llama", "mistral", "qwen2", "bert", "opt")
FAMILIES = ("gemma", "qwen3", "roberta", "t5", "bloom", "mixtral", "gpt_neo", "gptj", "phi3")
BOUND = 1e-5
OPTIONS = {"plain": {}, "vocab": {"vocab": True}, "sequence": {"sequence_parallel": True}}


def compare(comm, whole, cut, data=None):
    """Train both on one batch."""
    data = data or batch()
    expected, found = whole(**data), cut(**data)
    assert_near(found.loss.detach(), expected.loss.detach(), BOUND, "loss")
    assert_near(found.logits.detach(), expected.logits.detach(), BOUND, "logits")
    expected.loss.backward()
    found.loss.backward()
    grads = whole_gradients(comm, cut)
    for name, param in whole.named_parameters():
        assert_near(grads[name], torch.zeros_like(param) if param.grad is None else param.grad, BOUND, name)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *itertools.product(KNOWN, ("plain", "sequence")),
        *itertools.product(("gpt2", "llama", "bert", "gemma"), ("vocab",)),
        *itertools.product(FAMILIES, ("plain",)),
        ("qwen3", "sequence"),
    ],
)
def test_losses_and_gradients(comm, name, options):
    whole, cut = build(name).train(), build(name).train()
    report = inject(cut, comm, **OPTIONS[options])
    parts = whole_parameters(comm, cut)
    assert all(torch.equal(parts[key], param) for key, param in whole.named_parameters())
    assert set(cuts(cut)) <= set(dict(cut.named_parameters(remove_duplicate=False)))
    assert report.local_elements == sum(p.numel() for p in cut.parameters()) < report.elements
    if name in KNOWN:
        blocks = [path for path in report.whole if ".layers." in path or ".h." in path or ".layer." in path]
        assert not blocks
    compare(comm, whole, cut)


@pytest.mark.parametrize("name", KNOWN)
def test_evaluation_and_tied_tables(comm, name):
    whole, cut = build(name).eval(), build(name)
    tied = cut.get_input_embeddings().weight is cut.get_output_embeddings().weight
    inject(cut.eval(), comm, vocab=True, sequence_parallel=True)
    assert (cut.get_input_embeddings().weight is cut.get_output_embeddings().weight) == tied
    with torch.no_grad():
        data = batch(length=LENGTH - 1)  # no multiple of the number of ranks: evaluation does not cut sequences
        assert_near(cut(**data).logits, whole(**data).logits, BOUND)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generated_tokens(comm, name):
    whole, cut = build(name).eval(), build(name).eval()
    inject(cut, comm)
    data = {"input_ids": batch()["input_ids"][:, :5], "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(cut.generate(**data), whole.generate(**data))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gpt2", {"n_head": 8}),
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 32}),
        ("llama", {"num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 5}),
        ("llama", {"attn_implementation": "eager"}),
        ("gpt2", {"attn_implementation": "eager", "add_cross_attention": True}),
        ("bert", {"attn_implementation": "eager", "intermediate_size": 3}),
    ],
    ids=str,
)
def test_other_numbers_of_heads_and_widths(comm, name, change):
    whole, cut = build(name, **change).train(), build(name, **change).train()
    inject(cut, comm)
    compare(comm, whole, cut)


def test_three_heads(comm):
    change = {"num_attention_heads": 3, "num_key_value_heads": 3}
    whole, cut = build("llama", **change), build("llama", **change)
    if comm.size > 3:
        with pytest.raises(ConfigError, match=r"layers.0.self_attn has 3 heads, fewer than the 4 ranks"):
            inject(cut, comm)
        return
    inject(cut, comm)
    compare(comm, whole, cut)


def test_loss_of_cut_logits(comm):
    """The layer to logits can leave them cut; the loss is the same without their gather."""
    whole, cut = build("llama"), build("llama")
    inject(cut, comm, vocab=True)
    cut.lm_head.gather_output = False
    data = batch()
    labels = data.pop("labels")
    loss = cross_entropy(cut(**data).logits[:, :-1], labels[:, 1:], comm, VOCAB)
    expected = whole(**data, labels=labels).loss
    assert_near(loss.detach(), expected.detach(), BOUND)


@pytest.mark.parametrize(
    ("name", "options", "implementation"),
    [
        ("gpt2", "plain", "sdpa"),
        ("gpt2", "plain", "eager"),
        ("gpt2", "sequence", "eager"),
        ("llama", "plain", "eager"),
        ("bert", "sequence", "sdpa"),
    ],
)
def test_dropout(comm, name, options, implementation):
    """What is whole stays equal on all ranks, masks of heads differ, and recomputing draws the same masks."""
    drops = {
        "gpt2": {"attn_pdrop": 0.3, "resid_pdrop": 0.3, "embd_pdrop": 0.3},
        "llama": {"attention_dropout": 0.3},
        "bert": {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3},
    }[name]
    model = build(name, **drops, attn_implementation=implementation).train()
    inject(model, comm, **OPTIONS[options])
    results = []
    for is_checkpointed in (False, True):
        reference = copy.deepcopy(model)
        if is_checkpointed:
            reference.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(3)
        loss = reference(**batch()).loss
        loss.backward()
        after = torch.get_rng_state()
        assert all(torch.equal(state, after) for state in comm.gather_objects(after))
        results.append(
            (loss.detach(), whole_gradients(comm, reference))
        )  # whole parameters: equal on all ranks, asserted
    assert torch.equal(results[0][0], results[1][0])
    for key, grad in results[0][1].items():
        assert_near(results[1][1][key], grad, BOUND, key)
    assert results[0][0] != model.eval()(**batch()).loss


def test_masks_of_heads_differ(comm):
    """Without dropout equal weights in all heads give equal gradients of all heads; own masks make them differ."""
    model = build("llama", attention_dropout=0.5, num_key_value_heads=4).train()
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
            layer.weight.copy_(layer.weight[:6].repeat(4, 1))
        attention.o_proj.weight.copy_(attention.o_proj.weight[:, :6].repeat(1, 4))
    inject(model, comm)
    torch.manual_seed(1)
    model(**batch()).loss.backward()
    first = [grad[:6] for grad in comm.gather_objects(attention.v_proj.weight.grad)]
    assert all(not torch.equal(first[0], other) for other in first[1:])


def test_partial_gradients_of_head_norms(comm):
    model = build("qwen3")
    inject(model, comm)
    expected = [f"model.layers.{i}.self_attn.{name}.weight" for i in range(2) for name in ("q_norm", "k_norm")]
    assert sorted(partial_gradients(model)) == sorted(expected)


def test_ranks_start_from_rank_0(comm):
    model = build("gpt2", seed=comm.rank)
    inject(model, comm)
    compare(comm, build("gpt2", seed=0), model)


def test_sequences_of_two_lists_of_blocks(comm):
    with pytest.raises(ConfigError, match=r"one list of blocks that has all cut layers, found \['encoder.block', 'dec"):
        inject(build("t5"), comm, sequence_parallel=True)


def test_injected_once(comm):
    model = build("gpt2")
    inject(model, comm)
    with pytest.raises(UsageError, match="cut already"):
        inject(model, comm)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("t5", {"T5Block": ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")}),
        ("roberta", {"RobertaLayer": "output.dense"}),
    ],
)
def test_policies_in_deepspeeds_form(comm, name, policy):
    whole, cut = build(name).train(), build(name).train()
    report = inject(cut, comm, policy)
    assert len(report.cut) == {"t5": 32, "roberta": 12}[name]
    compare(comm, whole, cut)
