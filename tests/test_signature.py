"""A result names the commit of this project that produced it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "package"
    folder.mkdir()
    shutil.copy(ROOT / "multimax_fairseq" / "signature.py", folder)
    git(tmp_path, "init", "--quiet")
    (tmp_path / "other").write_text("of the checkout")
    git(tmp_path, "add", "other")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    return tmp_path


def git(folder, *words):
    who = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    done = subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)
    return done.stdout.decode().strip()


def commit_of(checkout, **options):
    words = "import sys; sys.path.insert(0, 'package'); import signature; print(signature.commit())"
    done = subprocess.run(
        [sys.executable, "-c", words], cwd=checkout, check=True, capture_output=True, **options
    )
    return done.stdout.decode().strip()


def test_commit_is_none_in_an_unrelated_checkout(checkout):
    assert commit_of(checkout) == "None"


def test_commit_marks_modified_files_as_dirty(checkout):
    git(checkout, "add", "package")
    git(checkout, "commit", "--quiet", "--message", "second")
    head = git(checkout, "rev-parse", "HEAD")
    assert commit_of(checkout) == head
    (checkout / "untracked").write_text("an output, say")
    assert commit_of(checkout) == head
    (checkout / "other").write_text("changed")
    assert commit_of(checkout) == f"{head}-dirty"


def test_commit_is_none_without_git(checkout):
    git(checkout, "add", "package")
    assert commit_of(checkout, env={"PATH": str(checkout)}) == "None"
