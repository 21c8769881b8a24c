# A run that was interrupted goes on in the next job; one that has failed or finished does not.
state="$$MPISPEED_RUN_DIR/state.json"
if [ "$$state" -nt "$$MPISPEED_RUN_DIR/started" ] && grep -q '"state": *"interrupted"' "$$state"; then
    next=$$(qsub "$$job_script") && echo "the run was interrupted: it goes on in job $$next" ||
        echo "the run was interrupted, and no job can be submitted from here; to go on: qsub $$job_script" >&2
fi
