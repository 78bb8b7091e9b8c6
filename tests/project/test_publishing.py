"""How the project is published: pinned actions, few permissions, one version, and an sdist with all files that its
pages link to.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

import grapeshot

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_there_are_workflows():
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "matrix.yml", "release.yml"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit(path):
    uses = re.findall(r"uses: *(\S+)(.*)", path.read_text())
    assert uses
    for action, comment in uses:
        assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), f"{action}: which version is that?"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_no_rights_and_each_job_its_own(path):
    text = path.read_text()
    assert re.search(r"^permissions: \{\}$", text, re.MULTILINE)
    jobs = text.split("\njobs:\n", 1)[1]
    for job in re.split(r"(?m)^  (?=[\w-]+:$)", jobs)[1:]:
        assert "\n    permissions:\n" in job, job.splitlines()[0]
        assert "\n    timeout-minutes: " in job, job.splitlines()[0]
        if job.startswith("publish:"):
            assert "environment:" in job
            assert "github.ref_type == 'tag'" in job
        else:
            assert "id-token" not in job


def test_one_action_has_one_version():
    versions = {}
    for path in WORKFLOWS:
        for action, commit in re.findall(r"uses: *([^@\s]+)@([0-9a-f]{40})", path.read_text()):
            versions.setdefault(action, set()).add(commit)
    assert {action: commits for action, commits in versions.items() if len(commits) > 1} == {}


def test_the_version_is_written_in_one_place():
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    assert grapeshot.__version__ == version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"]
    assert "version" not in project
    for name in ("core/Cargo.toml", "python/grapeshot/__init__.py", "CITATION.cff", "docs/releasing.md"):
        assert f'"{version}"' not in (ROOT / name).read_text(), name


def test_the_wheels_are_for_the_versions_that_the_project_names():
    """pyproject.toml, .ci/common and release.yml name the same versions. .ci/common and release.yml may also name
    free-threaded builds, and release.yml names each build that .ci/common names.
    """
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = {each.rpartition(" ")[2] for each in classifiers if re.search(r":: 3\.\d+$", each)}
    release = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    built = set(re.search(r'INTERPRETERS: "(.*)"', release)[1].split())
    assert {version.rstrip("t") for version in built} == named
    local = set(re.search(r"ALL_VERSIONS=\((.*)\)", (ROOT / ".ci" / "common").read_text())[1].split())
    assert {version.rstrip("t") for version in local} == named
    assert local <= built


def test_releases_are_built_with_one_rust_and_one_maturin():
    tools = (ROOT / "requirements" / "tools.in").read_text()
    given = {
        "rust-toolchain: ": "${{ steps.rust.outputs.version }}",
        "maturin-version: v": re.search(r"^maturin==(\S+)$", tools, re.MULTILINE)[1],
    }
    release = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    uses = release.count("uses: PyO3/maturin-action@")
    assert uses
    for setting, version in given.items():
        assert re.findall(rf"{setting}(.+)", release) == [version] * uses
    reads = '- id: rust\n        run: echo "version=$(cat .ci/rust-version)" >>"$GITHUB_OUTPUT"\n'
    assert release.count(reads) == uses


@pytest.mark.parametrize(("release", "are_errors"), [("pinned", True), ("1.999.0", False)])
def test_new_lints_of_another_rust_are_no_errors(tmp_path, release, are_errors):
    """`make lint`, a part of `make test`, must also pass with a newer Rust, whose new lints may find something."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    if release == "pinned":
        release = (ROOT / ".ci" / "rust-version").read_text().strip()
    rustc = tmp_path / "rustc"
    rustc.write_text(f"#!/bin/sh\necho 'rustc {release} (0 2026-01-01)'\n")
    rustc.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["make", "--dry-run", "lint"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    lines = [line for line in done.stdout.splitlines() if "cargo clippy " in line or "cargo doc " in line]
    assert len(lines) == 5
    assert all(("-D warnings" in line) is are_errors for line in lines), lines
    assert all(("--cap-lints warn" in line) is not are_errors for line in lines), lines


def test_the_workflow_audits_the_dependencies():
    assert re.search(r"^ +- run: \.ci/audit$", (ROOT / ".github" / "workflows" / "ci.yml").read_text(), re.MULTILINE)


def test_every_lock_file_of_cargo_is_audited():
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    tracked = subprocess.run(["git", "ls-files", "*Cargo.lock"], cwd=ROOT, capture_output=True, text=True, check=True)
    common = (ROOT / ".ci" / "common").read_text()
    manifests = re.search(r"^MANIFESTS=\((.*)\)$", common, re.MULTILINE)[1].split()
    assert sorted(tracked.stdout.split()) == sorted(each.replace(".toml", ".lock") for each in manifests)
    assert 'for manifest in "${MANIFESTS[@]}"' in (ROOT / ".ci" / "audit").read_text()


def test_the_check_before_a_merge_runs_the_command_of_the_readme():
    command = "make test"
    assert re.search(rf"^{command}$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert re.search(rf"^if ! {command}; then", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


def test_the_licences_of_linked_crates_are_up_to_date():
    if shutil.which("cargo") is None:
        pytest.skip("cargo is not installed")
    command = [sys.executable, ROOT / ".ci" / "licences", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_wheels_have_the_licences():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in project["license-files"]:
        assert (ROOT / name).read_text()
    assert "THIRD-PARTY-LICENSES" in project["license-files"]


def linked_files(page):
    """Yield the files of the project that a page links to."""
    for target in re.findall(r"\]\(([^)#\s]+)", (ROOT / page).read_text()):
        if "://" not in target:
            yield (ROOT / page).parent.joinpath(target).resolve()


@pytest.mark.slow
def test_the_sdist_has_the_files_that_its_pages_link_to(tmp_path):
    maturin = Path(sys.executable).with_name("maturin")
    if not maturin.exists():
        pytest.skip("maturin is not installed beside this interpreter")
    subprocess.run([maturin, "sdist", "--out", tmp_path], cwd=ROOT, check=True, capture_output=True, timeout=120)
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    for page in ("README.md", "CONTRIBUTING.md", "docs/coro.md", "docs/releasing.md"):
        assert page in names
        for target in linked_files(page):
            inside = str(target.relative_to(ROOT))
            assert inside in names or any(name.startswith(inside + "/") for name in names), f"{page} links to {inside}"
    assert "benchmarks/loadgen/Cargo.toml" in names
    assert not [name for name in names if name.endswith((".so", ".pyc")) or "/target/" in f"/{name}"]
