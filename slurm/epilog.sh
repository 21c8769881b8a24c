#!/bin/bash
# Epilog for SLURM, run by slurmd as root on each node when a job ends (Epilog= in slurm.conf): removes folders of
# `mpispeed run --stage-env` and `mpispeed sbatch --stage-env` that the job has left there, as after a kill -9.
#
# Only folders of this job and its user are looked at, by name and owner; links are never followed; those of other jobs
# stay, also of the same user. The user's own rights do the removing, so that whatever is put in the way can harm nobody
# else. MPISPEED_STAGE_PLACES names further places than /tmp and /dev/shm, separated by spaces.
#
# It always ends with 0: SLURM would drain the node otherwise.
set -u
export PATH=/usr/sbin:/usr/bin:/sbin:/bin # whatever has called it
job="${SLURM_JOB_ID:-}" user="${SLURM_JOB_UID:-}"
if ! [[ "$job" =~ ^[0-9]+$ && "$user" =~ ^[0-9]+$ ]]; then
    echo "epilog of mpispeed: SLURM_JOB_ID is '$job', SLURM_JOB_UID '$user'; nothing is removed" >&2
    exit 0
fi

as_user=()
if [ "$(id -u)" = 0 ] && [ "$user" != 0 ]; then
    if ! command -v setpriv >/dev/null; then
        echo "epilog of mpispeed: there is no setpriv (util-linux), and root removes no files of users" >&2
        exit 0
    fi
    group=$(getent passwd "$user" | cut -d: -f4)
    as_user=(setpriv --reuid="$user" --regid="${group:-65534}" --clear-groups --)
fi
# Places are separated by spaces.
# shellcheck disable=SC2086
for place in /tmp /dev/shm ${MPISPEED_STAGE_PLACES:-}; do
    [ -d "$place" ] || continue
    # -P: never through a link; -xdev: what is mounted below is not ours.
    find -P "$place/" -maxdepth 1 -xdev -type d -uid "$user" -name "mpispeed-env-$user-$job-????????" -print0 |
        xargs -0 --no-run-if-empty "${as_user[@]}" rm -rf --one-file-system --
done
exit 0
