"""Tokens per second of batch generation on one rank beside transformers' own `generate` in the same run.

    python benchmarks/inference/generate.py --json benchmarks/results/generate.json

Three comparisons, whose contenders take turns in every round:

- same batch: prompts of one length with answers of one length;
- mixed: prompts and answers of mixed length. transformers gets them in the order of the file, in batches of as many,
  and goes on until the longest answer of a batch is done; tokens count that belong to an answer;
- continuous: the mixed prompts by transformers' `generate_batch`, with its paged cache.

Seconds are those of the core that works, so that what else runs on the machine does not matter; torch has one thread.
Answers that differ between contenders are counted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mpispeed
from mpispeed.generation.batches import cut
from mpispeed.generation.decoding import Answerer, Job
from mpispeed.generation.model import Described, Opened
from mpispeed.generation.prompts import open_prompts
from mpispeed.generation.requests import Options
from mpispeed.generation.texts import Encoder

VOCABULARY, POSITIONS = 8000, 512
Tokens = dict[int, list[int]]


def build(hidden: int, layers: int) -> Any:
    """A LLaMA of random weights."""
    import transformers as hub

    torch.manual_seed(0)
    config = hub.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=POSITIONS, eos_token_id=None,
        bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = hub.LlamaForCausalLM(config).eval()
    model.generation_config = hub.GenerationConfig()
    return model


class Work:
    """Prompts, and the contenders that answer them; each returns the answers' tokens."""

    def __init__(self, model: Any, folder: Path, shapes: Sequence[tuple[int, int]], batch_size: int) -> None:
        """Args: `shapes` has (tokens of the prompt, tokens of the answer) of each."""
        draw = random.Random(1)
        self.model, self.batch_size = model, batch_size
        self.ids = [[draw.randrange(VOCABULARY) for _ in range(length)] for length, _ in shapes]
        self.limits = [limit for _, limit in shapes]
        lines = ({"prompt": ids, "max_new_tokens": limit} for ids, limit in zip(self.ids, self.limits, strict=True))
        path = folder / f"{len(shapes)}-{sum(self.limits)}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        described = Described(folder, folder, model.config, None, POSITIONS, VOCABULARY, frozenset(), 0, "")
        prompts = open_prompts(path)
        batches = cut(
            np.array([len(ids) for ids in self.ids]),
            np.array(self.limits),
            batch_size=batch_size,
            max_positions=POSITIONS,
        )
        job = Job(described, prompts, batches, Encoder(None, vocabulary=VOCABULARY), Options(max_new_tokens=1))
        engine = mpispeed.init_inference(model, dtype=torch.float32, max_out_tokens=POSITIONS)
        self.answerer = Answerer(job, Opened(engine, engine.mesh["model"]), lambda: False)

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(self.limits)

    def ours(self) -> Tokens:
        """Batches of like length, rows that have ended left behind."""
        found: Tokens = {}
        for number in range(len(self.answerer.job.batches)):
            for answer in self.answerer.answer(number).answers:
                found[answer.request] = list(answer.tokens)
        return found

    def transformers(self) -> Tokens:
        """Batches in the order of the file."""
        found: Tokens = {}
        for first in range(0, len(self.ids), self.batch_size):
            own = self.ids[first : first + self.batch_size]
            limits = self.limits[first : first + self.batch_size]
            width = max(map(len, own))
            ids = torch.tensor([[0] * (width - len(each)) + each for each in own])
            mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in own])
            out = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=max(limits), do_sample=False, pad_token_id=0
            )
            for row, limit in enumerate(limits):
                found[first + row] = out[row, width : width + limit].tolist()
        return found

    def continuous(self) -> Tokens:
        """`generate_batch`, which has one limit for all; answers are cut to theirs."""
        from transformers import GenerationConfig

        config = GenerationConfig(max_new_tokens=max(self.limits), do_sample=False, pad_token_id=0, eos_token_id=-1)
        out = self.model.generate_batch(inputs=self.ids, generation_config=config, progress_bar=False)
        by_prompt = {tuple(each.prompt_ids): each.generated_tokens for each in out.values()}
        return {
            place: by_prompt[tuple(ids)][:limit]
            for place, (ids, limit) in enumerate(zip(self.ids, self.limits, strict=True))
        }


def compare(calls: dict[str, Callable[[], Tokens]], tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens per second of each by rounds, after one that does not count; answers have to be equal."""
    speeds: dict[str, list[float]] = {name: [] for name in calls}
    first: Tokens = {}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            begin = time.process_time()
            found = call()
            seconds = time.process_time() - begin
            first = first or found
            if turn == 0 and found != first:
                wrong = sum(found[place] != first[place] for place in first)
                sys.stderr.write(f"{name}: {wrong} of {len(first)} answers differ\n")
            if turn:
                speeds[name].append(round(tokens / seconds, 1))
    return {"tokens_per_second": speeds, "median": {name: statistics.median(found) for name, found in speeds.items()}}


def main() -> None:
    """Compare, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--continuous", action="store_true")
    words = parser.parse_args()
    warnings.simplefilter("ignore")
    draw = random.Random(2)
    mixed = [(draw.randint(4, 256), draw.randint(4, 96)) for _ in range(words.prompts)]
    found: dict[str, Any] = {"model": {"hidden": words.hidden, "layers": words.layers, "vocabulary": VOCABULARY}}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        model = build(words.hidden, words.layers)
        same = Work(model, Path(name), [(64, 48)] * 16, 16)
        found["same batch"] = compare({"ours": same.ours, "transformers": same.transformers}, same.tokens, words.rounds)
        work = Work(model, Path(name), mixed, 16)
        calls = {"ours": work.ours, "transformers": work.transformers}
        if words.continuous:
            calls["continuous"] = work.continuous
        found["mixed"] = compare(calls, work.tokens, words.rounds)
    for what in ("same batch", "mixed"):
        medians = found[what]["median"]
        found[what]["ratio"] = round(medians["ours"] / medians["transformers"], 3)
        print(f"{what:12} {found[what]['ratio']:.2f} x transformers   {medians}")
    if words.json:
        words.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
