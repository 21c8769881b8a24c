#%Module
# Environment Modules (https://modules.readthedocs.io): install as mpispeed/0.1.0 in a folder of MODULEPATH, with the
# settings below. The environment is a virtual environment that has mpispeed; it is used as `source bin/activate` would.

set root /opt/mpispeed/0.1.0 ;# the virtual environment
set site_file /etc/mpispeed/site.toml ;# the administrator's defaults
set mpi mpich ;# the module whose mpirun belongs to the library that mpi4py is to load

proc ModulesHelp { } {
    puts stderr "mpispeed: training of large models over MPI. Start with `mpispeed run` in a job, or `mpispeed sbatch`."
}
module-whatis "mpispeed 0.1.0: training of large models over MPI, driven by DeepSpeed-style JSON"

conflict mpispeed
module load $mpi
prepend-path PATH $root/bin
setenv VIRTUAL_ENV $root
setenv MPISPEED_PYTHON $root/bin/python
setenv PYTHONNOUSERSITE 1 ;# what users have in ~/.local would win over the module's packages
if {[file isfile $site_file]} {
    setenv MPISPEED_SITE_FILE $site_file
}
