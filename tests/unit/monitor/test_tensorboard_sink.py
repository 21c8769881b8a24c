"""TensorBoard sink: what is written can be read back with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mpispeed.monitor.tensorboard_sink import TensorBoardSink


def test_scalars_can_be_read_back_before_and_after_closing(tmp_path: Path) -> None:
    sink = TensorBoardSink.from_section({"output_path": str(tmp_path), "job_name": "run"})
    sink.write("Train/Samples/lr", 0.5, 24)
    sink.flush()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("Train/Samples/lr")] == [(24, 0.5)]
    sink.write("Train/Samples/lr", 0.25, 48)
    sink.close()
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("Train/Samples/lr")] == [(24, 0.5), (48, 0.25)]
