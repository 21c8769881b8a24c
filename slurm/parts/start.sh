srun "$${srun_flags[@]}" "$${ranks[@]}" &
srun_pid=$$!
while :; do
    signalled="" code=0
    wait "$$srun_pid" || code=$$?
    # A signal ends the wait, not srun.
    [ -n "$$signalled" ] || break
done
