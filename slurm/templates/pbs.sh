#!/bin/bash
# A job of PBS, on one node or several: `mpispeed run` starts the ranks on the hosts of its node file.
#PBS -N $job_name
#PBS -l select=$select
#PBS -l place=$place
#PBS -l walltime=$time_limit
#PBS -j oe
#PBS -o $log_folder/
$directives

set -euo pipefail
# The limit counts from here, for ranks that cannot ask PBS.
MPISPEED_JOB_END="$$(( $$(date +%s) + $limit_seconds ))"
export MPISPEED_JOB_END
cd $work_folder
# Scripts of a site's modules read variables that are not set.
set +u
$setup
set -u

# What belongs to this run goes here: logs of ranks, reports, state.json.
export MPISPEED_RUN_DIR=$run_folder
mkdir -p "$$MPISPEED_RUN_DIR"
if [ -e "$$MPISPEED_RUN_DIR/STOP" ]; then
    echo "$$MPISPEED_RUN_DIR/STOP is there: nothing is started; remove that file to go on" >&2
    exit 0
fi
# PBS's own copy goes with the job; the next one is submitted from this one.
job_script="$$MPISPEED_RUN_DIR/job.pbs"
cp "$$0" "$$job_script.$$PBS_JOBID"
mv "$$job_script.$$PBS_JOBID" "$$job_script"
touch "$$MPISPEED_RUN_DIR/started"

export OMP_NUM_THREADS=$cores_per_rank
export PYTHONUNBUFFERED=1

code=0
$python -m mpispeed run --launcher pbs $run_flags -n $ranks $arguments || code=$$?
$again
exit "$$code"
