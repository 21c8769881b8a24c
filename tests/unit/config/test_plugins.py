"""Pydantic looks for plugins for models of an application, not for those of settings."""

import os
import subprocess
import sys

from mpispeed.config.plugins import VARIABLE, without_plugins

SCRIPT = """
import importlib.metadata, sys
scans = []
found = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **words: scans.append(words) or found(**words)
import mpispeed.config
mpispeed.config.load({"train_batch_size": 8})
print(len(scans))
import pydantic
class Own(pydantic.BaseModel):
    x: int
print(scans)
"""


def test_settings_read_no_entry_points_and_later_models_have_their_plugins():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["0", "[{'group': 'pydantic'}]"]


def test_a_setting_of_the_user_stays(monkeypatch):
    monkeypatch.setenv(VARIABLE, "one-plugin")
    with without_plugins():
        pass
    assert os.environ[VARIABLE] == "one-plugin"
