"""Exchange of activations and gradients between stages: any tree of tensors, preceded by its shapes.

Every tree is preceded by the length of a description, 0 if it has not changed. So shapes may change at any time, and a
tree of equal shapes costs one message of 8 bytes more than its tensors. Where a stage has failed there is no tree:
then that message has the length -1 and nothing follows it, in neither direction. Sends are posted and overlap with
computation; receives wait.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from mpispeed.base.device import HOST
from mpispeed.base.errors import MessageError

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.work import Work
    from mpispeed.mesh.comm import Comm

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
IsOwn = Callable[[torch.Tensor], bool]
_PLAIN = (bool, int, float, str, type(None))
MISSING: Any = object()
"""Stands for a tree that a failure has prevented. It has no leaves that take gradients."""
_NO_TREE = -1


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of a tree.

    Attributes:
        takes_grad: a gradient of it comes back.
        is_own: it differs between ranks of a slicing group, as with a sliced sequence.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    takes_grad: bool
    is_own: bool = False


def leaves_of(tree: Any) -> list[Any]:
    """All leaves of a tree, tensors or not, in its order."""
    return pytree.tree_flatten(tree)[0]


def tensors_with_grad(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree that take gradients, in its order."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def describe(tree: Any, is_own: IsOwn) -> str:
    """Shape of a tree as text: equal for trees whose tensors fit the same buffers.

    Raises:
        MessageError: something in it is neither a tensor nor a plain value.
    """
    leaves, spec = pytree.tree_flatten(tree)
    rows: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.dtype not in _NAMES or leaf.layout != torch.strided:
                msg = f"a {leaf.layout} tensor of {leaf.dtype} cannot be sent to the next stage; make it dense"
                raise MessageError(msg)
            rows.append([_NAMES[leaf.dtype], list(leaf.shape), leaf.requires_grad, is_own(leaf)])
        elif isinstance(leaf, _PLAIN):
            rows.append([leaf])
        else:
            msg = (
                f"a {type(leaf).__name__} cannot be sent to the next stage; layers between stages pass tensors, "
                "numbers, text and None, in tuples, lists and dicts"
            )
            raise MessageError(msg)
    try:
        return json.dumps([pytree.treespec_dumps(spec), rows])
    except (RuntimeError, ValueError) as error:  # torch knows no text for some forms
        msg = f"what a layer returned cannot be sent to the next stage: {error}; return tuples, lists or dicts"
        raise MessageError(msg) from error


def parse(text: str) -> tuple[Any, list[Any]]:
    """The tree's form, and its leaves: a `Leaf` for each tensor, plain values as they are."""
    form, rows = json.loads(text)
    leaves = [Leaf(_DTYPES[row[0]], tuple(row[1]), *row[2:]) if len(row) > 1 else row[0] for row in rows]
    return pytree.treespec_loads(form), leaves


def _outline(leaves: list[Any], spec: Any, is_own: IsOwn) -> tuple[Any, list[Any]]:
    """Inputs of `describe`, cheap to compare: the text is made only for trees that look new."""
    facts = [
        (leaf.dtype, leaf.shape, leaf.requires_grad, leaf.layout, is_own(leaf))
        if isinstance(leaf, torch.Tensor)
        else (type(leaf), repr(leaf))  # 0.0 == -0.0
        for leaf in leaves
    ]
    return spec, facts


