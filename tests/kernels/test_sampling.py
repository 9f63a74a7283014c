"""`sample.cu` and `adjust.cu` on the CPU: against their twin, and the twin against the float64 reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.kernels import sampling_twin as twin
from support.kernels.host_build import HostLauncher
from support.kernels.planted_faults import Fault, assert_noticed, visible

from pagekv.executor.backend.interface import Sampling
from pagekv.kernels import launch_config, sampling
from pagekv.kernels.params import ADJUSTMENT, CHOICE, EDIT
from pagekv.kernels.sampling import SamplingKernels
from pagekv.kernels.sources import translation_unit

# Filters alone and together; a nucleus of most of the vocabulary, which no list holds.
KINDS = (
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_k=1),
    Sampling(temperature=1.5, top_k=50),
    Sampling(temperature=1.0, top_k=1600),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=3.0, top_p=0.999),
    Sampling(temperature=1.0, top_p=1e-6),
    Sampling(temperature=0.9, min_p=0.02),
    Sampling(temperature=1.1, top_k=40, top_p=0.95, min_p=0.01),
    Sampling(temperature=2.0, top_k=2100, top_p=0.9),
    Sampling(temperature=1e-30, top_p=0.5),
)


def random_logits(seed: int, vocab_size: int, dtype: str, spread: float = 3.0) -> torch.Tensor:
    return (torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * spread).to(getattr(torch, dtype))


def choice(kind: Sampling, key: int, row: int, adjusted: int = -1, penalty_row: int = -1) -> tuple[Any, ...]:
    scale = sampling.scales(kind.temperature) if kind.temperature else (0.0, 0.0)
    filters = sampling.top_p_share(kind.top_p), sampling.min_weight(kind.min_p)
    return key, *filters, kind.top_k, adjusted, row, penalty_row, *scale


def run(
    launcher: HostLauncher,
    logits: torch.Tensor,
    choices: Sequence[tuple[Any, ...]],
    adjusted: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> tuple[list[int], list[int]]:
    """The tokens, and what stands in `last_tokens`, written in reverse."""
    vocab_size, rows = logits.shape[1], len(choices)
    words = torch.from_numpy(np.array(choices, CHOICE).view(np.int32).copy())
    tokens, last_tokens = torch.full((rows,), -7, dtype=torch.int32), torch.full((rows,), -7, dtype=torch.int32)
    none = torch.zeros(1, dtype=torch.int32)
    kernels = SamplingKernels(launcher, str(logits.dtype).removeprefix("torch."), vocab_size)
    kernels.sample(
        logits,
        adjusted,
        words,
        tokens,
        last_tokens,
        none if counts is None else counts,
        none if seen is None else seen,
    )
    return tokens.tolist(), last_tokens.tolist()


def expected(logits: torch.Tensor, kind: Sampling, key: int) -> int:
    row = logits.float().numpy()
    if not kind.temperature:
        return int(row.argmax())
    return int(twin.draws(twin.kept_weights(row, kind), np.array([key], np.uint64))[0][0])


def check_kinds(
    launcher: HostLauncher,
    vocab_size: int = 2200,
    dtype: str = "bfloat16",
    spread: float = 3.0,
    keys: Sequence[int] = (5, 2**64 - 1),
    kinds: Sequence[Sampling] = KINDS,
) -> None:
    """Each kind with each key, the rows apart."""
    pairs = [(kind, key) for kind in kinds for key in keys]
    rows = torch.stack([random_logits(n, vocab_size + 5, dtype, spread) for n in range(len(pairs))])[:, :vocab_size]
    limited = [
        (Sampling(kind.temperature, kind.top_p, kind.top_k if kind.top_k < vocab_size else 0, kind.min_p), key)
        for kind, key in pairs
    ]
    tokens, last_tokens = run(launcher, rows, [choice(*pair, n) for n, pair in enumerate(limited)])
    assert tokens == [expected(row, *pair) for row, pair in zip(rows, limited, strict=True)]
    assert last_tokens == tokens


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_filter(launcher: HostLauncher, dtype: str) -> None:
    check_kinds(launcher, dtype=dtype)


@pytest.mark.parametrize("vocab_size", [1, 257, 5001])
def test_vocabularies_of_any_size(launcher: HostLauncher, vocab_size: int) -> None:
    check_kinds(launcher, vocab_size)


@pytest.mark.parametrize("spread", [0.0, 1e-4, 60.0])
def test_flat_and_steep_rows(launcher: HostLauncher, spread: float) -> None:
    """All tokens equal; nearly so; and most without weight."""
    check_kinds(launcher, spread=spread, dtype="float32")


def check_ties(launcher: HostLauncher) -> None:
    """Of equals the first are kept, by greedy too: 0 and -0 are equal."""
    row = torch.full((600,), -40.0)
    # The first two are one thread's.
    row[[5, 517, 520]] = torch.tensor([-0.0, 0.0, 0.0])
    kinds = {
        Sampling(): {5},
        Sampling(temperature=1.0, top_k=2): {5, 517},
        Sampling(temperature=1.0, top_k=3, top_p=0.3): {5},
        Sampling(temperature=1.0, top_k=3, top_p=0.6): {5, 517},
        Sampling(temperature=1.0, top_k=3, top_p=0.7): {5, 517, 520},
        # A nucleus that makes up its share exactly.
        Sampling(temperature=1.0, top_k=2, top_p=0.5): {5},
    }
    for kind, kept in kinds.items():
        tokens, _ = run(launcher, row.expand(16, -1).contiguous(), [choice(kind, key, key) for key in range(16)])
        assert {*tokens} == kept


@pytest.mark.sanitize
def test_ties_go_to_the_lowest_ids(launcher: HostLauncher) -> None:
    check_ties(launcher)


def test_infinite_logits(launcher: HostLauncher) -> None:
    """A banned token is never drawn; where all are, any is, and no kernel hangs."""
    rows = torch.zeros(3, 300)
    rows[0, 1:] = -math.inf
    rows[1] = -math.inf
    rows[2, 7] = math.inf
    kind = Sampling(temperature=1.0, top_p=0.89, top_k=20)
    tokens, _ = run(launcher, rows, [choice(kind, n, n) for n in range(3)])
    assert [tokens[0], tokens[2]] == [0, 7]
    assert 0 <= tokens[1] <= 17
    tokens, _ = run(launcher, rows, [choice(Sampling(), 0, n) for n in range(3)])
    assert tokens == [0, 0, 7]


@pytest.mark.parametrize("place", [0, 511, 512, 2999])
def test_what_is_no_number_is_marked(launcher: HostLauncher, place: int) -> None:
    rows = torch.stack([random_logits(1, 3000, "float32")] * 3)
    rows[1, place] = math.nan
    kinds = [Sampling(), Sampling(), Sampling(temperature=1.0)]
    tokens, last_tokens = run(launcher, rows, [choice(kind, 9, 2 - n) for n, kind in enumerate(kinds)])
    assert tokens[1] == -1
    assert last_tokens == [tokens[2], 0, tokens[0]]
    assert min(tokens[0], tokens[2]) >= 0


def check_adjusted(launcher: HostLauncher) -> None:
    """Against the order of the reference: bias, ban, penalties; then the token is counted."""
    vocab_size, rows = 2500, [4, 1]
    logits = torch.stack([random_logits(n, vocab_size, "bfloat16") for n in range(5)])
    # The first is banned in row 1.
    logits[1, [17, 40, 41]] = torch.tensor([math.inf, math.inf, -math.inf], dtype=logits.dtype)
    counts = torch.zeros(3, vocab_size, dtype=torch.int32)
    seen = torch.zeros(3, vocab_size, dtype=torch.bool)
    counts[2, :40] = torch.arange(40, dtype=torch.int32) % 3
    seen[2, 20:2100] = True
    seen[2, :40] |= counts[2, :40] > 0
    biases = [(3, 5.0), (2048, -3.5), (2499, 80.0), (30, 2.0), (2400, 60.0)]
    banned = [2499, 17]
    edits = np.array([*biases, *((token, -math.inf) for token in banned)], EDIT)
    adjustments = np.array([(4, 0, 7, 2, 1.3, 0.5, 0.25), (1, 6, 1, -1, 1.0, 0.0, 0.0)], ADJUSTMENT)
    out = torch.full((2, vocab_size), math.nan)
    kernels = SamplingKernels(launcher, "bfloat16", vocab_size)
    rows_of, edits_of = (torch.from_numpy(array.view(np.int32).copy()) for array in (adjustments, edits))
    kernels.adjust(logits, out, rows_of, edits_of, counts, seen)
    wanted = logits[rows].double().numpy()
    for token, bias in biases:
        wanted[0, token] += bias
    wanted[0, banned] = wanted[1, 17] = -math.inf
    penalised = np.where(wanted[0] > 0, wanted[0] / 1.3, wanted[0] * 1.3)
    wanted[0] = np.where(seen[2].numpy(), penalised, wanted[0])
    times = counts[2].numpy()
    wanted[0] -= np.where(times > 0, 0.5 + 0.25 * times, 0)
    np.testing.assert_allclose(out.numpy(), wanted, rtol=3e-7, atol=1e-6)
    before = int(counts[2].sum())
    lines = [choice(Sampling(), 0, 0), choice(Sampling(), 0, 1, adjusted=0, penalty_row=2)]
    tokens, _ = run(launcher, logits[:2], lines, out, counts, seen)
    assert tokens == [int(logits[0].argmax()), int(out[0].argmax())]
    assert int(counts[2].sum()) == before + 1
    assert seen[2, tokens[1]]
    assert not counts[:2].any()


def check_no_numbers(launcher: HostLauncher) -> None:
    """Where a logit that is no number is biased, and banned."""
    logits = torch.zeros(2, 300)
    logits[0, 7] = logits[1, 9] = math.nan
    edits = np.array([(7, 2.0), (7, -math.inf), (9, -math.inf)], EDIT)
    adjustments = np.array([(0, 0, 2, -1, 1.0, 0.0, 0.0), (1, 2, 1, -1, 1.0, 0.0, 0.0)], ADJUSTMENT)
    counts, seen = torch.zeros(1, 300, dtype=torch.int32), torch.zeros(1, 300, dtype=torch.bool)
    out = torch.zeros(2, 300)
    rows_of, edits_of = (torch.from_numpy(array.view(np.int32).copy()) for array in (adjustments, edits))
    SamplingKernels(launcher, "float32", 300).adjust(logits, out, rows_of, edits_of, counts, seen)
    assert out.isnan().nonzero().tolist() == [[0, 7], [1, 9]]
    tokens, _ = run(launcher, logits, [choice(Sampling(), 0, row, adjusted=row) for row in range(2)], out)
    assert tokens == [-1, -1]


def test_a_ban_hides_no_logit_that_is_no_number(launcher: HostLauncher) -> None:
    check_no_numbers(launcher)


@pytest.mark.sanitize
def test_bias_ban_and_penalties(launcher: HostLauncher) -> None:
    check_adjusted(launcher)


def test_a_row_does_not_depend_on_the_batch(launcher: HostLauncher) -> None:
    rows = torch.stack([random_logits(n, 700, "bfloat16") for n in range(4)])
    lines = [choice(KINDS[9], n, n) for n in range(4)]
    together, _ = run(launcher, rows, lines)
    assert together == [
        run(launcher, rows[n : n + 1].clone(), [(*lines[n][:5], 0, *lines[n][6:])])[0][0] for n in range(4)
    ]


def test_weights_follow_from_keys() -> None:
    """Every fraction of a key: the weight rises with the likelihood, and is off by less than 1.1 * 2^-24."""
    found = np.arange(2**twin.FRACTION_BITS + 1, dtype=np.uint64)
    held = twin.weights(found).astype(np.float64)
    assert (np.diff(held) <= 0).all()
    assert np.abs(held / 2.0 ** (44 - found / 2**twin.FRACTION_BITS) - 1).max() < 1.1 * 2.0**-24
    assert twin.weights(np.array([0, twin.LAST_KEY], np.uint64)).tolist() == [2**44, 0]


def test_a_million_draws_are_the_reference_s() -> None:
    """Wherever the float64 reference is not within 2^-21 of a tie; and nearly always where it is."""
    rng, num_draws, num_ties, num_rows, num_others = np.random.default_rng(11), 0, 0, 0, 0
    for vocab_size, rows in ((40, 60), (1000, 60), (32_000, 60), (128_256, 20)):
        for row in range(rows):
            dtype = ("float32", "float16", "bfloat16")[row % 3]
            logits = random_logits(row, vocab_size, dtype, spread=float(rng.uniform(0.5, 5))).float().numpy()
            kind = Sampling(
                temperature=float(rng.uniform(0.2, 2.5)),
                top_p=float(rng.choice([1.0, 0.9, 0.99, rng.uniform(0.05, 1)])),
                top_k=int(rng.choice([0, 0, 20, 1000])),
                min_p=float(rng.choice([0.0, 0.0, 0.05])),
            )
            keys = rng.integers(0, 2**64, 5200, np.uint64)
            exact, kept = twin.reference(logits, kind), twin.kept_weights(logits, kind)
            num_rows += 1
            if exact.tied:
                continue
            # Tokens that weigh less than 2^-44 count as nothing.
            assert (kept[exact.kept > 2.0**-43] > 0).all(), kind
            assert not kept[exact.kept == 0].any(), kind
            wanted, tied = twin.draws(exact.kept, keys)
            differ = twin.draws(kept, keys)[0] != wanted
            assert not (differ & ~tied).any(), kind
            num_draws, num_ties, num_others = (
                num_draws + len(keys),
                num_ties + int(tied.sum()),
                num_others + int(differ.sum()),
            )
    print(f"{num_draws} draws of {num_rows} rows: {num_ties} within rounding of a tie, {num_others} another token")
    assert num_draws >= 1_000_000
    assert num_others <= 20


def test_vocabularies_that_sums_do_not_hold_are_refused() -> None:
    with pytest.raises(ValueError, match=r"vocab_size: must be in \[1, 524288\], got 524289"):
        SamplingKernels(HostLauncher(), "float32", 2**19 + 1)


def test_a_row_is_sampled_by_one_thread_block_and_adjusted_by_one_for_2048_tokens() -> None:
    assert launch_config.sample(7) == launch_config.LaunchConfig((7, 1, 1), 512, 0)
    assert launch_config.adjust(7, 2049) == launch_config.LaunchConfig((7, 2, 1), 256, 0)


def check_some(launcher: HostLauncher) -> None:
    """Filters at their limits, among them one that keeps more tokens than are listed."""
    kinds = [
        *(Sampling(temperature=2.0, top_p=top_p) for top_p in (0.3, 0.8, 0.97)),
        Sampling(temperature=3.0, top_k=1700, top_p=0.999),
        Sampling(temperature=50.0, top_k=1700),
        Sampling(temperature=1.5, top_k=2),
        Sampling(temperature=1.5, top_k=50, top_p=0.6),
        Sampling(temperature=1.5, top_k=50, min_p=0.3),
        Sampling(temperature=1.5, min_p=0.3),
    ]
    check_kinds(launcher, 1900, "float32", 2.0, range(13), kinds)


def check_carries(launcher: HostLauncher) -> None:
    """Sums of many weights below 2^44 whose lower halves are large: what lower halves carry is a share of them."""
    row = torch.full((1900,), -3.1)
    row[3] = 0.0
    kinds = [(Sampling(temperature=1.0, top_p=top_p), key) for top_p in (0.5, 0.9) for key in range(32)]
    tokens, _ = run(launcher, row.expand(len(kinds), -1).contiguous(), [choice(*kind, 0) for kind in kinds])
    assert tokens == [expected(row, *kind) for kind in kinds]


@pytest.mark.sanitize
def test_sums_carry(launcher: HostLauncher) -> None:
    check_carries(launcher)


def test_tokens_without_weight_are_not_added() -> None:
    """All of these have one digit: a warp's additions to one address would come one after the other."""
    mass = "const u32 low = static_cast<u32>(mass);"
    # An addition for such a token would show.
    wrong = "const u32 low = mass == 0ull ? ~0u : static_cast<u32>(mass);"
    assert mass in translation_unit("sample.cu")
    steep = [Sampling(temperature=0.05, top_p=0.9), Sampling(temperature=0.05, top_k=1700, top_p=0.9)]
    check_kinds(HostLauncher(edit=lambda text: text.replace(mass, wrong)), 5001, "float32", kinds=steep)


