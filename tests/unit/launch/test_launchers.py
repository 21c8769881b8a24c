"""Command lines for several hosts, by launcher; what ranks are bound to; which variables reach them."""

import os
from pathlib import Path

import pytest

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.launch import bind, command, env, plan_launch
from mpispeed.launch.hosts import Host
from mpispeed.launch.mpirun import Family, Mpirun
from mpispeed.launch.mpirun_words import device_variables, launcher_variables, mpirun_argv
from mpispeed.launch.options import Binding, Wishes, parse_binding, parse_core_list
from mpispeed.launch.srun import srun_argv

EQUAL = (Host("a", (0, 1)), Host("b", (0, 1)))
UNEQUAL = (Host("a", (0, 1)), Host("b", (0,)))
DIFFERING = (Host("a", (2, 3)), Host("b", (0,)))
AGENT = ("rsh", "-p", "7")


def words(family, wishes, ranks, version=5, cores=8):
    mpirun = Mpirun(Path("/x/mpirun"), family, version)
    argv = mpirun_argv(mpirun, ranks, ["p", "q"], cores=cores, is_root=False, wishes=wishes, exported=("V",))
    return " ".join(argv).removeprefix("/x/mpirun ")


@pytest.mark.parametrize(
    ("family", "hosts", "line"),
    [
        (Family.MPICH, EQUAL, "-genvall -hosts a,b -ppn 2 -n 4 p q"),
        (Family.MPICH, UNEQUAL, "-genvall -hosts a:2,b:1 -n 3 p q"),
        (
            Family.MPICH,
            DIFFERING,
            "-genvall -hosts a:2,b:1 -n 2 -env CUDA_VISIBLE_DEVICES 2,3 p q : -n 1 -env CUDA_VISIBLE_DEVICES 0 p q",
        ),
        (Family.INTEL, EQUAL, "-genvall -hosts a,b -ppn 2 -n 4 p q"),
        (Family.INTEL, UNEQUAL, "-genvall -host a -n 2 p q : -host b -n 1 p q"),
        (
            Family.INTEL,
            DIFFERING,
            "-genvall -host a -n 2 -env CUDA_VISIBLE_DEVICES 2,3 p q : -host b -n 1 -env CUDA_VISIBLE_DEVICES 0 p q",
        ),
        (Family.OPEN_MPI, EQUAL, "--map-by slot --bind-to none -x V --host a:2,b:2 -n 4 p q"),
        (Family.OPEN_MPI, UNEQUAL, "--map-by slot --bind-to none -x V --host a:2,b:1 -n 3 p q"),
        (
            Family.OPEN_MPI,
            DIFFERING,
            "--map-by slot --bind-to none -x V --host a:2 -n 2 -x CUDA_VISIBLE_DEVICES=2,3 p q"
            " : -x V --host b:1 -n 1 -x CUDA_VISIBLE_DEVICES=0 p q",
        ),
    ],
)
def test_hosts(family, hosts, line):
    assert words(family, Wishes(hosts=hosts), sum(len(host.slots) for host in hosts)) == line


@pytest.mark.parametrize(
    ("family", "version", "line"),
    [
        (Family.MPICH, 5, "-launcher ssh -launcher-exec rsh -genvall"),
        (Family.INTEL, 2021, "-bootstrap ssh -bootstrap-exec rsh -bootstrap-exec-args -p 7 -genvall"),
        (Family.OPEN_MPI, 4, "--mca plm_rsh_agent rsh -p 7 "),
        (Family.OPEN_MPI, 5, "--prtemca plm_ssh_agent rsh -p 7 "),
    ],
)
def test_the_command_that_reaches_a_host(family, version, line):
    wishes = Wishes(hosts=EQUAL, agent=AGENT)
    assert words(family, wishes, 4, version).startswith(line)
    variables = launcher_variables(Mpirun(Path("/x/mpirun"), family, version), wishes, {})
    assert variables.get("HYDRA_LAUNCHER_EXTRA_ARGS") == ("-p 7" if family is Family.MPICH else None)


@pytest.mark.parametrize(
    ("family", "binding", "line", "variables"),
    [
        (Family.MPICH, "cores", "-bind-to core:4 -n 2 p q", {}),
        (Family.MPICH, "cores:3", "-bind-to core:3 -n 2 p q", {}),
        (Family.MPICH, "none", "-bind-to none -n 2 p q", {}),
        (Family.MPICH, "mpi", "-n 2 p q", {}),
        (Family.OPEN_MPI, "cores", "--map-by slot:PE=4 --bind-to core -n 2 p q", {}),
        (Family.OPEN_MPI, "none", "--bind-to none -n 2 p q", {}),
        (Family.OPEN_MPI, "mpi", "--bind-to none -n 2 p q", {}),
        (Family.INTEL, "cores", "-n 2 p q", {"I_MPI_PIN": "on", "I_MPI_PIN_DOMAIN": "auto"}),
        (Family.INTEL, "cores:3", "-n 2 p q", {"I_MPI_PIN": "on", "I_MPI_PIN_DOMAIN": "3:compact"}),
        (Family.INTEL, "none", "-n 2 p q", {"I_MPI_PIN": "off"}),
        (Family.INTEL, "mpi", "-n 2 p q", {}),
    ],
)
def test_binding(monkeypatch, family, binding, line, variables):
    monkeypatch.setattr(env, "physical_cores", lambda: 8)
    wishes = Wishes(binding=parse_binding(binding))
    assert words(family, wishes, 2) == line
    found = launcher_variables(Mpirun(Path("/x/mpirun"), family, 5), wishes, {})
    found.pop("PATH", None)
    assert found == variables


