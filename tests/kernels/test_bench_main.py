"""The bench's command: machines that cannot run it, and kernels that are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.kernels.bench_machine import HostMachine

from pagekv.kernels.bench import __main__ as bench_main
from pagekv.kernels.bench.stages import Bench


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_main.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: the bench needs a GPU, torch and CuPy, and cannot run here: torch ")
    assert err.count("\n") == 1


def test_without_torch_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert bench_main.main([]) == 2
    assert "torch is not installed: pip install 'pagekv[executor,cuda12]'" in capsys.readouterr().err


def test_nothing_is_timed_where_a_kernel_is_wrong(machine: HostMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagekv.kernels.bench import machine as machine_module

    monkeypatch.setattr(machine_module, "CudaMachine", lambda say: machine)
    monkeypatch.setattr(Bench, "correctness", lambda self, wanted: False)
    monkeypatch.setattr(Bench, "measure", lambda self: pytest.fail("timed"))
    assert bench_main.main([]) == 1


def test_the_page_is_printed_and_the_json_written(
    machine: HostMachine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pagekv.kernels.bench import machine as machine_module

    monkeypatch.setattr(machine_module, "CudaMachine", lambda say: machine)
    monkeypatch.setattr(Bench, "correctness", lambda self, wanted: len(wanted) > 10)
    monkeypatch.setattr(Bench, "measure", lambda self: {"copy_gb_per_s": 4300.0, "decode": [{"case": "a"}]})
    file = tmp_path / "gpu.json"
    assert bench_main.main(["--json", str(file)]) == 0
    assert "device copy: 4300 GB/s" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert list(found) == ["machine", "copy_gb_per_s", "decode", "notes", "seconds"]
    assert bench_main.main(["--correctness-only", "--json", str(file)]) == 0
    assert list(json.loads(file.read_text())) == ["machine", "notes", "seconds"]
