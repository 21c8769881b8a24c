"""The model of a job of generation: its folder, its tokenizer, and the engine that answers with it."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mpispeed.base.errors import UsageError
from mpispeed.base.plain import printable
from mpispeed.engine.distributed import join_world
from mpispeed.plan.device import choose_device

if TYPE_CHECKING:
    from mpispeed.mesh import Comm

T = TypeVar("T")

MOST_POSITIONS = 1 << 20
"""Of models whose config names no limit."""

MOST_LAYERS = 4096
"""They are built before any weight is read, so a file must not ask for any number of them."""

_OF_LAYERS = {
    "replace_with_kernel_inject", "kernel_inject", "injection_policy", "injection_dict", "injection_policy_tuple",
    "zero",
}  # fmt: skip
"""Settings of `init_inference` that say what becomes of layers, or do not go with fused ones."""

_PIECES, _PIECE_BYTES = 16, 4096
"""Of each large file of a model the digest takes so many pieces."""

_WHOLE_BYTES = 1 << 20
"""Files up to this size are taken as a whole."""


@dataclass(frozen=True)
class Described:
    """Everything that is known of a model without its weights.

    Attributes:
        folder: of the model's config and tokenizer.
        weights: folder or file that its weights are in.
        config: of transformers.
        tokenizer: of transformers; None: the folder has none.
        most_positions: tokens of a prompt and its answer at most; None: the config names no limit.
        vocabulary: tokens that the model knows.
        ends: ids of end tokens.
        pad: id of what fills batches up; the model does not look at it.
        digest: of names, sizes and samples of all files.
    """

    folder: Path
    weights: Path
    config: Any
    tokenizer: Any
    most_positions: int | None
    vocabulary: int | None
    ends: frozenset[int]
    pad: int
    digest: str

    def decode(self, tokens: Any) -> str:
        """The text of tokens, without special ones; "" without a tokenizer."""
        if self.tokenizer is None:
            return ""
        text: str = self.tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)
        return text


@dataclass(frozen=True)
class Opened:
    """A model that can answer.

    Attributes:
        engine: called as the model.
        tensor: ranks that share its layers, neighbours on a node.
    """

    engine: Any
    tensor: Comm


def describe_model(model: Path, config_folder: Path | None = None) -> Described:
    """Read config and tokenizer of a folder that `save_pretrained` has written. Nothing is downloaded, no code is run.

    Args:
        model: the folder; with `config_folder` anything that `init_inference` takes as a checkpoint.
        config_folder: has config and tokenizer, if `model` has not.

    Raises:
        UsageError: there is no such folder, or it has no model that continues texts.
    """
    if config_folder is not None and not model.exists():
        msg = f"--model is {str(model)!r}, and there is no such checkpoint"
        raise UsageError(msg)
    folder = config_folder or model
    if config_folder is not None and not folder.is_dir():
        msg = f"--model-config is {str(folder)!r}, and there is no such folder; give that of config.json and tokenizer"
        raise UsageError(msg)
    if not folder.is_dir():
        msg = f"--model is {str(folder)!r}, and there is no such folder; models are not downloaded: give the folder "
        msg += "of one that was saved by save_pretrained, or copied from the hub"
        raise UsageError(msg)
    if not (folder / "config.json").is_file():
        option = "--model" if config_folder is None else "--model-config"
        msg = f"{option} is {str(folder)!r}, which has no config.json: expected the folder of a model of transformers"
        if config_folder is None:
            msg += "; of a checkpoint, give a folder with config.json as --model-config"
        raise UsageError(msg)
    _require_transformers()
    from transformers import AutoConfig

    config = _read(lambda: AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False), folder)
    if getattr(config, "is_encoder_decoder", False):
        msg = f"{folder} has a {config.model_type} model, with an encoder; only models that continue texts can be used"
        raise UsageError(msg)
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > MOST_LAYERS:
        msg = f"config.json in {folder} speaks of {layers} layers; models with up to {MOST_LAYERS} are built"
        raise UsageError(msg)
    kernels = next((named for named in map(_attention_of, (config, text)) if "/" in named), "")
    if kernels:
        msg = (
            f"config.json in {folder} asks for attention by {printable(kernels, 80)}, code that transformers would get "
        )
        msg += "from the hub; take the entry attn_implementation out of it"
        raise UsageError(msg)
    tokenizer = _tokenizer(folder)
    ends = _ends(folder, text, tokenizer)
    pad = getattr(tokenizer, "pad_token_id", None)
    return Described(
        folder=folder,
        weights=model,
        config=config,
        tokenizer=tokenizer,
        most_positions=getattr(text, "max_position_embeddings", None),
        vocabulary=getattr(text, "vocab_size", None),
        ends=ends,
        pad=int(pad) if pad is not None else min(ends, default=0),
        digest=digest_of(*dict.fromkeys((folder, model))),
    )


def _require_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        msg = "mpispeed generate reads models and tokenizers by the package transformers, which is not installed here: "
        msg += "pip install transformers"
        raise UsageError(msg)


def _attention_of(config: Any) -> str:
    return str(getattr(config, "_attn_implementation", None) or "")


def _read(read: Callable[[], T], folder: Path) -> T:
    """What transformers reads from a folder.

    Raises:
        UsageError: it cannot; the hub's own text would speak of downloads.
    """
    try:
        return read()
    except Exception as failure:  # of any kind: transformers passes on those of parsers
        text = str(failure).strip() or type(failure).__name__
        if "trust_remote_code" in text:
            text = "it needs Python code of its own, which is not run (trust_remote_code stays off)"
        msg = f"the model in {folder} cannot be used: {printable(text, 400)}"
        raise UsageError(msg) from failure


def _tokenizer(folder: Path) -> Any:
    if not any((folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json", "vocab.json")):
        return None
    from transformers import AutoTokenizer

    return _read(lambda: AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False), folder)


def _ends(folder: Path, config: Any, tokenizer: Any) -> frozenset[int]:
    """Ids of end tokens: of the folder's config of generation, else of the config, else of the tokenizer."""
    found: Any = None
    path = folder / "generation_config.json"
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as failure:
            msg = f"{path} cannot be read: {failure}"
            raise UsageError(msg) from failure
    for holder in (config, tokenizer):
        found = getattr(holder, "eos_token_id", None) if found is None else found
    ids = found if isinstance(found, (list, tuple)) else [] if found is None else [found]
    return frozenset(int(each) for each in ids)


