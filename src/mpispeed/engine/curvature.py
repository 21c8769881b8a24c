"""The curvature of blocks of a model: the largest eigenvalue of each block's Hessian of the loss, by power iteration.

Products of the Hessian with a vector are second backward passes through the graph of the gradients.

Source: Shen et al., "Q-BERT", arXiv 1909.05840; the class is that of DeepSpeed's `deepspeed.runtime.eigenvalue`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mpispeed.base.errors import UsageError

log = logging.getLogger(__name__)

Product = Callable[[torch.Tensor], torch.Tensor]
"""The Hessian times a vector. Shapes: [elements of a block], both."""

_ONCE = (
    "derivative",
    "differentiate twice",
    "double backward",
)  # in torch's messages, and our own, about operators without a second one


@dataclass(frozen=True, slots=True)
class Iteration:
    """Settings of the power iteration.

    Attributes:
        most: iterations after which it ends.
        tol: it ends where the value changes by a smaller part of itself.
        stability: added to the norm of a vector before it is divided, but no more than the norm itself.
    """

    most: int = 100
    tol: float = 1e-2
    stability: float = 1e-6

    def run(self, product: Product, start: torch.Tensor, agreed: Callable[[float], float] = float) -> float:
        """The eigenvalue of the largest magnitude; 0 where the product is.

        Values of a product that are infinite or NaN count as zeros.

        Args:
            product: of a symmetric matrix with a vector.
            start: any vector that is not at right angles to the eigenvector.
            agreed: makes values the same on all ranks that iterate together.
        """
        vector, value = self._scaled(start), None
        for _ in range(self.most):
            found = torch.nan_to_num(product(vector), nan=0.0, posinf=0.0, neginf=0.0)
            # Divided by the vector's square, because `stability` makes it shorter than 1.
            before, value = value, agreed(inner(found, vector) / (inner(vector, vector) or 1.0))
            if not value or (before is not None and abs(value - before) < self.tol * abs(value)):
                break
            vector = self._scaled(found)
        return value or 0.0

    def _scaled(self, vector: torch.Tensor) -> torch.Tensor:
        norm = inner(vector, vector) ** 0.5
        # Vectors of a matrix that is small beside `stability` would get shorter each time, until nothing is left.
        return vector / (norm + min(self.stability, norm)) if norm else vector


def inner(x: torch.Tensor, y: torch.Tensor) -> float:
    """The inner product of two flat tensors, summed in fp64."""
    return float(torch.dot(x.double(), y.double()))


def start_vector(params: Sequence[torch.Tensor], number: int) -> torch.Tensor:
    """Normally distributed values for the elements of `params`, the same whenever block `number` is asked for.

    Random numbers of torch are neither used nor moved on. Shapes: [elements of all parameters], fp32, or fp64 if one of
    them is.
    """
    dtype = torch.float32
    for param in params:
        dtype = torch.promote_types(dtype, param.dtype)
    generator = torch.Generator().manual_seed(number)
    made = torch.randn(sum(param.numel() for param in params), generator=generator, dtype=dtype)
    return made.to(params[0].device)


def split_like(vector: torch.Tensor, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Parts of a flat vector as tensors with shapes and dtypes of `params`."""
    parts = vector.split([param.numel() for param in params])
    return [part.view(param.shape).to(param.dtype) for part, param in zip(parts, params, strict=True)]


def joined(tensors: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Tensors as one flat vector; zeros stand for those that are None."""
    pairs = zip(tensors, like, strict=True)
    return torch.cat([
        torch.zeros(each.numel(), dtype=dtype, device=each.device) if found is None
        else found.detach().to_dense().reshape(-1).to(dtype)
        for found, each in pairs
    ])  # fmt: skip


def product_with(grads: Sequence[torch.Tensor | None], params: Sequence[torch.Tensor]) -> Product:
    """Products of the Hessian, from gradients that have a graph; others do not depend on the parameters.

    Args:
        grads: one for each parameter; None: zeros.
        params: parameters of one block.
    """
    live = [number for number, grad in enumerate(grads) if grad is not None and grad.requires_grad]

    def product(vector: torch.Tensor) -> torch.Tensor:
        if not live:
            return torch.zeros_like(vector)
        parts = split_like(vector, params)
        chosen = [grad for grad in (grads[number] for number in live) if grad is not None]
        found = second_order(
            chosen, params, [part.to(grad.dtype) for part, grad in zip((parts[n] for n in live), chosen, strict=True)]
        )
        return joined(found, params, vector.dtype)

    return product


def second_order(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] | None = None,
    *, keeps_graph: bool = False,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Gradients for second derivatives; None where an output does not depend on an input. The graph of outputs stays.

    Args:
        outputs: what is differentiated.
        inputs: by what.
        weights: a factor for each element of the outputs; None: outputs are scalars.
        keeps_graph: the result has a graph, too.

    Raises:
        UsageError: an operator of the model has no second derivative.
    """
    try:
        found = torch.autograd.grad(
            outputs, inputs, weights, retain_graph=True, create_graph=keeps_graph, allow_unused=True
        )
    except (RuntimeError, UsageError) as error:
        text = str(error).partition("\n")[0]
        if not any(words in text for words in _ONCE):
            raise
        raise _refusal(text) from error
    if keeps_graph:
        require_second(found)
    return found


def require_second(grads: Sequence[torch.Tensor | None]) -> None:
    """Look for operators in the graph of gradients that torch would silently take for constants.

    Raises:
        UsageError: there is one.
    """
    # The error that such an operator leaves in the graph is before a tensor of its own, where no pass gets to.
    if any(node.name() == "torch::autograd::Error" for node in _nodes(grads)):
        text = "its gradient is marked by once_differentiable"
        raise _refusal(text)


def _refusal(text: str) -> UsageError:
    return UsageError(
        f"eigenvalues need second derivatives, which an operator of the model does not have: {text}; fused "
        'attention has none: load models of transformers with attn_implementation="eager", or forward under '
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH); or set eigenvalue.enabled to false"
    )


