"""Dtypes in which masters and optimizer states rest, as the config asks for them, and the rules that can have them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mpispeed.base.errors import ConfigError
from mpispeed.config.dtypes import AMP_KEY, amp_masters, master_dtype, optimizer_dtypes
from mpispeed.store.state_code import StateCode, StateCodes

if TYPE_CHECKING:
    from mpispeed.config.root import Config


def codes_of(config: Config) -> StateCodes:
    """Codes of the states of fp32 units."""
    master, rounding = master_dtype(config), config.data_types.master_rounding
    words = optimizer_dtypes(config)
    return StateCodes(
        master=None if master == "fp32" else StateCode(master, rounding, seed=config.seed),
        words=tuple(sorted(words.items())) if isinstance(words, dict) else (),
        word=words if isinstance(words, str) else "fp32",
        seed=config.seed,
    )


def describe_codes(config: Config) -> str:
    """Dtypes of masters and optimizer states at rest, in words."""
    codes = codes_of(config)
    rounding = "" if codes.master is None or codes.master.rounding == "nearest" else f" ({codes.master.rounding})"
    master = "fp32" if codes.master is None else codes.master.word
    states = ", ".join(f"{slot} {word}" for slot, word in codes.words) or codes.word
    return f"masters {master}{rounding}, optimizer states {states}"


def require_codes(config: Config, name: str, slots: Iterable[str], *, takes_any_cut: bool) -> None:
    """Require that an optimizer can have its states in the dtypes of the config.

    Args:
        config: the settings.
        name: of the optimizer.
        slots: names of its states in the engine's stores.
        takes_any_cut: it is an own one whose states are updated element by element.

    Raises:
        ConfigError: it updates whole tensors, keeps states of its own or exchanges them; or has no such state.
    """
    codes, slots = codes_of(config), tuple(slots)
    if codes.is_plain:
        return
    if not takes_any_cut:
        msg = (
            f"optimizer {name} cannot have masters or states in other dtypes than fp32, as "
            f"{_asked(config)} asks: it looks at whole tensors, keeps states of its own or exchanges them; use Adam, "
            'AdamW, Adagrad, Lion, Muon or SGD by name, or fp32 (data_types.master_dtype "fp32" for masters)'
        )
        raise ConfigError(msg)
    unknown = [slot for slot, _ in codes.words if slot not in slots]
    if unknown:
        msg = (
            f"data_types.optimizer_states names {unknown[0]!r}, and optimizer {name} has "
            f"{', '.join(map(repr, slots)) or 'no states'}; name these, or give one word for all"
        )
        raise ConfigError(msg)


def _asked(config: Config) -> str:
    """The key that asks for other dtypes."""
    types = config.data_types
    asked = {
        "data_types.master_dtype": types.master_dtype not in (None, "fp32"),
        "data_types.optimizer_states": types.optimizer_states is not None,
        "fp16.fp16_master_weights_and_grads": config.fp16.fp16_master_weights_and_grads,
        "bf16.bf16_master_weights_and_grads": config.bf16.bf16_master_weights_and_grads,
        AMP_KEY: bool(amp_masters(config)),
    }
    return next(path for path, is_asked in asked.items() if is_asked)
