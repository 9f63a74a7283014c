"""Kernel variants: the macros of each and the combinations that exist.

Block size, group size and head counts are run-time parameters, so that the number of variants stays small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

HEAD_SIZES = (64, 80, 96, 128, 256)
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MAX_GROUP_SIZE = 64
MIN_COMPUTE_CAPABILITY = 80
WGMMA_CAPABILITY = 90
"""The compute capability of Hopper. Only its GPUs multiply matrices by warpgroups (wgmma)."""
WGMMA_HEAD_SIZES = (64, 128)

# Name -> code of PAGEKV_DTYPE and PAGEKV_KV_DTYPE (types.cuh).
DTYPE_CODES: Mapping[str, int] = {"float32": 0, "float16": 1, "bfloat16": 2, "float8_e4m3fn": 3}
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}

# Element type of queries and outputs -> element types of KV memory that it goes with.
DTYPE_PAIRS: Mapping[str, tuple[str, ...]] = {
    "float32": ("float32",),
    "float16": ("float16", "float8_e4m3fn"),
    "bfloat16": ("bfloat16", "float8_e4m3fn"),
}


class UnsupportedVariant(ValueError):
    """No kernel exists for this combination; the message names the field and what it may be."""


@dataclass(frozen=True)
class Variant:
    """One compiled form of the kernels."""

    dtype: str
    """Element type of queries, new keys and values, and outputs: float32, float16 or bfloat16."""
    kv_dtype: str
    """Element type of the block pool: the same as `dtype`, or float8_e4m3fn beside a 16-bit dtype."""
    head_size: int
    """Elements of a head: 64, 80, 96, 128 or 256."""
    features: bool = False
    """Whether sliding window, soft cap and sinks are compiled in; run-time parameters turn each on."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_PAIRS:
            raise UnsupportedVariant(f"dtype: must be one of {', '.join(DTYPE_PAIRS)}, got {self.dtype!r}")
        if self.kv_dtype not in DTYPE_PAIRS[self.dtype]:
            pairs = ", ".join(DTYPE_PAIRS[self.dtype])
            raise UnsupportedVariant(f"kv_dtype: must be one of {pairs} with dtype {self.dtype}, got {self.kv_dtype!r}")
        if self.head_size not in HEAD_SIZES:
            sizes = ", ".join(map(str, HEAD_SIZES))
            raise UnsupportedVariant(f"head_size: must be one of {sizes}, got {self.head_size!r}")

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_element_bytes(self) -> int:
        return DTYPE_BYTES[self.kv_dtype]

    def macros(self) -> dict[str, int]:
        return {
            "PAGEKV_DTYPE": DTYPE_CODES[self.dtype],
            "PAGEKV_KV_DTYPE": DTYPE_CODES[self.kv_dtype],
            "PAGEKV_HEAD_SIZE": self.head_size,
            "PAGEKV_FEATURES": int(self.features),
        }

    def __str__(self) -> str:
        kv_dtype = "" if self.kv_dtype == self.dtype else f"/{self.kv_dtype}"
        return f"{self.dtype}{kv_dtype} d{self.head_size}{' features' if self.features else ''}"


