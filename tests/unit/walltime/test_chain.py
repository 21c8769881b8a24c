"""The job that follows: the call of sbatch, its environment, and when there is none. SLURM's commands are scripts here;
tests/slurm has the real ones.
"""

import json
import logging
import time

import pytest

from mpispeed.walltime import requeue
from mpispeed.walltime.handoff import Ending, Leaving
from mpispeed.walltime.requests import Asked
from mpispeed.walltime.requeue import Chain, ChainError, ends_by_itself, read_job

SHOWN = (
    "JobId=12 JobName=a run UserId=root(0) Account=(null) QOS=normal JobState=RUNNING Reason=None Dependency=(null) "
    "Requeue=1 TimeLimit=1-00:00:00 EndTime=2026-11-22T20:18:55 Partition=main NumNodes=2 NumCPUs=4 NumTasks=4 "
    "CPUs/Task=1 ReqB:S:C:T=0:0:*:* NtasksPerN:B:S:C=0:0:*:* MinCPUsNode=1 MinMemoryNode=0 Features=(null) "
    "Command=/w/job.sh one two WorkDir=/w StdErr=/w/logs/run-12.err StdIn=/dev/null "
    "StdOut=/w/12/run-12.out Power= \n"
)


@pytest.fixture(autouse=True)
def told(monkeypatch):
    monkeypatch.setattr(logging.getLogger("mpispeed"), "propagate", True)  # for caplog


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Commands that write down how they are called; `answers` is what they print, by name."""

    class Slurm:
        calls = property(lambda _: [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()])

        def answer(self, name, text, code=0, seconds=0):
            (tmp_path / f"{name}.out").write_text(text)
            file = tmp_path / "bin" / name
            file.write_text(
                f"#!/bin/sh\n"
                f'python3 -c "import json, sys, os; print(json.dumps([sys.argv[1:], dict(os.environ)]))" '
                f'{name} "$@" >> {tmp_path}/calls\n'
                f"cat {tmp_path}/{name}.out\n{f'exec sleep {seconds}' if seconds else ''}\nexit {code}\n"
            )
            file.chmod(0o755)

    (tmp_path / "bin").mkdir()
    (tmp_path / "calls").touch()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(requeue, "PAUSE_SECONDS", 0.0)
    found = Slurm()
    found.answer("scontrol", SHOWN)
    found.answer("sbatch", "13;cluster\n")
    return found


@pytest.fixture
def environ(tmp_path):
    script = tmp_path / "job.sbatch"
    script.write_text("#!/bin/bash\n")
    return {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "SLURM_JOB_ID": "12", "SLURM_NTASKS": "4", "SLURM_CONF": "/c",
        "PMI_RANK": "0", "RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "1", "CUDA_VISIBLE_DEVICES": "0",
        "MPISPEED_JOB_SCRIPT": str(script), "MPI4PY_MPIABI": "mpich", "MY_RANK_FILE": "x",
    }  # fmt: skip


def test_fields_of_a_job():
    facts = read_job(SHOWN)
    assert (facts["JobName"], facts["Command"], facts["CPUs/Task"]) == ("a run", "/w/job.sh one two", "1")
    assert not {"Account", "Reason", "Power"} & set(facts)
    assert read_job("") == {}
    shown = SHOWN.replace(
        "Command=/w/job.sh one two", "Command=/w/job.sh lr=0.1 x=2 SubmitLine=sbatch /w/job.sh lr=0.1"
    )
    assert read_job(shown)["Command"] == "/w/job.sh lr=0.1 x=2"


def test_what_the_job_was_given_on_the_command_line(slurm, environ, tmp_path):
    given = {
        "CPUs/Task": "8", "MinMemoryCPU": "2G", "Features": "a100&ib", "NtasksPerN:B:S:C": "4:0:*:1",
        "TresPerNode": "gres:gpu:a100:4,gres/nvme:1", "TresPerJob": "gres/gpu=8", "TresPerTask": "cpu=8,gres/gpu:1",
    }  # fmt: skip
    assert Chain(environ, tmp_path).command(given)[4:-1] == [
        "--constraint=a100&ib", "--mem-per-cpu=2G", "--cpus-per-task=8", "--ntasks-per-node=4",
        "--gres=gpu:a100:4,nvme:1", "--gpus=8", "--gpus-per-task=1",
    ]  # fmt: skip
    assert "--mem=90G" in Chain(environ, tmp_path).command({"MinMemoryNode": "90G"})
    users = {"OMPI_MCA_btl": "tcp,self", "OMPI_MCA_orte_hnp_uri": "x", "OMPI_COMM_WORLD_RANK": "0"}
    users |= {"MPISPEED_JOB_END": "1700000000"}  # of this job
    assert set(users) & set(Chain(environ | users, tmp_path).environment()) == {"OMPI_MCA_btl"}


def test_a_script_whose_path_has_spaces(slurm, environ, tmp_path):
    script = tmp_path / "my job.sh"
    script.touch()
    one = Chain(environ | {"MPISPEED_JOB_SCRIPT": str(script)}, tmp_path)
    assert one.command({"Command": f"{script} one two"})[-3:] == [str(script), "one", "two"]
    assert one.command({"Command": str(script)})[-1] == str(script)
    assert f"'{script}'" in one.by_hand({})


@pytest.mark.parametrize(
    ("facts", "follows"),
    [
        ({"JobState": "RUNNING"}, True), ({}, True), ({"JobState": "COMPLETING", "Reason": "TimeLimit"}, True),
        ({"JobState": "TIMEOUT"}, True), ({"JobState": "PREEMPTED"}, True), ({"JobState": "COMPLETING"}, False),
        ({"JobState": "CANCELLED"}, False), ({"JobState": "CANCELLED,COMPLETING"}, False),
        ({"JobState": "REQUEUED"}, False), ({"JobState": "SIGNALING"}, True), ({"JobState": "RUNNING,SIGNALING"}, True),
        ({"JobState": "CANCELLED,SIGNALING"}, False),
    ],
)  # fmt: skip
def test_who_cancels_a_job_wants_no_other_one(facts, follows):
    assert ends_by_itself(facts) is follows


def test_the_next_job_is_asked_for_like_this_one(slurm, environ, tmp_path):
    assert Chain(environ, tmp_path).submit(read_job(SHOWN)) == "13"
    words, given = slurm.calls[-1]
    assert words == [
        "sbatch", "--parsable", "--dependency=afterany:12", "--open-mode=append", "--job-name=a run",
        "--partition=main", "--qos=normal", "--time=1-00:00:00", "--nodes=2", "--ntasks=4", "--chdir=/w",
        "--output=/w/12/run-%j.out", "--error=/w/logs/run-%j.err", environ["MPISPEED_JOB_SCRIPT"], "one", "two",
    ]  # fmt: skip
    gone = {"SLURM_JOB_ID", "SLURM_NTASKS", "PMI_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"}
    assert not gone & set(given)
    assert (given["SLURM_CONF"], given["MPI4PY_MPIABI"], given["MY_RANK_FILE"]) == ("/c", "mpich", "x")
    assert given["MPISPEED_CHAIN_LINK"] == "1"


def test_a_task_of_an_array_is_followed_by_the_same_task(slurm, environ, tmp_path):
    array = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "15"}
    Chain(environ | array, tmp_path).submit(read_job(SHOWN.replace("run-12.", "run-12_3.")))
    words = slurm.calls[-1][0]
    assert "--dependency=afterany:12_3" in words
    assert "--array=3" in words
    assert "--output=/w/12/run-%A_%a.out" in words


def test_the_script_that_slurm_has_kept(slurm, environ, tmp_path):
    del environ["MPISPEED_JOB_SCRIPT"]
    slurm.answer("scontrol", "#!/bin/bash\nsrun x\n")
    script = Chain(environ, tmp_path / "run").script()
    assert script == tmp_path / "run" / "job-12.sbatch"
    assert script.read_text() == "#!/bin/bash\nsrun x\n"
    assert slurm.calls[-1][0] == ["scontrol", "write", "batch_script", "12", "-"]
    slurm.answer("scontrol", "job script retrieval failed")
    with pytest.raises(ChainError, match="MPISPEED_JOB_SCRIPT"):
        Chain(environ, tmp_path / "run").script()


def test_a_script_that_is_gone(slurm, environ, tmp_path):
    with pytest.raises(ChainError, match="/gone"):
        Chain(environ | {"MPISPEED_JOB_SCRIPT": "/gone"}, tmp_path).submit({})


def test_a_refusal_is_told_with_what_to_do_by_hand(slurm, environ, tmp_path):
    slurm.answer("sbatch", "sbatch: error: invalid partition\n", 1)
    with pytest.raises(ChainError, match=r"invalid partition; submit it by hand: sbatch --parsable"):
        Chain(environ, tmp_path).submit({})
    assert len(submitted(slurm)) == requeue.ATTEMPTS


@pytest.mark.parametrize(
    ("waiting", "found"),
    [
        ("9|(null)|other\n13|afterany:11(unfulfilled),afterany:12(unfulfilled)|a run\n", "13"),
        (
            "13|afterany:123(unfulfilled)|a run\n14|afterany:12(unfulfilled)|figures\n15|afterok:12(unfulfilled)|a run",
            "",
        ),
    ],
)
def test_a_job_that_sbatch_may_have_submitted_is_looked_for_and_not_submitted_again(
    slurm, environ, tmp_path, monkeypatch, waiting, found
):
    monkeypatch.setattr(requeue, "SUBMIT_SECONDS", 3.0)
    slurm.answer("sbatch", "", seconds=30)
    slurm.answer("squeue", waiting)
    one, until = Chain(environ, tmp_path), time.monotonic() + (60 if found else 5.0)
    if found:
        assert one.submit(read_job(SHOWN), until) == found
    else:
        with pytest.raises(ChainError, match="sbatch did not answer within 3 s; if squeue shows no job"):
            one.submit(read_job(SHOWN), until)
        assert time.monotonic() < until + 20, "no command is waited for to its end"
    assert len(submitted(slurm)) == 1


def test_no_sbatch_at_all(environ, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    environ["PATH"] = str(tmp_path)
    monkeypatch.setattr(requeue, "PAUSE_SECONDS", 0.0)
    with pytest.raises(ChainError, match="in a container perhaps"):
        Chain(environ, tmp_path).submit({})


def test_silent_commands_cost_no_more_than_the_time_that_is_left(slurm, environ, tmp_path):
    slurm.answer("scontrol", "", seconds=30)
    begun = time.monotonic()
    assert requeue.describe_job("12", begun + 0.3) == {}
    with pytest.raises(ChainError, match=r"was not called.*submit it by hand"):
        Chain(environ, tmp_path).submit({}, begun + 0.3)
    assert time.monotonic() < begun + 20
    assert not submitted(slurm)


# -- what rank 0 leaves ------------------------------------------------------------------------------------------------


def leave(environ, folder, *, follows="dependency", first=0, step=9, asked=Asked.JOB_END, most=100):
    one = Leaving(environ, folder, follows=follows, most_links=most)
    one.begin(folder / "saves", first, "")
    one.leave(Ending(asked, "the job ends", "t9", step, 2.5, "SIGTERM"))
    return json.loads((folder / "state.json").read_text())


def submitted(slurm):
    return [words for words, _ in slurm.calls if words[0] == "sbatch"]


def test_an_interrupted_run_is_followed_by_one_job(slurm, environ, tmp_path):
    state = leave(environ, tmp_path)
    assert (state["state"], state["next_job"], state["tag"], state["step"]) == ("interrupted", "13", "t9", 9)
    assert (state["save_seconds"], state["job"]) == (2.5, "12")
    assert len(submitted(slurm)) == 1
    # The same job again, requeued by SLURM: job 13 waits for it already.
    slurm.answer("scontrol", SHOWN.replace("RUNNING", "PENDING"))
    assert leave(environ, tmp_path, first=9, step=12)["next_job"] == "13"
    assert len(submitted(slurm)) == 1
    # That job itself is followed by another one.
    slurm.answer("scontrol", SHOWN)
    slurm.answer("sbatch", "14\n")
    assert leave(environ | {"SLURM_JOB_ID": "13"}, tmp_path, first=12, step=15)["next_job"] == "14"


@pytest.mark.parametrize(("state", "waits"), [("PENDING", True), ("PENDING,REQUEUED", True), ("RUNNING", False)])
def test_a_job_waits_whatever_flags_it_has(slurm, state, waits):
    slurm.answer("scontrol", SHOWN.replace("RUNNING", state))
    assert requeue.is_waiting("12") is waits
    assert not requeue.is_waiting("")


def test_a_job_that_was_submitted_and_cancelled_is_waited_for_no_longer(slurm, environ, tmp_path):
    environ = environ | {"SLURM_JOB_ID": "12"}
    (tmp_path / "state.json").write_text('{"state": "interrupted", "job": "12", "next_job": "13"}')
    slurm.answer("scontrol", SHOWN.replace("RUNNING", "CANCELLED"))
    assert leave(environ, tmp_path, follows="requeue")["next_job"] == ""
    (tmp_path / "state.json").write_text('{"state": "interrupted", "job": "12", "next_job": "13"}')
    slurm.answer("sbatch", "14\n")
    assert leave(environ, tmp_path)["next_job"] == "14"


def test_without_an_answer_a_signal_is_followed_by_nothing_but_a_hint(slurm, environ, tmp_path, caplog):
    """The job may be cancelled."""
    slurm.answer("scontrol", "", 1)
    state = leave(environ, tmp_path, asked=Asked.SIGNAL)
    assert (state["state"], state["next_job"]) == ("interrupted", "")
    assert "to go on: sbatch --parsable --dependency=afterany:12" in caplog.text
    assert not submitted(slurm)
    assert leave(environ, tmp_path)["next_job"] == "13", "the end of the job is no cancellation"


def test_jobs_are_counted_where_the_environment_is_not_given_on(slurm, environ, tmp_path):
    assert leave(environ, tmp_path, most=2)["link"] == 0
    assert slurm.calls[-1][1]["MPISPEED_CHAIN_LINK"] == "1"
    slurm.answer("sbatch", "14\n")
    state = leave(environ | {"SLURM_JOB_ID": "13"}, tmp_path, first=9, step=12, most=2)
    assert (state["state"], state["link"], slurm.calls[-1][1]["MPISPEED_CHAIN_LINK"]) == ("interrupted", 1, "2")
    state = leave(environ | {"SLURM_JOB_ID": "14"}, tmp_path, first=12, step=15, most=2)
    assert (state["state"], state["link"]) == ("stopped", 2)
    assert leave(environ | {"SLURM_JOB_ID": "20"}, tmp_path, first=15, step=18, most=2)["link"] == 0, "a new chain"


def test_two_jobs_do_not_write_one_run(slurm, environ, tmp_path):
    first = Leaving(environ, tmp_path, follows="none", most_links=1)
    assert first.find_rival() == ""
    first.begin(tmp_path, 0, "")
    assert first.find_rival() == "", "its own"
    second = Leaving(environ | {"SLURM_JOB_ID": "13"}, tmp_path, follows="none", most_links=1)
    assert "job 12 is writing this run" in second.find_rival()
    for state in ("SIGNALING", "SUSPENDED", "RUNNING,SIGNALING"):
        slurm.answer("scontrol", SHOWN.replace("RUNNING", state))
        assert "job 12 is writing this run" in second.find_rival()
    slurm.answer("scontrol", SHOWN.replace("RUNNING", "FAILED"))
    assert second.find_rival() == "", "it died without a word"
    slurm.answer("scontrol", "", 1)
    assert second.find_rival() == "", "SLURM has forgotten it"


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"asked": Asked.STOP}, "STOP"), ({"follows": "none"}, "none"), ({"first": 9}, "made no step"),
        ({"most": 0}, "max_chain is 0"),
    ],
)  # fmt: skip
def test_a_run_that_is_not_followed(slurm, environ, tmp_path, caplog, how, why):
    with caplog.at_level(logging.INFO, logger="mpispeed.walltime.handoff"):
        state = leave(environ, tmp_path, **how)
    assert (state["state"], state["next_job"]) == ("stopped", "")
    assert why in state["reason"]
    assert "no job follows by itself" in caplog.text
    assert not submitted(slurm)


def test_a_cancelled_job_is_not_followed(slurm, environ, tmp_path):
    assert leave(environ, tmp_path / "a", asked=Asked.SIGNAL)["state"] == "interrupted"
    slurm.answer("scontrol", SHOWN.replace("RUNNING", "COMPLETING"))
    state = leave(environ, tmp_path / "b", asked=Asked.SIGNAL)
    assert state["state"] == "stopped"
    assert "SIGTERM came because the job is cancelled or requeued" in state["reason"]


@pytest.mark.parametrize("count", [{"MPISPEED_CHAIN_LINK": "3"}, {"SLURM_RESTART_COUNT": "3"}])
def test_chains_end(slurm, environ, tmp_path, count):
    assert leave(environ | count, tmp_path / "a", most=4)["state"] == "interrupted"
    state = leave(environ | count, tmp_path / "b", most=3)
    assert (state["state"], "3 jobs came before" in state["reason"]) == ("stopped", True)


def test_requeued_by_the_batch_script_and_outside_of_slurm_nothing_is_submitted(slurm, environ, tmp_path):
    assert leave(environ, tmp_path / "a", follows="requeue")["state"] == "interrupted"
    del environ["SLURM_JOB_ID"]
    assert leave(environ, tmp_path / "b")["state"] == "interrupted"
    assert not submitted(slurm)


def test_a_refused_job_and_a_full_disk_are_told_and_do_not_end_the_run(slurm, environ, tmp_path, caplog):
    slurm.answer("sbatch", "no\n", 1)
    assert leave(environ, tmp_path / "a")["next_job"] == ""
    assert "no job could be submitted" in caplog.text
    (tmp_path / "b").write_text("no folder")
    one = Leaving(environ, tmp_path / "b", follows="none", most_links=1)
    one.begin(tmp_path, 0, "")
    assert "could not be written" in caplog.text
