"""The gate's compilations: every kernel variant for every architecture, with every compiler that users have."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from compile_gate.ptxas_log import Usage
from pagekv.kernels import launch_config
from pagekv.kernels.sources import translation_unit
from pagekv.kernels.variants import Kernel, Variant

# Compute capability -> bytes of shared memory that a thread block may have (CUDA C++ programming guide).
ARCHITECTURES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
COMPILERS = (12, 13)  # CUDA major versions, each with an NVRTC of its own
GROUP_SIZES = (1, 4, 8, 16, 64)


@dataclass(frozen=True)
class Job:
    """One compilation."""

    kernel: Kernel
    variant: Variant
    arch: int
    cuda: int
    """Version of the NVRTC that compiles: one of COMPILERS."""

    @property
    def label(self) -> str:
        """The part of the variant that the kernel depends on."""
        return self.kernel.label(self.variant)

    @property
    def text(self) -> str:
        return translation_unit(self.kernel.source)

    def options(self) -> list[str]:
        return [f"--gpu-architecture={self.kernel.architecture(self.arch)}", *self.plain_options()]

    def plain_options(self) -> list[str]:
        """The options without the architecture."""
        return ["--ptxas-options=-v", *self.kernel.options(self.variant)]

    def digest(self) -> str:
        """A digest of everything that is compiled, without architecture and compiler."""
        return hashlib.sha256("\0".join([*self.plain_options(), self.text]).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.kernel.name} {self.label} {self.kernel.architecture(self.arch)} CUDA {self.cuda}"


@dataclass(frozen=True)
class Outcome:
    """Result of a job: the kernel's usage, or the compiler's message."""

    job: Job
    usage: Usage | None
    error: str = ""
    warnings: str = ""


def jobs(architectures: Sequence[int], kernels: Iterable[Kernel], variants: Iterable[Variant]) -> list[Job]:
    """Every distinct compilation: variants that are the same to a kernel are compiled once."""
    distinct: dict[tuple[object, ...], Job] = {}
    variants = list(variants)
    for kernel in kernels:
        for variant in filter(kernel.serves, variants):
            for arch, cuda in product(architectures, COMPILERS):
                if kernel.arch not in (0, arch):
                    continue
                key = (kernel.name, *kernel.macros_of(variant).values(), arch, cuda)
                distinct.setdefault(key, Job(kernel, variant, arch, cuda))
    return list(distinct.values())


def launch_limits(kernel: Kernel, variant: Variant) -> tuple[int, int]:
    """The most dynamic shared memory and the most threads of a launch, over the widths of a group."""
    shapes = []
    for group_size in GROUP_SIZES:
        match kernel.name:
            case "pagekv_cache_write":
                shapes.append(launch_config.cache_write(variant, 1, group_size + 1))
            case "pagekv_cache_write_together":
                shapes.append(launch_config.cache_write_together(1))
            case "pagekv_add_norm":
                shapes.append(launch_config.add_norm(1, 1 << 14))
            case "pagekv_gated":
                shapes.append(launch_config.gated(1, 1 << 14))
            case "pagekv_sample":
                shapes.append(launch_config.sample(1))
            case "pagekv_adjust":
                shapes.append(launch_config.adjust(1, 1 << 17))
            case "pagekv_block_copy":
                shapes.append(launch_config.block_copy(1, 1 << 20))
            case "pagekv_decode":
                shapes.append(launch_config.decode(variant, 1, group_size, 1))
            case "pagekv_decode_wide":
                shapes.append(launch_config.decode(variant, 1, group_size, 1, wide=True))
            case "pagekv_merge":
                shapes.append(launch_config.merge(variant, 1, group_size))
            case "pagekv_merge_rows":
                shapes.append(launch_config.merge_rows(variant, 1, group_size))
            case "pagekv_prefill":
                shapes.append(launch_config.prefill(variant, 1, 1))
            case "pagekv_prefill_wgmma":
                shapes.append(launch_config.prefill(variant, 1, 1, wgmma=True))
    return max(shape.shared_bytes for shape in shapes), max(shape.threads for shape in shapes)
