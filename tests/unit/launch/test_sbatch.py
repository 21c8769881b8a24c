"""Batch scripts and profiles of sites without a SLURM: what is filled in, what is refused, and with which words."""

import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.base import assets
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.launch import sbatch, submit
from mpispeed.launch.mpirun import Family, Mpirun
from mpispeed.launch.sbatch import Request, choose_template, fill, values_of
from mpispeed.launch.sites import Limits, Site, find_site, seconds_of
from mpispeed.launch.submit import Partition

SHIPPED = sorted((assets.folder("slurm") / "sites").glob("*.toml"))


def request(**changes):
    asked = {"words": ["train.py"], "run_folder": Path("/run"), "work_folder": Path("/work"), "time": "30"}
    return Request(**{**asked, "cores_per_rank": 2, **changes})


def script(site=None, known=None, **changes):
    asked = request(**changes)
    return fill(choose_template(asked), values_of(asked, site or Site(mpi_plugin="pmi2"), known or Partition()))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_profiles_can_be_used_and_what_they_suggest_too(path, tmp_path):
    site = find_site(path.stem, {})
    assert site.description
    assert f"--mpi={site.mpi_plugin}" in script(site, Partition(cores_per_node=64), cores_per_rank=None)
    whole = tmp_path / "whole.toml"
    whole.write_text(re.sub(r"(?m)^# (?=\w+ = |\[)", "", path.read_text()))
    assert find_site(str(whole)).account == "my-project"


def test_profile_of_the_user_goes_before_the_shipped_one(tmp_path):
    own = tmp_path / "mpispeed" / "sites"
    own.mkdir(parents=True)
    (own / "gpu.toml").write_text('partition = "mine"\nmax_time = "2:00:00"\n[partitions.debug]\nmax_time = "10"\n')
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    site = find_site("gpu", environ)
    assert site.partition == "mine"
    assert site.limits("debug") == Limits("10", None)
    assert site.limits("mine") == Limits("2:00:00", None)
    named = tmp_path / "named"
    named.mkdir()
    (named / "gpu.toml").write_text('partition = "named"\n')
    assert find_site("gpu", {**environ, "MPISPEED_SITES": str(named)}).partition == "named"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('partiton = "x"', "'partiton' is nothing a site profile says; did you mean partition?"),
        ("gpus_per_node = true", "gpus_per_node is True; expected a whole number"),
        ("ranks_per_node = -1", "ranks_per_node is -1; expected a whole number"),
        ('modules = "gcc"', "modules is 'gcc'; expected a list of texts"),
        ('max_time = "a day"', "max_time: expected seconds, or a time"),
        ('memory_per_node = "much"', "memory_per_node: expected a number"),
        ("[partitions.debug]\nmax = 1", "partitions.debug is {'max': 1}; expected a table with max_time and max_nodes"),
        ("partition = ", "cannot be read: "),
        ("modules = " + "[" * 10_000, "cannot be read: "),
    ],
)
def test_profile_with_a_mistake_is_refused(text, message, tmp_path):
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises((ConfigError, UsageError)) as caught:
        find_site(str(tmp_path / "site.toml"))
    assert message in str(caught.value)
    assert "site.toml" in str(caught.value)


def test_unknown_profile_names_the_known_ones():
    with pytest.raises(UsageError, match=r"no site profile 'here'; known are cray, gpu, mpich, openmpi"):
        find_site("here", {"XDG_CONFIG_HOME": "/nowhere"})


def test_plain_number_is_minutes():
    assert [seconds_of(text) for text in ("90", "1:30", "2:00:00", "1-12")] == [5400, 90, 7200, 129600]


@pytest.mark.parametrize(
    ("changes", "template"),
    [
        ({}, "single"), ({"nodes": 2}, "multi"), ({"array": "0-3"}, "array"), ({"image": "x.sif"}, "container"),
        ({"requeues": True, "nodes": 2}, "requeue"), ({"template": "mine.sbatch", "array": "1"}, "mine.sbatch"),
    ],
)  # fmt: skip
def test_template_is_chosen_by_what_is_asked_for(changes, template):
    assert choose_template(request(**changes)) == template


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"template": "single", "nodes": 2}, "single runs on one node, not on 2; ask for multi"),
        ({"template": "array"}, "--array 0-9"),
        ({"template": "multi", "array": "1"}, "multi takes no --array"),
        ({"template": "container"}, "--image FILE.sif"),
        ({"template": "single", "image": "x"}, "single takes no --image"),
        ({"template": "singular"}, "no batch template 'singular'"),
        ({"time": ""}, "give --time"),
        ({"time": "long"}, "--time is 'long'"),
        ({"cores_per_rank": None}, "give --cpus-per-task"),
        ({"job_name": "my job"}, "the name of the job is 'my job'"),
        ({"array": "0..9"}, "--array is '0..9'"),
        ({"run_folder": Path("/my run")}, "SLURM takes no spaces"),
    ],
)
def test_request_with_a_mistake_is_refused(changes, message):
    with pytest.raises((ConfigError, UsageError)) as caught:
        script(**changes)
    assert message in str(caught.value)


