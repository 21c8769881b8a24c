"""The one-bit mean and the three 1-bit optimizers for n workers in one process, in fp64 numpy and written plainly.

Everything follows the formulas of the papers (arXiv 2102.02888, 2202.06009, 2104.06069) with sgn(0) = +1, and shares
no code with the package. Where the variance is exactly 0 after the warm-up, the momentum is kept at 0.

Shapes: a gradient is a flat array; a step takes one gradient per worker, for LAMB one list of them per worker.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def sign(x: Array) -> Array:
    return np.where(x >= 0, 1.0, -1.0)


def scale(x: Array) -> float:
    return float(np.linalg.norm(x)) / math.sqrt(len(x))


class OneBitMean:
    """The mean of n vectors of d elements through one bit each, with the errors of n workers and n servers."""

    def __init__(self, workers: int, length: int) -> None:
        self.workers, self.length = workers, length
        whole = 8 * workers
        self.padded = -(-length // whole) * whole
        self.worker_errors = [np.zeros(self.padded) for _ in range(workers)]
        self.server_errors = [np.zeros(self.padded // workers) for _ in range(workers)]
        self.sent: dict[str, Any] = {}  # what the last call sent: scales, and bits as bytes
        self.inputs: list[Array] = []  # of the last call
        self.last = np.zeros(length)  # result of the last call

    def __call__(self, inputs: list[Array]) -> Array:
        assert [len(x) for x in inputs] == [self.length] * self.workers
        worker_scales, worker_signs = [], []
        for index, x in enumerate(inputs):
            y = np.concatenate([x, np.zeros(self.padded - self.length)]) + self.worker_errors[index]
            worker_scales.append(scale(y))
            worker_signs.append(sign(y))
            self.worker_errors[index] = y - worker_scales[-1] * worker_signs[-1]
        server_scales, server_signs = [], []
        for index in range(self.workers):
            chunk = slice(index * self.padded // self.workers, (index + 1) * self.padded // self.workers)
            z = self.server_errors[index].copy()
            for factor, signs in zip(worker_scales, worker_signs, strict=True):
                z = z + factor / self.workers * signs[chunk]
            server_scales.append(scale(z))
            server_signs.append(sign(z))
            self.server_errors[index] = z - server_scales[-1] * server_signs[-1]
        self.sent = {
            "worker scales": worker_scales,
            "worker bytes": [np.packbits(signs > 0).tolist() for signs in worker_signs],
            "server scales": server_scales,
            "server bytes": [np.packbits(signs > 0).tolist() for signs in server_signs],
        }
        parts = [factor * signs for factor, signs in zip(server_scales, server_signs, strict=True)]
        self.inputs, self.last = [x.copy() for x in inputs], np.concatenate(parts)[: self.length]
        return self.last

    def clear(self) -> None:
        for error in (*self.worker_errors, *self.server_errors):
            error[:] = 0.0


def clean(x: Array, v: Array) -> Array:
    return np.where(v == 0, 0.0, x)


def quotient(m: Array, v: Array, eps: float) -> Array:
    """m / (sqrt(v) + eps), 0 where v is 0."""
    found = np.zeros_like(m)
    live = v != 0
    found[live] = m[live] / (np.sqrt(v[live]) + eps)
    return found


class Adam:
    """1-bit Adam; `agreed` keeps the momentum of every step after the warm-up."""

    def __init__(self, start: Array, mean: OneBitMean, *, freeze_step: int, lr: float, betas: tuple[float, float],
                 eps: float, weight_decay: float) -> None:  # fmt: skip
        self.p, self.mean, self.freeze_step, self.lr = start.astype(np.float64), mean, freeze_step, lr
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.m, self.v, self.t = np.zeros_like(self.p), np.zeros_like(self.p), 0

    def step(self, grads: list[Array]) -> Array:
        self.t += 1
        beta1, beta2 = self.betas
        if self.t <= self.freeze_step:
            g = np.mean(grads, axis=0)
            self.m = beta1 * self.m + (1 - beta1) * g
            self.v = beta2 * self.v + (1 - beta2) * g**2
            q = self.m / (np.sqrt(self.v) + self.eps)
        else:
            self.m = clean(self.mean([beta1 * self.m + (1 - beta1) * g for g in grads]), self.v)
            q = quotient(self.m, self.v, self.eps)
        self.p = self.p - self.lr * (q + self.weight_decay * self.p)
        return self.p


class ZeroOne:
    """0/1 Adam, with counters kept from step to step."""

    def __init__(self, start: Array, mean: OneBitMean, workers: int, *, var_freeze_step: int, var_update_scaler: int,
                 local_step_scaler: int, local_step_clipper: int, lr: float, betas: tuple[float, float],
                 eps: float, weight_decay: float) -> None:  # fmt: skip
        self.mean, self.lr, self.betas, self.eps, self.weight_decay = mean, lr, betas, eps, weight_decay
        self.counters = Counters(var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper)
        self.p = [start.astype(np.float64) for _ in range(workers)]
        self.m = [np.zeros(len(start)) for _ in range(workers)]
        self.u = [np.zeros(len(start)) for _ in range(workers)]
        self.v, self.lrs, self.was_frozen = np.zeros(len(start)), 0.0, False

    def step(self, grads: list[Array]) -> list[Array]:
        kind = self.counters.next()
        if kind in ("full", "coded"):
            self._common(np.mean(grads, axis=0) if kind == "full" else self.mean(grads), kind == "full")
            return self.p
        if not self.was_frozen:
            self.was_frozen = True
            self.mean.clear()
        self._local(grads)
        if kind == "sync":
            self._meet()
        return self.p

    def _common(self, g: Array, is_full: bool) -> None:
        beta1, beta2 = self.betas
        m = beta1 * self.m[0] + (1 - beta1) * g
        if is_full:
            self.v = beta2 * self.v + (1 - beta2) * g**2
        m = clean(m, self.v)
        p = self.p[0] - self.lr * (quotient(m, self.v, self.eps) + self.weight_decay * self.p[0])
        self.p, self.m = [p.copy() for _ in self.p], [m.copy() for _ in self.m]

    def _local(self, grads: list[Array]) -> None:
        beta1 = self.betas[0]
        self.lrs += self.lr
        for i, g in enumerate(grads):
            self.m[i] = clean(beta1 * self.m[i] + (1 - beta1) * g, self.v)
            q = quotient(self.m[i], self.v, self.eps) + self.weight_decay * self.p[i]
            self.p[i] = self.p[i] - self.lr * q
            self.u[i] = self.u[i] - self.lr * q

    def _meet(self) -> None:
        root = np.sqrt(self.v) + self.eps
        agreed = self.mean([clean(u * root, self.v) for u in self.u])
        for i, u in enumerate(self.u):
            back = self.p[i] - u
            self.p[i] = back + np.where(self.v == 0, u, agreed / root)  # decay alone is the same on all workers
            self.m[i] = clean(-agreed / self.lrs, self.v)
            self.u[i] = np.zeros_like(u)
        self.lrs = 0.0


class Counters:
    """What each step of 0/1 Adam is: "full", "coded", "local" or "sync", by counting.

    With `dry_run` the counter is one ahead, as after DeepSpeed's first step without effect.
    """

    def __init__(self, freeze: int, kappa: int, alpha: int, most: int, *, dry_run: bool = False) -> None:
        self.freeze, self.kappa, self.alpha, self.most = freeze, kappa, alpha, most
        self.var_interval, self.var_counter, self.local_interval, self.local_counter = 1, 0, 1, 0
        self.t, self.updates, self.is_frozen = int(dry_run), 0, False

    def next(self) -> str:
        self.t += 1
        self.updates += 1
        if self.is_frozen:
            kind = "sync" if self.t % self.local_interval == 0 else "local"
            self.local_counter += 1
            if self.local_counter == self.alpha:
                self.local_counter, self.local_interval = 0, min(self.most, 2 * self.local_interval)
            return kind
        kind = "full" if self.t % self.var_interval == 0 else "coded"
        if kind == "full":
            self.var_counter += 1
            if self.var_counter == self.kappa:
                self.var_counter, self.var_interval = 0, 2 * self.var_interval
        self.is_frozen = self.updates >= self.freeze  # the step after it is the first local one
        return kind


class Lamb:
    """1-bit LAMB over a list of parameters, whose momenta go through one mean together."""

    def __init__(self, starts: list[Array], mean: OneBitMean, *, freeze_step: int, lr: float,
                 betas: tuple[float, float], eps: float, weight_decay: float, max_coeff: float,
                 min_coeff: float, coeff_beta: float, factor_max: float, factor_min: float,
                 factor_threshold: float) -> None:  # fmt: skip
        self.p, self.mean, self.freeze_step = [x.astype(np.float64) for x in starts], mean, freeze_step
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.limits, self.coeff_beta = (min_coeff, max_coeff), coeff_beta
        self.factor_limits, self.threshold = (factor_min, factor_max), factor_threshold
        self.m, self.v, self.fresh = ([np.zeros_like(x) for x in self.p] for _ in range(3))
        self.trust, self.last = [0.0] * len(starts), [1.0] * len(starts)
        self.scaling: list[float] = []
        self.coefficients = [1.0] * len(starts)
        self.t = 0

    def step(self, grads: list[list[Array]]) -> list[Array]:
        self.t += 1
        if self.t <= self.freeze_step:
            for k in range(len(self.p)):
                self._warm(k, np.mean([worker[k] for worker in grads], axis=0))
            return self.p
        if not self.scaling:
            sizes = [scale(m) for m in self.m]
            middle = sum(sizes) / len(sizes)
            self.scaling = [middle / size if size else 1.0 for size in sizes]
        beta1 = self.betas[0]
        mixed = [
            np.concatenate(
                [(beta1 * m + (1 - beta1) * g) * c for m, g, c in zip(self.m, worker, self.scaling, strict=True)]
            )
            for worker in grads
        ]
        ends = np.cumsum([len(x) for x in self.p])[:-1]
        agreed = np.split(self.mean(mixed), ends)
        for k, m in enumerate(agreed):
            self._frozen(k, clean(m / self.scaling[k], self.v[k]))
        return self.p

    def _warm(self, k: int, g: Array) -> None:
        beta1, beta2 = self.betas
        self.m[k] = beta1 * self.m[k] + (1 - beta1) * g
        self.v[k] = beta2 * self.v[k] + (1 - beta2) * g**2
        q = self.m[k] / (np.sqrt(self.v[k]) + self.eps) + self.weight_decay * self.p[k]
        weight, direction = np.linalg.norm(self.p[k]), np.linalg.norm(q)
        ratio = float(np.clip(weight / direction, *self.limits)) if weight and direction else 1.0
        if ratio != 1.0:
            self.trust[k] = self.coeff_beta * self.trust[k] + (1 - self.coeff_beta) * ratio
        self.p[k] = self.p[k] - self.lr * ratio * q
        self.coefficients[k] = ratio
        if self.t == self.freeze_step:
            self.fresh[k] = self.v[k].copy()

    def _frozen(self, k: int, m: Array) -> None:
        beta1, beta2 = self.betas
        g = (m - beta1 * self.m[k]) / (1 - beta1)
        self.m[k] = m
        self.fresh[k] = beta2 * self.fresh[k] + (1 - beta2) * g**2
        frozen, fresh = np.sqrt(self.v[k]) + self.eps, np.sqrt(self.fresh[k]) + self.eps
        factor = float(np.max(frozen / fresh))
        plain = quotient(m, self.v[k], self.eps)
        q = plain + self.weight_decay * self.p[k]
        if self.weight_decay > 0:
            share = min(1.0, float(np.linalg.norm(plain) / np.linalg.norm(q)))
            factor = factor * share + (1 - share)
        factor = float(np.clip(factor, *self.factor_limits))
        factor = float(np.clip(factor, self.last[k] * (1 - self.threshold), self.last[k] * (1 + self.threshold)))
        self.last[k] = factor
        self.coefficients[k] = self.trust[k] * factor
        self.p[k] = self.p[k] - self.lr * self.coefficients[k] * q
