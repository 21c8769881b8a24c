"""The example that profiles a model."""

import importlib
from pathlib import Path

LINES = 60


def test_it_reports_a_model_and_a_step(capsys):
    example = importlib.import_module("profile_flops")
    example.alone()
    out = capsys.readouterr().out
    assert "Detailed Profile" in out and "(attention): Attention(" in out
    assert out.splitlines()[-1].endswith("132.35 K parameters")
    example.train()
    out = capsys.readouterr().out
    assert out.count("Profile Summary at step 3:") == 1 and "model flops utilisation (MFU):" in out


def test_it_is_short():
    assert len(Path(importlib.import_module("profile_flops").__file__).read_text().splitlines()) <= LINES
