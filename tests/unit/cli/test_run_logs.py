"""The folder of a run: what `mpispeed run` does with it before and after the job."""

import pytest

from mpispeed.cli import run
from mpispeed.cli.main import main
from mpispeed.logs import merge


def test_a_folder_of_the_run_that_cannot_be_is_refused(tmp_path, capsys):
    (tmp_path / "train.py").touch()
    with pytest.raises(SystemExit) as leaving:
        main(["run", "-n", "1", "--run-dir", str(tmp_path / "train.py/logs"), str(tmp_path / "train.py")])
    assert leaving.value.code == 2
    said = capsys.readouterr().err
    assert "the folder of the run cannot be made" in said
    assert "--run-dir" in said


def test_logs_are_merged_at_the_end_unless_they_are_large_or_somebody_is_in_a_hurry(tmp_path, capsys, monkeypatch):
    logs = tmp_path / "my logs"
    logs.mkdir()
    (logs / "rank-0.log").write_text("2026-03-01 10:00:00.000000 o hello\n")
    run._merge_logs(str(logs))
    assert (logs / "merged.log").read_text() == "2026-03-01 10:00:00.000000 [0] hello\n"
    (logs / "merged.log").unlink()
    with monkeypatch.context() as smaller:
        smaller.setattr(run, "MERGE_BYTES", 10)
        run._merge_logs(str(logs))
    assert f"have 35 B; merge them with `mpispeed logs merge '{logs}'`" in capsys.readouterr().err

    def interrupted(logs):
        raise KeyboardInterrupt

    monkeypatch.setattr(merge, "merged_lines", interrupted)
    run._merge_logs(str(logs))
    assert "are not merged; merge them with" in capsys.readouterr().err
    assert [path.name for path in logs.iterdir()] == ["rank-0.log"]
