-- Lmod (https://lmod.readthedocs.io): install as mpispeed/0.1.0.lua in a folder of MODULEPATH, with the settings below.
-- The environment is a virtual environment that has mpispeed; it is used as `source bin/activate` would use it.

local root = "/opt/mpispeed/0.1.0" -- the virtual environment
local site_file = "/etc/mpispeed/site.toml" -- the administrator's defaults
local mpi = "mpich" -- the module whose mpirun belongs to the library that mpi4py is to load

help([[mpispeed: training of large models over MPI. Start with `mpispeed run` in a job, or `mpispeed sbatch`.]])
whatis("Name: mpispeed")
whatis("Version: 0.1.0")
whatis("Description: training of large models over MPI, driven by DeepSpeed-style JSON")

family("mpispeed")
depends_on(mpi)
prepend_path("PATH", pathJoin(root, "bin"))
setenv("VIRTUAL_ENV", root)
setenv("MPISPEED_PYTHON", pathJoin(root, "bin/python"))
setenv("PYTHONNOUSERSITE", "1") -- what users have in ~/.local would win over the module's packages
if isFile(site_file) then
    setenv("MPISPEED_SITE_FILE", site_file)
end
