"""Calls of the compiled loops on arrays of numpy, without torch: the same numbers on every processor.

`python native_calls.py FOLDER` loads the modules from FOLDER (`--installed`: of the installed package), compares what
has a formula with it, and prints a line of JSON: name of a case -> digest of its bytes. Loops neither fuse products
into sums nor change their order, so that two processors give equal digests (`BITWISE`); `CLOSE` uses functions of the C
library, and gives the numbers themselves.
Standard library and numpy only: it runs under an emulator that has nothing else.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import math
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np

COUNT = 4099  # neither a multiple of a vector nor of a block
THREADS = 2
FLOAT, BF16, HALF = 1, 2, 3  # numbers of dtypes in the loops
Case = Callable[[Path], Iterator[np.ndarray]]
BITWISE: dict[str, Case] = {}
CLOSE: dict[str, Case] = {}


def load(folder: Path, name: str) -> ModuleType:
    """The compiled module of this name in `folder`, whatever package it belongs to."""
    paths = sorted(folder.rglob(f"{name}.*.so"))
    if len(paths) != 1:
        msg = f"{folder} has {len(paths)} files {name}.*.so: {paths}; build the modules there first"
        raise FileNotFoundError(msg)
    full = f"mpispeed._native.{name}"
    loader = importlib.machinery.ExtensionFileLoader(full, str(paths[0]))
    spec = importlib.util.spec_from_file_location(full, paths[0], loader=loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def case(table: dict[str, Case]) -> Callable[[Case], Case]:
    """Enter a function into a table under its own name."""

    def enter(function: Case) -> Case:
        table[function.__name__] = function
        return function

    return enter


def draws(*shape: int, seed: int = 7) -> np.ndarray:
    """Floats of many magnitudes, by integers and powers of two only: equal everywhere."""
    bits = np.random.Generator(np.random.PCG64(seed)).integers(0, 1 << 24, size=shape)
    return np.ldexp(((bits & 0xFFFF) - 32768).astype(np.float32), ((bits >> 16) % 12 - 18).astype(np.int32))


def at(x: np.ndarray) -> int:
    """The address of its first element."""
    return x.ctypes.data


def to_bf16(x: np.ndarray) -> np.ndarray:
    """The nearest bf16, ties to even, as its bits."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@case(BITWISE)
def checksums(folder: Path) -> Iterator[np.ndarray]:
    """CRC-32C: the check value of the catalogue of CRC algorithms; tables and instructions agree."""
    module = load(folder, "crc32c")
    assert module.update(b"123456789") == 0xE3069283
    data = draws(COUNT).tobytes()
    whole = module.update(data)
    assert whole == module.update(data, 0, True)
    assert whole == module.combine(module.update(data[:999]), module.update(data[999:]), len(data) - 999)
    yield np.array([whole], dtype=np.uint32)


@case(BITWISE)
def sums(folder: Path) -> Iterator[np.ndarray]:
    """Tree sums of five parts, and the exact norm against `math.fsum` of exact squares."""
    module = load(folder, "fp_sum")
    parts, out = draws(5, COUNT), np.zeros(COUNT, np.float32)
    module.tree_sum(at(out), [at(part) for part in parts], COUNT, FLOAT, FLOAT, 0.5, THREADS)
    assert np.allclose(out, 0.5 * parts.astype(np.float64).sum(0), rtol=1e-5, atol=1e-5)
    yield out
    partials = np.array(module.square_partials(at(out), COUNT, 256, FLOAT, THREADS))
    assert math.isclose(math.fsum(partials), math.fsum(float(v) ** 2 for v in out), rel_tol=1e-14)
    limbs = np.zeros(68, np.int64)
    module.add_to_limbs(at(limbs), partials.tolist())
    assert module.value_of_limbs(at(limbs)) == math.fsum(partials)
    yield partials


def _adam_terms(step: int) -> tuple[float, ...]:
    root = math.sqrt(1 - 0.999**step)
    return (0.9, 0.999, 1e-3 / (1 - 0.9**step), 1 / root, 1e-8, 1e-5, 1, 1.0, False, 0.0, math.inf)


