#!/usr/bin/env bash
# Whether ranks in a container work with the host's MPI: two ranks, the library from the bound folder.
#     bind_mpi.sh IMAGE MPI_FOLDER [LIBRARY]
# MPI_FOLDER is the host's, such as /opt/cray/pe/mpich/8.1.30/ofi/gnu/12.3; LIBRARY is below it, lib/libmpi.so.12 if not
# given. CONTAINER (apptainer), MPIRUN (mpirun -n 2) and PYTHON (that of the image) may be set. More folders that the
# library needs (libfabric, PMI) go into BINDS, separated by commas; those that are bound go into LIBRARIES, by colons.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: bind_mpi.sh IMAGE MPI_FOLDER [LIBRARY]" >&2
    exit 2
fi
image=$1 folder=$2 library=${3:-lib/libmpi.so.12}
if [ ! -e "$folder/$library" ]; then
    echo "bind_mpi.sh: $folder/$library is missing; name the library below the folder as the third word" >&2
    exit 2
fi
read -r -a start <<<"${MPIRUN:-mpirun -n 2}"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
inside=/host/mpi
# UCX, which MPICH may use, opens shared memory of another rank by /proc, which ranks in name spaces of their own may not.
exec "${start[@]}" "${CONTAINER:-apptainer}" exec \
    --bind "$folder:$inside,$here${BINDS:+,$BINDS}" \
    --env UCX_POSIX_USE_PROC_LINK=n \
    --env "MPI4PY_LIBMPI=$inside/$library" \
    --env "LD_LIBRARY_PATH=$inside/$(dirname "$library")${LIBRARIES:+:$LIBRARIES}" \
    "$image" "${PYTHON:-/opt/mpispeed/bin/python}" "$here/which_mpi.py" "$inside" 2
