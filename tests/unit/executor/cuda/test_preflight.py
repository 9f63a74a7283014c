"""Refusals of the cuda backend's start before torch is imported: with the word of a driver that the test plays."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.clients.stack import environment
from support.executor.cuda_host import save_small_model

from pagekv.executor.choose_backend import load_backend
from pagekv.executor.config import parse_config
from pagekv.executor.cuda import preflight
from pagekv.executor.cuda.preflight import Builds, Gpu, UnusableGpu, check_machine, check_model, installed_builds
from pagekv.executor.model.files import read_model_files
from pagekv.kernels.cupy_launcher import GpuUnavailable
from pagekv.kernels.nvrtc import CompileError

GIB = 2**30
H200 = Gpu("NVIDIA H200", 90, 140 * GIB, (13, 0))
BUILDS = Builds(torch_cuda=13, cupy=True, cupy_cuda=(13,))


def one_line(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    return text


def refused(gpu: Gpu = H200, builds: Builds = BUILDS, host_bytes: int = 64 * GIB) -> str:
    with pytest.raises(UnusableGpu) as caught:
        check_machine(gpu, builds, host_bytes)
    return one_line(caught.value)


# --- the machine


def test_a_machine_that_can_serve_is_let_through() -> None:
    check_machine(H200, BUILDS, 64 * GIB)
    # Newer minor versions of CUDA run on an older driver of the same major version; a newer driver serves older ones.
    check_machine(replace(H200, cuda=(12, 0)), Builds(12, True, (12,)), 64 * GIB)
    check_machine(H200, Builds(12, True, (12,)), 64 * GIB)
    # Doubtful cases are left to torch and CuPy, such as two wheels of CuPy, of which CuPy warns.
    check_machine(replace(H200, cuda=(12, 9)), Builds(None, True, ()), 64 * GIB)
    check_machine(replace(H200, cuda=(12, 9)), Builds(12, True, (12, 13)), 64 * GIB)
    check_machine(replace(H200, cuda=(14, 1)), BUILDS, 64 * GIB)


def test_a_gpu_that_is_too_old() -> None:
    words = refused(replace(H200, name="Tesla T4", capability=75))
    assert "Tesla T4, has compute capability 7.5; a GPU of compute capability 8.0 or newer" in words
    assert "CUDA_VISIBLE_DEVICES" in words


def test_a_driver_that_is_too_old() -> None:
    assert "serves CUDA 11.4 at most; 12.0 is the oldest" in refused(replace(H200, cuda=(11, 4)))
    old = replace(H200, cuda=(12, 8))
    words = refused(old, replace(BUILDS, torch_cuda=12))
    assert "the driver of the GPU serves CUDA 12.8 at most and CuPy (cupy-cuda13x) needs 13.0 or newer" in words
    assert "update the driver, or pip uninstall cupy-cuda13x and pip install 'pagekv[cuda12]'" in words
    words = refused(old)
    assert "serves CUDA 12.8 at most and torch is built for CUDA 13: update the driver, or pip install torch" in words
    assert "whl/cu126" in words


def test_packages_that_are_missing() -> None:
    words = refused(builds=replace(BUILDS, cupy=False, cupy_cuda=()))
    assert "CuPy is not installed; it compiles and starts the kernels: pip install 'pagekv[cuda13]'" in words
    assert "pagekv[cuda12]" in refused(replace(H200, cuda=(12, 2)), Builds(12, False, ()))
    words = refused(builds=replace(BUILDS, torch_cuda=0))
    assert "torch is built without CUDA; a build for CUDA 13 or older is needed: pip install torch" in words


def test_a_host_without_memory() -> None:
    words = refused(host_bytes=100 << 20)
    assert "100 MiB of host memory are available; 512 MiB are the least" in words
    assert "raise the memory limit" in words


def test_builds_are_read_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def install(package: str, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    assert installed_builds() == Builds(None, False, ())
    broken = "raise AssertionError('imported')\n"
    install("torch", {"__init__.py": broken, "version.py": "cuda: Optional[str] = '12.8'\n"})
    install("cupy", {"__init__.py": broken})
    install("cupy_cuda12x-14.2.0.dist-info", {"METADATA": "Metadata-Version: 2.1\nName: cupy-cuda12x\nVersion: 14.2\n"})
    assert installed_builds() == Builds(12, True, (12,))
    install("torch", {"version.py": "cuda = '13.0'\n"})
    assert installed_builds().torch_cuda == 13
    install("torch", {"version.py": "__version__ = '2.13+cpu'\ncuda: Optional[str] = None\nhip = '6'\n"})
    assert installed_builds().torch_cuda == 0
    install("torch", {"version.py": "from elsewhere import cuda\n"})
    assert installed_builds().torch_cuda is None


# --- the model


def write(directory: Path, **config: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16", **config}))
    return directory


def refused_model(directory: Path, dtype: str = "auto", kv_dtype: str = "auto", memory: int = GIB) -> str:
    with pytest.raises(ValueError, match=str(directory)) as caught:
        check_model(directory, dtype, kv_dtype, replace(H200, memory_bytes=memory))
    return one_line(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {"head_dim": 72},
        {"hidden_size": 48, "num_attention_heads": 4},
        {"model_type": "gpt2", "n_embd": 48, "n_head": 4},
        {"model_type": "gemma3", "text_config": {"head_dim": 100}},
    ],
)
def test_a_head_size_without_a_kernel(tmp_path: Path, config: dict[str, Any]) -> None:
    words = refused_model(write(tmp_path, **config))
    assert "head_size: must be one of 64, 80, 96, 128, 256, got" in words
    assert "use another model, or --backend cpu" in words


@pytest.mark.parametrize(
    "config",
    [
        {"head_dim": 128, "hidden_size": 48, "num_attention_heads": 4},
        {"hidden_size": 4096, "num_attention_heads": 32},
        # Types whose heads have a size of their own, and nothing that says it.
        {"model_type": "qwen3", "hidden_size": 48, "num_attention_heads": 4},
        {"model_type": "gemma3", "text_config": {"hidden_size": 48, "num_attention_heads": 4}},
        {"model_type": "deepseek_v3", "kv_lora_rank": 512, "head_dim": 48},
        {"head_dim": "large"},
        {},
    ],
)
def test_head_sizes_that_are_served_or_not_known(tmp_path: Path, config: dict[str, Any]) -> None:
    check_model(write(tmp_path, **config), "auto", "auto", H200)


def test_more_query_heads_than_a_kernel_takes(tmp_path: Path) -> None:
    config = {"head_dim": 64, "num_attention_heads": 128, "num_key_value_heads": 1}
    assert "at most 64 query heads a KV head, got 128" in refused_model(write(tmp_path, **config))
    check_model(write(tmp_path, **{**config, "num_attention_heads": 64}), "auto", "auto", H200)


def test_element_types_without_a_kernel(tmp_path: Path) -> None:
    write(tmp_path, head_dim=64, dtype="float32")
    assert "dtype: must be one of float32, float16, bfloat16, got 'float64'" in refused_model(tmp_path, "float64")
    words = refused_model(tmp_path, kv_dtype="fp8")
    assert "--dtype auto, --kv-dtype fp8" in words
    assert "kv_dtype: must be one of float32 with dtype float32" in words
    check_model(tmp_path, "bfloat16", "fp8", H200)
    # As the backend: what is stored in a type that no kernel has is served in bfloat16.
    check_model(write(tmp_path, head_dim=64, dtype="float64"), "auto", "fp8", H200)


def test_a_model_that_is_too_large(tmp_path: Path) -> None:
    model = save_small_model("llama", tmp_path)
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert read_model_files(tmp_path).num_weights == elements
    check_model(tmp_path, "float32", "auto", replace(H200, memory_bytes=4 * elements))
    words = refused_model(tmp_path, "float32", memory=4 * elements - 1)
    assert "its weights take 0.00 GiB in float32, NVIDIA H200 has 0.00 GiB of memory: use --dtype bfloat16, a" in words
    assert "--dtype" not in refused_model(tmp_path, "bfloat16", memory=2 * elements - 1)
    # Each of two ranks has half of them.
    check_model(tmp_path, "float32", "auto", replace(H200, memory_bytes=2 * elements), ranks=2)
    with pytest.raises(ValueError, match=r"GiB in float32 on each of 2 ranks, .* more ranks \(torchrun\)"):
        check_model(tmp_path, "float32", "auto", replace(H200, memory_bytes=2 * elements - 2), ranks=2)


def test_each_rank_has_some_of_the_heads(tmp_path: Path) -> None:
    """Of KV heads it has one at least: those that a kernel serves with its query heads."""
    config = {"head_dim": 64, "num_attention_heads": 128, "num_key_value_heads": 1}
    check_model(write(tmp_path, **config), "auto", "auto", H200, ranks=2)
    with pytest.raises(ValueError, match=r"3 ranks .* do not divide the 128 query heads"):
        check_model(tmp_path, "auto", "auto", H200, ranks=3)


# --- the process


def test_the_checks_run_in_order_and_before_the_model_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(*argv: str) -> Any:
        return parse_config(["--backend", "cuda", *argv], env={})

    monkeypatch.setattr(ctypes, "CDLL", None)  # nobody asks the driver of this machine
    monkeypatch.setattr(preflight, "find_gpu", lambda **_: replace(H200, capability=61))
    with pytest.raises(ValueError, match=r"--backend cuda: the GPU, NVIDIA H200, has compute capability 6.1"):
        load_backend(config("--model", "/nowhere"))
    monkeypatch.setattr(preflight, "find_gpu", lambda **_: replace(H200, memory_bytes=2**20))
    monkeypatch.setattr(preflight, "installed_builds", lambda: BUILDS)
    with pytest.raises(ValueError, match=r"demo_model: its weights take 0\.\d\d GiB in float32, NVIDIA H200 has"):
        load_backend(config("--dtype", "float32"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (GpuUnavailable("capability 14.0: install a newer nvidia-cuda-nvrtc"), "used: capability 14.0: install"),
        (RuntimeError("CUDA error: misaligned address\nCUDA kernel errors"), "RuntimeError: CUDA error: misaligned ad"),
        (CompileError("decode.cu: error\nline 3"), "CompileError: decode.cu: error; look at nvidia-smi, try --no-fu"),
    ],
)
def test_what_only_the_gpu_finds_out_ends_the_start_in_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    """A compiler that does not know the GPU, and a kernel that fails while the backend is made."""

    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(preflight, "find_gpu", lambda **_: H200)
    monkeypatch.setattr(preflight, "installed_builds", lambda: BUILDS)
    monkeypatch.setattr("pagekv.executor.cuda.device.CudaDevice.__init__", lambda _: None)
    monkeypatch.setattr("pagekv.executor.cuda.backend.CudaBackend.__init__", failing)
    with pytest.raises(ValueError, match="--backend cuda: the GPU cannot be used") as caught:
        load_backend(parse_config(["--backend", "cuda", "--dtype", "bfloat16"], env={}))
    assert words in one_line(caught.value)


@pytest.mark.e2e
def test_a_refused_start_is_one_line_and_does_no_more_than_import_the_server() -> None:
    """In processor time, against a process that imports the server and ends: torch alone would take seconds more."""
    args = ["--backend", "cuda", "--listen", "127.0.0.1:0", "--dtype", "float64"]  # float64: what no GPU serves
    _, _, importing = _run("-c", "import pagekv.executor.server")
    status, log, refused = _run("-m", "pagekv.executor.server", *args)
    errors = [line for line in log.splitlines() if " info " not in line]
    print(f"refused after {refused:.2f} s of computing, {importing:.2f} s of them for imports: {errors}")
    assert status == 1
    assert len(errors) == 1
    assert "cannot start reason=" in errors[0]
    assert "--backend cpu" in errors[0]
    assert refused < 2.5 * importing + 0.5


def _run(*args: str) -> tuple[int, str, float]:
    """Exit status, standard error and seconds of processor time of a Python process."""
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen([sys.executable, *args], env=environment(), stderr=file)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        file.seek(0)
        return process.returncode, file.read(), used.ru_utime + used.ru_stime


@pytest.mark.e2e
def test_torch_is_not_imported_by_the_checks(tmp_path: Path) -> None:
    write(tmp_path, head_dim=64)
    code = (
        "import sys; from pathlib import Path; from pagekv.executor import server\n"
        "from pagekv.executor.cuda import preflight as p\n"
        "gpu = p.Gpu('H', 90, 2**37, (13, 0)); builds = p.installed_builds()\n"
        "p.check_machine(gpu, p.Builds(13, True, (13,)), 2**33)\n"
        f"p.check_model(Path({str(tmp_path)!r}), 'auto', 'auto', gpu)\n"
        "print(sorted({'torch', 'transformers', 'cupy', 'safetensors', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr
