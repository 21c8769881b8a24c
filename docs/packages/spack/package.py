"""Spack: copy to packages/py_mpispeed/ of your package repository (docs/hpc/install.md)."""

from spack.package import depends_on, license, variant, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyMpispeed(PythonPackage):
    """Training of large models over MPI, driven by DeepSpeed-style JSON."""

    license("Apache-2.0", checked_by="mpispeed")

    # `spack develop --path CHECKOUT py-mpispeed@0.1.0` gives the source; a site that keeps the sdist in its mirror
    # adds sha256= from the SHA256SUMS of `make build`.
    version("0.1.0")

    variant("cuda", default=False, description="Kernels on GPUs by pycuda")
    variant("monitor", default=False, description="TensorBoard and plots")
    variant("data", default=False, description="Token stores from tables, and with tokenizers of Hugging Face")
    variant("hjson", default=False, description="Configurations in Hjson")

    # The compiled modules link neither MPI nor torch: no variant for either.
    depends_on("c", type="build")
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-cython@3.1:3", type="build")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-torch@2.8:", type="run")
    depends_on("py-mpi4py@4.1:", type="run")
    depends_on("py-numpy@1.26:", type="run")
    depends_on("py-h5py@3.11:", type="run")
    depends_on("py-pydantic@2.7:", type="run")
    depends_on("py-click@8.1:", type="run")
    depends_on("py-rich@13:", type="run")
    depends_on("py-tomli@2:", type="run", when="^python@:3.10")

    depends_on("py-pycuda@2026.1:", type="run", when="+cuda")
    depends_on("py-tensorboard@2.17:", type="run", when="+monitor")
    depends_on("py-matplotlib@3.8:", type="run", when="+monitor")
    depends_on("py-pyarrow@15:", type="run", when="+data")
    depends_on("py-tokenizers@0.20:", type="run", when="+data")
    depends_on("py-hjson@3.1:", type="run", when="+hjson")

    import_modules = ("mpispeed", "mpispeed.native", "mpispeed.cli")
