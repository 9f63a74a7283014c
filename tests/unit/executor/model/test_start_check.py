"""Mistakes that are refused before torch is imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagekv.common.models import resolve_model
from pagekv.executor.cpu.backend import DTYPES
from pagekv.executor.cpu.choose_forward import TOLERANCE
from pagekv.executor.model import start_check
from pagekv.executor.model.files import NUMBERED_LAYERS, StoredModel, absent_layers, read_model_files
from pagekv.executor.model.start_check import CPU_ELEMENT_BYTES, check_cpu_start, check_kv_memory, check_ranks


def test_element_types_are_those_of_the_cpu_backend() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == CPU_ELEMENT_BYTES
    assert {DTYPES[name] for name in start_check.REPACKED} == {*TOLERANCE}


@pytest.mark.parametrize(
    ("dtype", "kv_memory", "words"),
    [
        ("float16", 0, "--dtype float16: must be one of auto, float32, bfloat16, float64 with the cpu backend"),
        ("auto", 1, r"--kv-memory 1: must hold a block of 16 tokens, .* 98304 bytes or more, at 6144 a token"),
        ("auto", 98303, r"--kv-memory 98303: .* 98304 bytes"),
        ("bfloat16", 49151, r"--kv-memory 49151: .* 49152 bytes or more, at 3072 a token"),
        ("auto", 2**40 + 1, rf"at most {2**40} bytes \(1024.0 GiB\) are available for .*: give less"),
    ],
)
def test_flags_that_cannot_serve_the_demo_model(dtype: str, kv_memory: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_cpu_start(resolve_model("demo"), dtype, kv_memory, 2**40)


def test_each_rank_needs_memory_for_its_own_heads() -> None:
    """Of the demo model's two KV heads each of two ranks has one."""
    demo = resolve_model("demo")
    check_cpu_start(demo, "auto", 49152, 2**40, ranks=2)
    with pytest.raises(ValueError, match=r"49152 bytes or more, at 3072 a token"):
        check_cpu_start(demo, "auto", 49151, 2**40, ranks=2)
    with pytest.raises(ValueError, match=r"at most 1073741824 bytes \(.* GiB\) are available on each rank "):
        check_cpu_start(demo, "auto", 2**30 + 1, 2**30, ranks=2)


def test_only_what_is_certain_is_refused(tmp_path: Path) -> None:
    check_cpu_start(resolve_model("demo"), "auto", 98304, 2**40)
    check_cpu_start(resolve_model("demo"), "auto", 2**40, 2**40)
    check_cpu_start(resolve_model("demo"), "float64", 0, 2**40)
    stored = read_model_files(resolve_model("demo"))
    assert stored.token_bytes(4) == 6144
    # A shape that config.json does not show.
    unknown = StoredModel("new", None, 4, None, None, None, 2)
    assert unknown.token_bytes(4) is None
    check_kv_memory(tmp_path, unknown, 4, 1, 1)


def test_weights_that_do_not_fit_once_converted() -> None:
    """The demo model's are stored in bfloat16: 5.2 million."""
    demo = resolve_model("demo")
    number = read_model_files(demo).num_weights
    assert number
    words = r"take 0\.02 GiB in float32, and 0\.0. GiB are available: use --dtype bfloat16, as they are stored, "
    with pytest.raises(ValueError, match=words):
        check_cpu_start(demo, "auto", 0, 4 * number - 1)
    with pytest.raises(ValueError, match="are available: use a smaller model, "):
        check_cpu_start(demo, "auto", 0, 2 * number - 1)
    check_cpu_start(demo, "auto", 0, 4 * number)
    with pytest.raises(ValueError, match="in float64 on each of 2 ranks, "):
        check_cpu_start(demo, "float64", 0, 4 * number - 1, ranks=2)
    check_cpu_start(demo, "float64", 0, 4 * number, ranks=2)


