"""Named events of a run and the bus that delivers them; features watch a run through these."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

log = logging.getLogger(__name__)

Listener = Callable[[Mapping[str, Any]], None]


class Event(enum.Enum):
    """Events that an engine announces. Payload keys are listed beside each event."""

    BATCH_START = "batch_start"  # micro_step, global_step, is_training
    # seconds: a number, or what becomes one by `float` where a device is timed, which may wait for it
    FORWARD_END = "forward_end"  # seconds
    BACKWARD_END = "backward_end"  # seconds
    # global_step, samples, loss (of rank 0; None if the script ran the backward passes), lr, norm, loss_scale, skipped,
    # seconds (since the last step ended), update_seconds (of reduce, clip, update and publish)
    # where a device does not tell yet, reading loss, norm, skipped or update_seconds waits for it
    STEP_END = "step_end"
    # the same, when all of it is known: after STEP_END, at the latest before the next update; for what records it
    STEP_KNOWN = "step_known"
    # global_step, samples, series (name -> seconds of rank 0 since the last step ended: forward, backward with the sums
    # of its gradients wherever they are waited for, backward_allreduce (those sums alone), backward_inner (backward
    # without them), step); announced on rank 0 after STEP_END, where wall_clock_breakdown is on
    TIMES = "times"
    # global_step, and since the last step ended: bytes_read, requests_read, bytes_written, requests_written of swap
    # files by this rank; announced on rank 0 where states are swapped
    SWAP = "swap"
    # global_step, samples, phase, series (name -> value: bytes sent, bytes saved against sums in fp32, norm of rank 0's
    # errors), of an exchange that compresses; announced on rank 0 after steps that were applied
    CODED = "coded"
    # global_step, samples, layers (name -> [2, experts]: choices of each expert by all ranks since the last step, and
    # those of them that were dropped); announced on rank 0 of models with layers of experts, for monitors and the log
    EXPERT_LOADS = "expert_loads"
    # spans (array of record.layout.SPAN: rank, lane, name, step, begin, end, bytes), names (texts of lanes and spans by
    # number): what all ranks did in the steps of the section `trace`; announced once, on rank 0
    SPANS = "spans"
    EVAL_END = "eval_end"  # global_step, samples, loss
    SAVE_END = "save_end"  # path, tag, seconds, stall_seconds (that training stood still), bytes; when it is complete
    LOAD_END = "load_end"  # path, tag, seconds
    CLOSE = "close"  # nothing


class Late(Mapping[str, Any]):
    """A payload of which some values are found out when somebody reads them."""

    def __init__(self, known: dict[str, Any], late: Mapping[str, Callable[[], Any]]) -> None:
        """Args: `late` are called once, each for its key."""
        self._known, self._late = known, dict(late)

    def __getitem__(self, key: str) -> Any:
        if key not in self._known and key in self._late:
            self._known[key] = self._late[key]()
        return self._known[key]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._known, **self._late})

    def __len__(self) -> int:
        return len({**self._known, **self._late})


class Bus:
    """Delivers events to listeners in the order in which they subscribed.

    Listeners only watch: what they return is ignored. An exception of a listener is logged once
    and the listener is dropped, because a broken plot must not end a training run.
    """

    def __init__(self) -> None:
        self._listeners: dict[Event, list[Listener]] = {}

    def subscribe(self, event: Event, listener: Listener) -> Callable[[], None]:
        """Call `listener(payload)` whenever `event` is announced, from now on; returns what ends that."""
        listeners = self._listeners.setdefault(event, [])
        listeners.append(listener)

        def end() -> None:
            if listener in listeners:  # one that failed is dropped already
                listeners.remove(listener)

        return end

    def has(self, event: Event) -> bool:
        """True if somebody listens; lets the caller skip building an expensive payload."""
        return bool(self._listeners.get(event))

    def announce(self, event: Event, **payload: Any) -> None:
        """Deliver `payload` to all listeners of `event`."""
        self.deliver(event, payload)

    def deliver(self, event: Event, payload: Mapping[str, Any]) -> None:
        """Deliver a payload as it is."""
        for listener in list(self._listeners.get(event, ())):
            try:
                listener(payload)
            except Exception:
                log.exception("a listener of %s failed and is dropped", event.value)
                if listener in self._listeners[event]:  # it may have ended its subscription before
                    self._listeners[event].remove(listener)
