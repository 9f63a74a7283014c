"""Where the name of a model leads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagekv.common.models import ModelNotFound, check_model_files, resolve_model
from pagekv.common.phases import Phase


@pytest.mark.parametrize(
    "name", ["", "no/such/model/dir", "/nowhere", "../x", "bad name", "~no-user/x", "./" + "x" * 300]
)
def test_names_that_lead_nowhere_say_what_to_do(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where relative names surely lead nowhere
    with pytest.raises(ModelNotFound, match="neither a model directory, nor 'demo', nor a hub id"):
        resolve_model(name)


def test_a_directory_is_itself_and_a_file_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    Path("model.bin").touch()
    with pytest.raises(ModelNotFound, match="neither"):
        resolve_model("model.bin")


def test_a_path_that_no_message_can_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor failed each time that its manager asked for its model, and `pagekv up` waited in vain."""
    # Of a system with Latin-1 names, and as every name with an umlaut is read in a locale of ASCII.
    directory = tmp_path / "Modell \udcfc"
    directory.mkdir()
    monkeypatch.chdir(directory)
    for name in (str(directory), "."):
        with pytest.raises(
            ModelNotFound, match=r"Modell \\udcfc' is not the path of a model directory in UTF-8: give it"
        ):
            resolve_model(name)


@pytest.mark.parametrize("weights", [True, False])
def test_hub_models_are_fetched_without_other_formats(monkeypatch: pytest.MonkeyPatch, weights: bool) -> None:
    asked: list[tuple[str, list[str]]] = []

    def fetch(name: str, allow_patterns: list[str], tqdm_class: type) -> str:
        asked.append((name, allow_patterns))
        return "/cache/model"

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert resolve_model("owner/model", weights=weights) == Path("/cache/model")
    [(name, patterns)] = asked
    assert name == "owner/model"
    assert ("*.safetensors" in patterns) is weights
    assert "*.json" in patterns
    assert not any(".bin" in pattern or ".pth" in pattern for pattern in patterns)


class LocalEntryNotFoundError(Exception):
    """Named as the hub client's."""


class GatedRepoError(Exception):
    """Named as the hub client's."""


