"""The tree in which numbered leaves are added by neighbouring pairs, and forests of its complete subtrees. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """The sum of the leaves from `number << level` on, as many as `1 << level` or up to the last one."""

    level: int
    number: int


@dataclass(frozen=True, slots=True)
class Subtree:
    """A node and its leaves, in order."""

    node: Node
    leaves: tuple[int, ...]


class LeafTree:
    """The pairwise tree of `native.reduce.tree_sum` over a number of leaves.

    Neighbours (0+1), (2+3), ... are added, an odd one at the end passes up, and so on. So each node is the tree over
    its own leaves, and sums of some leaves can be made anywhere: the bits of the root hang on the leaves alone.
    """

    def __init__(self, leaves: int) -> None:
        """Args: `leaves` is their number, at least 1."""
        self.leaves = leaves
        self._counts = [leaves]  # of nodes, by level
        while self._counts[-1] > 1:
            self._counts.append(-(-self._counts[-1] // 2))

    @property
    def root(self) -> Node:
        """The sum of all leaves."""
        return Node(len(self._counts) - 1, 0)

    def risen(self, node: Node) -> Node:
        """The highest node with the same sum: a last one without a neighbour passes up."""
        level, number = node
        while self._counts[level] > 1 and not number & 1 and number == self._counts[level] - 1:
            level, number = level + 1, number >> 1
        return Node(level, number)

    def cover(self, leaves: Iterable[int]) -> tuple[Subtree, ...]:
        """The fewest complete subtrees that have exactly these leaves, in the order of the leaves."""
        forest: Forest[tuple[int, ...]] = Forest(self, lambda left, right: left + right)
        for leaf in leaves:
            forest.add(Node(0, leaf), (leaf,))
        return tuple(sorted((Subtree(node, own) for node, own in forest.items()), key=lambda tree: tree.leaves))


class Forest(Generic[T]):
    """Sums of complete subtrees, which come in any order; two that are neighbours become one."""

    def __init__(self, tree: LeafTree, join: Callable[[T, T], T]) -> None:
        """Args: `join` adds a left and a right sum, and may use both for its result."""
        self._tree, self._join = tree, join
        self._sums: dict[Node, T] = {}

    def add(self, node: Node, value: T) -> None:
        """Take the sum of a subtree that has no leaf of those taken before."""
        node = self._tree.risen(node)
        while (other := self._sums.pop(Node(node.level, node.number ^ 1), None)) is not None:
            value = self._join(other, value) if node.number & 1 else self._join(value, other)
            node = self._tree.risen(Node(node.level + 1, node.number >> 1))
        self._sums[node] = value

    def items(self) -> list[tuple[Node, T]]:
        """The sums, in the order of their leaves."""
        return sorted(self._sums.items(), key=lambda item: item[0].number << item[0].level)

    def pop(self, node: Node) -> T:
        """Give a sum away."""
        return self._sums.pop(node)

    def clear(self) -> list[T]:
        """Give all sums away."""
        sums = [value for _, value in self.items()]
        self._sums.clear()
        return sums

    def __len__(self) -> int:
        return len(self._sums)
