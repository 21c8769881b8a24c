"""Sums of subtrees, made anywhere and joined in any order, have the bits of one sum over all leaves."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.native.reduce import tree_sum
from mpispeed.sharding.leaf_tree import Forest, LeafTree, Node


def values_of(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(5, generator=generator) * 10 ** (i % 5) for i in range(count)]


def whole(values):
    out = torch.empty(5)
    tree_sum(out, values)
    return out


@given(st.integers(1, 40), st.integers(0, 9), st.randoms())
def test_leaves_in_any_order_give_the_bits_of_the_whole_sum(count, seed, random):
    values = values_of(count, seed)
    forest = Forest(LeafTree(count), torch.add)
    for leaf in random.sample(range(count), count):
        forest.add(Node(0, leaf), values[leaf])
    assert len(forest) == 1
    assert torch.equal(forest.pop(LeafTree(count).root), whole(values))


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 9), st.randoms())
def test_subtrees_of_several_owners_give_the_bits_of_the_whole_sum(count, owners, seed, random):
    values, tree = values_of(count, seed), LeafTree(count)
    owned = [[] for _ in range(owners)]
    for leaf in range(count):
        owned[random.randrange(owners)].append(leaf)
    subtrees = [subtree for own in owned for subtree in tree.cover(random.sample(own, len(own)))]
    assert sorted(leaf for subtree in subtrees for leaf in subtree.leaves) == list(range(count))
    forest = Forest(tree, torch.add)
    for subtree in random.sample(subtrees, len(subtrees)):
        forest.add(subtree.node, whole([values[leaf] for leaf in subtree.leaves]))
    assert torch.equal(forest.pop(tree.root), whole(values))


@given(st.integers(1, 64), st.data())
def test_a_run_of_leaves_is_few_subtrees(count, data):
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first, count - 1))
    subtrees = LeafTree(count).cover(range(first, last + 1))
    assert len(subtrees) <= max(1, 2 * (last - first + 1).bit_length() - 2)


def test_a_power_of_two_that_begins_at_a_multiple_is_one_subtree():
    assert [len(LeafTree(12).cover(range(at, at + 4))) for at in (0, 4, 8)] == [1, 1, 1]
    assert len(LeafTree(12).cover(range(3))) == 2
    assert LeafTree(3).cover([2])[0].node == Node(1, 1)