def check_wgmma(variant: Variant) -> None:
    """Raises UnsupportedVariant where prompts of this variant cannot be multiplied by warpgroups."""
    if variant.element_bytes != 2 or variant.kv_dtype != variant.dtype or variant.head_size not in WGMMA_HEAD_SIZES:
        sizes = " or ".join(map(str, WGMMA_HEAD_SIZES))
        raise UnsupportedVariant(
            "prefill by warpgroups: needs float16 or bfloat16, KV memory of the same type and a head size of "
            f"{sizes}, got {variant}"
        )


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Raises UnsupportedVariant where no kernel serves this many query heads over this many KV heads."""
    if num_heads < 1 or num_heads % num_kv_heads:
        raise UnsupportedVariant(f"num_heads: must be a multiple of the {num_kv_heads} KV heads, got {num_heads}")
    if num_heads // num_kv_heads > MAX_GROUP_SIZE:
        raise UnsupportedVariant(
            f"num_heads: at most {MAX_GROUP_SIZE} query heads a KV head, got {num_heads // num_kv_heads}"
        )


def all_variants() -> list[Variant]:
    """Every variant that exists, in a stable order."""
    return [
        Variant(dtype, kv_dtype, head_size, features)
        for dtype, kv_dtypes in DTYPE_PAIRS.items()
        for kv_dtype, head_size, features in product(kv_dtypes, HEAD_SIZES, (False, True))
    ]


@dataclass(frozen=True)
class Kernel:
    """One `extern "C"` kernel: its file, and the macros that its text depends on."""

    name: str
    source: str
    macros: tuple[str, ...]
    arch: int = 0
    """The only compute capability that has the kernel's instructions; 0: the kernel runs on all."""
    contracts: bool = True
    """Whether the compiler may contract a product and a sum to a multiply-add, which rounds once. False for kernels
    that compute the same rows, whose bits must not depend on the kernel."""

    def serves(self, variant: Variant) -> bool:
        """Whether the kernel exists for a variant."""
        if self.arch:
            try:
                check_wgmma(variant)
            except UnsupportedVariant:
                return False
        return True

    def architecture(self, capability: int) -> str:
        """The compiler's name of the machine code for a compute capability, such as sm_90."""
        return f"sm_{capability}{'a' if self.arch else ''}"

    def macros_of(self, variant: Variant) -> dict[str, int]:
        """The variant's macros. Macros that this kernel does not depend on have the values of the plainest variant, so
        equal results mean the same machine code.
        """
        values = variant.macros()
        return {name: values[name] if name in self.macros else plain for name, plain in PLAIN_MACROS.items()}

    def options(self, variant: Variant) -> tuple[str, ...]:
        """Compiler options, without the architecture."""
        # fp32 subnormals count as 0: tolerances and register budgets were judged with this option.
        rounding = () if self.contracts else ("--fmad=false",)
        macros = (f"-D{name}={value}" for name, value in self.macros_of(variant).items())
        return ("--std=c++17", "-ftz=true", *rounding, *macros)

    def label(self, variant: Variant) -> str:
        """The part of the variant that this kernel depends on, in words."""
        words = [variant.dtype] if "PAGEKV_DTYPE" in self.macros else []
        if "PAGEKV_KV_DTYPE" in self.macros and variant.kv_dtype != variant.dtype:
            words[-1:] = [f"{variant.dtype}/{variant.kv_dtype}"]
        words += [f"d{variant.head_size}"] if HEAD_SIZE in self.macros else []
        words += ["features"] if variant.features and "PAGEKV_FEATURES" in self.macros else []
        return " ".join(words) or "any"


PLAIN_MACROS: Mapping[str, int] = Variant("float32", "float32", 64).macros()
DTYPES = ("PAGEKV_DTYPE", "PAGEKV_KV_DTYPE")
HEAD_SIZE = "PAGEKV_HEAD_SIZE"

KERNELS: Mapping[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("pagekv_cache_write", "cache_write.cu", (*DTYPES, HEAD_SIZE)),
        Kernel("pagekv_cache_write_together", "cache_write_together.cu", (*DTYPES, HEAD_SIZE)),
        Kernel("pagekv_add_norm", "add_norm.cu", ("PAGEKV_DTYPE",)),
        Kernel("pagekv_gated", "gated.cu", ("PAGEKV_DTYPE",)),
        Kernel("pagekv_adjust", "adjust.cu", ("PAGEKV_DTYPE",)),
        Kernel("pagekv_sample", "sample.cu", ("PAGEKV_DTYPE",)),
        Kernel("pagekv_block_copy", "block_copy.cu", ()),
        Kernel("pagekv_decode", "decode.cu", (*DTYPES, HEAD_SIZE, "PAGEKV_FEATURES"), contracts=False),
        Kernel("pagekv_decode_wide", "decode_wide.cu", (*DTYPES, HEAD_SIZE, "PAGEKV_FEATURES"), contracts=False),
        Kernel("pagekv_merge", "merge.cu", ("PAGEKV_DTYPE", HEAD_SIZE), contracts=False),
        Kernel("pagekv_prefill", "prefill.cu", (*DTYPES, HEAD_SIZE, "PAGEKV_FEATURES")),
        Kernel(
            "pagekv_prefill_wgmma", "prefill_wgmma.cu", (*DTYPES, HEAD_SIZE, "PAGEKV_FEATURES"), arch=WGMMA_CAPABILITY
        ),
        Kernel("pagekv_merge_rows", "merge_rows.cu", ("PAGEKV_DTYPE", HEAD_SIZE), contracts=False),
    )
}
EVERYWHERE = tuple(name for name, kernel in KERNELS.items() if not kernel.arch)
"""Names of the kernels that every GPU runs, for every variant."""
