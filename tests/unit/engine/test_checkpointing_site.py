"""`checkpointing.configure` with a config: the site's section is under it, and what is locked stays."""

import json

import pytest

from mpispeed import checkpointing
from mpispeed.base.errors import ConfigError
from mpispeed.base.site_file import hold
from mpispeed.nn.activation_checkpointing import current, unconfigure
from tests.helpers.site_files import written_sites

TEXT = """
locked = ["activation_checkpointing.cpu_checkpointing", "activation_checkpointing.synchronize_checkpoint_boundary"]
[config]
gradient_clipping = 1.0
[config.activation_checkpointing]
profile = true
number_checkpoints = "4"
cpu_checkpointing = true
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A function that writes the file, and its path."""
    yield from written_sites(tmp_path, monkeypatch, TEXT)
    unconfigure()


def chosen():
    options = current().options
    return options.profile, options.number_checkpoints, options.cpu_checkpointing


def test_defaults_are_under_the_config_and_that_under_arguments(site, tmp_path):
    site()
    checkpointing.configure(None, {})
    assert chosen() == (True, 4, True)
    file = tmp_path / "ds.json"
    given = {"partition_activations": True, "profile": False, "number_checkpoints": "auto", "_why": "a comment"}
    file.write_text(json.dumps({"train_batch_size": 8, "activation_checkpointing": given}))
    for source in (file, str(file), json.loads(file.read_text())):
        checkpointing.configure(None, source, num_checkpoints=2, contiguous_checkpointing=True)
        assert chosen() == (False, 2, True)
        assert current().options.contiguous_memory_optimization
    assert given["number_checkpoints"] == "auto"


def test_without_a_config_nothing_is_read(site):
    site("[config\n")
    checkpointing.configure(None, profile=True)
    assert chosen() == (True, None, False)
    hold(None)
    with pytest.raises(ConfigError, match="is no TOML"):
        checkpointing.configure(None, {}, profile=False)
    assert chosen() == (True, None, False)


@pytest.mark.parametrize(
    ("given", "arguments", "told"),
    [
        ({"cpu_checkpointing": False}, {}, r"activation_checkpointing\.cpu_checkpointing: is locked at true by {} of"),
        ({}, {"checkpoint_in_cpu": False}, r"argument checkpoint_in_cpu: is locked at true by {} of"),
        ({"cpu_checkpointing": True}, {"synchronize": True}, "argument synchronize: is locked by {} of"),
    ],
)
def test_what_is_locked_is_refused(site, given, arguments, told):
    path = site()
    with pytest.raises(ConfigError, match=told.format(path)):
        checkpointing.configure(None, {"activation_checkpointing": given}, **arguments)


@pytest.mark.parametrize(
    ("line", "given", "told"),
    [
        ("contiguous_memory_optimization = true", {}, "only available with partitioned.*contiguous_memory_opt"),
        ("partition_activations = false", {"contiguous_memory_optimization": True}, "partition_activations: from the"),
        ("partition = true", {}, "unknown key.*partition: from the"),
        ("profile = 3", {}, "expected true or false, found 3.*profile: from the"),
    ],
)
def test_a_message_on_a_value_of_the_site_names_its_file(site, line, given, told):
    path = site(f"[config.activation_checkpointing]\n{line}\n")
    with pytest.raises(ConfigError, match=f"{told}.*site file {path}"):
        checkpointing.configure(None, {"activation_checkpointing": given})