class Slices:
    """Slicing of a tensor that all ranks of a slicing group have alike: each rank sends its part.

    Source: partitioned activations of Megatron-LM's pipeline (arXiv 2104.04473, section 4.1).
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def takes(self, flat: torch.Tensor) -> bool:
        """True for tensors that are worth slicing: of floats, and every rank has a part."""
        return flat.is_floating_point() and flat.numel() >= self._comm.size > 1

    def length(self, numel: int) -> int:
        """Elements of each rank's part, the last one padded."""
        return -(-numel // self._comm.size)

    def cut(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part. Shapes: flat [numel] -> [length(numel)]."""
        length = self.length(flat.numel())
        part = flat[self._comm.rank * length :][:length]
        if part.numel() == length:
            return part
        padded = flat.new_zeros(length)
        padded[: part.numel()] = part
        return padded

    def join(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """Collective over: the slicing group. Shapes: part [length], out [numel]."""
        if part.numel() * self._comm.size == out.numel():
            self._comm.all_gather(out, part)
            return
        whole = part.new_empty(part.numel() * self._comm.size)
        self._comm.all_gather(whole, part)
        out.copy_(whole[: out.numel()])


class Exchange:
    """Messages of one rank over the pipe axis. `link` numbers the boundary that a message crosses."""

    def __init__(
        self,
        comm: Comm,
        slices: Slices | None = None,
        grad_slices: Slices | None = None,
        is_own: IsOwn = lambda _: False,
        mark: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
        device: torch.device = HOST,
    ) -> None:
        """Make the exchange.

        Args:
            comm: over the pipe axis, used by nothing else.
            slices: slices activations; None: every rank sends full ones.
            grad_slices: slices gradients; likewise.
            is_own: True for tensors that differ between the ranks of a slicing group: they are sent in full.
            mark: makes `is_own` true for a received tensor.
            device: of received tensors.
        """
        self._mark, self._device = mark, device
        self._comm, self._slices, self._grad_slices, self._is_own = comm, slices, grad_slices, is_own
        self._sent: dict[int, tuple[Any, list[Any]]] = {}
        self._known: dict[int, tuple[Any, list[Any]]] = {}
        self._works: list[Work] = []
        self.peak_in_flight = 0

    def forget_shapes(self) -> None:
        """Announce every shape again. Local, but of use only if both sides call it."""
        self._sent.clear()
        self._known.clear()

    # -- activations -------------------------------------------------------------------------------------------------

    def send_tree(self, tree: Any, dst: int, link: int) -> None:
        """Post a tree of tensors to stage `dst`, or `MISSING`; it must not be written to before `settle`.

        Raises:
            MessageError: it holds something that cannot be sent; nothing was posted.
        """
        tag = 2 * link
        if tree is MISSING:
            self._post(torch.tensor([_NO_TREE], dtype=torch.int64), dst, tag)
            return
        leaves, spec = pytree.tree_flatten(tree)
        outline = _outline(leaves, spec, self._is_own)
        is_new = self._sent.get(link) != outline
        header = describe(tree, self._is_own).encode() if is_new else b""
        self._post(torch.tensor([len(header)], dtype=torch.int64), dst, tag)
        if is_new:
            self._sent[link] = outline
            self._post(torch.frombuffer(bytearray(header), dtype=torch.uint8), dst, tag)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self._post_one(leaf, dst, tag, None if self._is_own(leaf) else self._slices)

    def recv_tree(self, src: int, link: int) -> Any:
        """The next tree from stage `src`, or `MISSING`; its tensors take gradients where the sender's do.

        Collective over: the slicing group, if activations are sliced.
        """
        tag = 2 * link
        length = torch.empty(1, dtype=torch.int64)
        self._comm.recv(length, src, tag)
        if length.item() == _NO_TREE:
            return MISSING
        if length.item():
            text = torch.empty(int(length.item()), dtype=torch.uint8)
            self._comm.recv(text, src, tag)
            self._known[link] = parse(bytes(text.numpy()).decode())
        form, rows = self._known[link]
        leaves = [self._recv(row, src, tag, self._slices) if isinstance(row, Leaf) else row for row in rows]
        return pytree.tree_unflatten(leaves, form)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def send_grads(self, tree: Any, dst: int, link: int) -> None:
        """Post the gradients of a received tree to the stage it came from; zeros where there is none."""
        for x in tensors_with_grad(tree):
            grad = torch.zeros_like(x) if x.grad is None else x.grad
            self._post_one(grad, dst, 2 * link + 1, None if self._is_own(x) else self._grad_slices)

    def recv_grads(self, tree: Any, src: int, link: int) -> list[torch.Tensor]:
        """The gradients of a sent tree: one for each of its tensors that take them.

        Collective over: the slicing group, if gradients are sliced.
        """
        rows = [Leaf(x.dtype, tuple(x.shape), False, self._is_own(x)) for x in tensors_with_grad(tree)]
        return [self._recv(row, src, 2 * link + 1, self._grad_slices) for row in rows]

    # -- parts -------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for everything that was posted."""
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def _post_one(self, tensor: torch.Tensor, dst: int, tag: int, slices: Slices | None) -> None:
        flat = tensor.detach().contiguous().view(-1)
        if flat.numel():
            self._post(slices.cut(flat) if slices is not None and slices.takes(flat) else flat, dst, tag)

    def _post(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        self._works = [work for work in self._works if not work.is_done()]
        self._works.append(self._comm.start_send(tensor, dst, tag))
        self.peak_in_flight = max(self.peak_in_flight, len(self._works))

    def _recv(self, row: Leaf, src: int, tag: int, slices: Slices | None) -> torch.Tensor:
        tensor = torch.empty(row.shape, dtype=row.dtype, device=self._device)
        flat = tensor.view(-1)
        if flat.numel():
            if slices is not None and not row.is_own and slices.takes(flat):
                part = flat.new_empty(slices.length(flat.numel()))
                self._comm.recv(part, src, tag)
                slices.join(flat, part)
            else:
                self._comm.recv(flat, src, tag)
        tensor = tensor.requires_grad_() if row.takes_grad else tensor
        return self._mark(tensor) if row.is_own else tensor
