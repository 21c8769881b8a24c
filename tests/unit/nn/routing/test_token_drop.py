"""Layers that see some of the tokens: values, gradients, masks, tuples, names; whole layers of tiny models."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.nn.routing import RandomLayerTokenDrop, RandomLTDScheduler, convert_to_random_ltd
from mpispeed.nn.routing.convert import (
    dropping_layers,
    remove_random_ltd_state_dict,
    routes_of,
    save_without_random_ltd,
)
from mpispeed.nn.routing.kept_inputs import KeptTokens
from tests.helpers.token_dropping import drop_tokens, kept_of, section

WIDTH, TOKENS, BATCH = 8, 12, 3


class Layer(nn.Module):
    """Attention of one head and a perceptron; tokens of dim 1, or 0."""

    def __init__(self, batch_first=True):
        super().__init__()
        self.qkv, self.up = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.batch_first = batch_first
        self.seen = []

    def forward(self, x, attention_mask=None, position_ids=None):
        self.seen.append((x, attention_mask, position_ids))
        h = x if self.batch_first else x.transpose(0, 1)
        q, k, v = self.qkv(h).chunk(3, -1)
        mask = None if attention_mask is None else attention_mask[:, 0]
        h = h + F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        h = h + torch.tanh(self.up(h))
        return h if self.batch_first else h.transpose(0, 1)


class Stack(nn.Module):
    def __init__(self, count=3, **options):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(**options) for _ in range(count))

    def forward(self, x, **kwargs):
        for layer in self.layers:
            x = layer(x, **kwargs)
        return x


def inputs(batch_first=True):
    torch.manual_seed(1)
    x = torch.randn(BATCH, TOKENS, WIDTH)
    return (x if batch_first else x.transpose(0, 1).contiguous()).requires_grad_()


def by_hand(model, x, config, *, batch_first=True, step=0, **kwargs):
    """The stack with gather and scatter of torch around the layers of the config."""
    for number, layer in enumerate(model.layers):
        if number not in config["random_ltd_layer_id"]:
            x = layer(x, **kwargs)
            continue
        places = kept_of(config, number, BATCH, TOKENS, step=step)
        dim, places = (1, places) if batch_first else (0, places.t())
        places = places[:, :, None].expand(-1, -1, WIDTH)
        y = layer(x.gather(dim, places), **kwargs)
        is_kept = torch.zeros_like(x, dtype=torch.bool).scatter(dim, places, True)
        x = torch.where(is_kept, torch.zeros_like(x).scatter(dim, places, y), x)
    return x


def grads(model, x, out):
    out.square().sum().backward()
    found = [x.grad, *(param.grad for param in model.parameters())]
    for tensor in (x, *model.parameters()):
        tensor.grad = None
    return found


@pytest.mark.parametrize("order", ["batch_seq_dim", "seq_batch_dim"])
def test_a_stack_has_the_bits_of_gather_and_where(order):
    batch_first = order == "batch_seq_dim"
    plain, model = Stack(batch_first=batch_first), Stack(batch_first=batch_first)
    config = section(3, [0, 2], 5, TOKENS, hidden_state_order=order)
    drop_tokens(model, Layer, config, step=4)
    x = inputs(batch_first)
    ours, wanted = model(x), by_hand(plain, x, config, batch_first=batch_first, step=4)
    assert torch.equal(ours, wanted)
    assert all(torch.equal(a, b) for a, b in zip(grads(model, x, ours), grads(plain, x, wanted), strict=True))
    seen = [layer.seen[0][0].shape[1 if batch_first else 0] for layer in model.layers]
    assert seen == [5, TOKENS, 5]


def test_evaluation_and_whole_lengths_are_the_plain_call():
    plain, model, x = Stack(), Stack(), inputs()
    scheduler = drop_tokens(model, Layer, section(3, [0, 1], 5, TOKENS))
    wanted = grads(plain, x, plain(x))
    assert torch.equal(model.eval()(x), plain(x))
    model.train()
    assert not torch.equal(model(x), plain(x))
    scheduler.set_current_seq(TOKENS)
    assert all(torch.equal(a, b) for a, b in zip(grads(model, x, model(x)), wanted, strict=True))


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_recomputation_drops_the_same_tokens(is_reentrant):
    model, x, config = Stack(1), inputs(), section(1, [0], 5, TOKENS)
    drop_tokens(model, Layer, config)
    wanted = grads(model, x, model(x))
    again = checkpoint(model.layers[0], x, use_reentrant=is_reentrant)
    assert all(torch.equal(a, b) for a, b in zip(grads(model, x, again), wanted, strict=True))
    assert len(model.layers[0].seen) == 3
    (route,) = routes_of(model).values()
    assert route._call is None  # holds nothing of a layer that was left early


def test_masks_of_an_encoder_are_gathered_for_each_sample():
    model, plain, x = Stack(1), Stack(1), inputs().detach()
    config = section(1, [0], 5, TOKENS, model_type="encoder", model_mask_name="attention_mask")
    drop_tokens(model, Layer, config)
    sees = torch.rand(BATCH, 1, TOKENS, TOKENS) < 0.8
    sees |= torch.eye(TOKENS, dtype=torch.bool)
    padding = sees[:, :, :1].clone()
    padding[..., 0] = True
    places = kept_of(config, 0, BATCH, TOKENS)
    for mask in (sees, padding.expand_as(sees), padding, padding[:1]):
        ours = model(x, attention_mask=mask)
        for sample in range(BATCH):
            own = mask.expand(BATCH, 1, -1, TOKENS)[sample : sample + 1]
            kept = own[..., places[sample]]
            kept = kept[:, :, places[sample]] if kept.shape[2] == TOKENS else kept
            wanted = plain.layers[0](x[sample : sample + 1, places[sample]], attention_mask=kept)
            assert torch.equal(ours[sample, places[sample]], wanted[0])


def test_a_decoders_common_mask_is_its_corner_and_one_of_samples_is_gathered():
    model, x = Stack(1), inputs().detach()
    config = section(1, [0], 5, TOKENS, model_mask_name="attention_mask")
    drop_tokens(model, Layer, config)
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    ours = model(x, attention_mask=causal[None, None])
    assert torch.equal(model.layers[0].seen[-1][1], causal[None, None, :5, :5])
    assert torch.allclose(ours, model(x), atol=1e-6)
    padded = causal.repeat(BATCH, 1, 1, 1)
    padded[1, ..., :3] = False
    padded[1, 0].fill_diagonal_(True)
    model(x, attention_mask=padded)
    places = kept_of(config, 0, BATCH, TOKENS)
    for sample, kept in enumerate(model.layers[0].seen[-1][1]):
        assert torch.equal(kept[0], padded[sample, 0][places[sample]][:, places[sample]])


def test_masks_of_other_dims():
    index = torch.tensor([[0, 2], [1, 3]])
    kept = KeptTokens(index.int(), 4, True, True)
    padding = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1]])
    assert kept.mask("mask", padding).tolist() == [[1, 0], [1, 1]]
    causal = torch.ones(4, 4).tril()
    assert kept.mask("mask", causal).tolist() == [[1, 0], [1, 1]]
    assert kept.mask("mask", padding[:, None]).tolist() == [[[1, 0]], [[1, 1]]]
    pairs = torch.arange(32).view(2, 4, 4)
    assert kept.mask("mask", pairs).tolist() == [[[0, 2], [8, 10]], [[21, 23], [29, 31]]]
    assert kept.mask("mask", None) is None
    for wrong in (torch.ones(2, 5), torch.ones(3, 1, 4, 4), torch.ones(4), "a block mask"):
        with pytest.raises(UsageError, match="mask"):
            kept.mask("mask", wrong)
    with pytest.raises(UsageError, match=r"\(4, 4\) for 2 samples"):
        KeptTokens(index.int(), 4, True, False).mask("mask", causal)


def test_the_mask_of_one_sample_or_of_heads_is_no_common_one():
    """A batch of one has its padding, or a window; heads have distances."""
    sees = torch.ones(4, 4).tril().triu(-1)
    sees[:, 0] = 0
    one = KeptTokens(torch.tensor([[1, 3]]).int(), 4, True, True)
    for mask in (sees[None], sees[None, None]):
        assert one.mask("mask", mask).flatten().tolist() == [1, 0, 0, 1]
    two = KeptTokens(torch.tensor([[1, 3], [0, 1]]).int(), 4, True, True)
    heads = torch.arange(32).view(1, 2, 4, 4)
    assert two.mask("mask", heads)[0].tolist() == [[[5, 7], [13, 15]], [[21, 23], [29, 31]]]
    assert two.mask("mask", heads)[1].tolist() == [[[0, 1], [4, 5]], [[16, 17], [20, 21]]]


@pytest.mark.parametrize("batch_first", [True, False])
def test_positions_are_those_of_the_kept_tokens(batch_first):
    index = torch.tensor([[0, 2], [1, 3]])
    kept = KeptTokens(index.int(), 4, batch_first, True)
    assert torch.equal(kept.along_tokens("position_ids", torch.arange(4)[None]), index)
    table = torch.randn(4, 6)
    found = kept.along_tokens("position_embeddings", (table[None], table[None] * 2))
    assert torch.equal(found[0], table[index]) and torch.equal(found[1], 2 * table[index])
    by_tokens = kept.along_tokens("rotary_pos_emb", table[:, None, None])
    assert torch.equal(by_tokens.squeeze(2), table[index].transpose(0, 1))
    with pytest.raises(UsageError, match=r"cache is \(4,\) for 2 samples of 4 tokens; each sample keeps tokens"):
        kept.along_tokens("cache", torch.arange(4))


class TupleLayer(nn.Module):
    """Takes and gives a tuple as one object, as layers of pipelines do."""

    def __init__(self):
        super().__init__()
        self.inner = Layer()

    def forward(self, parts):
        x, mask, positions = parts
        assert positions.shape == x.shape[:2]
        return self.inner(x, mask), mask, positions


def test_tuples_in_and_out():
    torch.manual_seed(0)
    config = section(1, [0], 5, TOKENS)
    model, x = nn.Sequential(TupleLayer()), inputs()
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().repeat(BATCH, 1, 1, 1)
    positions = torch.arange(TOKENS).repeat(BATCH, 1)
    drop_tokens(model, TupleLayer, config)
    out = model((x, mask, positions))
    assert isinstance(out, tuple) and out[1] is mask and out[2] is positions
    seen = model[0].inner.seen[0]
    assert seen[0].shape == (BATCH, 5, WIDTH) and seen[1].shape == (BATCH, 1, 5, 5)
    places = kept_of(config, 0, BATCH, TOKENS)
    assert torch.equal(out[0].gather(1, places[:, :, None].expand(-1, -1, WIDTH)), model[0].inner(*seen))
    is_rest = torch.ones(BATCH, TOKENS, dtype=torch.bool).scatter(1, places, False)
    assert torch.equal(out[0][is_rest], x[is_rest])


def test_what_cannot_be_dropped_from_is_refused():
    config = section(1, [0], 5, TOKENS, model_mask_name="mask")
    with pytest.raises(ConfigError, match=r"'mask', and layer 'layers.0' takes x, attention_mask, position_ids"):
        drop_tokens(Stack(1), Layer, config)
    model = Stack(1)
    drop_tokens(model, Layer, section(1, [0], 5, TOKENS))
    with pytest.raises(UsageError, match="Layer: random-LTD needs hidden states as first input, found a list"):
        model.layers[0]([])
    with pytest.raises(ConfigError, match="model has no layer of class Bilinear"):
        convert_to_random_ltd(model, nn.Bilinear)
    for key, words in (("model_type", "'decoder' or 'encoder'"), ("hidden_state_order", "'batch_seq_dim'")):
        with pytest.raises(ConfigError, match=words):
            drop_tokens(model, Layer, section(1, [0], 5, TOKENS, **{key: None}))
    with pytest.raises(ConfigError, match="model_mask_name is missing"):
        drop_tokens(model, Layer, section(1, [0], 5, TOKENS, model_type="encoder"))


def test_numbers_are_whole_and_belong_to_one_layer():
    names = [f"model.layers.{i}.block" for i in range(12)] + ["head.1"]
    assert dropping_layers(names[:12], [1, 11]) == {"model.layers.1.block": 0, "model.layers.11.block": 1}
    assert dropping_layers(["layer1", "layer10"], [10]) == {"layer10": 0}
    for wanted, count, words in (
        ([12], None, r"random_ltd_layer_id has 12, and no converted layer has such a number"),
        ([1], 2, r"random_ltd_layer_num is 2, but 1 layers were converted: \[1\]"),
    ):
        with pytest.raises(ValueError, match=words):
            dropping_layers(names[:12], wanted, count)
    with pytest.raises(ValueError, match=r"'model.layers.1.block' and 'head.1' both have the number 1"):
        dropping_layers(names, [1])


def test_names_of_weights_do_not_change():
    model, plain = Stack(), Stack()
    drop_tokens(model, Layer, section(3, [0, 1], 5, TOKENS))
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    wrapped = copy.deepcopy(plain)
    wrapped.layers[1] = RandomLayerTokenDrop(wrapped.layers[1])
    assert "layers.1.random_ltd_layer.up.weight" in wrapped.state_dict()
    assert list(save_without_random_ltd(wrapped)) == list(plain.state_dict())
    assert list(remove_random_ltd_state_dict(plain.state_dict())) == list(plain.state_dict())


def test_a_wrapper_by_hand_drops_as_a_converted_layer_does():
    config = section(3, [1], 5, TOKENS)
    converted, wrapped, x = Stack(), Stack(), inputs()
    drop_tokens(converted, Layer, config, step=-1)
    scheduler = RandomLTDScheduler({**config, "global_batch_size": 4})
    wrapped.layers[1] = RandomLayerTokenDrop(wrapped.layers[1])
    assert torch.equal(wrapped(x), Stack()(x))  # not configured
    wrapped.layers[1].init_config(config, scheduler, 0)
    assert torch.equal(wrapped(x), converted(x))


def test_a_copy_of_a_model_drops_by_itself():
    model, x = Stack(), inputs()
    drop_tokens(model, Layer, section(3, [0], 5, TOKENS))
    twin = copy.deepcopy(model)
    wanted = model(x)
    assert torch.equal(twin(x), wanted)
    for route in routes_of(model).values():
        route.clear()
    assert torch.equal(twin(x), wanted) and not torch.equal(model(x), wanted)
