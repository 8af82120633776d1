"""On a machine where the cluster cannot run, the rig names what is missing and the way out."""

from __future__ import annotations

import os
import sys

import pytest

from tests.cluster.rig import prerequisites
from tests.cluster.rig.errors import RigError
from tests.cluster.rig.layout import Instance
from tests.cluster.rig.prerequisites import check_go, check_machine
from tests.cluster.rig.versions import PARTS
from tests.support.places import ROOT


def test_another_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RigError, match=r"needs Linux, and this is darwin: .* REPRIEVE_TEST_KUBECONFIG"):
        check_machine()


def test_another_user_than_root_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RigError, match=r"needs root .*: use sudo; .* REPRIEVE_TEST_KUBECONFIG"):
        check_machine()


def test_missing_packages_are_listed_where_they_cannot_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(prerequisites, "find_command", lambda name: None)
    with pytest.raises(RigError, match=r"apt-get install .* containernetworking-plugins debootstrap .* runc"):
        check_machine()


@pytest.mark.parametrize("found", ["go1.24.3", "devel"])
def test_an_old_go_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path, found: str) -> None:
    program = tmp_path / "go"
    program.write_text(f"#!/bin/sh\necho {found}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(RigError, match=rf"Go 1\.26 or newer, found {found}"):
        check_go()


@pytest.mark.parametrize("name", ["", "Mine", "a/b", "..", "x" * 30])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(RigError, match="is no name for a cluster"):
        Instance(name)


def test_the_docs_name_the_pinned_versions() -> None:
    page = (ROOT / "docs" / "test-cluster.md").read_text()
    versions = {version.removeprefix("v") for part in PARTS for version in part.modules.values()}
    assert {version for version in versions if version not in page} == set()
