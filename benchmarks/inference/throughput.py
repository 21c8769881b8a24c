"""Tokens per second of generation on one rank, beside transformers' own in the same run.

    mpispeed run -n 1 benchmarks/inference/throughput.py --json benchmarks/results/inference-throughput-gpt2.json

A GPT-2 of 124 million parameters or a LLaMA of 125 million, with random weights; greedy, in fp32 and bf16, with equal
threads. All take turns in every round:

- `same batch`: prompts of one length and answers of one length. `transformers` is `model.generate`, `plain` that of
  `init_inference`, `fused` with `replace_with_kernel_inject`; `job` and `job, fused` go the way of `mpispeed generate`.
- `mixed`: prompts and answers of mixed length. `transformers` answers them in the order of the file, 32 at once, each
  batch until its longest answer ends; `transformers, sorted` has the batches of the job. Only tokens that were asked
  for count.

Figures are seconds of a turn, by rounds; ratios are to `transformers`, of medians, of the fastest, by rounds, and of
medians of the process's CPU seconds, which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import mpispeed
from mpispeed.generation.batches import cut
from mpispeed.generation.decoding import Answerer, Job
from mpispeed.generation.model import Described, Opened
from mpispeed.generation.prompts import open_prompts
from mpispeed.generation.requests import Options
from mpispeed.generation.texts import Encoder

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "step"))
import peers

VOCABULARY = {"gpt2": 50257, "llama": 32000}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BATCH_SIZE = 32
POSITIONS = 1024

Tokens = list[list[int]]
"""The new tokens of every prompt."""


@dataclass(frozen=True)
class Work:
    """Prompts as token ids, and how many tokens each answer is to have."""

    prompts: list[list[int]]
    limits: list[int]


def same_batch(vocabulary: int, rows: int, length: int, new: int) -> Work:
    """Prompts and answers of one length."""
    draw = np.random.default_rng(3)
    return Work([draw.integers(3, vocabulary, length).tolist() for _ in range(rows)], [new] * rows)


def mixed(vocabulary: int, rows: int, longest: int, most_new: int) -> Work:
    """Prompts and answers of lengths whose logarithms are even: many short ones, few long ones."""
    draw = np.random.default_rng(4)
    lengths = np.exp(draw.uniform(np.log(8), np.log(longest), rows)).astype(int)
    limits = np.exp(draw.uniform(np.log(4), np.log(most_new), rows)).astype(int)
    return Work([draw.integers(3, vocabulary, length).tolist() for length in lengths], limits.tolist())


def build(name: str, dtype: torch.dtype, layers: int) -> Any:
    """The model, with random weights."""
    torch.manual_seed(1)
    if name == "gpt2":
        shape = {"n_layer": layers, "n_positions": POSITIONS, "bos_token_id": None, "eos_token_id": None}
        model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
    else:
        shape = {
            "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": layers, "num_attention_heads": 12,
            "num_key_value_heads": 4, "max_position_embeddings": POSITIONS, "bos_token_id": None, "eos_token_id": None,
        }  # fmt: skip
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    model.generation_config = transformers.GenerationConfig()
    return model.to(dtype).eval()


class Generating:
    """`generate` of a model or an engine on batches of a piece of work, padded on the left."""

    def __init__(self, model: Any, work: Work, batches: Sequence[Sequence[int]]) -> None:
        self.model, self.work, self.batches = model, work, batches

    def __call__(self) -> Tokens:
        """Answer all."""
        found: Tokens = [[] for _ in self.work.prompts]
        for batch in self.batches:
            width = max(len(self.work.prompts[each]) for each in batch)
            ids, mask = (
                torch.zeros(len(batch), width, dtype=torch.int64),
                torch.zeros(len(batch), width, dtype=torch.int64),
            )
            for row, each in enumerate(batch):
                own = self.work.prompts[each]
                ids[row, width - len(own) :], mask[row, width - len(own) :] = torch.tensor(own), 1
            most = max(self.work.limits[each] for each in batch)
            config = transformers.GenerationConfig(do_sample=False, max_new_tokens=most, pad_token_id=0)
            out = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
            for row, each in enumerate(batch):
                found[each] = out[row, width : width + self.work.limits[each]].tolist()
        return found


class Answering:
    """The way of `mpispeed generate`: its batches, its padding, rows that have ended left behind."""

    def __init__(self, engine: Any, work: Work, prompts: Any) -> None:
        config = engine.module.config
        described = Described(Path(), Path(), config, None, POSITIONS, config.vocab_size, frozenset(), pad=0, digest="")
        self.work, lengths = work, [len(each) for each in work.prompts]
        batches = cut(np.array(lengths), np.array(work.limits), batch_size=BATCH_SIZE, max_positions=POSITIONS)
        job = Job(described, prompts, batches, Encoder(None, vocabulary=config.vocab_size), Options())
        self.answerer = Answerer(job, Opened(engine, engine.mesh["model"]), lambda: False)

    @property
    def batches(self) -> list[list[int]]:
        """The job's batches."""
        batches = self.answerer.job.batches
        return [batches[number].tolist() for number in range(len(batches))]

    def __call__(self) -> Tokens:
        """Answer all."""
        found: Tokens = [[] for _ in self.work.prompts]
        for number in range(len(self.answerer.job.batches)):
            for each in self.answerer.answer(number).answers:
                found[each.request] = list(each.tokens)
        return found


