"""Instructions, registers and spills of CUDA kernels, counted in their machine code; needs no GPU.

    python benchmarks/micro/kernel_code.py [--arch sm_80,sm_90] [--before FOLDER] [--json FILE]

Kernels that are bound by instructions, as Nsight Compute said of them on an H100, are compiled with what their usual
call has: no mask or a causal one, whole packets, blocks of 512. What is counted is the longest way through the code,
loops once: no fewer instructions than a thread executes in one turn of each loop. `--before` names the folder cuda/ of
another commit (`git worktree add`). It also says how much processor time each source takes to compile. Needs nvcc and
nvdisasm (wheel nvidia-cuda-nvdisasm, or a toolkit); MPISPEED_NVDISASM names another. One architecture takes some
minutes of two cores.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "step"))
import peers

from mpispeed.base import assets
from mpispeed.native.cuda import catalog, toolchain

_ROW = """
#if __has_include("mpispeed_softmax.cuh")
#include "mpispeed_softmax.cuh"
using namespace mpispeed;
#else
#include "softmax/softmax.cu"
#endif
extern "C" __global__ void __launch_bounds__({threads})
probe(const {T}* a, const void* mask, const {T}* b, {T}* c, SoftmaxTerms t) {{
    t.mask_kind = {kind};
    t.mask_is_wide = 1;
    t.is_causal = {causal};
    t.scale = 0.125f;
    {team}
    {call};
}}
"""
_LANES = """
    const u32 row = row_in_lanes(t), lane = threadIdx.x & ((1u << t.lane_bits) - 1);
    const LaneTeam team = {1u << t.lane_bits};"""
_BLOCK = """
    __shared__ float parts[32];
    const u32 row = blockIdx.x, lane = threadIdx.x;
    const BlockTeam team = {blockDim.x, parts};"""
_CODES = """
#include "{source}"
extern "C" __global__ void __launch_bounds__({threads})
probe({arguments}, const __grid_constant__ {grid} given, const __grid_constant__ CodedParts parts) {{
    {grid} grid = given;
    grid.block = 512;
    {lines}
}}
"""
_CODED = ("quant/block_encode.cu", "quant/block_decode.cu")
_TYPES = {"fp32": "float", "bf16": "bf16", "fp16": "fp16"}
_SASS = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*)")
_LABEL = re.compile(r"^(\.L_x?_?\w+):")
_TARGET = re.compile(r"\((\.L_\w+)\)")


@dataclass
class Code:
    """One kernel as it is executed: its instructions, and where each may go on."""

    names: list[str] = field(default_factory=list)
    nexts: list[list[int]] = field(default_factory=list)


def softmax_probe(dtype: str, share: int, kind: int, *, is_causal: bool = False, is_grad: bool = False) -> str:
    """A kernel that has one row a team: `share` elements a thread, 0 for a block with 8."""
    team, threads = (_LANES, "128, 8") if share else (_BLOCK, "1024")
    count, wide = share or 8, 4 if dtype == "fp32" else 8
    call = f"softmax_row<false, {wide}, {count}>(a, mask, c, c, t, row, lane, team)"
    if is_grad:
        call = f"grad_row<false, {wide}, {count}>(a, b, c, t, row, lane, team)"
    return _ROW.format(T=_TYPES[dtype], kind=kind, causal=int(is_causal), threads=threads, team=team, call=call)


def encode_probe(bits: int, source: str, *, has_error: bool) -> str:
    """A kernel that codes floats of a dtype, or sums of codes of 8 or 4 bits."""
    values = f"Floats<{_TYPES[source]}>{{x}}" if source in _TYPES else f"Sums<{source}>{{parts}}"
    kept = ", {error, error_scales}" if has_error else ""
    name = "encode_with_error" if has_error else "encode"
    lines = ["grid.team = 32;", "grid.piece &= ~511ull;"]
    lines += [f"__builtin_assume(reinterpret_cast<size_t>({p}) % 16 == 0);" for p in ("x", "codes", "error")]
    lines += [f"{name}<{bits}>({values}, {{codes, scales}}{kept}, grid);"]
    x = _TYPES.get(source, "float")
    arguments = f"const {x}* x, unsigned char* codes, float* scales, unsigned char* error, float* error_scales"
    return _CODES.format(
        source=_CODED[0], grid="EncodeGrid", threads="512, 2", arguments=arguments, lines=" ".join(lines)
    )


def decode_probe(bits: int, dtype: str) -> str:
    """A kernel that sums codes to floats of a dtype."""
    lines = ["grid.piece &= ~511ull;", "__builtin_assume(reinterpret_cast<size_t>(out) % 16 == 0);"]
    lines += [f"decode<{_TYPES[dtype]}, {bits}, false>(out, grid, parts);"]
    return _CODES.format(
        source=_CODED[1], grid="DecodeGrid", threads="256, 4", arguments=f"{_TYPES[dtype]}* out",
        lines=" ".join(lines),
    )  # fmt: skip


def probes() -> dict[str, tuple[int, str]]:
    """Name of each kernel, how many elements a thread has, and its source."""
    found = {}
    for dtype in ("fp16", "bf16"):
        for mask, kind, is_causal in (("no mask", 0, False), ("causal", 0, True), ("mask of its type", 1, False)):
            for share in (8, 16):
                made = softmax_probe(dtype, share, kind, is_causal=is_causal)
                found[f"softmax {dtype}, {share} a lane, {mask}"] = (share, made)
        found[f"softmax {dtype}, 8 a thread of a block, no mask"] = (8, softmax_probe(dtype, 0, 0))
        found[f"softmax gradient {dtype}, 16 a lane"] = (16, softmax_probe(dtype, 16, 0, is_grad=True))
    for bits in (8, 4):
        for source in ("bf16", "fp32", "8", "4"):
            kind = f"sums of {source} bits" if source in "84" else source
            found[f"{kind} to {bits} bits"] = (16, encode_probe(bits, source, has_error=False))
            found[f"{kind} to {bits} bits, with error"] = (8, encode_probe(bits, source, has_error=True))
        found[f"sums of {bits} bits to bf16"] = (16, decode_probe(bits, "bf16"))
    return found


def read_code(cubin: Path, disassembler: str, kernel: str) -> Code:
    """The instructions of one kernel."""
    words = [disassembler, "-c", str(cubin)]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    rows: list[tuple[str, bool, str | None]] = []
    labels: dict[str, int] = {}
    is_inside = False
    for line in said.splitlines():
        section = re.match(r"\.text\.(\w+):", line.strip())
        if section:
            is_inside = section[1] == kernel
        label = _LABEL.match(line.strip())
        if label and is_inside:
            labels[label[1]] = len(rows)
        found = _SASS.match(line)
        if found and is_inside:
            target = _TARGET.search(found[4])
            rows.append((found[3], bool(found[2]), target[1] if target else None))
    return _linked(rows, labels)


def _linked(rows: list[tuple[str, bool, str | None]], labels: dict[str, int]) -> Code:
    code = Code()
    for at, (name, is_predicated, target) in enumerate(rows):
        stem, after = name.split(".")[0], [at + 1] if at + 1 < len(rows) else []
        if stem in ("BRA", "EXIT", "RET") and ".DIV" not in name:
            # A branch whose operand is a predicate has none before it.
            after = after if is_predicated or ".U" in name else []
            if stem == "BRA" and target in labels:
                after = [*after, labels[target]]
        code.names.append(name)
        code.nexts.append(after)
    return code


def longest_way(code: Code) -> list[int]:
    """The way through the code with the most instructions, which follows no loop back."""
    best: dict[int, tuple[int, int | None]] = {}
    open_now: set[int] = set()
    stack = [(0, False)]
    while stack:
        at, is_done = stack.pop()
        if is_done:
            open_now.discard(at)
            ways = [(best[after][0], after) for after in code.nexts[at] if after in best]
            length, after = max(ways) if ways else (0, None)
            best[at] = (length + 1, after)
        elif at not in best and at not in open_now:
            open_now.add(at)
            stack.append((at, True))
            stack += [(after, False) for after in code.nexts[at] if after not in best and after not in open_now]
    way, at = [], 0
    while at is not None:
        way.append(at)
        at = best[at][1]
    return way


def compiled(text: str, arch: str, folder: Path, place: Path, number: int) -> tuple[Path, toolchain.Resources]:
    """The machine code of a probe, and what it needs."""
    source, out = place / f"probe-{number}.cu", place / f"probe-{number}.{arch}.cubin"
    source.write_text(text)
    command = [toolchain.find_nvcc(), f"-arch={arch}", *toolchain.FLAGS[:-1], "-cubin", "-I", folder / "include"]
    command += ["-I", folder, "-o", out, source]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        msg = f"a probe does not compile for {arch}:\n{done.stderr[-2000:]}\n{text}"
        raise RuntimeError(msg)
    found = [entry for entry in toolchain.read_resources(done.stdout + done.stderr) if entry.kernel == "probe"]
    return out, found[0]


def measure(folder: Path, archs: list[str], disassembler: str) -> dict[str, dict[str, Any]]:
    """For each kernel and architecture: instructions an element, the most frequent ones, registers, spilled bytes."""
    work = [(number, name, *probe, arch) for arch in archs for number, (name, probe) in enumerate(probes().items())]
    with tempfile.TemporaryDirectory() as made:
        for source in _CODED:  # without its own kernels, of which each would take as long as a probe
            (Path(made) / source).parent.mkdir(exist_ok=True)
            (Path(made) / source).write_text((folder / source).read_text().split("// ---- kernels")[0])

        def one(item: tuple[int, str, int, str, str]) -> tuple[str, str, dict[str, Any]]:
            number, name, count, text, arch = item
            cubin, needs = compiled(text, arch, folder, Path(made), number)
            code = read_code(cubin, disassembler, "probe")
            names = [code.names[at] for at in longest_way(code)]
            most = Counter(name.split(".")[0] for name in names).most_common(8)
            return name, arch, {
                "instructions": len(names), "an_element": round(len(names) / count, 2), "most": dict(most),
                "registers": needs.registers, "spilled_bytes": needs.spilled_bytes,
            }  # fmt: skip

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            found: dict[str, dict[str, Any]] = {}
            for name, arch, row in pool.map(one, work):
                found.setdefault(name, {})[arch] = row
    return found


def compile_seconds(arch: str) -> dict[str, float]:
    """Processor time of the compiler for each source, one after another."""

    def timed() -> Iterator[tuple[str, float]]:
        for source in catalog.sources():
            begin = os.times()
            toolchain.compile_source(source, arch)
            end = os.times()
            used = end.children_user + end.children_system - begin.children_user - begin.children_system
            yield source, round(used, 2)

    return dict(timed())


def find_disassembler() -> str:
    """The nvdisasm of MPISPEED_NVDISASM, of PATH, or beside a nvcc of wheels.

    Raises:
        SystemExit: there is none.
    """
    named = os.environ.get("MPISPEED_NVDISASM") or shutil.which("nvdisasm")
    if named:
        return named
    wheels = [path for place in sys.path for path in Path(place).glob("nvidia/*/bin/nvdisasm")]
    if not wheels:
        sys.exit("no nvdisasm; install nvidia-cuda-nvdisasm, or set MPISPEED_NVDISASM")
    wheels[0].chmod(wheels[0].stat().st_mode | 0o111)  # the wheel does not say that it is a program
    return str(wheels[0])


def main() -> None:
    """Compile, count, show."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default=",".join(catalog.ARCHITECTURES))
    parser.add_argument("--before", type=Path, help="cuda/ of another commit")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    archs, disassembler = args.arch.split(","), find_disassembler()
    now = measure(assets.folder("cuda"), archs, disassembler)
    before = measure(args.before.absolute(), archs, disassembler) if args.before else {}
    for name, rows in now.items():
        for arch, row in rows.items():
            old = before[name][arch]["an_element"] if before else float("nan")
            said = f"{row['an_element']:6.2f} an element (before {old:6.2f}), {row['registers']:3d} registers"
            print(f"{name:44s} {arch:6s} {said}, {row['spilled_bytes']} bytes spilled")
    seconds = compile_seconds(archs[-1])
    said = f"{sum(seconds.values()):.1f} s of processor time to compile {len(seconds)} sources"
    print(f"{said}, at most {max(seconds.values()):.1f} s")
    if args.json:
        results = {"kernels": now, "kernels_before": before, "compile_seconds": seconds}
        peers.write_record(
            args.json, "micro/kernel_code", {"arch": archs, "nvcc": toolchain.version(toolchain.find_nvcc())}, results
        )


if __name__ == "__main__":
    main()