SAMPLE, ADJUST = "pagekv_sample", "pagekv_adjust"
FAULTS = [
    Fault("no carry", SAMPLE, "sum < low ? 1u : 0u", "sum & 0u", check_carries),
    Fault("upper halves lost", SAMPLE, "if (high != 0u) atomicAdd", "if (false) atomicAdd", check_some),
    Fault("sums of the digit before", SAMPLE, "= 0u;\n    __syncthreads();", "= 0u;", check_some),
    Fault("ties by nothing", SAMPLE, "<< kIdBits | static_cast<u32>(id)", "<< kIdBits | (id & 0u)", check_ties),
    Fault("one too many", SAMPLE, "static_cast<u64>(choice.top_k) - 1", "static_cast<u64>(choice.top_k)", check_some),
    Fault("top-p of everything", SAMPLE, "== prefix && bound.keeps(key, id))", "== prefix)", check_some),
    Fault("too many listed", SAMPLE, "shared.found <= kListed ? end : 0u", "end", check_some),
    Fault("more than are listed", SAMPLE, "(counts && target <", "(counts && target + 2 * kListed >", check_some),
    Fault("listed in part", SAMPLE, "listed = shared.listed_below >= end;", "listed = true;", check_some),
    Fault("no room for rounding", SAMPLE, "max(row.key(bar), 1u) - 1u", "kLastKey", check_some),
    Fault("groups by rank", SAMPLE, "add(shared, id / kGroup, held)", "add(shared, id % kGroup, held)", check_some),
    Fault("a token of any group", SAMPLE, "(id / kGroup == group)", "(id / kGroup >= group)", check_some),
    Fault("a draw of the rest", SAMPLE, "held >= min_weight) visit", "held >= 0 * min_weight) visit", check_some),
    Fault("numbers of tokens for groups", SAMPLE, "kFirstGroup + static", "0ull + static", check_some),
    Fault("bits mixed once", SAMPLE, "bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9ull;", "", check_some),
    Fault("the largest id of equals", SAMPLE, "| kLastPlace) -", "& ~kLastPlace) +", check_some),
    Fault("every weight wins alike", SAMPLE, "static_cast<double>(held) /", "1.0 /", check_some),
    Fault("the best thread of a warp", SAMPLE, "max(value, shared.of_warps[warp])", "value", check_some),
    Fault("half a group", SAMPLE, "threadIdx.x < kGroup ?", "threadIdx.x < kGroup / 2 ?", check_some),
    Fault(
        "a digit as large as its sum",
        SAMPLE,
        "before <= target && target < sum",
        "before < target && target <= sum",
        check_some,
    ),
    Fault("a share of what is below", SAMPLE, "target = shared.rest", "target = target", check_some),
    Fault("no min-p", SAMPLE, "return held >= min_weight ?", "return held >= 0 * min_weight ?", check_some),
    Fault("no nucleus", SAMPLE, "choice.top_p != kNone", "false", check_some),
    Fault("the last equal", SAMPLE, "logit <= most", "logit < most", check_ties),
    Fault("-0 below 0", SAMPLE, "most + 0.0f", "most", check_ties),
    Fault("the token is not counted", SAMPLE, "p.counts[place] += 1;", "", check_adjusted),
    Fault("the token is not seen", SAMPLE, "p.seen[place] = 1;", "", check_adjusted),
    Fault("the raw logits", SAMPLE, "choice.adjusted >= 0", "false", check_adjusted),
    Fault(
        "no barrier before edits",
        ADJUST,
        "__syncthreads();\n    // Biases",
        "// Biases",
        check_adjusted,
    ),
    Fault("edits of the first row", ADJUST, "p.edits[row.edits + i]", "p.edits[i]", check_adjusted),
    Fault(
        "edits of another piece",
        ADJUST,
        "at >= size",
        "edit.token >= p.vocab_size",
        check_adjusted,
        sanitizer=True,
    ),
    Fault(
        "a ban is added",
        ADJUST,
        "bans == 1 ? -infinity() : piece[at] + edit.value",
        "piece[at] + edit.value",
        check_adjusted,
    ),
    Fault("a ban hides what is no number", ADJUST, " || piece[at] != piece[at]", "", check_no_numbers),
    Fault("penalties of tokens not seen", ADJUST, "&& p.seen[tokens + i]", "", check_adjusted),
    Fault("no frequency", ADJUST, "row.frequency, row.presence", "0.0f, row.presence", check_adjusted),
]


@pytest.mark.sanitize
@pytest.mark.parametrize("fault", visible(FAULTS), ids=str)
def test_planted_faults_are_noticed(fault: Fault) -> None:
    assert_noticed(fault)
