"""Where the name of a model leads."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagekv.common.models import ModelNotFound, resolve_model


@pytest.mark.parametrize("name", ["", "no/such/model/dir", "/nowhere", "../x", "bad name"])
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


@pytest.mark.parametrize("weights", [True, False])
def test_hub_models_are_fetched_without_other_formats(monkeypatch: pytest.MonkeyPatch, weights: bool) -> None:
    asked: list[tuple[str, list[str]]] = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return "/cache/model"

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert resolve_model("owner/model", weights=weights) == Path("/cache/model")
    [(name, patterns)] = asked
    assert name == "owner/model"
    assert ("*.safetensors" in patterns) is weights
    assert "*.json" in patterns
    assert not any(".bin" in pattern or ".pth" in pattern for pattern in patterns)


def test_a_hub_failure_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, allow_patterns: list[str]) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelNotFound, match=r"could not be fetched .*no route.*name a directory"):
        resolve_model("owner/model")


def test_a_missing_demo_model_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="the demo model is not installed"):
        resolve_model("demo")
