# The environment goes to each node as one file, and the ranks start from its copy there: they read nothing of it from
# the shared file system. It is removed at the end; where this shell is killed, by the site's epilog (slurm/epilog.sh).
staged_lines=$$($staging_command begin$staging_options)
eval "$$staged_lines"
# shellcheck disable=SC2317
end_staging() { env -u PYTHONNOUSERSITE $staging_command end "$$MPISPEED_STAGED" || :; }
trap end_staging EXIT
