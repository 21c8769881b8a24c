"""Token ids of prompts, and texts of answers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mpispeed.generation.answers import EOS, LENGTH, STOP
from mpispeed.generation.prompts import open_prompts
from mpispeed.generation.requests import Options, Prompt, PromptError
from mpispeed.generation.texts import Encoder, RowLimits, trim

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def tokenizer():
    """A token for each byte, one for the end, and one for the beginning."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", bos_token="<begin>", chat_template=TEMPLATE
    )


def prompt(content):
    return Prompt(0, "p.jsonl, prompt 3 (id x)", "x", 0, content, Options())


@pytest.fixture
def decode(tokenizer):
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def test_prompts_of_all_kinds(tokenizer):
    encoder = Encoder(tokenizer, vocabulary=300)
    assert tokenizer.decode(encoder(prompt("wört"))) == "wört"
    assert encoder(prompt((5, 0, 9))) == [5, 0, 9]
    chat = ({"role": "system", "content": "Be"}, {"role": "user", "content": "Why?"})
    assert tokenizer.decode(encoder(prompt(chat))) == "<system>Be<user>Why?<assistant>"
    other = Encoder(tokenizer, chat_template="{{ messages[0]['content'] }}!")
    assert tokenizer.decode(other(prompt(chat))) == "Be!"
    assert encoder(prompt("")) == [tokenizer.bos_token_id]


def test_lengths_are_those_of_single_prompts(tokenizer, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f'"{"wört " * (number % 9)}"\n' for number in range(2100)))
    encoder = Encoder(tokenizer)
    with open_prompts(path) as prompts:
        found = encoder.lengths(prompts, 5, 2100)
        assert found.dtype == np.int32
        for request in (5, 8, 1029, 2099):
            assert found[request - 5] == len(encoder(prompts[request]))


def test_prompts_that_have_no_tokens_are_refused(tokenizer):
    chat = ({"role": "user", "content": "Why?"},)
    with pytest.raises(PromptError, match=r"p\.jsonl, prompt 3 \(id x\) has the token id 299; the model knows"):
        Encoder(tokenizer, vocabulary=299)(prompt((299,)))
    with pytest.raises(PromptError, match="is a text, and the model's folder has no tokenizer"):
        Encoder(None)(prompt("a"))
    with pytest.raises(PromptError, match="the chat template does not take it: no user"):
        Encoder(tokenizer, chat_template="{{ raise_exception('no user') }}")(prompt(chat))
    with pytest.raises(PromptError, match="has no tokens, and the tokenizer has none for the beginning"):
        Encoder(None)(prompt(()))
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(PromptError, match="the tokenizer has no chat template"):
        Encoder(bare)(prompt(chat))


def test_templates_cannot_reach_the_machine(tokenizer):
    for template in ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{% include 'x' %}"):
        with pytest.raises(PromptError, match="the chat template does not take it"):
            Encoder(tokenizer, chat_template=template)(prompt(({"role": "user", "content": "a"},)))


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_answers_end_where_they_have_to(tokenizer, decode):
    ids = ids_of(tokenizer, "one two three")
    end = tokenizer.eos_token_id

    def found(tokens, **options):
        cut = trim(tokens, **{"limit": 100, "ends": {end}, "decode": decode, **options})
        return cut.text, cut.reason, len(cut.tokens)

    assert found(ids) == ("one two three", LENGTH, 13)
    assert found([*ids, end, *ids]) == ("one two three", EOS, 14)
    assert found([*ids, end], limit=13) == ("one two three", LENGTH, 13)
    assert found([*ids, end], limit=5) == ("one t", LENGTH, 5)
    assert found([*ids, end], stops=["thr", "two"]) == ("one ", STOP, 7)
    assert found([*ids, end], stops=["one"]) == ("", STOP, 3)
    assert found([*ids[:4], end, *ids], stops=["two"]) == ("one ", EOS, 5)
    assert found(ids, stops=["xyz"]) == ("one two three", LENGTH, 13)
    assert found([end]) == ("", EOS, 1)
    assert found([]) == ("", LENGTH, 0)
    assert found([*ids, end], decode=None) == ("", EOS, 14)
    assert found(np.array([*ids, end]), ends=()) == ("one two three", LENGTH, 14)


@settings(deadline=None, max_examples=60)
@given(text=st.text("abé", max_size=30), stops=st.lists(st.text("abé", min_size=1, max_size=3), max_size=2))
def test_a_row_is_done_at_the_token_that_trim_keeps_last(tokenizer, text, stops):
    def decode(ids):
        return tokenizer.decode(ids, skip_special_tokens=True)

    ids = ids_of(tokenizer, text)
    limits = RowLimits([25, 40], 2, [stops, []], decode)
    done = next(
        (count for count in range(1, 41) if limits(torch.tensor([[0, 0, *(ids + [0] * 40)[:count]]] * 2))[0]), None
    )
    cut = trim((ids + [0] * 40)[:40], limit=25, ends=(), stops=stops, decode=decode)
    assert done == len(cut.tokens)
    if cut.reason == STOP:
        assert not any(stop in cut.text for stop in stops)


def test_limits_of_rows_do_not_need_stop_texts():
    limits = RowLimits([2, 3, 1], 4)
    found = [limits(torch.zeros(3, 4 + count, dtype=torch.int64)).tolist() for count in (1, 2, 3)]
    assert found == [[False, False, True], [True, False, True], [True, True, True]]
