set -euo pipefail
# A signal before the ranks are there is for nobody; without a trap it would end this shell.
trap : USR1
cd $work_folder
# Scripts of a site's modules read variables that are not set.
set +u
$setup
set -u

# What belongs to this run goes here: logs of ranks, reports, state.json. The next job of a chain finds it again.
export MPISPEED_RUN_DIR=$run_folder"$${task_folder:-}"
mkdir -p "$$MPISPEED_RUN_DIR"
if [ -e "$$MPISPEED_RUN_DIR/STOP" ]; then
    echo "$$MPISPEED_RUN_DIR/STOP is there: nothing is started; remove that file to go on" >&2
    exit 0
fi
# SLURM's own copy goes with the job; a follow-up is submitted from this one, and goes on with one task of an array.
export MPISPEED_JOB_SCRIPT="$$MPISPEED_RUN_DIR/job.sbatch"
sed "s/^#SBATCH --array=.*/#SBATCH --array=$${SLURM_ARRAY_TASK_ID:-}/" "$$0" >"$$MPISPEED_JOB_SCRIPT.$$SLURM_JOB_ID"
mv "$$MPISPEED_JOB_SCRIPT.$$SLURM_JOB_ID" "$$MPISPEED_JOB_SCRIPT"
touch "$$MPISPEED_RUN_DIR/started"

export OMP_NUM_THREADS="$${SLURM_CPUS_PER_TASK:-1}"
export PYTHONUNBUFFERED=1

# srun does not inherit --cpus-per-task since SLURM 22.05, and without --ntasks-per-node it may fill the first node.
# What is exported above has to reach the ranks also where jobs are submitted with --export=NONE.
srun_flags=(--mpi=$mpi_plugin --export=ALL --kill-on-bad-exit=1 --nodes="$$SLURM_JOB_NUM_NODES" --ntasks-per-node=$ranks_per_node
    --cpus-per-task="$${SLURM_CPUS_PER_TASK:-1}"$srun_flags)

# USR1 comes before the time limit (--signal=B:), and srun passes it to all ranks. TERM comes with scancel and preemption:
# SLURM sends it to the ranks too, and those that save at USR1 get that one besides. This shell has to outlive both.
srun_pid="" signalled=""
# shellcheck disable=SC2317
pass_on() { [ -z "$$srun_pid" ] || kill -USR1 "$$srun_pid" 2>/dev/null || :; }
trap 'signalled=1; pass_on' USR1
trap 'signalled=1; $forward' TERM
$environment