@case(BITWISE)
def optimizers(folder: Path) -> Iterator[np.ndarray]:
    """Three updates of every elementwise rule, with bf16 gradients and copies; Adam by its formula."""
    module = load(folder, "cpu_optim")
    for rule in range(3):  # Adam, Adagrad, Lion
        p, a, b = draws(COUNT, seed=1), np.zeros(COUNT, np.float32), np.zeros(COUNT, np.float32)
        g, out = to_bf16(draws(COUNT, seed=2)), np.zeros(COUNT, np.uint16)
        second = at(b) if rule == 0 else 0
        row = (at(p), at(a), second, 0, at(g), at(out), COUNT, FLOAT, FLOAT, BF16, BF16, 0)
        before = p.astype(np.float64)
        for step in (1, 2, 3):
            module.Table([row]).run(rule, [_adam_terms(step)], THREADS)
            if rule == 0 and step == 1:
                grad = (g.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
                expected = before * (1 - 1e-5) - 1e-3 * grad / (np.abs(grad) + 1e-8)
                assert np.allclose(p, expected, rtol=1e-5, atol=1e-7)
        assert (out == to_bf16(p)).all()
        yield from (p, a, b, out)


@case(BITWISE)
def coded_states(folder: Path) -> Iterator[np.ndarray]:
    """Codes of 8 bits to the nearest and drawn, halves and pairs; then an update of Adam over codes."""
    module = load(folder, "state_codes")
    x, scales, codes = draws(COUNT), np.zeros(COUNT // 256 + 1, np.float32), np.zeros(COUNT, np.uint8)
    for draw in (None, (3, 5, 0)):
        back = np.zeros(COUNT, np.float32)
        module.encode8(at(codes), at(scales), at(x), COUNT, True, draw, THREADS)
        module.decode8(at(back), at(codes), at(scales), COUNT, True, THREADS)
        assert np.abs(back - x).max() <= np.abs(x).max() / 16
        yield from (codes.copy(), scales.copy(), back)
    high, low, back = np.zeros(COUNT, np.uint16), np.zeros(COUNT, np.uint16), np.zeros(COUNT, np.float32)
    module.split(at(x), at(high), at(low), BF16, COUNT, THREADS)
    assert (high == to_bf16(x)).all()
    module.join(at(back), at(high), at(low), BF16, COUNT, THREADS)
    assert np.allclose(back, x, rtol=2**-16)
    module.round(at(high), HALF, at(x), COUNT, (3, 5, 0), THREADS)
    yield from (low, back, high)
    p, g = draws(COUNT, seed=3), draws(COUNT, seed=4)
    first, second = np.zeros((2, COUNT), np.uint8), np.zeros((2, scales.size), np.float32)
    places = [(0, (at(p), 0), FLOAT, False, None)]
    places += [(1, (at(first[k]), at(second[k])), 0, k == 0, None if k == 0 else 11) for k in (0, 1)]
    update = load(folder, "coded_optim").update
    for step in (1, 2):
        update(0, places, (at(g), FLOAT), (0, 0), COUNT, _adam_terms(step), (step, 0), THREADS)
    yield from (p, first, second)


@case(BITWISE)
def compressed_sums(folder: Path) -> Iterator[np.ndarray]:
    """Blocks of 8 bits with what was lost kept, and signs."""
    module, size = load(folder, "block_quant"), 4096
    x, codes, scales = draws(size), np.zeros(size, np.int8), np.zeros(size // 256, np.float32)
    out = np.zeros(size, np.float32)
    module.encode(at(x), FLOAT, (1, size, 256), (at(codes), at(scales), 8), (0, 0), 0.0, THREADS)
    module.decode(at(out), FLOAT, [at(codes)], [at(scales)], 8, (1, size, 256), False, 1.0, THREADS)
    assert np.abs(out - x).max() <= np.abs(x).max() / 127
    yield from (codes, scales, out)
    module = load(folder, "one_bit")
    error, bits = np.zeros(size, np.float32), np.zeros(size // 8, np.uint8)
    squares = module.mix(at(error), (at(x), FLOAT, 1.0), (0, 0, 0.0), size, THREADS)
    assert math.isclose(math.fsum(squares), math.fsum(float(v) ** 2 for v in x), rel_tol=1e-12)
    scale = math.sqrt(math.fsum(squares) / size)
    module.encode(at(bits), at(error), scale, size, THREADS)
    signs = np.zeros(size, np.float32)
    module.decode(at(signs), FLOAT, at(bits), 1.0, size, THREADS)
    assert (signs == np.where(x >= 0, 1, -1)).all()
    yield from (bits, error)


@case(BITWISE)
def rows(folder: Path) -> Iterator[np.ndarray]:
    """Rows of tokens to experts and back against numpy's indexing, and the choice of tokens."""
    module, tokens, width = load(folder, "permute"), 37, 24
    x = draws(tokens, width)
    index = np.ascontiguousarray((np.arange(2 * tokens) * 17 % tokens).reshape(tokens, 2))
    sizes = (tokens, 2, tokens, width, 4)
    assert module.wrong_place(at(index), index.size, tokens, False, 0) < 0
    assert module.wrong_place(at(index), index.size, tokens - 1, False, 0) >= 0
    weights, out = draws(tokens, 2, seed=5), np.zeros((tokens, width), np.float32)
    module.combine(at(out), at(x), at(index), at(weights), sizes, FLOAT, THREADS)
    products = weights[..., None] * x[index]
    assert (out == products[:, 0] + products[:, 1]).all()
    dots = np.zeros((tokens, 2), np.float32)
    module.dot(at(dots), at(x), at(out), at(index), sizes, FLOAT, THREADS)
    assert np.allclose(dots, np.einsum("th,tjh->tj", out.astype(np.float64), x[index]), rtol=1e-5, atol=1e-3)
    yield from (out, dots)
    places = np.zeros((3, 5), np.int32)
    load(folder, "token_choice").choose(at(places), 12345, 0, 3, tokens, 5)
    assert all(len(set(row)) == 5 for row in places.tolist())
    yield places


@case(BITWISE)
def coded_products(folder: Path) -> Iterator[np.ndarray]:
    """Rows times a matrix in 8 bits, against the product with its values."""
    module, outputs, width, count = load(folder, "weight_codes"), 19, 256, 3
    codes, scales = (draws(outputs, width) % 100).astype(np.int8), np.abs(draws(outputs, 4, seed=6)) + 0.5
    weight, sizes = (at(codes), at(scales), 0), (outputs, width, 64)
    values, x = np.zeros((outputs, width), np.float32), draws(count, width, seed=8)
    module.expand(at(values), FLOAT, weight, sizes, 8, THREADS)
    assert (values == codes * np.repeat(scales, 64, axis=1)).all()
    out = np.zeros((count, outputs), np.float32)
    module.multiply(at(out), at(x), 0, count, FLOAT, weight, sizes, 8, THREADS)
    exact = x.astype(np.float64) @ values.astype(np.float64).T
    bound = np.abs(x.astype(np.float64)) @ np.abs(values.astype(np.float64)).T
    assert (np.abs(out - exact) <= width * 2.0**-24 * bound).all()
    yield out


@case(BITWISE)
def files(folder: Path) -> Iterator[np.ndarray]:
    """Blocks through the thread pool, and token ids of a file."""
    module, data = load(folder, "block_io"), draws(1 << 14)
    with tempfile.TemporaryFile() as file:
        pool, back = module.Pool(0, 2, 4, 4096, False, True), np.zeros_like(data)
        for address, is_write in ((at(data), True), (at(back), False)):
            job = pool.submit(-1, file.fileno(), is_write, address, data.nbytes, 0, 3)
            assert job.wait(60.0)
            assert job.error()[0] == 0
        pool.close()
        assert (back == data).all()
    ids = (np.arange(1000) * 7 % 997).astype(np.uint16)
    with tempfile.TemporaryFile() as file:
        os.pwrite(file.fileno(), ids.tobytes(), 64)
        out = np.full((2, 8), -5, np.int64)
        starts, counts = np.array([3, 990], np.int64), np.array([8, 6], np.int64)
        code, _ = load(folder, "token_reads").read(
            (file.fileno(), 64, ids.size, 2), starts, counts, 8, 8, at(out), -1, 0, -100, 0
        )
        assert code == 0
        assert out.tolist() == [ids[3:11].tolist(), [*ids[990:996].tolist(), -1, -1]]
        yield out


@case(BITWISE)
def meetings(folder: Path) -> Iterator[np.ndarray]:
    """Two threads meet and see what the other brought; at last they come with other codes, and are told."""
    module = load(folder, "meeting")
    stride, times = module.LINE_BYTES + 64, 200
    memory = np.zeros(module.DOOR_BYTES + 4 * stride, np.uint8)
    seen = np.zeros((2, times), np.int64)

    def come(place: int) -> None:
        side, gift = module.Meeting(at(memory), place, 2, 64), np.zeros(8, np.int64)
        for turn in range(times):
            gift[:] = turn * 2 + place
            row = side.meet(at(gift), gift.nbytes, turn // 199 * place, 1000, lambda: None)
            first = module.DOOR_BYTES + ((row % 2) * 2 + 1 - place) * stride + module.LINE_BYTES
            seen[place, turn] = memory[first : first + 8].view(np.int64)[0] if row >= 0 else row - 1000

    other = threading.Thread(target=come, args=(1,))
    other.start()
    come(0)
    other.join()
    expected = 2 * np.arange(times) + np.array([[1], [0]])
    assert (seen[:, :-1] == expected[:, :-1]).all()
    assert (seen[:, -1] < 0).all()
    yield seen


@case(CLOSE)
def layers(folder: Path) -> Iterator[np.ndarray]:
    """Thin products, norms and gates of layers; `exp` and `erf` are the C library's."""
    module, count, width = load(folder, "layer_loops"), 5, 96
    x, weight = draws(count, width) / 64, draws(width, width, seed=9) / 64
    out = np.zeros((count, width), np.float32)
    module.thin(at(out), at(x), at(weight), 0, count, width, width, FLOAT, THREADS)
    assert np.allclose(out, x @ weight.T, rtol=1e-4, atol=1e-4)
    yield out.copy()
    gain = np.ones(width, np.float32)
    module.norm(at(out), 0, at(x), 0, at(gain), 0, count, width, 1e-5, True, FLOAT, THREADS)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    assert np.allclose(out, expected, rtol=1e-5, atol=1e-5)
    yield out.copy()
    module.gate(at(out), at(x), 0, x.size, 4, FLOAT, THREADS)  # silu
    assert np.allclose(out, wide / (1 + np.exp(-wide)), rtol=1e-5, atol=1e-6)
    yield out.copy()


def answers(folder: Path) -> dict[str, str | list[float]]:
    """Digests of the bitwise cases, and the numbers of the others."""
    found: dict[str, str | list[float]] = {}
    for name, function in BITWISE.items():
        digest = hashlib.sha256()
        for array in function(folder):
            digest.update(np.ascontiguousarray(array).tobytes())
        found[name] = digest.hexdigest()
    for name, function in CLOSE.items():
        found[name] = [float(v) for array in function(folder) for v in array.ravel()[:500]]
    return found


def installed() -> Path:
    """Where the package is installed; it is not imported, because that takes torch."""
    for entry in sys.path[1:]:  # not the folder of this file
        if (found := Path(entry) / "mpispeed" / "_native").is_dir():
            return found
    msg = f"no package mpispeed in {sys.path[1:]}; install it first"
    raise FileNotFoundError(msg)


if __name__ == "__main__":
    place = installed() if sys.argv[1] == "--installed" else Path(sys.argv[1])
    sys.stdout.write(json.dumps(answers(place)) + "\n")
