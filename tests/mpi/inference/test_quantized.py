"""Coded weights in sliced layers, and in engines by their settings.

Logits on T ranks are near those on one, and not equal: a share of the inputs begins a group of its own, so that scales
differ where shares are no multiples of groups, and the ranks' parts are summed in another order than one rank's.
"""

import copy

import pytest
import torch
from torch import nn

import mpispeed
from mpispeed.base.errors import ConfigError
from mpispeed.inference.quantized import QuantOptions, Rule, dequantized, is_quantized, quantize_model, quantize_module
from mpispeed.inference.quantized.layers import Format, codes_of
from mpispeed.inference.slicing import slice_model
from mpispeed.nn.tensor import ColumnLinear, RowLinear, VocabEmbedding, VocabLinear
from tests.helpers.hub_models import batch, build

pytestmark = [pytest.mark.mpi(min_size=1)]

FORMATS = {"int8": Format(8, 16), "int4": Format(4, 16, is_symmetric=False)}


def values_in(layer, kind):
    """The same layer as it was, with what its codes stand for."""
    made = copy.deepcopy(layer)
    made.__class__ = kind
    del made.weight, made.weight_codes, made.weight_scales, made.weight_offsets, made._coded
    made.weight = nn.Parameter(dequantized(layer))
    return made


@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", [ColumnLinear, RowLinear])
def test_linear_layers_keep_sums_and_gathers(comm, kind, transposed, how):
    torch.manual_seed(0)
    special = {"gather_output": True} if kind is ColumnLinear else {"input_is_whole": True}
    layer = kind(100, 70, comm, transposed=transposed, **special)
    x = torch.randn(3, 5, 100)
    assert quantize_module(layer, FORMATS[how]) is layer and isinstance(layer, kind)
    plain = values_in(layer, kind)
    with torch.no_grad():
        found, wanted = layer(x), plain(x)
    assert found.shape == (3, 5, 70) and (found - wanted).abs().max() < 1e-5
    assert all(torch.equal(other, found) for other in comm.gather_objects(found))


@pytest.mark.parametrize("how", FORMATS)
def test_vocabularies(comm, how):
    torch.manual_seed(0)
    table, head = VocabEmbedding(67, 32, comm), VocabLinear(32, 67, comm)
    index = torch.arange(67).view(1, -1)
    wanted = head(table(index)).detach()
    for layer, kind in ((table, VocabEmbedding), (head, VocabLinear)):
        quantize_module(layer, FORMATS[how])
        assert is_quantized(layer) and isinstance(layer, kind)
    rows = values_in(table, VocabEmbedding)(index)
    assert torch.equal(table(index), rows.detach())
    with torch.no_grad():
        found = head(table(index))
        assert (found - values_in(head, VocabLinear)(rows)).abs().max() < 1e-5
    assert (found - wanted).norm() < (0.02 if how == "int8" else 0.2) * wanted.norm()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "bloom", "mixtral"])
def test_logits_of_sliced_models(comm, name, bits):
    whole, cut = build(name).eval(), build(name).eval()
    options = QuantOptions(bits=bits, group_size=8, least=64)
    slice_model(cut, comm)
    report = quantize_model(cut, options, tensor=comm)
    one = quantize_model(whole, options)
    assert set(report.quantized) == set(one.quantized)
    assert report.bytes_before <= one.bytes_before // comm.size * 1.6  # uneven shares of heads
    tokens = batch()["input_ids"]
    with torch.no_grad():
        plain, expected, found = build(name).eval()(tokens).logits, whole(tokens).logits, cut(tokens).logits
    error = (expected - plain).norm()
    if comm.size == 1:
        assert torch.equal(found, expected)
    # different groups have different roundings of the same size
    assert error > 0 and (found - expected).norm() <= 2 * error and (found - plain).norm() <= 2 * error
    tokens = cut.generate(tokens, max_new_tokens=3, do_sample=False)
    assert all(torch.equal(other, tokens) for other in comm.gather_objects(tokens))


@pytest.mark.ranks(2, 3)
def test_groups_that_do_not_fit_on_one_rank_are_refused_on_all(comm):
    layer = RowLinear(40, 64, comm)  # 20, 20 or 14, 13, 13 inputs
    model = nn.Sequential(layer)
    options = QuantOptions(named=(("0", Rule(8, 14)),), only_named=True)
    with pytest.raises(ConfigError, match="groups of 14 do not divide") as caught:
        quantize_model(model, options, tensor=comm)
    assert len(set(comm.gather_objects(str(caught.value)))) == 1


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("also", ["", "copy", "fused"])
def test_weights_are_coded_as_they_are_read(comm, also, tmp_path):
    """The codes are those of a model that had its values; no layer's weight is there when the next one is read."""
    folder = comm.share(str(tmp_path))
    sizes = {"hidden_size": 48, "intermediate_size": 96}
    expected = build("llama", seed=9, **sizes).eval()
    if comm.rank == 0:
        expected.save_pretrained(f"{folder}/whole")
    comm.barrier()
    settings = {"dtype": "int8", "quant": {"weight": {"q_groups": 3}}, "tensor_parallel": {"tp_size": comm.size}}
    settings |= {"kernel_inject": True} if also == "fused" else {}
    one = mpispeed.init_inference(expected, **settings)
    with torch.device("meta"):
        model = build("llama", **sizes)
    settings |= {"save_mp_checkpoint_path": f"{folder}/copy"} if also == "copy" else {}
    two = mpispeed.init_inference(model, checkpoint=f"{folder}/whole", **settings)
    tokens = batch()["input_ids"]
    with torch.no_grad():
        assert torch.equal(one(tokens).logits, two(tokens).logits)
        assert torch.equal(
            one.generate(tokens, max_new_tokens=4, do_sample=False),
            two.generate(tokens, max_new_tokens=4, do_sample=False),
        )
    assert sum(map(is_quantized, two.module.modules())) == sum(map(is_quantized, one.module.modules())) > 8
    if also == "copy":
        with torch.device("meta"):
            model = build("llama", **sizes)
        three = mpispeed.init_inference(
            model, checkpoint=f"{folder}/copy", **{**settings, "save_mp_checkpoint_path": None}
        )
        with torch.no_grad():
            assert torch.equal(one(tokens).logits, three(tokens).logits)
        three.destroy()
    one.destroy()
    two.destroy()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("settings", "bits", "group"),
    [
        ({"dtype": torch.int8}, 8, 128),
        ({"dtype": "int8", "quant": (True, 1)}, 8, 32),
        ({"dtype": "int8", "quant": {"weight": {"num_bits": 4}}}, 4, 64),
        ({"dtype": "fp32", "quant": {"weight": {"post_init_quant": {"mlp": {"num_bits": 4, "group_size": 2}}}}}, 4, 2),
    ],
)
def test_engines_by_their_settings(comm, settings, bits, group):
    model = build("llama", hidden_size=48, intermediate_size=96).eval()
    plain = copy.deepcopy(model)
    engine = mpispeed.init_inference(model, tensor_parallel={"tp_size": comm.size}, **settings)
    layers = {path: layer for path, layer in engine.module.named_modules() if is_quantized(layer)}
    assert len(layers) == (6 if group == 2 else 14)
    codes = codes_of(layers["model.layers.0.mlp.up_proj"])
    assert (codes.bits, codes.group, codes.offsets is None) == (bits, group, group != 2)
    tokens = batch()["input_ids"]
    with torch.no_grad():
        found, wanted = engine(tokens).logits, plain(tokens).logits
    assert 0 < (found - wanted).norm() < (0.03 if bits == 8 else 0.3) * wanted.norm()
    engine.destroy()
