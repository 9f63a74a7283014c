"""The GPU as a driver describes it, played by the test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from pagekv.executor.cuda.preflight import Gpu, UnusableGpu, find_gpu

GIB = 2**30


H200 = Gpu("NVIDIA H200", 90, 140 * GIB, (13, 0))


@dataclass
class FakeDriver:
    """libcuda as far as it is asked; `fails`: function -> the code it returns."""

    count: int = 1
    name: bytes = b"NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    memory: int = 140 * GIB
    version: int = 13000
    fails: tuple[str, int] = ("", 0)

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*args: Any) -> int:
            if name == self.fails[0]:
                return self.fails[1]
            return int(getattr(self, f"_{name}")(*args) or 0)

        return call

    def _cuInit(self, flags: int) -> None:
        assert flags == 0

    def _cuDeviceGetCount(self, found: Any) -> None:
        found._obj.value = self.count

    def _cuDeviceGet(self, found: Any, ordinal: int) -> None:
        assert ordinal == self.count - 1
        found._obj.value = 5

    def _cuDeviceGetName(self, buffer: Any, size: int, device: int) -> None:
        assert device == 5
        assert len(self.name) < size
        buffer.value = self.name

    def _cuDeviceTotalMem_v2(self, found: Any, device: int) -> None:
        found._obj.value = self.memory

    def _cuDeviceGetAttribute(self, found: Any, attribute: int, device: int) -> None:
        found._obj.value = self.capability[{75: 0, 76: 1}[attribute]]

    def _cuDriverGetVersion(self, found: Any) -> None:
        found._obj.value = self.version

    def _cuGetErrorName(self, code: int, found: Any) -> None:
        found._obj.value = {100: b"CUDA_ERROR_NO_DEVICE", 803: b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"}[code]


def one_line(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    return text


def test_the_driver_is_asked_for_everything() -> None:
    asked: list[str] = []

    def load(name: str) -> FakeDriver:
        asked.append(name)
        return FakeDriver(capability=(8, 6), version=12080, memory=24 * GIB)

    assert find_gpu(load) == Gpu("NVIDIA H200", 86, 24 * GIB, (12, 8))
    assert asked == ["libcuda.so.1"]


def test_each_rank_of_a_machine_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert find_gpu(lambda _: FakeDriver(count=2), index=1).name == "NVIDIA H200"
    with pytest.raises(UnusableGpu) as caught:
        find_gpu(lambda _: FakeDriver(count=2), index=2)
    assert "shows 2 GPUs, too few for LOCAL_RANK 2: each rank" in one_line(caught.value)


def test_a_machine_without_a_driver() -> None:
    def load(_: str) -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    with pytest.raises(UnusableGpu) as caught:
        find_gpu(load)
    words = one_line(caught.value)
    assert "there is no NVIDIA driver (libcuda.so.1: cannot open" in words
    assert "compute capability 8.0 or newer" in words
    assert "install the driver" in words


@pytest.mark.parametrize("fake", [FakeDriver(count=0), FakeDriver(fails=("cuInit", 100))])
def test_a_driver_without_a_gpu(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UnusableGpu, match=r"^the NVIDIA driver shows no GPU; a GPU of .* are needed: see what nvidia"):
        find_gpu(lambda _: fake)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(UnusableGpu, match=r"shows no GPU \(CUDA_VISIBLE_DEVICES is '7'\)"):
        find_gpu(lambda _: fake)


@pytest.mark.parametrize("function", ["cuInit", "cuDeviceGetCount", "cuDeviceTotalMem_v2", "cuDriverGetVersion"])
def test_a_driver_that_does_not_work(function: str) -> None:
    with pytest.raises(UnusableGpu) as caught:
        find_gpu(lambda _: FakeDriver(fails=(function, 803)))
    assert f"{function} says CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)" in one_line(caught.value)
    assert "see whether nvidia-smi works" in str(caught.value)