def contenders(models: dict[str, Any], work: Work, stack: ExitStack) -> dict[str, Callable[[], Tokens]]:
    """All that answer a piece of work."""
    file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "prompts.jsonl"
    lines = [{"prompt": own, "max_new_tokens": limit} for own, limit in zip(work.prompts, work.limits, strict=True)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = stack.enter_context(open_prompts(file))
    whole, plain, fused = models["transformers"], models["plain"], models["fused"]
    in_order = [list(range(len(lines)))[first : first + BATCH_SIZE] for first in range(0, len(lines), BATCH_SIZE)]
    jobs = {"job": Answering(plain, work, prompts), "job, fused": Answering(fused, work, prompts)}
    found: dict[str, Callable[[], Tokens]] = {"transformers": Generating(whole, work, in_order)}
    if len(set(work.limits)) == 1:
        found["plain"], found["fused"] = Generating(plain, work, in_order), Generating(fused, work, in_order)
    else:
        found["transformers, sorted"] = Generating(whole, work, jobs["job"].batches)
    return {**found, **jobs}


def compare(calls: dict[str, Callable[[], Tokens]], work: Work, rounds: int) -> dict[str, Any]:
    """Seconds of each by rounds; answers are compared in the first one."""
    asked = sum(work.limits)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    answers: dict[str, Tokens] = {}
    for _ in range(rounds):
        for name, call in calls.items():
            begin, cpu_begin = time.perf_counter(), time.process_time()
            found = call()
            seconds[name].append(time.perf_counter() - begin)
            cpu[name].append(time.process_time() - cpu_begin)
            answers.setdefault(name, found)
    for name, found in answers.items():
        if [len(each) for each in found] != work.limits:
            msg = f"{name} has answers of other lengths than were asked for"
            raise RuntimeError(msg)
    first = answers["transformers"]
    equal = {name: sum(map(list.__eq__, found, first)) / len(first) for name, found in answers.items()}
    rates = {name: asked / statistics.median(own) for name, own in seconds.items()}
    return {
        "tokens": asked, "seconds": seconds, "cpu_seconds": cpu, "tokens_per_second": rates,
        "times_as_fast": {name: ratios(seconds, cpu, name) for name in calls}, "share_of_equal_answers": equal,
    }  # fmt: skip


def ratios(seconds: dict[str, list[float]], cpu: dict[str, list[float]], name: str) -> dict[str, float]:
    """How many times as fast as transformers: by medians, by the fastest, by rounds, and by medians of CPU seconds."""
    base, own = seconds["transformers"], seconds[name]
    return {
        "medians": statistics.median(base) / statistics.median(own),
        "fastest": min(base) / min(own),
        "rounds": statistics.median(a / b for a, b in zip(base, own, strict=True)),
        "cpu": statistics.median(cpu["transformers"]) / statistics.median(cpu[name]),
    }


def show(title: str, found: dict[str, Any]) -> None:
    """Print a table."""
    print(f"{title}: {found['tokens']} tokens", flush=True)
    for name, rate in found["tokens_per_second"].items():
        shown = ", ".join(f"{key} {value:.2f}" for key, value in found["times_as_fast"][name].items())
        equal = found["share_of_equal_answers"][name]
        print(f"  {name:22s}{rate:8.1f} tokens/s   {shown}   {equal:.0%} equal answers", flush=True)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=VOCABULARY, default="gpt2")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--works", nargs="+", default=["8", "mixed"], help="rows of a batch, or mixed")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=64, help="tokens of the prompts of a batch")
    parser.add_argument("--new", type=int, default=16, help="tokens of their answers")
    parser.add_argument("--prompts", type=int, default=64, help="prompts of mixed length")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--mixed-rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    mpispeed.init_distributed()
    torch.set_num_threads(options.threads)
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    results: dict[str, Any] = {}
    for dtype in options.dtypes:
        whole = build(options.model, DTYPES[dtype], options.layers)
        given = {"dtype": DTYPES[dtype], "max_out_tokens": POSITIONS}
        models = {
            "transformers": whole,
            "plain": mpispeed.init_inference(copy.deepcopy(whole), **given),
            "fused": mpispeed.init_inference(copy.deepcopy(whole), replace_with_kernel_inject=True, **given),
        }
        for name in options.works:
            vocabulary = VOCABULARY[options.model]
            is_mixed = name == "mixed"
            work = (
                mixed(vocabulary, options.prompts, 96, 48)
                if is_mixed
                else same_batch(vocabulary, int(name), options.length, options.new)
            )
            with ExitStack() as stack, torch.inference_mode():
                calls = contenders(models, work, stack)
                found = compare(calls, work, options.mixed_rounds if is_mixed else options.rounds)
            title = f"{dtype}, {'mixed' if is_mixed else f'batch of {name}'}"
            results[title] = found
            show(title, found)
            peers.write_record(options.json, "inference/throughput", settings, results)  # what is measured is kept


if __name__ == "__main__":
    main()
