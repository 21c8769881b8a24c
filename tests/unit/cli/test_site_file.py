"""The site file in commands: variables of ranks, the profile of batch jobs, what explain and the doctor show."""

import json

import pytest
from click.testing import CliRunner

from mpispeed.cli.doctor import _count_defaults
from mpispeed.cli.main import cli, main
from mpispeed.launch.findings import Verdict
from mpispeed.launch.probes_site import check_site
from mpispeed.launch.sites import chosen_site

TEXT = """
locked = ["gradient_clipping"]
profile = "{profile}"
[config]
gradient_clipping = 1.0
[environment]
SITE_WORD = "it's $HOME"
SITE_SET = "site"
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder with a site file, a profile, a script and a config; the user has set one of the variables."""
    tmp_path.chmod(0o700)
    profile = tmp_path / "here.toml"
    profile.write_text('partition = "of-site"\ncores_per_node = 8\ntime = "10"\n')
    path = tmp_path / "site.toml"
    path.write_text(TEXT.format(profile=profile))
    path.chmod(0o644)
    (tmp_path / "train.py").touch()
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "SITE_WORD", "MPISPEED_SITE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MPISPEED_SITE_FILE", str(path))
    monkeypatch.setenv("SITE_SET", "user")
    monkeypatch.chdir(tmp_path)
    return path


def shown(*words):
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_run_and_env_give_variables_to_ranks(site):
    assert "SITE_WORD='it'\"'\"'s $HOME'" in shown("run", "--dry-run", "train.py")
    assert "SITE_SET" not in shown("run", "--dry-run", "train.py")
    exported = shown("env")
    assert "export SITE_WORD=" in exported
    assert "SITE_SET" not in exported


def test_files_of_users_go_before_the_site(site):
    (site.parent / ".mpispeed_env").write_text("SITE_WORD=mine\n")
    assert "SITE_WORD=mine" in shown("run", "--dry-run", "train.py")


def test_batch_jobs_have_its_profile_and_its_variables(site):
    for command, queue in (("sbatch", "#SBATCH --partition=of-site"), ("qsub", "#PBS -q of-site")):
        script = shown(command, "--dry-run", "train.py")
        assert queue in script
        assert "export SITE_WORD=${SITE_WORD-'it'\"'\"'s $HOME'}\n" in script
    own = site.parent / "own.toml"
    own.write_text('partition = "own"\n')
    assert chosen_site(str(own)).partition == "own"
    assert "SITE_WORD" in chosen_site(str(own)).shell_lines[0]


def test_a_locked_setting_is_no_job(site, capsys):
    (site.parent / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 2}')
    for words in (["sbatch", "--dry-run", "--config", "ds.json", "train.py"], ["config", "check", "ds.json"]):
        with pytest.raises(SystemExit) as leaving:
            main(words)
        assert leaving.value.code == 2
        assert f"gradient_clipping: is locked at 1.0 by {site} of " in capsys.readouterr().err


def test_explain_names_the_file(site):
    rows = json.loads(shown("config", "explain", "-n", "1", "--json", "ds.json"))
    assert {"path": "gradient_clipping", "value": 1.0, "origin": f"site file {site}"} in rows


def test_the_doctor_looks_at_it(site):
    environ = {"MPISPEED_SITE_FILE": str(site), "SITE_SET": "user"}
    found = {finding.name: finding for finding in check_site(environ, _count_defaults)}
    assert found["site file"].verdict is Verdict.OK
    assert found["defaults"].detail.startswith("1;")
    assert found["locked"].detail == "gradient_clipping"
    assert found["environment"].detail == "SITE_SET, SITE_WORD; set otherwise here: SITE_SET"
    site.write_text("[config]\ntrain_batch_size = 4\n")
    assert [f.verdict for f in check_site(environ, _count_defaults)] == [Verdict.OK, Verdict.FAIL]
    site.chmod(0o666)
    assert [f.verdict for f in check_site(environ, _count_defaults)] == [Verdict.FAIL]
