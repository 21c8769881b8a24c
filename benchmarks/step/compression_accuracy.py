"""Accuracy of a tiny BERT on a small text task after each compression technique, with that of the full model.

    mpispeed run -n 1 benchmarks/step/compression_accuracy.py --json benchmarks/results/compression-accuracy.json

The task, `tests/helpers/entailment.py`, is to tell whether a sentence follows from another one; its labels have no
noise. A BERT of 4 layers, 64 wide, is trained from random weights. Then each technique is applied, at the settings of
DeepSpeedExamples' scripts, and the model is trained on with it, with less steps and a smaller learning rate. `full` is
trained on for as many steps without compression: it is what all others are compared with. Accuracies are those on held
out examples, whose sentences are in no training example.

One rank, one thread: about two minutes for the model of each seed, and half a minute for a technique.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import mpispeed
from mpispeed.compression import init_compression

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import peers

from tests.helpers.entailment import WORDS, Pairs, make_pairs
from tests.helpers.paper_compression import EXTREME, TECHNIQUES, section_of

BATCH, HELD_OUT = 64, 6000
HEADS = 4
GROUPS = 16  # scales of a weight of 64 x 64, so many weights have one as BERT's of 768 x 768 in 64 groups have rows
FULL = "full"
NAMES = (FULL, *TECHNIQUES, *EXTREME)


def bert(layers: int = 4) -> nn.Module:
    """With random weights."""
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=64, num_hidden_layers=layers, num_attention_heads=HEADS,
        intermediate_size=256, max_position_embeddings=16, num_labels=3, initializer_range=0.05,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def settings(steps: int, rate: float) -> dict[str, Any]:
    """Of a run whose learning rate rises for a twentieth of the steps and falls to 0."""
    schedule = {"total_num_steps": steps, "warmup_num_steps": steps // 20, "warmup_type": "linear"}
    return {
        "train_batch_size": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": rate, **schedule}},
        "gradient_clipping": 1.0,
    }


def train(model: nn.Module, config: dict[str, Any], examples: Pairs) -> None:
    """One pass over the examples, in place."""
    engine, *_ = mpispeed.initialize(model=model, config=config)
    engine.train()
    for batch in examples.batches(BATCH):
        engine.backward(engine(**batch).loss)
        engine.step()
    engine.destroy()


@torch.no_grad()
def accuracy(model: nn.Module, examples: Pairs) -> float:
    """Part of the examples whose label has the largest logit, in percent."""
    model.eval()
    right = sum(
        int((model(**batch).logits.argmax(-1) == batch["labels"]).sum()) for batch in examples.batches(HELD_OUT)
    )
    return 100 * right / len(examples.labels)


def compressed(name: str, weights: dict[str, torch.Tensor], options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train on with a technique; the record of it."""
    torch.manual_seed(seed)
    model = bert()
    model.load_state_dict(weights)
    config = settings(options.more_steps, options.more_rate)
    if name != FULL:
        config["compression_training"] = section_of(name, options.more_steps, HEADS, GROUPS)
        init_compression(model, config)
    held_out = make_pairs(HELD_OUT, 1, held_out=True)
    began = time.process_time()
    train(model, config, make_pairs(options.more_steps * BATCH, 1000 + seed))
    seconds = time.process_time() - began
    return {"seed": seed, "accuracy": accuracy(model, held_out), "cpu_seconds": round(seconds, 1)}


def base(options: argparse.Namespace, seed: int) -> dict[str, torch.Tensor]:
    """The weights of the trained model, kept in the folder of the options."""
    path = options.folder / f"bert-{seed}-{options.steps}.pt"
    if not path.exists():
        torch.manual_seed(seed)
        model = bert()
        train(model, settings(options.steps, options.rate), make_pairs(options.steps * BATCH, seed))
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
    found: dict[str, torch.Tensor] = torch.load(path)
    return found


def compare(results: dict[str, dict[str, Any]]) -> None:
    """Add means and differences to `full`, and print them."""
    full = {run["seed"]: run["accuracy"] for run in results[FULL]["runs"]}
    for name, found in results.items():
        differences = [run["accuracy"] - full[run["seed"]] for run in found["runs"] if run["seed"] in full]
        if differences:
            found["accuracy"] = statistics.mean(run["accuracy"] for run in found["runs"])
            found["difference"] = statistics.mean(differences)
            print(f"{name:42s} {found['accuracy']:6.2f} %  {found['difference']:+.2f}", flush=True)


def main() -> None:
    """Run what a record of the same options does not hold yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000, help="of the full model (default %(default)s)")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="its learning rate (default %(default)s)")
    parser.add_argument("--more_steps", type=int, default=900, help="with a technique (default %(default)s)")
    parser.add_argument("--more_rate", type=float, default=1e-3, help="their learning rate (default %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--techniques", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    parser.add_argument("--folder", type=Path, default=Path("runs/compression"), help="trained models are kept here")
    parser.add_argument("--json", type=Path, help="write the figures here; runs that it holds already stay")
    options = parser.parse_args()
    peers.join()
    kept = {key: getattr(options, key) for key in ("steps", "rate", "more_steps", "more_rate")}
    held = peers.read_results(options.json, kept)
    results = {name: {"runs": held.get(name, {}).get("runs", [])} for name in NAMES}
    for seed in options.seeds:
        for name in options.techniques:
            if not any(run["seed"] == seed for run in results[name]["runs"]):
                results[name]["runs"].append(compressed(name, base(options, seed), options, seed))
                peers.write_record(options.json, "step/compression_accuracy", kept, results)
    compare(results)
    peers.write_record(options.json, "step/compression_accuracy", kept, results)


if __name__ == "__main__":
    main()
