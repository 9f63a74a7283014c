"""`pagekv plan`: output, weights, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.clients.llama_config import LLAMA

from pagekv.client.cli.commands.plan import size_text, weight_bytes
from pagekv.client.cli.main import main
from pagekv.common.models import resolve_model
from pagekv.executor.model.files import read_model_files
from pagekv.executor.model.start_check import check_ranks


def test_weights_are_counted_from_the_index_or_the_files(tmp_path: Path) -> None:
    assert weight_bytes(tmp_path) is None
    (tmp_path / "part-1.safetensors").write_bytes(bytes(30))
    (tmp_path / "part-2.safetensors").write_bytes(bytes(12))
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    assert weight_bytes(tmp_path) == 42
    (tmp_path / "model.safetensors").write_bytes(bytes(40))
    assert weight_bytes(tmp_path) == 40
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size": 39.0}}')
    assert weight_bytes(tmp_path) == 39
    index.write_text('{"metadata": {"total_size": Infinity}}')
    assert weight_bytes(tmp_path) == 40


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_json_of_a_model(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights and KV cache are two budgets, and both are shown."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    model = tmp_path if kind == "directory" else config
    assert main(["plan", str(model), "--json", "--memory", "8GiB", "--contexts", "4096", "--batches", "1,2"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["model"]["context"] == 131072
    assert plan["bytes_per_token"] == 128 * 2**10
    assert plan["weight_bytes"] == 1000
    assert [(f["context"], f["batch"], f["bytes_per_rank"]) for f in plan["footprints"]] == [
        (4096, 1, 2**29),
        (4096, 2, 2**30),
    ]
    assert plan["capacity"]["num_blocks"] == 4096
    assert plan["waste"] is plan["shared_prefix"] is plan["full_context_requests_sharing"] is None
    assert plan["capacity"]["table_bytes"] == 0
    assert plan["backends"]["cuda"] == {"runs": True, "reason": ""}


def test_the_published_example_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """Reserved against paged memory, admitted requests, sharing and ranks: published figures."""
    command = "plan --layers 80 --kv-heads 8 --head-size 128 --tp 2 --memory 8GiB --lengths 600,1250,4000,128"
    assert main([*command.split(), "--shared-prefix", "1000"]) == 0
    out = capsys.readouterr().out
    for line in (
        "a token            320 KiB",
        "ranks              2, 4 KV heads on each (sharded)",
        "a block on a rank  2.50 MiB, 16 tokens",
        "  weights   unknown: no model is named",
        "  requests  6 of 8192 tokens, each 1.30 GiB with 4.0% overhead",
        "  reserved  10.00 GiB at 8192 tokens each, 81.8% unused",
        "  live      1.82 GiB",
        "  tables    12 KiB of block tables for them, on top",
        "  fits           6 requests of 8192 tokens, the prefix held once",
        "  tables         12 KiB of block tables for them, on top",
        "  cpu   no: keys and values in float16 (it has float32, bfloat16, float64)",
        "  cuda  yes",
        "    1250      79   1264      14                6942",
    ):
        assert line in out.splitlines()
    assert "162 blocks, 97.4% saved" in out
    assert "why not 99.0%" in out


def test_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "demo", "--dtype", "float32", "--memory", "1MiB"]) == 0
    out = capsys.readouterr().out
    assert "6 layers, 2 KV heads of 64, float32, context 2048" in out
    assert "  weights   9.89 MiB as stored" in out
    assert "  requests  0 of 2048 tokens" in out


def test_a_cpu_serves_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of weights that are stored in another type, one that the backend has not included."""
    words = "on a CPU `pagekv up` serves float32 unless --dtype is given: 6 KiB a token"
    for dtype in ("bfloat16", "float16"):
        config = {**json.loads((resolve_model("demo") / "config.json").read_text()), "dtype": dtype}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert main(["plan", str(tmp_path)]) == 0
        out, err = capsys.readouterr()
        assert "a token          3 KiB" in out
        assert "  cpu   yes\n" in out
        assert err.splitlines()[-1] == words
    assert main(["plan", str(tmp_path), "--dtype", "float32"]) == 0
    assert words not in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    assert main(["plan", str(tmp_path)]) == 0
    assert "on a CPU" not in capsys.readouterr().err


def test_weights_of_a_hub_model_are_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []

    def fetch(name: str, allow_patterns: list[str], tqdm_class: type) -> str:
        fetched.extend(allow_patterns)
        return str(resolve_model("demo"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert main(["plan", "owner/model"]) == 0
    assert "*.json" in fetched
    assert "*.safetensors" not in fetched


def test_weights_larger_than_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 6 * 2**20, "SC_PAGE_SIZE": 4096}.__getitem__)
    (tmp_path / "config.json").write_bytes((resolve_model("demo") / "config.json").read_bytes())
    index = tmp_path / "model.safetensors.index.json"
    for gib, end in (
        (140, ", with more memory: the weights take 280.00 GiB, and this machine has 24.00 GiB"),
        (12, ""),
    ):
        index.write_text(json.dumps({"metadata": {"total_size": gib * 2**30}}))
        assert main(["plan", str(tmp_path)]) == 0
        assert f"  cpu   yes{end}\n" in capsys.readouterr().out


def test_ranks_that_the_executor_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    for ranks, answer in ((2, "yes"), (3, "no: 3 ranks, which do not divide its 4 query heads")):
        assert main(["plan", "demo", "--dtype", "float32", "--tp", str(ranks)]) == 0
        assert f"  cpu   {answer}\n" in capsys.readouterr().out
    demo = resolve_model("demo")
    with pytest.raises(ValueError, match="do not divide the 4 query heads"):
        check_ranks(demo, read_model_files(demo), 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "MODEL, or all of --layers, --kv-heads and --head-size, are required"),
        ("--layers 3 --kv-heads 2", "MODEL, or all of"),
        ("./nowhere", "'./nowhere' is neither a model directory"),
        (f"./{'x' * 300}", "is neither a model directory"),
        ("~nobody-of-this-name/model", "'~nobody-of-this-name/model' is neither a model directory"),
        ("demo --layers 0", "--layers: must be a whole number from 1 to 10000, got '0'"),
        ("demo --dtype complex64", "--dtype: must be one of float64"),
        ("demo --memory lots", "--memory: must be a size"),
        ("demo --block-size 17", "--block-size: must be a power of two"),
        ("demo --contexts 5,", "--contexts: must be a whole number"),
        ("demo --lengths 100,2049", "--lengths: 2049 tokens are more than the context of 2048"),
        ("demo --shared-prefix 2049", "--shared-prefix: 2049 tokens are more than the context of 2048"),
    ],
)
def test_wrong_usage(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: Any = main(["plan", *arguments.split()])
    except SystemExit as exit:
        status = exit.code
    assert status == 2
    assert message in capsys.readouterr().err.splitlines()[0]


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("[1]", "must be a JSON object, got list"), ("\udcff", "is not JSON")]
)
def test_a_file_that_is_no_config(tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert main(["plan", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"pagekv: {path}: {message}")
    path.unlink()
    assert main(["plan", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"pagekv: {tmp_path} is empty: it should hold a model's config.json")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(1023, "1023 B"), (40960, "40 KiB"), (1536, "1.5 KiB"), (2**20, "1.00 MiB"), (5 * 2**28, "1.25 GiB"),
     (2**41, "2.00 TiB"), (2**52, "4,096.00 TiB")],
)  # fmt: skip  # several entries a line: one each would fill a screen
def test_bytes_are_told_in_the_unit_that_fits(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
