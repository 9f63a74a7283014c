"""scripts/proto_breaking.sh, in a repository with a contract of one message."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = 'syntax = "proto3";\npackage a.v1;\nmessage A {\n  string name = 1;\n}\nenum E {\n  E_UNSPECIFIED = 0;\n}\n'
RENAMED = CONTRACT.replace("string name", "string title")


class Repository:
    """A git repository; `check` gives the exit status and what was printed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "proto_breaking.sh", folder / "scripts")
        shutil.copy(ROOT / "buf.yaml", folder)
        self.git("init", "-q")
        self.stated("# a comment")
        self.commit(CONTRACT)

    def git(self, *args: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *args], cwd=self.folder, check=True, stdout=subprocess.DEVNULL)

    def write(self, path: str, text: str) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text)

    def stated(self, *lines: str) -> None:
        self.write("proto/breaking-changes.txt", "".join(f"{line}\n" for line in lines))

    def commit(self, contract: str) -> None:
        self.write("proto/a/v1/a.proto", contract)
        self.git("add", ".")
        self.git("commit", "-q", "--allow-empty", "-m", "change")

    def check(self) -> tuple[int, str]:
        command = [str(self.folder / "scripts" / "proto_breaking.sh"), str(Path(sys.executable).with_name("buf"))]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=240)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_what_is_added_breaks_nobody(repository: Repository) -> None:
    status, said = repository.check()
    assert (status, "no parent commit" in said) == (1, True)
    grown = CONTRACT.replace("string name = 1;", "string name = 1; uint32 size = 2;")
    repository.commit(grown)
    assert repository.check()[0] == 0
    repository.commit(grown.replace("UNSPECIFIED = 0;", "UNSPECIFIED = 0; E_B = 1;"))
    assert repository.check()[0] == 0


def test_a_name_is_kept(repository: Repository) -> None:
    """Also in JSON and in generated code, which a check of the bytes alone would let pass."""
    repository.commit(RENAMED)
    status, said = repository.check()
    assert status != 0
    assert 'name "title"' in said
    # Nor may it be changed before it is committed.
    repository.commit(RENAMED)
    repository.write("proto/a/v1/a.proto", CONTRACT)
    assert repository.check()[0] != 0


def test_a_break_that_is_stated_excuses_its_own_commit_alone(repository: Repository) -> None:
    repository.stated("# a comment", "names are titles now")
    repository.commit(RENAMED)
    status, said = repository.check()
    assert status == 0
    assert "this change breaks it and says so:\nnames are titles now\n" in said
    repository.commit(CONTRACT)
    assert repository.check()[0] != 0
    # Taking a line back, or writing another comment, is no statement.
    repository.stated("# another comment")
    repository.commit(RENAMED)
    assert repository.check()[0] != 0


def test_after_a_release_nothing_excuses_a_break(repository: Repository) -> None:
    repository.git("tag", "v0.1.0")
    repository.stated("# a comment", "names are titles now")
    repository.commit(RENAMED)
    status, said = repository.check()
    assert (status != 0, 'name "title"' in said) == (True, True)
    # Compared with the release, whatever came between.
    repository.commit(CONTRACT)
    assert repository.check() == (0, "the contract keeps its promises to v0.1.0\n")
