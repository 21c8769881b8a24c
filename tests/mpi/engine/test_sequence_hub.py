"""transformers' models as they are, their sequences cut over ranks: losses and all gradients of one process."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

import mpispeed
from mpispeed import sequence
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.nn.hf_attention import NAME

pytestmark = pytest.mark.mpi(min_size=1)

VOCAB, ROWS, LENGTH = 61, 2, 23  # a length that no number of ranks divides
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
BOUND = 1e-5
"""Of the largest gradient of a parameter: sums of float32 in another order."""


def llama(width=32, heads=8, groups=2):
    torch.manual_seed(4)
    sizes = {**SIZES, "hidden_size": width}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=groups))


def bert():
    torch.manual_seed(4)
    plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**SIZES, **plain, num_attention_heads=4, max_position_embeddings=32))


def batch(kind, seed=0):
    words = torch.randint(1, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    if kind == "packed":
        ends = [torch.arange(9), torch.arange(11), torch.arange(3)]
        return {"input_ids": words, "labels": words, "position_ids": torch.cat(ends).expand(ROWS, -1)}
    if kind == "padded":
        mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [10]])).long()
        return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}
    return {"input_ids": words, "labels": words}


def settings(comm, stage, ring=1, **more):
    return {
        "train_micro_batch_size_per_gpu": ROWS, "sequence_parallel_size": comm.size, "seed": 3,
        "sequence_parallel": {"ring_size": ring}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **more,
    }  # fmt: skip


def assert_equal_to_one_process(engine, plain, kind):
    named = dict(engine.module.named_parameters())
    whole = batch(kind)
    if isinstance(plain, BertForMaskedLM):  # which computes the loss of labels beside the interface
        labels = whole.pop("labels")
        loss = mpispeed.sequence.cross_entropy(engine(**whole).logits, mpispeed.sequence.cut(labels))
        expected = plain(**whole, labels=labels).loss
    else:
        loss, expected = (model(**whole, use_cache=False).loss for model in (engine, plain))
    engine.backward(loss)
    expected.backward()
    torch.testing.assert_close(whole_loss(engine, loss), expected.detach(), rtol=BOUND, atol=0)
    for name, param in plain.named_parameters():
        found = mpispeed.zero.safe_get_full_grad(named[name])
        bound = max(BOUND * float(param.grad.abs().max()), 1e-9)  # that of biases of keys is zero but for rounding
        torch.testing.assert_close(found, param.grad, rtol=0, atol=bound, msg=lambda text, name=name: f"{name}: {text}")
    engine.destroy()


def whole_loss(engine, loss):
    """The loss of the sequence: the mean over its ranks."""
    total = loss.detach().clone()
    engine.get_sequence_parallel_group().all_reduce(total, scale=1 / engine.sequence_parallel_size)
    return total


@pytest.mark.parametrize(("kind", "stage"), [("plain", 3), ("packed", 0), ("padded", 2)])
def test_a_causal_model(comm, kind, stage):
    plain = llama()
    engine, *_ = mpispeed.initialize(model=copy.deepcopy(plain), config=settings(comm, stage))
    assert engine.module.config._attn_implementation == (NAME if comm.size > 1 else "sdpa")
    assert_equal_to_one_process(engine, plain, kind)


@pytest.mark.ranks(1, 2, 4)
def test_a_ring_and_recomputed_layers(comm):
    plain = llama(width=48, heads=6, groups=3)
    model = copy.deepcopy(plain)
    model.activation_checkpointing_enable()
    engine, *_ = mpispeed.initialize(model=model, config=settings(comm, 1, ring=min(comm.size, 2)))
    assert_equal_to_one_process(engine, plain, "packed")


@pytest.mark.ranks(1, 3)
def test_a_model_that_sees_everything(comm):
    plain = bert()
    engine, *_ = mpispeed.initialize(model=copy.deepcopy(plain), config=settings(comm, 3))
    assert_equal_to_one_process(engine, plain, "padded")


class Around(nn.Module):
    """A model of one's own that tells the one inside nothing of positions."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, words):
        return self.inner(words).logits


@pytest.mark.ranks(2, 3)
def test_positions_are_those_of_the_whole_sequence(comm):
    """Also where a model does not count padding, or stands in one that passes no positions on."""
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 32}
    torch.manual_seed(4)
    counting = RobertaForMaskedLM(RobertaConfig(**SIZES, **off, num_attention_heads=4, pad_token_id=1))
    whole = batch("padded")
    words = whole["input_ids"].masked_fill(whole["input_ids"] == 1, 2).masked_fill(whole["attention_mask"] == 0, 1)
    for plain, given in ((counting, {"attention_mask": whole["attention_mask"]}), (Around(bert()), {})):
        engine, *_ = mpispeed.initialize(model=copy.deepcopy(plain), config=settings(comm, 0, comm.size))
        found, expected = engine(words, **given), plain(words, **given)
        found, expected = (getattr(each, "logits", each).detach() for each in (found, expected))
        seen = (whole["attention_mask"] > 0) if given else torch.ones_like(words, dtype=torch.bool)
        torch.testing.assert_close(sequence.join(found)[seen], expected[seen], rtol=BOUND, atol=BOUND)
        engine.destroy()
    engine, *_ = mpispeed.initialize(model=Around(counting), config=settings(comm, 0))
    with pytest.raises(UsageError, match="counts positions by itself"):
        engine(words)
    engine.destroy()


