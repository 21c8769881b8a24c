"""The example of inference, started as its first lines say."""

import re
from pathlib import Path

from tests.helpers import prompts

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "answer.py"


def test_two_ranks_answer_as_the_model_alone(job, tmp_path):
    generator = prompts.generator()
    generator.model.save_pretrained(tmp_path)
    generator.tokenizer.save_pretrained(tmp_path)
    words = ["w5 w9 w11", "w7 w8"]
    alone = generator(words, max_new_tokens=5, do_sample=False, return_full_text=False)
    asked = [word for prompt in words for word in ("--prompt", prompt)]
    done = job(2, EXAMPLE, tmp_path, *asked, "--tokens", 5, "--dtype", "fp32", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    expected = [f"{prompt} -> {answer['generated_text']}" for prompt, [answer] in zip(words, alone, strict=True)]
    assert lines[:2] == expected, done.stdout
    assert re.fullmatch(r"10 passes of [\d.]+ ms on 2 ranks", lines[2])
