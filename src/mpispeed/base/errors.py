"""Typed errors. A message names the fault, the value, its source, and the cure."""

from __future__ import annotations


class MpispeedError(Exception):
    """Base of all errors this library raises on purpose.

    `is_collective` is True when every rank raises the same error from equal data, so that the
    process may leave quietly (one message, exit code 2). When it is False the other ranks know
    nothing of the failure and the job has to be aborted.

    `is_echo` is True where another rank raises the failure itself; if nobody catches either, that one is shown.
    """

    is_collective = False
    is_echo = False


class ConfigError(MpispeedError, ValueError, AssertionError):
    """The user's settings cannot hold. Also an AssertionError, because DeepSpeed scripts catch that."""

    is_collective = True


class UnknownOption(ConfigError, TypeError):
    """A parameter that the chosen optimizer or schedule does not take; as from its constructor, a TypeError."""


class UnsupportedOption(ConfigError, RuntimeError):
    """A parameter DeepSpeed knows but refuses at this value. Also the RuntimeError it raises."""


class UnimplementedOption(ConfigError, NotImplementedError):
    """A combination that DeepSpeed knows and does not offer. Also the NotImplementedError it raises."""


class UsageError(MpispeedError, RuntimeError, AssertionError):
    """The API was called in an order or with arguments that cannot work."""


class DataEnded(UsageError, StopIteration):
    """The iterator of a pipeline's data ended. Inside of a generator Python makes a plain RuntimeError of it."""


class UnimplementedUse(UsageError, NotImplementedError):
    """A value that a method does not offer. Also the NotImplementedError that DeepSpeed raises."""


class UnfitValue(UsageError, ValueError):
    """A value, or a size of a tensor, that a method cannot take. Also the ValueError that DeepSpeed raises."""


class ScheduleError(UsageError):
    """A pipeline schedule does not hold; the message names stage, step and instruction.

    Every rank plays the instructions of all stages, so all find the same.
    """

    is_collective = True


class TopologyError(ConfigError):
    """Axis sizes and the number of ranks do not fit."""


class UnknownAxis(TopologyError, AttributeError):
    """A coordinate on an axis that does not exist. Also the AttributeError DeepSpeed raises."""


class StageError(TopologyError, RuntimeError):
    """Layers, stages and the number of ranks do not fit. Also the RuntimeError DeepSpeed raises."""


class CommError(MpispeedError, RuntimeError):
    """A communication verb was called with buffers, counts or peers that do not fit."""


class MessageError(CommError):
    """A layer returned something that cannot be sent to the next stage. Nothing was sent of it."""


class AgreementError(CommError):
    """Raised on every rank of a group because at least one of them reported a failure."""

    is_collective = True


class DataError(MpispeedError, RuntimeError):
    """Samples of a data set could not be read, or made into a batch."""


class StoreError(MpispeedError, RuntimeError):
    """A layout, partition, placement or buffer is used against its contract."""


class PrecisionError(MpispeedError, RuntimeError):
    """Training in 16 bits cannot go on: the loss scale cannot be lowered further."""

    is_collective = True


class CheckpointError(MpispeedError, RuntimeError):
    """A checkpoint cannot be written, found, trusted or matched."""


class ZeRORuntimeException(CheckpointError):
    """Stored optimizer states do not fit the optimizer that is to take them. The name is DeepSpeed's."""


class NativeMissing(MpispeedError, ImportError):
    """Compiled code that is needed is not there; the message gives the reason."""


class PipelineError(UsageError):
    """A call that is not possible for a pipeline, which runs whole batches; or a batch that failed on another rank."""


class ElasticityError(ConfigError):
    """Batch sizes for changing numbers of ranks cannot be found."""


class ElasticityConfigError(ElasticityError):
    """The section `elasticity` is missing, off, incomplete or wrong."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The number of ranks is none that the section `elasticity` allows."""


class StagingError(MpispeedError, RuntimeError):
    """An environment cannot be packed, or unpacked on a node, or its folder is not to be trusted."""
