"""The batch-size triangle: batch = micro-batch x accumulation steps x data-parallel ranks. Pure integers."""

from __future__ import annotations

from mpispeed.base.errors import ConfigError

TRAIN_BATCH = "train_batch_size"
MICRO_BATCH = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


def resolve_batch(tb: int | None, mb: int | None, gas: int | None, world: int) -> tuple[int, int, int]:
    """Complete and check the three batch sizes for `world` data-parallel ranks.

    Args:
        tb: `train_batch_size`, samples of one optimizer step over all ranks, or None.
        mb: `train_micro_batch_size_per_gpu`, samples of one forward pass of one rank, or None.
        gas: `gradient_accumulation_steps`, forward passes per optimizer step, or None.
        world: data-parallel ranks.

    Returns:
        The three numbers, with tb == mb * gas * world.

    Raises:
        ConfigError: the given numbers are too few, not positive, or do not multiply.
    """
    if world < 1:
        msg = f"the number of data-parallel ranks must be at least 1, found {world}"
        raise ConfigError(msg)
    for key, value in ((TRAIN_BATCH, tb), (MICRO_BATCH, mb), (ACCUMULATION, gas)):
        if value is not None and value < 1:
            msg = f"{key}: must be at least 1, found {value}"
            raise ConfigError(msg)
    given = [f"{k} {v}" for k, v in ((TRAIN_BATCH, tb), (MICRO_BATCH, mb), (ACCUMULATION, gas)) if v is not None]
    full = _complete(tb, mb, gas, world)
    if full[0] != full[1] * full[2] * world or min(full) < 1:
        raise ConfigError(_explain_mismatch(given, full, world))
    return full


def require_slots(tb: int | None, mb: int | None, world: int) -> None:
    """Check batch sizes for `reduction` "invariant", whose micro-batches do not depend on the data-parallel ranks.

    Raises:
        ConfigError: one of both is missing, they do not divide, or the ranks do not divide the micro-batches.
    """
    if tb is None or mb is None:
        msg = (
            f'reduction "invariant" needs {TRAIN_BATCH} and {MICRO_BATCH}, because the micro-batches of a step may not '
            f"depend on the ranks; found {TRAIN_BATCH} {_text(tb)} and {MICRO_BATCH} {_text(mb)}; set both to numbers"
        )
        raise ConfigError(msg)
    if mb < 1 or tb < 1 or tb % mb:
        msg = f'reduction "invariant": {TRAIN_BATCH} {tb} is no multiple of {MICRO_BATCH} {mb}; change one of them'
        raise ConfigError(msg)
    require_dividing_ranks(tb // mb, world, f"{TRAIN_BATCH} {tb} / {MICRO_BATCH} {mb}")


def require_dividing_ranks(count: int, ranks: int, origin: str) -> None:
    """Check that data-parallel ranks divide the micro-batches of a step, for `reduction` "invariant".

    Args:
        count: micro-batches of a step.
        ranks: data-parallel ranks.
        origin: where the count comes from, for the message.

    Raises:
        ConfigError: they do not.
    """
    if count % ranks:
        fitting = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        msg = (
            f'reduction "invariant": {ranks} data-parallel ranks do not divide the {count} micro-batches of a step '
            f"({origin}); start {fitting} of them, or change the batch sizes (which makes another run)"
        )
        raise ConfigError(msg)


def _text(size: int | None) -> str:
    return "null" if size is None else str(size)


def _complete(tb: int | None, mb: int | None, gas: int | None, world: int) -> tuple[int, int, int]:
    """Fill in missing sizes by floor division; the result may not multiply."""
    if tb is not None:
        if mb is not None:
            return tb, mb, tb // mb // world if gas is None else gas
        if gas is not None:
            return tb, tb // world // gas, gas
        return tb, tb // world, 1
    if mb is not None:
        steps = 1 if gas is None else gas
        return mb * steps * world, mb, steps
    found = f"found only {ACCUMULATION} {gas}" if gas is not None else "found neither"
    msg = f"{TRAIN_BATCH} or {MICRO_BATCH} is required, {found}; set {MICRO_BATCH} to the samples per forward pass"
    raise ConfigError(msg)


def _explain_mismatch(given: list[str], full: tuple[int, int, int], world: int) -> str:
    """The sentence for sizes that do not multiply, with sizes that would."""
    tb, mb, gas = full
    ranks = f"{world} data-parallel rank{'s' if world > 1 else ''}"
    unit = mb * gas * world
    if len(given) < 3:  # the third number follows, so any multiple of the given ones will do
        unit = world * (mb if MICRO_BATCH in given[-1] else gas if ACCUMULATION in given[-1] else 1)
        near = [n for n in (tb // unit * unit, (tb // unit + 1) * unit) if n > 0]
    else:
        near = [unit]
    return (
        f"{', '.join(given)}: {TRAIN_BATCH} must equal {MICRO_BATCH} * {ACCUMULATION} * ranks, "
        f"but {tb} is not {mb} * {gas} * {world} = {mb * gas * world} on {ranks}; "
        f"set {TRAIN_BATCH} to {' or '.join(str(n) for n in near)}, or leave one of the three keys out"
    )