def test_a_binding_by_the_user_is_left_alone():
    assert words(Family.OPEN_MPI, Wishes(extra=("--bind-to", "socket")), 2) == "--bind-to socket -n 2 p q"


def test_more_ranks_than_cores_cannot_be_bound(monkeypatch):
    monkeypatch.setattr(env, "physical_cores", lambda: 2)
    with pytest.raises(ConfigError, match="3 ranks of a node cannot have a core each of the 2 here"):
        words(Family.MPICH, Wishes(binding=parse_binding("cores")), 3)


def test_an_unknown_mpi_starts_ranks_here_only():
    assert words(Family.OTHER, Wishes(), 2) == "-n 2 p q"
    with pytest.raises(UsageError, match="not known here"):
        words(Family.OTHER, Wishes(hosts=EQUAL), 4)


@pytest.mark.parametrize("text", ["", "core", "cores:", "cores:0", "all"])
def test_wrong_bindings_are_refused(text):
    with pytest.raises(ConfigError, match="--bind is"):
        parse_binding(text)


def test_lists_of_cores():
    assert parse_core_list("0,2-4,6") == (0, 2, 3, 4, 6)
    assert Binding(cores=(0, 2, 3, 4, 6)).parts(2) == ((0, 2), (3, 4))
    for text in ("", "1,0", "3-2", "0,0", "0-3,2", "a", "1-", "-1", "1,,2"):
        with pytest.raises(ValueError, match="--bind_core_list"):
            parse_core_list(text)
    with pytest.raises(ConfigError, match="3 ranks of a node cannot share the 2 cores"):
        Binding(cores=(0, 1)).parts(3)


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, (0, 1)),
        ({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (1, 2)),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "SLURM_LOCALID": "0"}, (3, 4)),
        ({"SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2),2"}, (1, 2)),
        ({"SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"}, (1, 2)),
    ],
)
def test_a_rank_finds_its_place_on_the_node(environ, place):
    assert bind.local_place(environ) == place


def test_a_rank_sees_the_chosen_devices_and_a_core_that_is_not_there_is_named():
    for node, devices in (("n1", "2,3"), ("n2", "0"), ("n3", "7")):
        environ = {bind.DEVICES: "n1=2,3;n2=0", "CUDA_VISIBLE_DEVICES": "7", "SLURMD_NODENAME": node}
        bind.bind_rank(environ)
        assert environ["CUDA_VISIBLE_DEVICES"] == devices
    with pytest.raises(ConfigError, match=r"cannot be bound to the cores 1000 .*it may run on "):
        bind.bind_rank({bind.CORES: "1000"})


SLURM = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "a,b"}


@pytest.mark.parametrize(
    ("hosts", "line"),
    [
        (EQUAL, "--nodelist=a,b --nodes=2 --ntasks-per-node=2 --ntasks=4"),
        (UNEQUAL, "--nodelist=a,a,b --nodes=2 --distribution=arbitrary --ntasks=3"),
        ((Host("b", (2,)),), "--nodelist=b --nodes=1 --ntasks-per-node=1 --ntasks=1"),
    ],
)
def test_srun_on_chosen_hosts(hosts, line):
    ranks = sum(len(host.slots) for host in hosts)
    argv = srun_argv(ranks, ["p"], Family.MPICH, SLURM, Wishes(hosts=hosts))
    assert " ".join(argv) == f"srun --kill-on-bad-exit=1 --export=ALL --mpi=pmi2 {line} p"


def test_srun_binds_and_takes_more_words():
    for binding, flag in (("cores", "--cpu-bind=cores"), ("none", "--cpu-bind=none"), ("cores:2", "--cpus-per-task=2")):
        wishes = Wishes(binding=parse_binding(binding), extra=("--label",))
        argv = srun_argv(4, ["p"], None, {**SLURM, "SLURM_CPUS_PER_TASK": "3"}, wishes)
        assert flag in argv
        assert "--label" in argv
    assert not [word for word in srun_argv(4, ["p"], None, SLURM, Wishes()) if "bind" in word]
    own = srun_argv(4, ["p"], None, SLURM, Wishes(extra=("--export=HOME,PATH",)))
    assert [word for word in own if "export" in word] == ["--export=HOME,PATH"]


def test_devices_that_are_the_same_everywhere_are_one_variable():
    assert device_variables((Host("a", (1,)), Host("b", (1,)))) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert device_variables(DIFFERING) == device_variables(EQUAL) == {}