def _nodes(tensors: Sequence[torch.Tensor | None]) -> set[Any]:
    """All nodes of the graph of some tensors."""
    found, ahead = set[Any](), [tensor.grad_fn for tensor in tensors if tensor is not None]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in found:
            found.add(node)
            ahead.extend(following for following, _ in node.next_functions)
    return found


def beside_largest(values: Sequence[float]) -> list[float]:
    """Magnitudes as parts of the largest, so from 0 to 1; 1 for blocks whose value is 0, of which nothing is known."""
    largest = max(map(abs, values), default=0.0)
    return [abs(value) / largest if value else 1.0 for value in values]


def find_blocks(model: nn.Module, path: str, count: int) -> list[nn.Module]:
    """The first `count` blocks of a module list; all of them if `count` is 0.

    Args:
        model: has the list.
        path: its name, as in `named_modules`.
        count: how many there have to be, at least.

    Raises:
        UsageError: there is no such list, it is shorter, or a block has no parameter that is trained.
    """
    try:
        held = model.get_submodule(path)
    except AttributeError as error:
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
        msg = (
            f"eigenvalue.layer_name: {path!r} is no module of {type(model).__name__}; lists of modules in it: "
            f"{', '.join(lists) or 'none'}"
        )
        raise UsageError(msg) from error
    blocks = list(held.children())
    if count > len(blocks) or not blocks:
        msg = f"eigenvalue.layer_num is {count}, and {path!r} has {len(blocks)} blocks; 0 takes all of them"
        raise UsageError(msg)
    count = count or len(blocks)
    frozen = next((number for number in range(count) if not trained(blocks[number])), None)
    if frozen is not None:
        msg = (
            f"eigenvalue: block {frozen} of {path!r} has no parameter that is trained; eigenvalues are of trained ones"
        )
        raise UsageError(msg)
    return blocks[:count]


def trained(block: nn.Module) -> list[nn.Parameter]:
    """The parameters of a block that need gradients, in their order."""
    return [param for param in block.parameters() if param.requires_grad]


class Eigenvalue:
    """The largest eigenvalues of blocks after a backward pass of a script, for models outside of an engine.

    With an engine the section `eigenvalue` of the config computes them. Signature of DeepSpeed's class.
    """

    def __init__(
        self,
        verbose: bool = False,
        max_iter: int = 100,
        tol: float = 1e-2,
        stability: float = 0,
        gas_boundary_resolution: int = 1,
        layer_name: str = "",
        layer_num: int = 0,
    ) -> None:
        """Args: as the keys of the section.

        Raises:
            UsageError: `layer_name` is empty, or `layer_num` not positive.
        """
        if not layer_name or layer_num < 1:
            msg = (
                f"Eigenvalue(layer_name={layer_name!r}, layer_num={layer_num}): give the name of the module list "
                "of the blocks, and their number"
            )
            raise UsageError(msg)
        self.verbose, self.max_iter, self.tol, self.stability = verbose, max_iter, tol, stability
        self.gas_boundary_resolution, self.layer_name, self.layer_num = gas_boundary_resolution, layer_name, layer_num

    def compute_eigenvalue(
        self, module: nn.Module, device: Any = None, scale: float = 1.0
    ) -> dict[int, tuple[float, int]]:
        """Eigenvalues from the gradients of `loss.backward(create_graph=True)`, in `param.grad`. Local.

        Args:
            module: the model; `.module` of a wrapper is looked for, too.
            device: no effect: vectors are where parameters are.
            scale: factor by which the loss was multiplied.

        Returns:
            id of each parameter of a block -> its block's magnitude as a part of the largest, and the block's number;
            empty, with a warning, if gradients have no graph.

        Raises:
            UsageError: blocks are not there, or an operator has no second derivative.
        """
        inside = getattr(module, "module", None)
        blocks = find_blocks(inside if isinstance(inside, nn.Module) else module, self.layer_name, self.layer_num)
        if not any(param.grad is not None and param.grad.requires_grad for block in blocks for param in trained(block)):
            log.warning(
                "eigenvalues cannot be computed: gradients have no graph; call loss.backward(create_graph=True) first"
            )
            return {}
        require_second([param.grad for block in blocks for param in trained(block)])
        values = []
        for number, block in enumerate(blocks):
            params = trained(block)
            product = product_with([param.grad for param in params], params)
            values.append(self._iteration.run(product, start_vector(params, number)) / scale)
            if self.verbose:
                log.info("eigenvalue of block %d: %g", number, values[-1])
        parts = beside_largest(values)
        return {
            id(param): (parts[number], number) for number, block in enumerate(blocks) for param in block.parameters()
        }

    @property
    def _iteration(self) -> Iteration:
        return Iteration(self.max_iter, self.tol, self.stability)