def test_limits_of_profile_and_slurm_are_kept():
    site = Site(name="here.toml", mpi_plugin="pmi2", max_time="1:00:00", partitions={"debug": Limits("10", 1)})
    assert "#SBATCH --time=60" in script(site, time="60")
    for asked, known, words in (
        ({"time": "61"}, Partition(), "--time 61 is more than 1:00:00, which is what here.toml says"),
        ({"time": "11", "partition": "debug"}, Partition(), "--time 11 is more than 10, which is what here.toml says"),
        (
            {"nodes": 2, "partition": "debug", "time": "5"},
            Partition(),
            "--nodes 2 is more than the 1 that here.toml says",
        ),
        ({"time": "40"}, Partition("main", "30:00"), "--time 40 is more than 30:00, which is what SLURM says"),
        ({"nodes": 5}, Partition("main", None, 4), "--nodes 5 is more than the 4 that SLURM says main may have"),
    ):
        with pytest.raises(ConfigError) as caught:
            script(site, known, **asked)
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match="9 ranks on a node of 8 cores"):
        script(known=Partition(cores_per_node=8), cores_per_rank=None, ranks_per_node=9)


def test_flags_of_request_and_site_stand_in_the_script():
    site = Site(
        mpi_plugin="pmix", account="project", partition="slow", sbatch_flags=("--constraint=gpu",), gpus_per_node=4,
        ranks_per_node=4, srun_flags=("--label",), modules=("gcc", "openmpi"), setup=("export A=1",),
    )  # fmt: skip
    lines = script(site, Partition(cores_per_node=64), cores_per_rank=None, partition="fast", memory_bytes=3 << 30)
    lines = lines.splitlines()
    for line in (
        "#SBATCH --partition=fast", "#SBATCH --account=project", "#SBATCH --gpus-per-node=4", "#SBATCH --mem=3072M",
        "#SBATCH --constraint=gpu", "#SBATCH --cpus-per-task=16", "#SBATCH --ntasks-per-node=4",
        "#SBATCH --signal=B:USR1@120", "#SBATCH --open-mode=append", "#SBATCH --requeue",
        "module load gcc", "module load openmpi", "export A=1",
    ):  # fmt: skip
        assert line in lines
    assert not [line for line in lines if "gpus-per-task" in line]
    assert "#SBATCH --signal" not in script(signal_seconds=0)
    assert "trap 'signalled=1; :' TERM" in lines
    assert "trap 'signalled=1; pass_on' TERM" in script(saves_at_signal=True)


def test_signal_leaves_short_jobs_time_to_train():
    assert [sbatch.signal_seconds(time) for time in ("2", "10", "12", "1-0", "soon")] == [0, 90, 120, 120, 120]


@given(
    words=st.lists(
        st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"]), max_size=20), max_size=4
    )
)
def test_any_words_survive(words, tmp_path_factory):
    """What the shell makes of the line with the arguments is what was given."""
    text = script(words=["train.py", *words])
    line = text[text.index("ranks=(") :].split("\nsrun ")[0]
    done = subprocess.run(["bash", "-c", f'{line}\nprintf "%s\\0" "${{ranks[@]}}"'], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[3:-1] == ["train.py", *words]


def test_own_template_with_unknown_names_is_refused(tmp_path):
    own = tmp_path / "own.sbatch"
    own.write_text(
        "#!/bin/bash\n#SBATCH --time=$time_limit --comment=$colour\n$prepare\nranks=($python $arguments)\n$start\n"
    )
    values = values_of(request(), Site(mpi_plugin="pmi2"), Partition())
    with pytest.raises(UsageError, match=r"has \$colour; known are arguments, array"):
        fill(str(own), values)
    own.write_text("#!/bin/bash\necho $5\n")
    with pytest.raises(UsageError, match=r"write \$\$ for a dollar sign"):
        fill(str(own), values)


def test_broken_scripts_are_found():
    found = submit.check_script("#!/bin/bash\n#SBATCH --output=$HOME/log\nif true\n").problems
    assert any("SLURM replaces no variables" in problem for problem in found)
    assert any(problem.startswith("bash -n: ") for problem in found)
    assert submit.check_script("echo\n").problems[0].startswith("its first line is no #!")
    assert not submit.check_script("#!/bin/bash\n#SBATCH --output=%x-%j.log\necho\n").problems


def test_plugin_follows_the_mpi_that_is_there(monkeypatch):
    monkeypatch.delenv("MPI4PY_MPIABI", raising=False)
    for family, plugin in ((Family.OPEN_MPI, "pmix"), (Family.MPICH, "pmi2"), (Family.INTEL, "pmi2")):
        monkeypatch.setattr(sbatch, "find_mpirun", lambda found=family: Mpirun(Path("mpirun"), found))
        assert sbatch.default_plugin() == plugin
    monkeypatch.setenv("MPI4PY_MPIABI", "openmpi")
    assert sbatch.default_plugin() == "pmix"
