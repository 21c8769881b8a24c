"""Accuracy of a tiny BERT on a small text task after each compression technique, with that of the full model.

    mpispeed run -n 1 benchmarks/step/compression_accuracy.py --json benchmarks/results/compression-accuracy.json

The task, `tests/helpers/entailment.py`, is to tell whether a sentence follows from another one; its labels have no
noise. A BERT of 4 layers, 64 wide, is trained from random weights. Then each technique is applied, at the settings of
DeepSpeedExamples' scripts, and the model is trained on with it, with less steps and a smaller learning rate. `full` is
trained on for as many steps without compression: it is what all others are compared with. Accuracies are those on held
out examples, whose pairs of sentences are in no training example. Fewer layers learn from the full model, for longer.

One rank, one thread: about two minutes for the model of each seed, and half a minute for a technique.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import mpispeed
from mpispeed.compression import DistillationLoss, Teacher, init_compression
from mpispeed.nn.compression import compression_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import peers

from tests.helpers.entailment import WORDS, Pairs, make_pairs
from tests.helpers.paper_compression import EXTREME, MIXED, TECHNIQUES, section_of

BATCH, HELD_OUT = 64, 6000
HEADS = 4
GROUPS = 16  # scales of a weight of 64 x 64, so many weights have one as BERT's of 768 x 768 in 64 groups have rows
FULL = "full"
LAYERS = "layers, 2 of 4 kept"
KEPT_LAYERS = [1, 3]
REDUCTION = {
    "enabled": True, "keep_number_layer": 2, "module_name_prefix": "bert.encoder.layer", "teacher_layer": KEPT_LAYERS,
    "other_module_name": ["bert.pooler", "bert.embeddings", "classifier"],
}  # fmt: skip
LONGER = 3  # times as many steps for fewer layers; the scripts have 18 epochs instead of 2
NAMES = (FULL, *TECHNIQUES, *MIXED, LAYERS, *EXTREME)


def bert(layers: int = 4) -> nn.Module:
    """With random weights."""
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=64, num_hidden_layers=layers, num_attention_heads=HEADS,
        intermediate_size=256, max_position_embeddings=16, num_labels=3, initializer_range=0.05,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
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


def train(model: nn.Module, config: dict[str, Any], examples: Pairs, teacher: nn.Module | None = None) -> None:
    """One pass over the examples, in place; with a teacher its outputs are learned, else the labels."""
    lesson = Teacher(teacher) if teacher is not None else None
    distance = DistillationLoss(logits=1.0, hidden=1.0, attention=1.0, teacher_layers=KEPT_LAYERS)
    more = {"output_hidden_states": True, "output_attentions": True} if lesson else {}
    engine, *_ = mpispeed.initialize(model=model, config=config)
    engine.train()
    for batch in examples.batches(BATCH):
        found = engine(**batch, **more)
        loss = found.loss if lesson is None else distance(found, lesson(**batch, **more), batch["attention_mask"])
        engine.backward(loss)
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
    teacher, model, steps = None, bert(len(KEPT_LAYERS) if name == LAYERS else 4), options.more_steps
    if name == LAYERS:
        teacher, steps = bert(), LONGER * options.more_steps
    (teacher or model).load_state_dict(weights)
    config = settings(steps, options.more_rate)
    if name == LAYERS:
        config["compression_training"] = {"layer_reduction": REDUCTION}
    elif name != FULL:
        config["compression_training"] = section_of(name, steps, HEADS, GROUPS)
    if name in MIXED:
        config["bf16"] = {"enabled": True}
    init_compression(model, config, teacher_model=teacher)
    held_out = make_pairs(HELD_OUT, 1, held_out=True)
    at_once = copy.deepcopy(model)
    if name not in (FULL, LAYERS):
        compression_of(at_once).set_step(steps)
    began = time.process_time()
    train(model, config, make_pairs(steps * BATCH, 1000 + seed), teacher)
    seconds = time.process_time() - began
    found = {"accuracy": accuracy(model, held_out), "at_once": accuracy(at_once, held_out)}
    return {"seed": seed, **found, "cpu_seconds": round(seconds, 1)}


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
            for key in ("accuracy", "at_once"):
                found[key] = statistics.mean(run[key] for run in found["runs"])
            found["difference"] = statistics.mean(differences)
            line = f"{name:42s} {found['accuracy']:6.2f} %  {found['difference']:+.2f}"
            print(f"{line}   without training on {found['at_once']:.2f} %", flush=True)


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
