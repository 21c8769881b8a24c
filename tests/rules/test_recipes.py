"""Recipes below docs/packages ask for what pyproject.toml asks for, and name this version."""

import re
import sys
import types

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mpispeed.base.version import VERSION
from tests.helpers.system import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGES = ROOT / "docs" / "packages"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RUN = {r.name: r for r in map(Requirement, PROJECT["project"]["dependencies"])}
BUILD = {r.name.lower(): r for r in map(Requirement, PROJECT["build-system"]["requires"])}
PYTHON = PROJECT["project"]["requires-python"]


def least(requirement):
    """The oldest version that it takes."""
    return next(s.version for s in SpecifierSet(str(requirement)) if s.operator == ">=")


def spack():
    """What the Spack recipe declares: (dependencies as name -> (bounds, type, when), versions, the class)."""
    declared, versions = {}, []
    package, python = types.ModuleType("spack.package"), types.ModuleType("spack_repo.builtin.build_systems.python")

    def depends_on(spec, type, when=None):
        name, _, bounds = spec.partition("@")
        declared.setdefault(name, (bounds, type, when))

    package.depends_on, package.version = depends_on, versions.append
    package.license = package.variant = lambda *words, **settings: None
    python.PythonPackage = type("PythonPackage", (), {})
    modules = {
        "spack": types.ModuleType("spack"),
        "spack.package": package,
        "spack_repo.builtin.build_systems.python": python,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        path = PACKAGES / "spack" / "package.py"
        scope = {}
        exec(compile(path.read_text(), str(path), "exec"), scope)
    return declared, versions, scope["PyMpispeed"]


def test_spack_asks_for_the_same():
    declared, versions, made = spack()
    assert versions == [VERSION]
    assert made.__mro__[1].__name__ == "PythonPackage"
    assert declared["python"][0] == f"{least(PYTHON)}:"
    for name, requirement in RUN.items():
        bounds, kind, when = declared[f"py-{name}"]
        assert bounds == f"{least(requirement.specifier)}:", name
        assert kind == "run"
        assert (when is None) == (requirement.marker is None), name
    assert declared["py-setuptools"][:2] == (f"{least(BUILD['setuptools'].specifier)}:", "build")
    cython = BUILD["cython"].specifier
    assert declared["py-cython"][0] == f"{least(cython)}:3"
    assert "3.99" in cython
    assert "4.0" not in cython
    extras = PROJECT["project"]["optional-dependencies"]
    for extra in ("cuda", "monitor", "data", "hjson"):
        for requirement in map(Requirement, extras[extra]):
            assert declared[f"py-{requirement.name}"] == (f"{least(requirement.specifier)}:", "run", f"+{extra}")


def test_conda_asks_for_the_same():
    recipe = yaml.safe_load((PACKAGES / "conda" / "recipe.yaml").read_text())
    assert recipe["schema_version"] == 1
    assert recipe["context"]["version"] == VERSION
    assert recipe["about"]["license"] == PROJECT["project"]["license"]
    assert (PACKAGES / "conda" / recipe["source"]["path"]).resolve() == ROOT

    def bounds(words):
        return dict(word.partition(" ")[::2] for word in words)

    found = bounds(recipe["requirements"]["run"])
    assert found.pop("python") == PYTHON
    assert found.pop("_openmp_mutex") == ""
    assert found == {
        {"torch": "pytorch"}.get(name, name): f">={least(requirement.specifier)}" for name, requirement in RUN.items()
    }
    host = bounds(recipe["requirements"]["host"])
    assert {name: SpecifierSet(text) for name, text in host.items() if text} == {
        name: requirement.specifier for name, requirement in BUILD.items()
    }
    scripts = PROJECT["project"]["scripts"]
    assert recipe["build"]["python"]["entry_points"] == [f"{name} = {place}" for name, place in scripts.items()]


def test_easybuild_has_versions_that_are_in_the_bounds():
    path = next((PACKAGES / "easybuild").glob("*.eb"))
    scope = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    toolchain = scope["toolchain"]
    assert path.name == f"mpispeed-{VERSION}-{toolchain['name']}-{toolchain['version']}.eb"
    assert scope["version"] == VERSION
    found = {name.lower(): version for name, version in scope["dependencies"]}
    assert Version(found.pop("python")) in SpecifierSet(PYTHON)
    assert found.pop("scipy-bundle")  # has numpy; its version is a year
    found["torch"] = found.pop("pytorch")
    unconditional = {name for name, requirement in RUN.items() if requirement.marker is None}
    assert found.keys() == unconditional - {"numpy"}
    for name, version in found.items():
        assert Version(version) in RUN[name].specifier, name
    for name, version in scope["builddependencies"]:
        assert Version(version) in BUILD[name.lower()].specifier, name


def test_apptainer_has_the_sections_it_needs():
    text = (PACKAGES / "apptainer" / "image.def").read_text()
    header, *rest = re.split(r"^%(\w+)\n", text, flags=re.MULTILINE)
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    assert dict(re.findall(r"^(\w+): (\S+)$", header, re.MULTILINE)) == {
        "Bootstrap": "docker",
        "From": "debian:bookworm-slim",
    }
    known = {"arguments", "files", "post", "environment", "runscript", "test", "labels", "help"}
    assert sections.keys() == known
    assert f'"torch{RUN["torch"].specifier}"' in sections["post"]
    arguments = set(re.findall(r"^ +(\w+)=", sections["arguments"], re.MULTILINE))
    assert set(re.findall(r"\{\{ (\w+) \}\}", text)) == arguments
    for line in sections["files"].split("\n"):
        source = line.split()[0] if line.split() else "setup.py"
        assert source.startswith("dist/") or (ROOT / source).exists(), source


def test_module_files_set_the_same():
    lua, tcl = ((PACKAGES / "modulefiles" / f"module.{kind}").read_text() for kind in ("lua", "tcl"))
    places = [re.findall(r'(?:local (\w+) = |^set (\w+) )"?([^\s";]+)', text, re.MULTILINE) for text in (lua, tcl)]
    ours, theirs = ({one or two: value for one, two, value in found} for found in places)
    assert ours == theirs
    assert ours["root"].endswith(f"/{VERSION}")
    assert re.findall(r'setenv\("(\w+)"', lua) == re.findall(r"setenv (\w+)", tcl)


def test_release_wheels_are_for_every_python_that_is_promised():
    settings = PROJECT["tool"]["cibuildwheel"]
    minors = [int(re.fullmatch(r"cp3(\d+)-\*", word)[1]) for word in settings["build"]]
    assert minors[0] == int(least(PYTHON).split(".")[1])
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert "--exclude libgomp.so.1" in settings["linux"]["repair-wheel-command"]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert set(workflow["jobs"]) == {"lint", "test", "wheels", "sdist"}
