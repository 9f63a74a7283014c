"""README, DESIGN and docs: short, linked, and about files, modules, targets, flags and commands that exist."""

from __future__ import annotations

import re
import runpy
import subprocess
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.documentation import (
    PAGES,
    ROOT,
    Command,
    anchors,
    fenced,
    inline_code,
    inline_commands,
    links,
    shell_commands,
)

from pagekv.client import Overloaded, PageKVClient, Unavailable
from pagekv.client.cli.main import make_parser
from pagekv.conformance.main import make_parser as make_conformance_parser
from pagekv.executor.config import parse_config as parse_executor
from pagekv.kvmanager.config import parse_config as parse_manager
from pagekv.kvmanager.replay.cli import make_parser as make_replay_parser

MAX_README_BYTES = 10_000
SOURCE_ROOTS = ("proto", "kvmanager", "executor", "kernels", "client")
# Files of these kinds belong to the repository wherever a page names one; others may be a reader's own.
SOURCES = (".py", ".cu", ".cuh", ".h", ".sh", ".md", ".proto", ".yaml", ".yml", ".toml")
TOP = (".ci", "client", "docs", "executor", "kernels", "kvmanager", "locks", "proto", "scripts", "tests")
FILES = [path.name for path in ROOT.glob("*") if path.is_file()] + [
    str(path.relative_to(ROOT)) for top in TOP for path in (ROOT / top).rglob("*") if path.is_file()
]
FOLDERS = {str(parent) for name in FILES for parent in Path(name).parents}


def by_page(page: Path) -> str:
    return str(page.relative_to(ROOT))


def exists(name: str) -> bool:
    """Whether the path of a file or folder of the repository is this one or ends with it."""
    name = name.rstrip("/")
    return any(path == name or path.endswith(f"/{name}") for path in (*FILES, *FOLDERS))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= MAX_README_BYTES


def test_every_page_is_in_the_index() -> None:
    index = {target.partition("#")[0] for target in links(ROOT / "docs" / "README.md")}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - index == {"README.md"}


@pytest.mark.parametrize("page", PAGES, ids=by_page)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in links(page):
        target, _, fragment = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (fragment and fragment not in anchors(path)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=by_page)
def test_files_exist(page: Path) -> None:
    words = {word.rstrip(",;:") for span in inline_code(page) for word in span.split()}
    paths = {word for word in words if re.fullmatch(r"[\w./-]+", word) and not word.startswith("/")}
    named = {path for path in paths if path.endswith(SOURCES) or ("/" in path and path.split("/")[0] in TOP)}
    assert sorted(path for path in named if not exists(path)) == []


@pytest.mark.parametrize("page", PAGES, ids=by_page)
def test_modules_exist(page: Path) -> None:
    named = {name for span in inline_code(page) for name in re.findall(r"\bpagekv(?:\.\w+)+", span)}
    assert sorted(name for name in named if not _is_module(name)) == []


