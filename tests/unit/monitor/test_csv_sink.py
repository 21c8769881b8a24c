"""CSV sink: names, header, appending across restarts."""

from __future__ import annotations

from pathlib import Path

from mpispeed.monitor.csv_sink import CsvSink


def test_files_and_rows(tmp_path: Path) -> None:
    sink = CsvSink.from_section({"output_path": str(tmp_path / "out"), "job_name": "run"})
    sink.write("Train/Samples/train loss", 1.25, 0)
    sink.write("Train/Samples/train loss", 1 / 3, 24)
    sink.write("lr", 1e-3, 24)
    sink.flush()
    folder = tmp_path / "out" / "run"
    assert sorted(p.name for p in folder.iterdir()) == ["Train_Samples_train_loss.csv", "lr.csv"]
    text = (folder / "Train_Samples_train_loss.csv").read_text()
    assert text == f"step,train loss\n0,1.25\n24,{1 / 3!r}\n"
    sink.close()


def test_a_restart_appends_without_a_second_header(tmp_path: Path) -> None:
    for x in (1, 2):
        sink = CsvSink(tmp_path)
        sink.write("a/loss", 0.5, x)
        sink.close()
    assert (tmp_path / "a_loss.csv").read_text() == "step,loss\n1,0.5\n2,0.5\n"


def test_defaults_of_a_section(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CsvSink.from_section({"output_path": ""}).folder == Path("DeepSpeedJobName")