def digest_of(*places: Path) -> str:
    """A digest of a model's files, in folders or by themselves: names, sizes, small ones whole, samples of large ones.

    Two models that differ in a few weights only may have the same one.

    Raises:
        UsageError: a file cannot be read.
    """
    hashed = blake2b(digest_size=32)
    try:
        for path, name in (found for place in places for found in _files_of(place)):
            size = path.stat().st_size
            hashed.update(f"{name}\0{size}\0".encode())
            step = max(1, (size - _PIECE_BYTES) // _PIECES)
            with path.open("rb") as file:
                if size <= _WHOLE_BYTES:
                    hashed.update(file.read())
                else:
                    for place in range(0, size, step):
                        hashed.update(os.pread(file.fileno(), _PIECE_BYTES, place))
    except OSError as failure:
        msg = f"the model in {places[-1]} cannot be read: {failure}"
        raise UsageError(msg) from failure
    return f"blake2b:{hashed.hexdigest()}"


def _files_of(place: Path) -> list[tuple[Path, str]]:
    """Files of a folder, or a file by itself, with names that do not depend on where it lies."""
    if not place.is_dir():
        return [(place, place.name)]
    return [(path, str(path.relative_to(place))) for path in sorted(place.rglob("*")) if path.is_file()]


def open_model(described: Described, *, dtype: str | None, tensor: int, settings: Mapping[str, Any]) -> Opened:
    """Make the engine: the model without values, its layers sliced, its weights read straight into the slices.

    On CPUs known layers are fused, unless the settings speak of it.

    Args:
        described: the model.
        dtype: of the weights; None: as its config says.
        tensor: ranks that share each layer.
        settings: of `mpispeed.init_inference`.

    Collective over: all ranks.

    Raises:
        MpispeedError: on every rank, if a setting or the model does not fit.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    from mpispeed.inference.api import init_inference
    from mpispeed.inference.fused import has_known_layer

    asked = {
        "dtype": dtype or str(getattr(described.config, "dtype", None) or "float32").removeprefix("torch."),
        "tensor_parallel": {"tp_size": tensor},
        "max_out_tokens": described.most_positions or MOST_POSITIONS,
        "checkpoint": str(described.weights),
    }
    given = {"tensor_parallel": {"tp", "mp_size"}, "max_out_tokens": {"max_tokens"}}
    asked = {name: value for name, value in asked.items() if not {name, *given.get(name, ())} & settings.keys()}
    world = join_world()
    with world.comm.together(UsageError), torch.device("meta"):
        module = _read(
            lambda: AutoModelForCausalLM.from_config(described.config, trust_remote_code=False), described.folder
        )
        # Options of generation are those of the job, and nothing comes out of the model's folder besides.
        module.generation_config = GenerationConfig()
    if not _OF_LAYERS & settings.keys() and choose_device(world, module).type == "cpu":
        asked["replace_with_kernel_inject"] = has_known_layer(module)
    engine = init_inference(module, dict(settings), **asked)
    if engine.runs_in_step and engine.mesh["model"].size != world.size:
        msg = (
            "with these settings (streamed parameters, or experts on other ranks) all ranks run the model together; "
            "groups could not take batches as they come: use --tensor"
        )
        raise UsageError(msg)
    return Opened(engine, engine.mesh["model"])
