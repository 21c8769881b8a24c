"""Orthogonal factors of matrices by the Newton-Schulz iteration.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024 (the iteration and its
coefficients); `torch.optim.Muon`, whose order of operations "standard" keeps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial of degree five: the steepest at zero whose iterates stay within about [0.7, 1.2]."""


def orthogonalise(
    matrices: Tensor,
    *,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
    method: str = "standard",
) -> Tensor:
    """About U V^T of each matrix U S V^T, in the dtype of `matrices`, which are not changed.

    Args:
        matrices: one, or a batch.
        steps: of the iteration.
        coefficients: a, b and c of a x + b x^3 + c x^5, which is applied to the singular values.
        eps: the least norm by which a matrix is divided, so that zeros stay zeros.
        method: "standard" multiplies the matrix in each step; "gram" iterates on its product with itself, of which it
            keeps fp32 at least, and multiplies the matrix once, which is less work the longer the matrix is.

    Shapes: [..., n, m].
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    x = _by_gram(x, steps, coefficients) if method == "gram" else _by_products(x, steps, coefficients)
    return x.mT if is_tall else x


def _by_products(x: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    a, b, c = coefficients
    add = torch.addmm if x.dim() == 2 else torch.baddbmm
    shape = x.shape
    x = x if x.dim() == 2 else x.reshape(-1, *shape[-2:])
    for _ in range(steps):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.view(shape)


def _by_gram(x: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """All factors are polynomials of x x^T, which commute: the product of them multiplies x once."""
    a, b, c = coefficients
    wide = x if x.dtype == torch.float64 else x.float()
    gram = wide @ wide.mT
    one = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    product = one.expand_as(gram)
    for step in range(steps):
        factor = a * one + b * gram + c * (gram @ gram)
        product = factor @ product
        if step < steps - 1:
            gram = factor @ (gram @ factor)
            gram = (gram + gram.mT) / 2  # rounding must not make it askew, which the next steps would amplify
    return (product @ wide).to(x.dtype)


def products_of(rows: int, columns: int, *, steps: int = 5, method: str = "standard") -> float:
    """Multiplications of `orthogonalise` for one matrix."""
    n, m = sorted((rows, columns))
    if method == "gram":
        return float(2 * n * n * m + n**3 * (4 * steps - 2))
    return float(steps * (2 * n * n * m + n**3))


def rate_factor(rows: int, columns: int, adjust: str) -> float:
    """The factor of the learning rate for a matrix of this shape.

    "original" is that of Jordan et al., max(1, rows / columns)^0.5; "match_rms_adamw" that of Liu et al. ("Muon is
    scalable for LLM training", arXiv 2502.16982), 0.2 max(rows, columns)^0.5, with which rates tuned for AdamW fit.
    """
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))
