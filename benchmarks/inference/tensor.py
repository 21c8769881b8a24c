"""Tensor parallelism in inference on two cores: tokens one by one and a long prompt, beside what memory gives.

    mpispeed run -n 2 benchmarks/inference/tensor.py --json benchmarks/results/inference-tensor.json

A LLaMA of 500 million parameters with random weights, in bf16, one thread for each rank. Whole on rank 0 alone, and
sliced over both by `nn.tensor.inject`; the first rank's core has the other one's memory to itself while that sleeps.
In every round each takes its turn, as do reads and copies of memory by one rank and by both. Figures are of the
slowest rank; ratios are of medians and of the fastest.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from mpispeed.mesh import Comm
from mpispeed.nn.tensor import inject

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "step"))
import peers

SHAPE = {
    "hidden_size": 1280, "intermediate_size": 3456, "num_hidden_layers": 24, "num_attention_heads": 20,
    "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
PROMPT, LONG_PROMPT = 16, 512
MEMORY_BYTES = 256 << 20


def build(layers: int) -> Any:
    """The whole model, equal on all ranks."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**{**SHAPE, "num_hidden_layers": layers}, dtype=torch.bfloat16)
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    model = transformers.LlamaForCausalLM(config).eval()
    torch.set_default_dtype(kept)
    return model


class Decoding:
    """Greedy decoding of one prompt; each call makes the next tokens."""

    def __init__(self, model: Any, tokens: int) -> None:
        self.model, self.tokens = model, tokens
        draw = torch.Generator().manual_seed(2)
        self.prompt = torch.randint(3, SHAPE["vocab_size"], (1, PROMPT), generator=draw)
        self.long_prompt = torch.randint(3, SHAPE["vocab_size"], (1, LONG_PROMPT), generator=draw)
        self.cache = transformers.DynamicCache(config=model.config)
        self.logits = self._step(self.prompt, self.cache)
        self.last = self.logits.argmax(-1, keepdim=True)

    def _step(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        return self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]

    def decode(self) -> None:
        """Some more tokens."""
        for _ in range(self.tokens):
            self.last = self._step(self.last, self.cache).argmax(-1, keepdim=True)

    def prefill(self) -> None:
        """A long prompt of another text."""
        self._step(self.long_prompt, transformers.DynamicCache(config=self.model.config))


def read_and_copy() -> dict[str, Callable[[], object]]:
    """Passes over memory that no cache holds."""
    x = torch.ones(MEMORY_BYTES // 4)
    y = torch.empty_like(x)
    return {"read": lambda: torch.dot(x, x), "copy": lambda: y.copy_(x)}


class Turns:
    """Seconds of calls that ranks make in turn."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self._token = comm, torch.zeros(1)
        self.seconds: dict[str, list[float]] = {}

    def take(self, name: str, call: Callable[[], object], ranks: int) -> None:
        """One turn of the first `ranks` ranks; others sleep. Collective over: the group."""
        self.comm.all_reduce(self._token)
        begin = time.perf_counter()
        if self.comm.rank < ranks:
            call()
        took = torch.tensor(time.perf_counter() - begin if self.comm.rank < ranks else 0.0)
        self.comm.all_reduce(took, "max")
        self.seconds.setdefault(name, []).append(float(took))


def ratios(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """How many times as fast two ranks are as one: by medians, by the fastest, and by rounds."""
    found = {}
    for name in ("read", "copy", "decode", "prefill"):
        one, two = seconds[f"{name} 1"], seconds[f"{name} 2"]
        work = 2.0 if name in ("read", "copy") else 1.0  # there each rank has as much to do as one alone
        found[name] = {
            "medians": work * statistics.median(one) / statistics.median(two),
            "fastest": work * min(one) / min(two),
            "rounds": work * statistics.median(a / b for a, b in zip(one, two, strict=True)),
        }
    return found


def main() -> None:
    """Measure, and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--prefill-every", type=int, default=2, help="rounds for each round with a long prompt")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    world = peers.join()
    whole = build(options.layers)
    elements = sum(param.numel() for param in whole.parameters())
    sliced = copy.deepcopy(whole) if world.rank == 0 else whole
    inject(sliced, world.comm, vocab=True)
    turns = Turns(world.comm)
    with torch.inference_mode():
        two = Decoding(sliced, options.tokens)
        one = Decoding(whole, options.tokens) if world.rank == 0 else two
        error = float((one.logits - two.logits).abs().max() / one.logits.abs().max())
        memory = read_and_copy()
        for turn in range(options.rounds + 1):
            for ranks, model in ((1, one), (2, two)):
                for name, call in memory.items():
                    turns.take(f"{name} {ranks}", call, ranks)
                turns.take(f"decode {ranks}", model.decode, ranks)
                if turn % options.prefill_every == 0:
                    turns.take(f"prefill {ranks}", model.prefill, ranks)
            if turn == 0:
                turns.seconds.clear()
    if world.rank == 0:
        found = ratios(turns.seconds)
        print(f"{elements / 1e6:.0f} million parameters, largest error of logits {error:.4f} of the largest logit")
        for name in ("read", "copy", "decode", "prefill"):
            one_s, two_s = (min(turns.seconds[f"{name} {ranks}"]) * 1e3 for ranks in (1, 2))
            shown = ", ".join(f"{key} {value:.2f}" for key, value in found[name].items())
            print(f"{name:8s} fastest {one_s:8.1f} ms on 1, {two_s:8.1f} ms on 2; times as fast: {shown}")
        share = {key: found["decode"][key] / found["read"][key] for key in found["read"]}
        print("decoding to reading: " + ", ".join(f"{key} {value:.2f}" for key, value in share.items()))
        results = {"seconds": turns.seconds, "times_as_fast": found, "decoding_to_reading": share, "logits": error}
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        peers.write_record(options.json, "inference/tensor", {**settings, **SHAPE, "elements": elements}, results)


if __name__ == "__main__":
    main()