class RepositoryNotFoundError(Exception):
    """Named as the hub client's."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            LocalEntryNotFoundError("Got: ConnectError: [Errno -2]\nAn error happened"),
            "the hub cannot be reached, and no copy was fetched earlier",
        ),
        (GatedRepoError("401 Client Error\nlong"), "requires consent: give it at https://huggingface.co/owner/model"),
        (RepositoryNotFoundError("404\nlong"), "the hub has no model 'owner/model', or it is private"),
        (
            OSError("no room left\nlong"),
            "fetching it from the hub failed (OSError: no room left): try again, or",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_hub_failure_is_one_line_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fail(name: str, allow_patterns: list[str], tqdm_class: type) -> str:
        raise error from ValueError("of another library")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelNotFound) as caught:
        resolve_model("owner/model")
    told = str(caught.value)
    assert told.startswith("there is no directory 'owner/model' here, and ")
    assert words in told
    assert "\n" not in told
    assert "long" not in told
    assert "Errno" not in told


def test_bytes_that_were_fetched_are_the_progress_of_the_phase(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told: list[int | None] = []

    def fetch(name: str, allow_patterns: list[str], tqdm_class: Any) -> str:
        """Does with the bars what huggingface_hub 2.4 does."""
        network = tqdm_class(desc="Downloading bytes", total=0, initial=0, unit="B", unit_scale=True)
        disk = tqdm_class(desc="Reconstructing", total=0, initial=0, unit="B", unit_scale=True, bar_format="{desc}")
        for bar in (network, disk):
            bar.total += 200
            bar.refresh()
        assert [*tqdm_class(["a", "b"], desc="Fetching 2 files", total=2)] == ["a", "b"]
        network.update(200)
        disk.update(50)
        told.append(phases[-1].percent)
        disk.update(100)
        disk.set_postfix_str("1 MB/s", refresh=False)
        disk.set_description("Reconstruction complete")
        told.append(phases[-1].percent)
        return str(tmp_path)

    phases: list[Phase] = []
    monkeypatch.setattr(
        "pagekv.common.phases._listeners", [lambda current: phases.extend([current] if current else [])]
    )
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert resolve_model("owner/model") == tmp_path
    assert phases[0].name == "fetching owner/model from the hub"
    assert told == [25, 75]
    assert capsys.readouterr().err == ""


def incomplete(directory: Path, kind: str) -> Path:
    """A model directory that lacks something."""
    config, index = directory / "config.json", directory / "model.safetensors.index.json"
    if kind == "empty":
        return directory
    contents = {"no config": "", "half a config": '{"a": ', "list": "[]", "levels": "[" * 100_000}
    contents |= {"no size": '{"hidden_size": "64"}', "no heads": '{"text_config": {"num_attention_heads": 0}}'}
    config.write_text(contents.get(kind, "{}"))
    if kind == "no config":
        config.rename(directory / "other.json")
    elif kind == "nested":
        (directory / "snapshot").mkdir()
        config.rename(directory / "snapshot" / "config.json")
    elif kind == "other weights":
        (directory / "pytorch_model.bin").touch()
    elif kind == "shards":
        index.write_text('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}')
        (directory / "1.safetensors").touch()
    elif kind == "half a shard":
        index.write_text('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}')
        (directory / "1.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
        (directory / "2.safetensors").write_bytes(b"\x02" + bytes(7) + b"{")
    elif kind == "unreadable":
        # Its first bytes cannot be read, not even by root.
        (directory / "model.safetensors").symlink_to("/proc/self/mem")
    elif kind == "pointer":
        (directory / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    return directory


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("empty", "is empty: it should hold a model's config.json, weights and tokenizer"),
        ("no config", "has no config.json, so it is not a model directory"),
        ("nested", "name the directory that has it, such as "),
        ("half a config", "config.json cannot be read as JSON: "),
        ("levels", "config.json cannot be read as JSON: maximum recursion depth"),
        ("no size", "config.json: hidden_size must be a whole number above 0, is '64'; correct it"),
        ("no heads", "config.json: num_attention_heads must be a whole number above 0, is 0; correct it"),
        ("list", "config.json: must be a JSON object, got list"),
        ("no weights", "has no weights: neither model.safetensors nor model.safetensors.index.json is there; copy"),
        ("other weights", "is there (pytorch_model.bin is of another format); copy"),
        ("shards", "lacks 1 of the 2 files that model.safetensors.index.json names, such as 2.safetensors"),
        ("half a shard", "2.safetensors has 9 bytes and needs more than 10: copy it again"),
        ("unreadable", "model.safetensors cannot be read: Input/output error"),
        ("pointer", "is a Git LFS pointer, not the weights: run git lfs pull"),
    ],
)
def test_a_directory_that_is_not_complete_is_refused_by_name(tmp_path: Path, kind: str, words: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        check_model_files(incomplete(tmp_path, kind))
    assert str(tmp_path) in str(caught.value)
    assert words in str(caught.value)


def test_sizes_that_transformers_may_know_are_left_to_it(tmp_path: Path) -> None:
    sizes = '"num_attention_heads": [4, 8], "vocab_size": null'
    # With a nested configuration of the text model, the outer one is of no model that is served.
    (tmp_path / "config.json").write_text(f'{{"hidden_size": 0, "text_config": {{"hidden_size": 64, {sizes}}}}}')
    check_model_files(tmp_path, weights=False)


def test_the_demo_model_is_complete_and_a_config_alone_is_where_no_weights_are_asked_for(tmp_path: Path) -> None:
    check_model_files(resolve_model("demo"))
    check_model_files(incomplete(tmp_path, "no weights"), weights=False)


def test_a_missing_demo_model_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="the demo model is not installed"):
        resolve_model("demo")