def _is_module(name: str) -> bool:
    """Whether it is a module or package, or a name written in the innermost one."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        for root in SOURCE_ROOTS:
            path = ROOT.joinpath(root, *parts[:end])
            files = [path.with_suffix(".py")] if path.with_suffix(".py").is_file() else []
            files += [*path.glob("*.py"), *path.glob("*.proto")] if path.is_dir() else []
            if files:
                text = "\n".join(file.read_text() for file in files)
                return all(re.search(rf"\b{part}\b", text) for part in parts[end:])
    return False


@pytest.mark.parametrize("page", PAGES, ids=by_page)
def test_flags_exist(page: Path) -> None:
    """Of manager and executor in the generated list; of commands and scripts in what declares them, as a flag or as a
    dataclass field with its value's name.
    """
    replay, bench = "kvmanager/pagekv/kvmanager/replay", "kernels/pagekv/kernels/bench"
    sources = ("client/pagekv/client", "proto/pagekv/common", replay, bench, "tests")
    code = "".join(path.read_text() for source in sources for path in (ROOT / source).rglob("*.py"))
    declared = set(re.findall(r"(?<=`)--[a-z-]+", (ROOT / "docs" / "flags.md").read_text()))
    declared |= {f"--{name}" for name in re.findall(r'"(?:--)?([a-z][a-z-]*)"', code)}
    declared |= {f"--{name.replace('_', '-')}" for name in re.findall(r"^    (\w+): .* = flag\(", code, re.MULTILINE)}
    named = {span.split()[0].split("=")[0].rstrip(",") for span in inline_code(page) if span.startswith("--")}
    assert sorted({flag.replace("--no-", "--", 1) for flag in named} - declared) == []


def test_the_page_of_the_client_names_its_methods() -> None:
    methods = {name for name in dir(PageKVClient) if not name.startswith("_")}
    named = {span.partition("(")[0] for span in inline_code(ROOT / "docs" / "python.md")}
    assert sorted(methods - named) == []


def test_a_server_after_the_sample_asks_for_no_retry_sooner_than_the_manager(tmp_path: Path) -> None:
    (sample,) = [text for text in fenced(ROOT / "docs" / "python.md", "python") if "def refusal" in text]
    (tmp_path / "sample.py").write_text(sample.replace("asyncio.run(main())", ""))
    refusal = runpy.run_path(str(tmp_path / "sample.py"))["refusal"]
    for delay_s, header in ((0.25, "Retry-After: 1"), (1.0, "Retry-After: 1"), (2.4, "Retry-After: 3")):
        assert refusal(Overloaded("full", delay_s)) == (429, header)
        assert refusal(Unavailable("starting", delay_s)) == (503, header)


def test_every_extra_and_every_target_says_what_it_is_for() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    install = inline_code(ROOT / "docs" / "install.md")
    assert [extra for extra in extras if extra not in install] == []
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^\.PHONY: (\S+)$", makefile, re.MULTILINE)
    assert len(targets) > 40
    assert targets == re.findall(r"^([a-z-]+):.* ## \S", makefile, re.MULTILINE)


@pytest.mark.parametrize("container", ["pagekv.kvmanager", "pagekv.executor", "pagekv.client"])
def test_the_picture_of_the_packages_shows_their_floors(container: str) -> None:
    """In the order of the import contract, from the top."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract.get("containers") == [container])
    picture = fenced(ROOT / "DESIGN.md", "")[0].splitlines()
    rows = [re.split(r"  +", line.strip()) for line in picture]
    line = 0
    for layer in layers:
        below = [number for number in range(line, len(rows)) if layer in rows[number]]
        assert below, f"{layer}: not in the picture, or not in the order of {layers}"
        line = below[0] + 1


# -- commands: what `tests/e2e/test_readme.py` cannot run is held against what would read it


def check_pagekv(args: list[str]) -> None:
    if args[0].isupper():  # COMMAND
        return
    if args[0] == "replay":
        # Prose may name a flag without its value.
        make_replay_parser().parse_args([*args[1:], "FILE"] if args[-1] == "--steps" else args[1:])
        return
    known = make_parser().parse_args(args)
    parse_manager(getattr(known, "manager_args", []), env={})
    parse_executor(getattr(known, "executor_args", []), env={})


@cache
def make_refuses(target: str) -> str:
    """make's complaint about a target that it does not know; empty: it knows it."""
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    return done.stderr if done.returncode else ""


def check_make(args: list[str]) -> None:
    for word in args:
        assert "=" in word or not make_refuses(word), make_refuses(word)


def check_python(args: list[str]) -> None:
    if args[0] == "-m":
        packages = [ROOT / root / args[1].replace(".", "/") for root in SOURCE_ROOTS]
        files = [each / "__main__.py" if each.is_dir() else each.with_suffix(".py") for each in packages]
        file = next((each for each in files if each.is_file()), files[0])
    else:
        file = ROOT / args[0]
    assert file.is_file()
    flags = [word for word in args if word.startswith("--")]
    assert [flag for flag in flags if f'"{flag}"' not in file.read_text()] == []


