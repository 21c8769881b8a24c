"""Kinds of altered settings, for `tests.helpers.fuzz`: what stands in them holds, or a run refuses them."""

import base64
import json
import math
from pathlib import Path

from mpispeed.base.errors import ConfigError
from mpispeed.config import load_for_run
from mpispeed.config.load import flatten
from mpispeed.config.text import decode
from tests.helpers import mutations
from tests.helpers.fuzz import Kind

SETTINGS = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": "1e3"}},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": "5e8",
        "stage3_param_persistence_threshold": 1e4,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    },
    "aio": {"block_size": 1048576, "thread_count": 2},
    "activation_checkpointing": {"partition_activations": True},
    "tensorboard": {"enabled": False, "output_path": "runs"},
    "csv_monitor": {"enabled": True, "job_name": "läuft"},
    "comet": {"enabled": False, "api_key": "kY7-distinctive-9Qz"},
    "walltime": {"save_dir": "out", "limit": "2:00:00"},
    "_comment": "anything",
}
STRANGE = (*mutations.STRANGE, "auto", "1e400", "5e8", "4GiB", 10**400, "NaN", ["AdamW"], 7, 1e9)


def make(folder):
    (folder / "ds.json").write_text(json.dumps(SETTINGS, indent=1))
    (folder / "base64").write_text(base64.urlsafe_b64encode(json.dumps(SETTINGS).encode()).decode())


def alter_file(pick, folder):
    path = folder / "ds.json"
    way = pick.random()
    if way < 0.15:
        altered, what = mutations.raw(pick, path.read_bytes())
        path.write_bytes(altered)
        return what
    if way < 0.35:
        altered, what = mutations.text(pick, path.read_text())
    else:
        content, what = mutations.tree(pick, json.loads(path.read_text()), STRANGE)
        if pick.random() < 0.4:
            content, more = mutations.tree(pick, content, STRANGE)
            what += f"; {more}"
        altered = json.dumps(content)
    path.write_text(altered, errors="surrogatepass")
    return what


def alter_base64(pick, folder):
    path = folder / "base64"
    if pick.random() < 0.4:
        altered, what = mutations.raw(pick, path.read_bytes())
        path.write_bytes(altered)
        return what
    altered, what = mutations.as_json(pick, json.dumps(SETTINGS))
    path.write_text(base64.urlsafe_b64encode(altered.encode(errors="surrogatepass")).decode())
    return what


def loaded(source):
    """The settings by path; a refusal of several lines as one, since lines are what a reader is to see."""
    try:
        found = load_for_run(source, ranks=4)
    except ConfigError as refusal:
        assert SETTINGS["comet"]["api_key"] not in str(refusal)
        raise ConfigError(" | ".join(str(refusal).split("\n"))[:2500]) from None
    text = json.dumps(found.config.resolved_dict())
    assert SETTINGS["comet"]["api_key"] not in text + "".join(found.warnings)
    return flatten(json.loads(text)), found.warnings


def wrong(_, folder, found, name="ds.json"):
    """A number or switch that stands in the file under a name of a setting is its value, but for those warned of."""
    values, warnings = found
    text = (folder / name).read_bytes()
    given, _ = decode((text if name == "ds.json" else base64.urlsafe_b64decode(text)).decode(), name)
    said = " ".join(warnings)
    for path, value in flatten(given).items():
        if path not in values or not isinstance(value, (bool, int, float)) or path in said:
            continue
        if values[path] != value and not (path == "steps_per_print" and value == math.inf):  # which means never
            return f"{path} is {values[path]!r:.80} instead of {value!r:.80}"
    return ""


KINDS = (
    Kind("config", make, alter_file, lambda folder: loaded(folder / "ds.json"), wrong, (ConfigError,)),
    Kind(
        "base64",
        make,
        alter_base64,
        lambda folder: loaded(Path(folder / "base64").read_text(errors="replace")),
        lambda right, folder, found: wrong(right, folder, found, "base64"),
        (ConfigError,),
    ),
)