def test_weights_as_they_are_stored_need_room_for_repacked_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding alone is read in the file."""
    demo = resolve_model("demo")
    stored = read_model_files(demo)
    assert stored.num_weights
    assert stored.num_linear
    assert 0.5 < stored.num_linear / stored.num_weights < 1
    words = r"take 0\.01 GiB in bfloat16, and 0\.0. GiB are available: use a smaller model, "
    with pytest.raises(ValueError, match=words):
        check_cpu_start(demo, "bfloat16", 0, 2 * stored.num_linear - 1)
    check_cpu_start(demo, "bfloat16", 0, 2 * stored.num_linear)
    check_cpu_start(demo, "bfloat16", 0, stored.num_linear, ranks=2)
    # Without compiled loops they may stay in the file.
    check_cpu_start(demo, "bfloat16", 0, 0, fused=False)
    monkeypatch.setattr(start_check, "find_spec", lambda _: None)
    check_cpu_start(demo, "bfloat16", 0, 0)


def _write_headers(directory: Path, dtype: str, **tensors: tuple[str, list[int]]) -> Path:
    """A Llama of these tensors, of which there are only headers; `dtype`: what config.json says."""
    (directory / "config.json").write_text(
        json.dumps({"model_type": "llama", "dtype": dtype, "num_hidden_layers": 2, "tie_word_embeddings": True})
    )
    header = json.dumps({name: {"dtype": kind, "shape": shape} for name, (kind, shape) in tensors.items()}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return directory


def test_only_matrices_of_layers_that_are_no_experts_are_certain_to_be_repacked(tmp_path: Path) -> None:
    one = "model.layers.1."
    tensors = {
        "model.embed_tokens.weight": ("F32", [10, 4]),
        "model.layers.0.norm.weight": ("F32", [4]),
        f"{one}q_proj.weight": ("F32", [4, 4]),
        f"{one}mlp.experts.0.up_proj.weight": ("F32", [4, 4]),
        f"{one}conv.weight": ("F32", [4, 1, 4]),
        f"{one}norm.weight": ("BF16", [4]),
        "model.layers.2.q_proj.weight": ("F32", [4, 4]),
    }
    stored = read_model_files(_write_headers(tmp_path, "bfloat16", **tensors))
    assert (stored.num_weights, stored.num_linear, stored.dtype) == (96, 16, "float32")
    check_cpu_start(tmp_path, "float32", 0, 64)
    with pytest.raises(ValueError, match="are available: use a smaller model, "):
        check_cpu_start(tmp_path, "float32", 0, 63)


def test_float16_is_no_way_out_on_a_cpu(tmp_path: Path) -> None:
    """Nor is what config.json says, if the weights are of another type."""
    _write_headers(tmp_path, "bfloat16", **{"model.layers.0.q.weight": ("F16", [4, 4])})
    assert read_model_files(tmp_path).dtype == "float16"
    with pytest.raises(ValueError, match="no tensor of 1 of the 2 layers"):
        check_cpu_start(tmp_path, "auto", 0, 0)
    tensors = {f"model.layers.{number}.q.weight": ("F16", [4, 4]) for number in range(2)}
    _write_headers(tmp_path, "bfloat16", **tensors)
    with pytest.raises(ValueError, match="are available: use a smaller model, or a machine with more memory"):
        check_cpu_start(tmp_path, "auto", 0, 0)
    check_cpu_start(tmp_path, "auto", 0, 128)


def _demo_with(directory: Path, **changes: object) -> Path:
    """The demo model's weights under another config.json."""
    demo = resolve_model("demo")
    config = json.loads((demo / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    (directory / "model.safetensors").symlink_to(demo / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 80}, "no tensor of 74 of the 80 layers of config.json, such as 6: copy "),
        # Nothing is listed for each of them.
        ({"num_hidden_layers": 10**12}, "no tensor of 999999999994 of the 1000000000000 layers"),
        ({"num_hidden_layers": 80, "quantization_config": {}}, "no tensor of 74 of the 80 layers"),
        ({"hidden_size": 8192}, "vectors of 256 elements, and config.json says hidden_size 8192: copy "),
    ],
)
def test_weights_of_another_model(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_cpu_start(_demo_with(tmp_path, **changes), "auto", 0, 2**40)


@pytest.mark.parametrize(
    "changes",
    [
        # Layers beyond the model's own may predict further tokens.
        {"num_hidden_layers": 4},
        # Layers of such a type may have no weights.
        {"num_hidden_layers": 80, "model_type": "deci"},
        {"hidden_size": 8192, "model_type": "opt"},
    ],
)
def test_weights_that_may_be_right(tmp_path: Path, changes: dict[str, object]) -> None:
    check_cpu_start(_demo_with(tmp_path, **changes), "auto", 0, 2**40)


def test_names_without_numbers_are_not_judged(tmp_path: Path) -> None:
    assert "llama" in NUMBERED_LAYERS
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    assert absent_layers(tmp_path, read_model_files(tmp_path)) == (0, None)


@pytest.mark.parametrize(("ranks", "near"), [(8, "6 or 12"), (5, "4 or 6"), (13, "12")])
def test_ranks_that_do_not_divide_the_heads_are_told_to_users_of_up_and_of_torchrun(ranks: int, near: str) -> None:
    """Users of `pagekv up` were told of WORLD_SIZE, which they had not set."""
    stored = StoredModel("llama", None, 12, None, None, None)
    with pytest.raises(ValueError, match="query heads") as caught:
        check_ranks(Path("m"), stored, ranks)
    words = f"{ranks} ranks (--tp of pagekv up, WORLD_SIZE with torchrun) do not divide the 12 query heads of m: start"
    assert str(caught.value) == f"{words} {near} ranks"
    for fits in (1, 2, 12):
        check_ranks(Path("m"), stored, fits)