def check_pip(args: list[str]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert args[0] == "install"
    extras = re.findall(r"[\w-]+", "".join(re.findall(r"^(?:pagekv|\.)\[(.*)\]$", args[1])))
    assert [extra for extra in extras if extra not in known] == []


def check_docker(args: list[str]) -> None:
    assert args[0] == "compose"
    files = [args[at + 1] for at, word in enumerate(args) if word == "-f"] or ["compose.yaml"]
    services: dict[str, Any] = {}
    for name in files:
        services |= yaml.safe_load((ROOT / name).read_text())["services"]
    known = {profile for service in services.values() for profile in service.get("profiles", ())}
    assert {args[at + 1] for at, word in enumerate(args) if word == "--profile"} <= known


def check_manager(args: list[str]) -> None:
    parse_manager(args, env={})


def check_executor(args: list[str]) -> None:
    parse_executor(args, env={})


def check_torchrun(args: list[str]) -> None:
    """Behind torchrun's own flags stands an executor."""
    at = args.index("pagekv.executor")
    assert args[at - 1] == "-m"
    parse_executor(args[at + 1 :], env={})


def check_conformance(args: list[str]) -> None:
    make_conformance_parser().parse_args(args)


def check_nothing(args: list[str]) -> None:
    """Programs of others: grpcurl is run end to end, the rest by the tests that the page names."""


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "pagekv": check_pagekv,
    "pagekv-manager": check_manager,
    "pagekv-executor": check_executor,
    "pagekv-conformance": check_conformance,
    "torchrun": check_torchrun,
    "make": check_make,
    "python": check_python,
    "pip": check_pip,
    "docker": check_docker,
    "grpcurl": check_nothing,
}


def commands(page: Path) -> list[Command]:
    """In blocks and in prose."""
    return [*shell_commands(page), *inline_commands(page, tuple(CHECKS))]


@pytest.mark.parametrize("page", PAGES, ids=by_page)
def test_commands_parse(page: Path) -> None:
    assert _failures(commands(page)) == []


def _failures(listed: list[Command]) -> list[str]:
    failures = []
    for command in listed:
        try:
            CHECKS[command.words[0]](list(command.words[1:]))
        except SystemExit as error:
            if error.code:
                failures.append(str(command))
        except (AssertionError, KeyError) as error:
            failures.append(f"{command}: {str(error).splitlines()[0]}")
    return failures


def test_the_words_of_other_systems_lead_to_ours() -> None:
    """Names that readers of the literature look for are in the glossary, and names beside them are in the code."""
    table = (ROOT / "docs/paged-kv.md").read_text().partition("## The words of other systems")[2]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")]
    theirs = {name for row in rows for name in re.findall(r"`([^`]+)`", row[1])}
    assert theirs >= {
        *("PagedKVCacheManager", "KVCacheT", "PagedKVCache", "ContiguousKVCache", "ContinuousBatchingKVCache"),
        *("lookup_table", "_get_idx", "cache_length", "next_token", "BlockPool", "KVCacheBlock", "KVCacheBlocks"),
        *("get_block_ids", "KVCacheManager", "KVCacheConfig", "KVCacheEvent", "num_gpu_blocks", "num_cpu_blocks"),
        *("_initialize_kv_caches", "paged_attention_kernel", "get_computed_blocks", "allocate_slots", "ref_cnt"),
        *("allocate", "append_slot", "free"),
    }
    code = "\n".join(
        path.read_text()
        for root in SOURCE_ROOTS
        for kind in ("py", "proto")
        for path in (ROOT / root).rglob(f"*.{kind}")
    )
    ours = {word for row in rows for name in re.findall(r"`([\w.]+)`", row[3]) for word in name.split(".")}
    assert len(ours) > 15
    assert [name for name in sorted(ours) if not re.search(rf"\b{name}\b", code)] == []