def fake(folder, name, text):
    (folder / name).write_text(f"#!/bin/sh\necho '{text}'\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A PATH with an Open MPI and an srun, and a working folder without files of variables."""
    fake(tmp_path, "mpirun", "mpirun (Open MPI) 4.1.4")
    fake(tmp_path, "srun", "slurm 22")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return {"PATH": str(tmp_path), "HOME": str(tmp_path / "home")}


def test_the_launcher_can_be_chosen(site, tmp_path):
    assert plan_launch(["p"], mpi="site", environ={**site, **SLURM}).argv[0] == "srun"
    wishes = Wishes(hosts=EQUAL, launcher="mpirun")
    launch = plan_launch(["p"], mpi="site", environ={**site, **SLURM}, wishes=wishes)
    assert launch.argv[0] == str(tmp_path / "mpirun")
    assert plan_launch(["p"], 3, mpi="site", environ=site, wishes=Wishes(launcher="srun")).argv[-2:] == (
        "--ntasks=3",
        "p",
    )
    (tmp_path / "srun").unlink()
    with pytest.raises(UsageError, match="no srun on PATH"):
        plan_launch(["p"], environ=site, wishes=Wishes(launcher="srun"))
    with pytest.raises(ConfigError, match="not 'pdsh'"):
        plan_launch(["p"], environ=site, wishes=Wishes(launcher="pdsh"))


def test_srun_leaves_devices_to_the_runner(site):
    wishes = Wishes(hosts=DIFFERING)
    assert plan_launch(["p"], mpi="site", environ={**site, **SLURM}, wishes=wishes).added[bind.DEVICES] == "a=2,3;b=0"
    assert (
        bind.DEVICES not in plan_launch(["p"], mpi="site", environ={**site, **SLURM}, wishes=Wishes(hosts=EQUAL)).added
    )
    with pytest.raises(ConfigError, match="not with --no_python"):
        plan_launch(["p"], mpi="site", environ={**site, **SLURM}, wishes=Wishes(hosts=DIFFERING, has_runner=False))


def test_what_other_hosts_get(site):
    environ = {**site, "NCCL_DEBUG": "INFO", "PYTHONHASHSEED": "0", "SECRET": "x", "MPISPEED_WALLTIME": "60"}
    wishes = Wishes(hosts=EQUAL, variables={"MPISPEED_INJECT": "stall"})
    launch = plan_launch(["p"], mpi="site", environ=environ, wishes=wishes)
    named = [word for before, word in zip(launch.argv, launch.argv[1:], strict=False) if before == "-x"]
    assert {"NCCL_DEBUG", "PYTHONHASHSEED", "MPISPEED_WALLTIME", "MPISPEED_INJECT", "PATH"} <= set(named)
    assert not {"SECRET", "HOME"} & set(named)
    assert not [word for word in named if "=" in word]  # values would be there for everybody to see
    assert launch.added["MPISPEED_INJECT"] == "stall"
    assert "OMP_NUM_THREADS" not in launch.added  # nobody knows the cores of other hosts


def test_a_host_file_that_names_this_machine_needs_no_ssh(site, monkeypatch):
    monkeypatch.setattr(env, "usable_cores", lambda: 2)
    launch = plan_launch(["p"], mpi="site", environ=site, wishes=Wishes(hosts=(Host("localhost", (2, 3)),)))
    assert launch.argv[-3:] == ("-n", "2", "p")
    assert "--host" not in launch.argv
    assert launch.added["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert launch.added["OMP_NUM_THREADS"] == "1"


def test_listed_cores_need_our_runner(site):
    wishes = Wishes(binding=parse_binding("mpi", "0,1"))
    assert plan_launch(["p"], mpi="site", environ=site, wishes=wishes).added[bind.CORES] == "0,1"
    with pytest.raises(ConfigError, match="not with --no_python"):
        plan_launch(["p"], mpi="site", environ=site, wishes=Wishes(binding=wishes.binding, has_runner=False))


def test_files_of_variables(site, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".deepspeed_env").write_text("# home\n\nA=1\nB=home = 2\n")
    (tmp_path / "work" / ".deepspeed_env").write_text('B="two words"\n')
    (tmp_path / "work" / ".mpispeed_env").write_text("C=\n")
    launch = plan_launch(["p"], mpi="site", environ=site)
    assert {name: launch.added[name] for name in "ABC"} == {"A": "1", "B": "two words", "C": ""}
    (tmp_path / "work" / "other").write_text("B=other\n")
    launch = plan_launch(["p"], mpi="site", environ={**site, "DS_ENV_FILE": "other"})
    assert launch.added["B"] == "other"
    assert "A" not in launch.added


@pytest.mark.parametrize("line", ["no equals", "=value", "1A=2", "A B=3"])
def test_wrong_lines_of_variables_are_refused(line):
    with pytest.raises(ConfigError, match=r"\.mpispeed_env, line 3: "):
        env.parse_variables(f"# x\nA=1\n{line}\n", ".mpispeed_env")


def test_hardware_threads_are_one_core(tmp_path):
    for cpu in os.sched_getaffinity(0):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text("0-99")
    assert env.physical_cores(tmp_path) == 1
    assert env.physical_cores(tmp_path / "no") == env.usable_cores() == command.env.usable_cores()
