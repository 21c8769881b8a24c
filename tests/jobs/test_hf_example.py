"""The example of Hugging Face's Trainer, started as its first lines say."""

import re
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "hf_trainer.py"


def test_the_example_learns_and_saves_its_model(job, tmp_path):
    done = job(2, "--as-deepspeed", EXAMPLE, "--steps", 20, "--out", tmp_path / "model", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", done.stdout)]
    assert len(losses) == 2, done.stdout  # of two ranks one writes
    assert losses[1] < losses[0] < 5.6  # that of a byte at random: ln 256
    assert re.search(r"batch +32 = 16 x 1 x 2$", done.stderr, re.MULTILINE), done.stderr
    assert re.search(r"stage +3$", done.stderr, re.MULTILINE), done.stderr
    assert (tmp_path / "model" / "model.safetensors").stat().st_size > 400_000
