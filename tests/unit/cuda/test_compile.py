"""Every CUDA source compiles for the architectures that are promised, without a warning; hot kernels spill nothing."""

from __future__ import annotations

import json
import os
import sys

import pytest
from click.testing import CliRunner

from mpispeed.base import assets
from mpispeed.base.errors import NativeMissing
from mpispeed.cli.main import cli
from mpispeed.native.cuda import build, catalog, store, toolchain
from tests.helpers.system import cannot

CUDA = assets.folder("cuda")


@pytest.fixture(scope="module", autouse=True)
def nvcc():
    try:
        return toolchain.find_nvcc()
    except NativeMissing as error:
        return cannot(str(error))


def test_the_catalog_names_every_source():
    assert catalog.sources() == sorted(str(path.relative_to(CUDA)) for path in CUDA.rglob("*.cu"))


def sources_and_architectures():
    """Each source for one architecture, these in turn; all pairs, which take minutes, in the full matrix."""
    archs = catalog.ARCHITECTURES
    if os.environ.get("MPISPEED_MATRIX") == "full":
        return [(source, arch) for source in catalog.sources() for arch in archs]
    return [(source, archs[number % len(archs)]) for number, source in enumerate(catalog.sources())]


@pytest.mark.parametrize(("source", "arch"), sources_and_architectures())
def test_source_compiles_and_hot_kernels_spill_nothing(source, arch, capsys):
    code, resources = toolchain.compile_source(source, arch)
    assert code[:4] == b"\x7fELF"
    build.check_names(source, [entry.kernel for entry in resources])
    spills = {entry.kernel: entry.spilled_bytes for entry in resources if entry.spilled_bytes}
    with capsys.disabled():
        if spills:
            sys.stdout.write(f"\n{source} for {arch}: bytes of spilled registers: {spills}\n")
    assert not [name for name in spills if catalog.KERNELS[name].is_hot], spills
    assert all(entry.registers for entry in resources)


def test_spills_are_read_from_what_the_assembler_says():
    said = (
        "ptxas info    : Compiling entry function 'one' for 'sm_90'\n"
        "ptxas info    : Function properties for one\n"
        "    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers, 128 bytes smem\n"
        "ptxas info    : Compiling entry function 'two' for 'sm_90'\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 12 registers\n"
    )
    assert toolchain.read_resources(said) == [
        toolchain.Resources("one", 255, 20, 128),
        toolchain.Resources("two", 12, 0, 0),
    ]


@pytest.fixture
def one_source(tmp_path, monkeypatch):
    """A cuda/ folder with one small kernel, in the place of ours."""
    folder = tmp_path / "cuda"
    (folder / "include").mkdir(parents=True)
    (folder / "one.cu").write_text('extern "C" __global__ void one(float* x) { x[threadIdx.x] = 1.0f; }\n')
    monkeypatch.setattr(assets, "folder", lambda kind: folder)
    monkeypatch.setattr(catalog, "KERNELS", {"one": catalog.Kernel("one", "one.cu", "P", True)})
    store.source_digest.cache_clear()
    yield folder
    store.source_digest.cache_clear()


def test_a_source_with_an_error_or_a_warning_is_refused_with_the_words_of_the_compiler(one_source):
    (one_source / "one.cu").write_text('extern "C" __global__ void one(float* x) { int unused; x[0] = 1.0f; }\n')
    with pytest.raises(NativeMissing, match=r"could not compile one\.cu for sm_90(?s:.*)unused"):
        toolchain.compile_source("one.cu", "sm_90")
    with pytest.raises(NativeMissing, match="sm_12"):
        toolchain.compile_source("one.cu", "sm_12")
    with pytest.raises(ValueError, match=r"'9\.0' is no architecture; expected one such as sm_80"):
        toolchain.compile_source("one.cu", "9.0")


def test_build_writes_what_is_then_used_without_a_compiler(one_source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    done = CliRunner().invoke(cli, ["kernels", "build", "--arch", "sm_80,sm_90", "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["kernels"]
    assert [(row["kernel"], row["arch"], row["spilled_bytes"]) for row in rows] == [
        ("one", "sm_80", 0),
        ("one", "sm_90", 0),
    ]
    monkeypatch.setenv(store.BUILT_VARIABLE, str(out))
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: pytest.fail("the compiler is not needed"))
    assert store.machine_code("one.cu", "sm_90") == (out / store.file_name("one.cu", "sm_90")).read_bytes()


def test_build_without_a_setting_is_found_too(one_source):
    done = CliRunner().invoke(cli, ["kernels", "build", "--arch", "sm_90"])
    assert done.exit_code == 0, done.output
    assert "1 kernels in" in done.stdout
    assert "found without a setting" in done.stdout
    assert (
        store.machine_code("one.cu", "sm_90")
        == (one_source / "built" / store.file_name("one.cu", "sm_90")).read_bytes()
    )


def test_build_refuses_a_wrong_architecture_and_a_folder_that_cannot_be(one_source, tmp_path):
    done = CliRunner().invoke(cli, ["kernels", "build", "--arch", "hopper"])
    assert done.exit_code != 0
    assert "'hopper' is no architecture" in str(done.exception)
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(cli, ["kernels", "build", "--arch", "sm_90", "--out", str(tmp_path / "file" / "out")])
    assert isinstance(done.exception, NativeMissing)
    assert "choose another with --out" in str(done.exception)


def test_a_source_and_a_catalog_that_differ_are_found(one_source):
    with pytest.raises(NativeMissing, match=r"missing in the source \['one'\], missing in the catalog \['two'\]"):
        build.check_names("one.cu", ["two"])
