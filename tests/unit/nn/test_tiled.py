"""A linear layer in tiles computes what the dense layer computes."""

import contextlib

import pytest
import torch
from torch import nn

from mpispeed.base.errors import UsageError
from mpispeed.mesh import sim
from mpispeed.nn.tiled import TiledLinear, TiledLinearReturnBias, piece_sizes
from tests.zoo import same_bits

SHAPES = [(32, 32), (23, 29), (29, 23)]
SPLITS = [(1, 1), (1, 2), (2, 1), (2, 2)]
EPS = torch.finfo(torch.float32).eps


class LinearReturnBias(nn.Linear):
    """Leaves adding the bias to its caller."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight), self.bias


class Exponential(nn.Linear):
    """Its backward pass needs its own output."""

    def forward(self, x):
        return super().forward(x).exp()


def dense_and_tiled(shape, splits, bias=True, cls=TiledLinear, **kwargs):
    torch.manual_seed(0)
    width, height = shape
    dense = nn.Linear(width, height, bias=bias)
    ins, outs = splits
    return dense, cls(width, height, bias=bias, in_splits=ins, out_splits=outs, init_linear=dense, **kwargs)


def assembled(rows):
    """The dense matrix of tiles."""
    return torch.cat([torch.cat(list(row), dim=1) for row in rows], dim=0)


def product_bound(a, b, extra=None):
    """Bound of the difference of a @ b in two orders of summation: twice the textbook n * eps * |a| @ |b|."""
    terms = a.abs() @ b.abs()
    return 2 * (a.shape[-1] + 1) * EPS * (terms if extra is None else terms + extra.abs())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_backward_equal_the_dense_layer(shape, splits, bias):
    dense, tiled = dense_and_tiled(shape, splits, bias)
    x = torch.randn(5, shape[0])
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    y, z = dense(inputs[0]), tiled(inputs[1])
    slope = torch.randn_like(y)
    y.backward(slope)
    z.backward(slope)
    assert bool(((y - z).abs() <= product_bound(x, dense.weight.T, dense.bias)).all())
    assert bool(((inputs[0].grad - inputs[1].grad).abs() <= product_bound(slope, dense.weight)).all())
    weight_grad = assembled([tile.weight.grad for tile in row] for row in tiled.linears)
    assert bool(((dense.weight.grad - weight_grad).abs() <= product_bound(slope.T, x)).all())
    if bias:
        bias_grad = torch.cat([row[-1].bias.grad for row in tiled.linears])
        assert bool(((dense.bias.grad - bias_grad).abs() <= product_bound(slope.T, torch.ones(5, 1))[:, 0]).all())


@pytest.mark.parametrize("shape", SHAPES)
def test_with_whole_inputs_every_row_has_the_bits_of_a_dense_layer_of_these_rows(shape):
    dense, tiled = dense_and_tiled(shape, (1, 2))
    x = torch.randn(7, shape[0])
    expected = [
        nn.functional.linear(x, weight.clone(), bias.clone())
        for weight, bias in zip(dense.weight.split(tiled.out_sizes), dense.bias.split(tiled.out_sizes), strict=True)
    ]
    assert torch.equal(tiled(x), torch.cat(expected, dim=-1))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_tiles_hold_the_blocks_and_only_the_last_of_a_row_has_a_bias(shape):
    dense, tiled = dense_and_tiled(shape, (2, 2))
    assert torch.equal(assembled([tile.weight for tile in row] for row in tiled.linears), dense.weight)
    assert all(row[0].bias is None for row in tiled.linears)
    assert torch.equal(torch.cat([row[1].bias for row in tiled.linears]), dense.bias)
    assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in dense.parameters())


def test_sizes_are_even_and_the_larger_pieces_come_first():
    assert piece_sizes(23, 2) == [12, 11]
    assert piece_sizes(10, 4) == [3, 3, 2, 2]
    assert piece_sizes(3, 3) == [1, 1, 1]
    layer = TiledLinear(23, 10, in_splits=2, out_splits=4)
    assert (layer.in_parts, layer.out_parts) == ([0, 12, 23], [0, 3, 6, 8, 10])


@pytest.mark.parametrize(("ins", "outs"), [(0, 0), (33, 33), (0, 1), (1, 33), (-1, 1)])
def test_numbers_of_pieces_out_of_range_are_refused(ins, outs):
    with pytest.raises(RuntimeError, match=r"_splits = .* is out of range: .* 1 to 32"):
        TiledLinear(32, 32, in_splits=ins, out_splits=outs)


def test_split_inputs_and_outputs():
    dense, tiled = dense_and_tiled((23, 29), (2, 2), input_is_already_split=True, combine_out_splits=False)
    x = torch.randn(2, 3, 23)
    first, second = tiled(list(x.split([12, 11], dim=-1)))
    assert first.shape == (2, 3, 15)
    assert second.shape == (2, 3, 14)
    whole = TiledLinear(23, 29, in_splits=2, out_splits=2, init_linear=dense)
    assert torch.equal(torch.cat([first, second], dim=-1), whole(x))


@pytest.mark.parametrize(
    ("is_split", "input_", "words"),
    [
        (True, torch.zeros(1, 8), "found one tensor"),
        (True, [torch.zeros(1, 8)], "found 1 pieces"),
        (False, [torch.zeros(1, 4), torch.zeros(1, 4)], "input_is_already_split=True"),
        (False, torch.zeros(1, 7), r"in_features = 8, found shape \(1, 7\)"),
    ],
)
def test_inputs_that_are_not_split_as_expected_are_refused(is_split, input_, words):
    with pytest.raises(UsageError, match=words):
        TiledLinear(8, 8, in_splits=2, input_is_already_split=is_split)(input_)


def test_a_tile_may_keep_its_output_for_backward():
    torch.manual_seed(0)
    tiled = TiledLinear(8, 6, in_splits=2, linear_cls=Exponential)
    x = torch.randn(3, 8, dtype=torch.float32, requires_grad=True)
    tiled(x).sum().backward()
    first, second = tiled.linears[0]
    expected = torch.cat(
        [torch.exp(nn.functional.linear(piece, t.weight, t.bias)) @ t.weight
         for piece, t in zip(x.detach().split(4, dim=-1), (first, second), strict=True)], dim=-1)  # fmt: skip
    torch.testing.assert_close(x.grad, expected)


def test_keywords_reach_the_layers():
    tiled = TiledLinear(8, 8, out_splits=2, dtype=torch.float64)
    assert {p.dtype for p in tiled.parameters()} == {torch.float64}
    assert "in_splits=1, out_splits=2" in repr(tiled)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("splits", SPLITS)
def test_layers_that_return_their_bias(splits, bias):
    dense, tiled = dense_and_tiled((23, 29), splits, bias, TiledLinearReturnBias, linear_cls=LinearReturnBias)
    x = torch.randn(5, 23)
    y, returned = tiled(x)
    expected = nn.functional.linear(x, dense.weight)
    assert bool(((y - expected).abs() <= product_bound(x, dense.weight.T)).all())
    assert torch.equal(returned, dense.bias) if bias else returned is None


def test_returned_biases_of_pieces():
    dense, tiled = dense_and_tiled(
        (8, 6), (2, 2), True, TiledLinearReturnBias, linear_cls=LinearReturnBias, combine_out_splits=False
    )
    pairs = tiled(torch.randn(1, 8))
    assert [output.shape[-1] for output, _ in pairs] == [3, 3]
    assert torch.equal(torch.cat([bias for _, bias in pairs]), dense.bias)


def test_a_layer_that_returns_one_tensor_is_refused_where_pairs_are_needed():
    with pytest.raises(UsageError, match=r"return \(output, bias\), found a Tensor"):
        TiledLinearReturnBias(4, 4)(torch.zeros(1, 4))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (nn.Linear(8, 7), r"shape \(8, 8\), found a weight of shape \(7, 8\)"),
        (nn.ReLU(), "found no weight in ReLU"),
        (nn.Linear(8, 8, bias=False), "has no bias, .* make it with bias=False"),
        (nn.Bilinear(8, 8, 8), r"found a weight of shape \(8, 8, 8\)"),
    ],
)
def test_layers_that_do_not_fit_are_refused_and_nothing_is_copied(other, words):
    tiled = TiledLinear(8, 8, out_splits=2)
    before = [p.clone() for p in tiled.parameters()]
    with pytest.raises(AssertionError, match=words):
        tiled.copy_params_from(other)
    same_bits(before, tiled.parameters())


def test_a_bias_that_the_tiles_do_not_have_is_refused():
    with pytest.raises(UsageError, match=r"has a bias, .* make it with bias=True"):
        TiledLinear(8, 8, bias=False, init_linear=nn.Linear(8, 8))


class Cut:
    """Parameters cut over ranks: each keeps an equal part of the flat values, and an empty tensor stands for the rest.

    Calling it is a gather: whole values inside the block, those of `modifier_rank` everywhere after it.
    """

    def __init__(self, comm):
        self.comm, self.parts, self.shapes, self.live, self.most = comm, {}, {}, 0, 0

    def cut(self, params):
        for param in params:
            self.shapes[param] = param.shape
            self._release(param)

    def _release(self, param):
        flat = param.data.flatten()
        size = -(-flat.numel() // self.comm.size)
        padded = torch.zeros(size * self.comm.size)
        padded[: flat.numel()] = flat
        self.parts[param] = padded[self.comm.rank * size :][:size].clone()
        param.data = torch.empty(0)

    @contextlib.contextmanager
    def __call__(self, params, modifier_rank):
        params = [param for param in params if param in self.parts]
        for param in params:
            out = torch.empty(self.parts[param].numel() * self.comm.size)
            self.comm.all_gather(out, self.parts[param])
            shape = self.shapes[param]
            param.data = out[: shape.numel()].view(shape).clone()
        self.live += len(params)
        self.most = max(self.most, self.live)
        yield
        self.live -= len(params)
        for param in params:
            if modifier_rank is not None:
                self.comm.broadcast(param.data, modifier_rank)
            self._release(param)


def copy_between_cut_layers(world):
    dense, tiled = nn.Linear(23, 29), TiledLinear(23, 29, in_splits=2, out_splits=2)
    with torch.no_grad():
        dense.weight.add_(world.rank)  # those of rank 0 must arrive everywhere
    cut = Cut(world.comm)
    cut.cut(tiled.parameters())
    with pytest.raises(UsageError, match=r"gather=mpispeed\.zero\.GatheredParameters"):
        empty = nn.Linear(23, 29)
        empty.weight.data = torch.empty(0)
        tiled.copy_params_from(empty)
    tiled.copy_params_from(dense, gather=cut)
    most = cut.most
    with cut(list(tiled.parameters()), None):
        weight = assembled([tile.weight.detach() for tile in row] for row in tiled.linears)
        bias = torch.cat([row[-1].bias.detach() for row in tiled.linears])
    return weight, bias, most, dense.weight.detach(), dense.bias.detach()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_cut_parameters_are_copied_tile_by_tile_from_rank_0(ranks):
    results = sim.run(ranks, copy_between_cut_layers)
    weight, bias = results[0][3:]
    for copied_weight, copied_bias, most, *_ in results:
        assert torch.equal(copied_weight, weight)
        assert torch.equal(copied_bias, bias)
        assert most == 2  # weight and bias of one tile


def test_a_subclass_may_know_how_to_gather():
    def both_cut(world):
        dense = nn.Linear(8, 6)
        original, cut = dense.weight.detach().clone(), Cut(world.comm)
        cut.cut(dense.parameters())
        subclass = type("Mine", (TiledLinear,), {"default_gather": staticmethod(cut)})
        tiled = subclass(8, 6, out_splits=2, init_linear=dense)
        return torch.cat([row[0].weight.detach() for row in tiled.linears]), original, dense.weight.numel()

    ((weight, original, left),) = sim.run(1, both_cut)
    assert torch.equal(weight, original)
    assert left == 0
