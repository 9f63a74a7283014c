"""Loading a model directory: what is found out, and what a loaded model shows that is refused by name."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.executor.cpu_driver import (
    MODELS,
    WINDOW,
    Driver,
    edit_config,
    prompts_of,
    reference,
    save_config,
    save_model,
)
from support.executor.families import family_config
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from pagekv.client.planning.kv_geometry import geometry_from_config
from pagekv.client.planning.served_context import served_context
from pagekv.executor.cpu.backend import CpuBackend
from pagekv.executor.model.loading import BlockGeometry, load_model
from pagekv.executor.model.shards import Shards
from pagekv.executor.world import World


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_model("llama", directory)
    return directory


@pytest.mark.parametrize(("where", "ids"), [("generation_config.json", [5, 3]), ("config.json", 9)])
def test_end_of_sequence_ids(tmp_path: Path, where: str, ids: int | list[int]) -> None:
    save_model("llama", tmp_path)
    (tmp_path / "generation_config.json").unlink()
    if where == "config.json":
        edit_config(tmp_path, eos_token_id=ids)
    else:
        (tmp_path / where).write_text(json.dumps({"eos_token_id": ids}))
    assert CpuBackend(tmp_path, "m", threads=1).describe(4, 8).eos_token_ids == ((9,) if ids == 9 else (3, 5))


def test_a_mixture_of_experts_in_float64(tmp_path: Path) -> None:
    model = save_config(family_config("mixtral"), tmp_path).double()
    model.set_experts_implementation("eager")
    driver = Driver(CpuBackend(tmp_path, "m", "float64", threads=1))
    (prompt,) = prompts_of([9])
    assert driver.generate([driver.sequence(prompt)], 4) == [reference(model, prompt, 4)]


def test_latent_attention_is_stored_by_attention_heads_as_planned(tmp_path: Path) -> None:
    """Where values are as wide as keys; a config.json names neither number as the cache has it."""
    config = family_config(
        "deepseek_v3", intermediate_size=80, first_k_dense_replace=2, num_key_value_heads=4, q_lora_rank=None,
        kv_lora_rank=8, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=20,
    )  # fmt: skip  # several arguments a line
    save_config(config, tmp_path)
    stored = load_model(tmp_path, torch.float32).geometry
    given = {"num_key_value_heads": 4, "head_dim": 20}
    planned, _ = geometry_from_config(json.loads((tmp_path / "config.json").read_text()), given)
    sizes = (planned.layers, planned.kv_heads, planned.head_size)
    assert (stored.num_layers, stored.num_kv_heads, stored.head_size) == sizes == (2, 4, 20)


def test_an_operator_without_a_kernel_is_no_reason_to_load_again_if_all_are_there(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importlib.import_module("torch._meta_registrations")
    asked: list[object] = []

    def fail(*args: object, **_: object) -> None:
        asked.append(args)
        raise NotImplementedError("aten::some_operator")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ValueError, match="cannot load the model: NotImplementedError: aten::some_operator"):
        load_model(llama, torch.float32)
    assert len(asked) == 1


def test_weights_that_cannot_be_mapped(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "unable to mmap 9 bytes from file <model.safetensors>: Cannot allocate memory (12)"

    def refused(*_: object, **__: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refused)
    with pytest.raises(
        MemoryError, match=r"are available \(unable to mmap 9 bytes .*\): use a smaller model, or a machine"
    ):
        load_model(llama, torch.float32)
    said = "another\nerror"
    with pytest.raises(ValueError, match=r"cannot load the model: RuntimeError: another error; use a complete copy"):
        load_model(llama, torch.float32)


def test_incomplete_weights_are_refused(tmp_path: Path) -> None:
    """transformers would fill them in at random, with a warning."""
    save_model("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lack 1 tensors .*layers\.1\.mlp\.up_proj\.weight"):
        CpuBackend(tmp_path, "m", threads=1)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"hidden_size": "48"}, r"cannot read config\.json: .*: Field 'hidden_size' expected int, got str"),
        ({"hidden_act": "unheard"}, "cannot load the model: KeyError: 'unheard'"),
        ({"return_dict": False}, "cannot compute the model: AttributeError: 'tuple' object"),
        ({"num_hidden_layers": 0}, "0 of its 0 layers"),
        ({"model_type": "unheard"}, r"knows no models of type 'unheard'; use another model$"),
    ],
)
def test_a_failure_of_transformers_is_told_in_one_line(tmp_path: Path, fields: Any, reason: str) -> None:
    save_model("llama", tmp_path)
    edit_config(tmp_path, **fields)
    with pytest.raises(ValueError, match=rf"{tmp_path}: [^\n]*{reason}"):
        load_model(tmp_path, torch.float32)


def test_weights_that_were_cut_off_are_told_in_one_line(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(ValueError, match=r"cannot load the model: SafetensorError: .*; use a complete copy"):
        load_model(tmp_path, torch.float32)


def test_an_error_of_a_gpu_is_left_to_those_who_know_it(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object, **__: object) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lost)
    with pytest.raises(RuntimeError, match=r"^the device is lost$"):
        load_model(llama, torch.float32, "cuda")


@pytest.mark.parametrize("kind", ["chatglm", "llama"])
def test_code_that_comes_with_a_checkpoint_is_neither_run_nor_asked_about(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("asked"))
    save_model("llama", tmp_path)
    (tmp_path / "code.py").write_text("raise SystemExit")
    edit_config(tmp_path, model_type=kind, auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"})
    if kind == "llama":
        assert type(load_model(tmp_path, torch.float32).model) is LlamaForCausalLM
        return
    with pytest.raises(ValueError, match="no models of type 'chatglm', and code that comes with a checkpoint is not"):
        load_model(tmp_path, torch.float32)


def test_an_end_of_sequence_that_is_no_token_id_is_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(ValueError, match="eos_token_id must be a token id, or a list of them, got '</s>'"):
        load_model(tmp_path, torch.float32)


def test_a_model_that_could_choose_a_token_without_an_embedding_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = LlamaForCausalLM.__init__

    def with_wider_head(model: LlamaForCausalLM, config: Any) -> None:
        made(model, config)
        model.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size + 3, bias=False)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", with_wider_head)
    rows = save_model("llama", tmp_path).config.vocab_size
    reason = f"LlamaForCausalLM cannot be served: it has logits of {rows + 3} tokens and embeddings of {rows};"
    with pytest.raises(ValueError, match=reason):
        CpuBackend(tmp_path, "m", threads=1)


def test_context_ends_where_frequencies_would_depend_on_the_batch(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    edit_config(
        tmp_path,
        max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 200,
        },
    )
    assert CpuBackend(tmp_path, "m", threads=1).describe(4, 8).max_model_len == 200
    assert served_context(json.loads((tmp_path / "config.json").read_text()), 1024)[0] == 200


@pytest.mark.parametrize("window", [WINDOW, 1024])
@pytest.mark.parametrize("name", ["llama", "qwen2_moe", "phimoe"])
def test_context_ends_with_a_window_that_attention_does_not_know(tmp_path: Path, name: str, window: int) -> None:
    """transformers has it in a mask alone (Phi-3.5-MoE), or in a cache alone: within it all is one."""
    kinds = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}
    config = family_config(name, sliding_window=window, **(kinds if name == "qwen2_moe" else {}))
    model = save_config(config, tmp_path)
    backend = CpuBackend(tmp_path, "m", threads=1)
    assert backend.describe(4, 8).max_model_len == min(window, config.max_position_embeddings)
    assert served_context(config.to_dict(), config.max_position_embeddings)[0] == backend.describe(4, 8).max_model_len
    (prompt,) = prompts_of([5])
    driver = Driver(backend)
    assert driver.generate([driver.sequence(prompt)], 4) == [reference(model, prompt, 4)]


@pytest.mark.parametrize("window", ["8", -1, 8.5, True])
@pytest.mark.parametrize("field", ["sliding_window", "attention_chunk_size"])
def test_a_window_that_is_no_number_of_tokens_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, window: Any
) -> None:
    """Of a family that has none: transformers hands on what is written."""
    save_model("llama", tmp_path)
    edit_config(tmp_path, **{field: window})
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights are read"))
    with pytest.raises(ValueError, match=rf"{field} in config\.json must be a number of tokens, got {window!r}; "):
        load_model(tmp_path, torch.float32)


@pytest.mark.parametrize("window", ["8", -1, 8.5])
def test_a_window_of_a_family_that_has_one_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: Any
) -> None:
    """By transformers or here."""
    save_model("mistral", tmp_path)
    edit_config(tmp_path, sliding_window=window)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights are read"))
    with pytest.raises(ValueError, match="sliding_window"):
        load_model(tmp_path, torch.float32)


def test_block_size_in_bytes() -> None:
    assert BlockGeometry(32, 8, 128, torch.bfloat16).bytes_per_block(16) == 2 * 2**20
    assert BlockGeometry(32, 8, 128, torch.float8_e4m3fn).bytes_per_block(16) == 2**20


def test_every_architecture_is_listed() -> None:
    assert {"llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt-oss", "gpt2"} <= set(MODELS)


class Loading(BaseException):
    """Ends a start where transformers begins."""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_rank_on_cpus_keeps_off_the_gpus(llama: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """transformers puts a rank's share on the kind of device that torch finds, here a GPU."""
    found: list[str] = []

    def load(*_: object, **__: object) -> None:
        found.append(torch._C._get_accelerator().type)
        raise Loading

    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(Loading):
        load_model(llama, torch.float32, device, Shards(World(0, 2, 2), pytest.fail))
    assert [*found, torch._C._get_accelerator().type] == [device, "cuda"]
