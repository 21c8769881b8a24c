# A run that was interrupted goes on in the same job; one that has failed or finished does not. Asked for from here and
# not by the ranks, which it would kill, and which may be in a container without scontrol.
state="$$MPISPEED_RUN_DIR/state.json"
if [ "$$state" -nt "$$MPISPEED_RUN_DIR/started" ] && grep -q '"state": *"interrupted"' "$$state" &&
    ! grep -q '"next_job": *"[^"]' "$$state"; then
    # One that is cancelled is completing by now, and nobody wants it to go on.
    if [ "$$(squeue --noheader --jobs="$$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
        echo "the run was interrupted: job $$SLURM_JOB_ID is requeued"
        scontrol requeue "$$SLURM_JOB_ID"
    else
        echo "the run was interrupted, but SLURM does not say that job $$SLURM_JOB_ID is running: it is not requeued" >&2
        echo "to go on: sbatch $$MPISPEED_JOB_SCRIPT" >&2
    fi
fi