@pytest.mark.ranks(1, 2, 4)
def test_training_goes_on_at_other_sizes(comm, tmp_path):
    """4 ranks of a sequence, then 2 with two sequences at a time, then 1: the losses of one process."""
    folder = comm.share(str(tmp_path))
    plain = llama()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step, size in enumerate([size for size in (4, 2, 1) if comm.size % size == 0]):
        config = settings(comm, 3)
        config.update(sequence_parallel_size=size, train_batch_size=4 * ROWS)
        del config["train_micro_batch_size_per_gpu"]
        config["gradient_accumulation_steps"] = 1
        engine, *_ = mpispeed.initialize(model=llama(), config=config)
        if step:
            engine.load_checkpoint(folder)
        rows = {name: torch.cat([batch("plain", 10 * step + n)[name] for n in range(4)]) for name in batch("plain")}
        expected = plain(**rows, use_cache=False).loss
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        micro, place = engine.train_micro_batch_size_per_gpu(), engine.mpispeed.parts.mesh.index("batch")
        part = {name: rows[name][place * micro : (place + 1) * micro] for name in rows}
        loss = engine(**part).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        comm.all_reduce(total, scale=1 / comm.size)
        torch.testing.assert_close(total, expected.detach(), rtol=BOUND, atol=0)
        engine.save_checkpoint(folder)
        engine.destroy()


@pytest.mark.ranks(2)
def test_models_that_cannot_be_cut_are_refused(comm):
    torch.manual_seed(0)
    both = T5ForConditionalGeneration(T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    with pytest.raises(ConfigError, match="two sequences"):
        mpispeed.initialize(model=both, config=settings(comm, 0))
    engine, *_ = mpispeed.initialize(model=llama(), config=settings(comm, 0))
    mask = torch.ones(ROWS, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    with pytest.raises(UsageError, match="attention_mask"):
        engine(**{**batch("plain"), "attention_mask": mask})
    engine.destroy()


@pytest.mark.ranks(2, 3)
def test_masks_by_place_are_known_and_empty_parts_refused(comm):
    net = llama()
    engine, *_ = mpispeed.initialize(model=copy.deepcopy(net), config=settings(comm, 0, comm.size))
    whole = batch("padded")
    by_place = (whole["input_ids"], whole["attention_mask"])
    loss = engine(*by_place, labels=whole["labels"]).loss
    expected = net(**whole).loss.detach()
    torch.testing.assert_close(whole_loss(engine, loss), expected, rtol=BOUND, atol=0)
    words = whole["input_ids"][:, : comm.size - 1]
    with pytest.raises(UsageError, match="cannot take an empty part; pad batches"):
        engine(words, labels=words)
    with pytest.raises(UsageError, match=r"mpispeed\.sequence\.use\(None\)"):
        engine.module(whole["input_ids"])  # the pass of the engine is still the one that runs
    engine.destroy()


@pytest.mark.ranks(2)
def test_batches_that_parts_cannot_tell_are_refused_on_all_ranks(comm):
    engine, *_ = mpispeed.initialize(model=llama(), config=settings(comm, 0))
    with pytest.raises(UsageError, match="a sequence of 1 tokens has none for some of its 2 ranks"):
        engine(input_ids=torch.ones(2, 1, dtype=torch.int64))
    group = engine.sequence.group
    running = sequence.Running(group, sequence.Layout(8, group.ulysses.size, group.ring.size))
    own, packed = torch.ones(1, 4, dtype=torch.int64), torch.tensor([[0, 1, 0, 1]])
    with sequence.use(running), pytest.raises(UsageError, match="position_ids begin anew, and the cut"):
        engine.module(input_ids=own, position_ids=packed)
    engine.destroy()


@pytest.mark.ranks(2)
def test_a_script_that_cuts_by_itself_has_to_tell_how(comm):
    config = settings(comm, 0)
    config["sequence_parallel"] = {"cuts_batches": False}
    engine, *_ = mpispeed.initialize(model=llama(), config=config)
    with pytest.raises(UsageError, match=r"nobody has told how the batch is cut.*UlyssesSPDataLoaderAdapter"):
        engine(**batch("plain"))
    engine.destroy()
