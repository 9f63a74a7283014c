"""`pagekv plan`: the memory of a model's KV cache, and the number of requests that fit into a memory size, before
anything runs.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pagekv.client.cli.parser import Subparsers, UsageError, add_command, add_flags
from pagekv.client.cli.terminal import Terminal, counted, table
from pagekv.client.errors import InvalidRequest
from pagekv.client.planning import kv_budget, kv_geometry
from pagekv.client.planning.kv_geometry import DTYPE_BYTES, KvGeometry
from pagekv.client.planning.runs_on import runs_on
from pagekv.common.flags import integer, number, power_of_two, size_in_bytes
from pagekv.common.models import ModelNotFound, check_model_files, resolve_model

EXAMPLES = """\
  pagekv plan demo --dtype float32
  pagekv plan ~/models/Qwen3-0.6B --memory 8GiB
  pagekv plan --layers 80 --kv-heads 8 --head-size 128 --context 8192 --tp 2 --memory 8GiB
  pagekv plan ~/models/Qwen3-0.6B --lengths 600,1250,4000,128
  pagekv plan ~/models/Qwen3-0.6B --shared-prefix 1000 --requests 100

Flags for the shape of the model override its config.json. Without --dtype the KV cache has the model's element type;
the CPU backend has a cache of float32 unless its own --dtype says otherwise.
"""
DEFAULT_CONTEXTS = (4096, 32768, 131072)
# Element type of `pagekv up` with the CPU backend if no --dtype is given.
_CPU_DTYPE = "float32"
# Far more than any file needs; a config.json has a few kilobytes.
_MAX_JSON_BYTES = 64 * 2**20


def add(commands: Subparsers) -> None:
    parser = add_command(
        commands, "plan", "compute the memory of a KV cache, and the requests that fit", run, examples=EXAMPLES
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a model directory, a config.json, demo, or a hub id")
    most = kv_geometry.MAX_TOKENS
    add_flags(
        parser.add_argument_group("shape of the model"),
        ("layers", integer(1, kv_geometry.MAX_LAYERS), None, "N", "attention layers"),
        ("kv-heads", integer(1, kv_geometry.MAX_KV_HEADS), None, "N", "KV heads of a layer"),
        ("head-size", integer(1, kv_geometry.MAX_HEAD_SIZE), None, "N", "elements of a head's vector"),
        ("dtype", _dtype, None, "TYPE",
         f"element type of the KV cache, such as fp8 [the model's, else {kv_geometry.DEFAULT_DTYPE}]"),
        ("context", integer(1, most), None, "N",
         f"most tokens of a sequence [the model's, else {kv_geometry.DEFAULT_CONTEXT}]"),
    )  # fmt: skip  # laid out as a table
    add_flags(
        parser.add_argument_group("deployment"),
        ("block-size", power_of_two(1, 256), 16, "N", "tokens in one block [16]"),
        ("tp", integer(1, 1024), 1, "N", "tensor-parallel ranks [1]"),
        ("memory", size_in_bytes(1, 2**60), None, "SIZE", "KV memory of one rank, such as 8GiB"),
        (
            "overhead",
            number(0, 10),
            0.04,
            "X",
            "extra memory of a request, as a share of the memory of its tokens, 0 to 10 [0.04]",
        ),
    )
    add_flags(
        parser.add_argument_group("questions"),
        ("contexts", numbers(1, most), None, "N,N",
         "memory at these lengths [4096, 32768 and 131072 up to the context, and the context]"),
        ("batches", numbers(1, 10**6), (1, 8, 32, 128), "N,N", "memory for these numbers of sequences [1,8,32,128]"),
        ("lengths", numbers(1, most), None, "N,N",
         "memory wasted by sequences of these lengths: with the whole context reserved, and with blocks"),
        ("shared-prefix", integer(1, most), None, "N", "blocks saved if requests share a prefix of N tokens"),
        ("requests", integer(1, 10**9), 100, "N", "requests that share the prefix [100]"),
    )  # fmt: skip  # laid out as a table


def numbers(low: int, high: int) -> Callable[[str], tuple[int, ...]]:
    """An argparse type: whole numbers within bounds, commas between them."""
    check = integer(low, high)
    return lambda text: tuple(check(part) for part in text.split(","))


def _dtype(text: str) -> str:
    try:
        return kv_geometry.canonical_dtype(text)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(error.description) from error


class _Plan(NamedTuple):
    """The results for the questions that the flags ask; None for questions that they do not ask."""

    geometry: KvGeometry
    # The geometry as the CPU backend serves it.
    on_cpu: KvGeometry
    query_heads: int | None
    weights: int | None
    block_size: int
    tp: int
    # A row for each context, a cell for each number of sequences.
    footprints: list[list[kv_budget.Footprint]]
    fits: kv_budget.KvBudget | None
    wasted: kv_budget.Waste | None
    saving: kv_budget.PrefixSaving | None
    # Full-context requests that fit when they share the prefix, and their block tables in bytes.
    sharing: int | None
    sharing_tables: int | None
    notes: list[str]

    @property
    def shard(self) -> kv_budget.Shard:
        return kv_budget.shard_kv_heads(self.geometry.kv_heads, self.tp)

    @property
    def backends(self) -> dict[str, str]:
        """For each backend, why it does not support this cache; empty if it does."""
        split = self.tp, self.query_heads
        return {**runs_on(self.geometry, *split), "cpu": runs_on(self.on_cpu, *split)["cpu"]}


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Computes and prints; starts nothing and asks no server."""
    plan = _plan(args)
    if args.json:
        terminal.json(_as_json(plan))
        return 0
    of_rank = " of each rank" if plan.tp > 1 else ""
    needed = {"cpu": _too_little(plan), "cuda": ""}
    groups = {
        f"KV cache{of_rank}, by context and sequences": _grid_text(plan.footprints),
        f"memory{of_rank}": _memory_text(plan, named=args.model is not None),
        "waste": plan.wasted and _waste_text(plan.wasted, plan.geometry.context),
        "shared prefix": plan.saving and _saving_text(plan, plan.saving),
        "PageKV runs this": table([(name, f"no: {reason}" if reason else f"yes{needed[name]}")
                                   for name, reason in plan.backends.items()], indent="  "),
    }  # fmt: skip  # laid out as a table
    texts = [f"{terminal.bold(title)}\n{text}" for title, text in groups.items() if text is not None]
    terminal.print("\n\n".join([_model_text(plan), *texts]))
    for note in plan.notes:
        terminal.note(note)
    return 0


def _plan(args: argparse.Namespace) -> _Plan:
    """Raises UsageError."""
    geometry, heads, weights, notes = _geometry(args)
    block_size, tp, prefix = args.block_size, args.tp, args.shared_prefix
    for flag, tokens in (("--lengths", max(args.lengths or [0])), ("--shared-prefix", prefix or 0)):
        if tokens > geometry.context:
            raise UsageError(f"{flag}: {tokens} tokens are more than the context of {geometry.context}")
    contexts = args.contexts or sorted({*(c for c in DEFAULT_CONTEXTS if c < geometry.context), geometry.context})
    fits = None if args.memory is None else kv_budget.capacity(geometry, block_size, tp, args.memory, args.overhead)
    # A prefix as long as the context leaves nothing to a request.
    sharing = tables = None
    if fits is not None and prefix and prefix < geometry.context:
        sharing = kv_budget.sharing_requests(geometry, block_size, fits, prefix)
        tables = kv_budget.table_bytes(geometry, block_size, sharing)
    on_cpu = geometry
    if args.model is not None and args.dtype is None:
        on_cpu = replace(geometry, dtype=_CPU_DTYPE)
        if geometry.dtype != _CPU_DTYPE:
            token = size_text(kv_budget.bytes_per_token(on_cpu))
            notes.append(f"on a CPU `pagekv up` serves {_CPU_DTYPE} unless --dtype is given: {token} a token")
    return _Plan(
        geometry=geometry,
        on_cpu=on_cpu,
        query_heads=heads,
        weights=weights,
        block_size=block_size,
        tp=tp,
        footprints=[
            [kv_budget.footprint(geometry, block_size, tp, context, batch) for batch in args.batches]
            for context in contexts
        ],
        fits=fits,
        wasted=args.lengths and kv_budget.waste(geometry, block_size, args.lengths),
        saving=prefix and kv_budget.prefix_saving(args.requests, prefix, block_size),
        sharing=sharing,
        sharing_tables=tables,
        notes=notes,
    )


def _as_json(plan: _Plan) -> dict[str, Any]:
    geometry, block_size, heads = plan.geometry, plan.block_size, plan.shard.kv_heads
    return {
        "model": geometry,
        "block_size": block_size,
        "tp": plan.tp,
        "rank": plan.shard,
        "bytes_per_token": kv_budget.bytes_per_token(geometry),
        "bytes_per_token_per_rank": kv_budget.bytes_per_token(geometry, heads),
        "bytes_per_block_per_rank": kv_budget.bytes_per_block(geometry, block_size, heads),
        "blocks_per_full_context": kv_budget.blocks_for(geometry.context, block_size),
        "footprints": [cell for row in plan.footprints for cell in row],
        "weight_bytes": plan.weights,
        "capacity": plan.fits,
        "waste": plan.wasted,
        "shared_prefix": plan.saving,
        "full_context_requests_sharing": plan.sharing,
        "table_bytes_sharing": plan.sharing_tables,
        "backends": {name: {"runs": not reason, "reason": reason} for name, reason in plan.backends.items()},
        "notes": plan.notes,
    }


def _too_little(plan: _Plan) -> str:
    """The end of a sentence if the weights, as the CPU backend serves them, need more than this machine's memory; else
    empty.
    """
    if plan.weights is None:
        return ""
    # With --dtype or quantised weights only the size of the files is certain.
    served = plan.weights * DTYPE_BYTES[plan.on_cpu.dtype] // DTYPE_BYTES[plan.geometry.dtype]
    needed = max(plan.weights, served)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed <= memory:
        return ""
    over = f" over {plan.tp} ranks" if plan.tp > 1 else ""
    return f", with more memory: the weights take {size_text(needed)}{over}, and this machine has {size_text(memory)}"


def _geometry(args: argparse.Namespace) -> tuple[KvGeometry, int | None, int | None, list[str]]:
    """The geometry, the query heads if config.json has them, the bytes of the weights if the files are there, and
    notes.
    """
    given = {
        "num_hidden_layers": args.layers,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.head_size,
        "dtype": args.dtype,
        "max_position_embeddings": args.context,
    }
    if args.model is None:
        if None in (args.layers, args.kv_heads, args.head_size):
            raise UsageError("MODEL, or all of --layers, --kv-heads and --head-size, are required")
        return kv_geometry.geometry_from_config({}, given)[0], None, None, []
    path = Path(os.path.expanduser(args.model))
    if not os.path.isfile(path):
        try:
            directory = resolve_model(args.model, weights=False)
            check_model_files(directory, weights=False)
            path = directory / "config.json"
        except ModelNotFound as error:
            raise UsageError(str(error)) from error
    try:
        config = _read_json(path)
        geometry, notes = kv_geometry.geometry_from_config(config, given)
    except InvalidRequest as error:
        raise UsageError(f"{path}: {error}") from error
    return geometry, kv_geometry.query_heads(config), weight_bytes(path.parent), notes


def _read_json(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_JSON_BYTES + 1)
        if len(text) > _MAX_JSON_BYTES:
            raise UsageError(f"{path}: is larger than {_MAX_JSON_BYTES} bytes, which no config is")
        found = json.loads(text)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path}: must be a JSON object, got {type(found).__name__}")
    return found


def weight_bytes(directory: Path) -> int | None:
    """Bytes of a model's safetensors; None if there are none. The index counts only tensors, so a second copy in other
    files of the repository does not count; without an index all files count.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        metadata = _read_json(index).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        # Some programs write a float here.
        if isinstance(total, (int, float)) and 0 < total < 2**63:
            return int(total)
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else directory.glob("*.safetensors")
    return sum(file.stat().st_size for file in files if file.is_file()) or None


def size_text(num_bytes: int) -> str:
    """A size as text, such as 128 KiB, 1.25 GiB or 8,192.00 TiB."""
    if num_bytes < 2**10:
        return f"{num_bytes} B"
    if num_bytes < 2**20:
        return f"{round(num_bytes / 2**10, 1):g} KiB"
    value, unit = num_bytes / 2**20, "MiB"
    for larger in ("GiB", "TiB"):
        if value >= 1024:
            value, unit = value / 1024, larger
    return f"{value:,.2f} {unit}"


def _model_text(plan: _Plan) -> str:
    geometry, shard, block_size, tp = plan.geometry, plan.shard, plan.block_size, plan.tp
    token, rank_token = kv_budget.bytes_per_token(geometry), kv_budget.bytes_per_token(geometry, shard.kv_heads)
    heads = counted(geometry.kv_heads, "KV head")
    rows = [
        ("model", f"{counted(geometry.layers, 'layer')}, {heads} of {geometry.head_size}, {geometry.dtype}, "
                  f"context {geometry.context}"),
        ("a token", size_text(token)),
    ]  # fmt: skip  # laid out as a table
    if tp > 1:
        rows += [
            ("ranks", f"{tp}, {counted(shard.kv_heads, 'KV head')} on each ({shard.sharding})"),
            ("a token on a rank", size_text(rank_token)),
        ]
    rows += [
        ("a block" + " on a rank" * (tp > 1), f"{size_text(block_size * rank_token)}, {counted(block_size, 'token')}"),
        ("a full sequence", f"{counted(kv_budget.blocks_for(geometry.context, block_size), 'block')}"),
        ("tail waste", f"at most {counted(block_size - 1, 'token')} of a sequence"),
    ]
    return table(rows)


def _grid_text(grid: Sequence[Sequence[kv_budget.Footprint]]) -> str:
    rows = [[f"{row[0].context}", *(size_text(cell.bytes_per_rank) for cell in row)] for row in grid]
    header = ["context", *(f"x {cell.batch}" for cell in grid[0])]
    return table(rows, header, indent="  ", right=True)


def _memory_text(plan: _Plan, *, named: bool) -> str:
    """The memory of weights and of the KV cache, two separate budgets: --memory is for the KV cache alone. `named`: the
    command line has a MODEL, so its files were looked for.
    """
    fits, weights, tp, rows = plan.fits, plan.weights, plan.tp, []
    if weights is None:
        rows.append(("weights", "unknown: no safetensors beside the config" if named else "unknown: no model is named"))
    else:
        rows.append(("weights", f"{size_text(-(-weights // tp))} as stored{', in even shares' * (tp > 1)}"))
    if fits is None:
        rows.append(("KV cache", "give --memory SIZE to see how many blocks and requests fit"))
        return table(rows, indent="  ")
    rows += [
        ("KV cache", size_text(fits.memory)),
        ("blocks", f"{fits.num_blocks:,}, {fits.tokens:,} tokens"),
        ("requests", f"{fits.full_context_requests:,} of {plan.geometry.context} tokens, "
                     f"each {size_text(fits.request_bytes)} with {fits.overhead:.1%} overhead"),
        ("tables", f"{size_text(fits.table_bytes)} of block tables for them, on top"),
    ]  # fmt: skip  # laid out as a table
    if weights is not None:
        rows.append(("together", f"{size_text(-(-weights // tp) + fits.memory)}, and activations and workspace on top"))
    return table(rows, indent="  ")


def _waste_text(wasted: kv_budget.Waste, context: int) -> str:
    tails = table(
        [(t.tokens, t.blocks, t.slots, t.unused, context - t.tokens) for t in wasted.tails],
        ["tokens", "blocks", "slots", "unused", "unused if reserved"],
        indent="  ",
    )
    rows = [
        ("live", size_text(wasted.live_bytes)),
        (
            "reserved",
            f"{size_text(wasted.reserved_bytes)} at {context} tokens each, {wasted.reserved_unused:.1%} unused",
        ),
        ("paged", f"{size_text(wasted.paged_bytes)}, {wasted.paged_unused:.1%} unused"),
    ]
    return f"{tails}\n\n{table(rows, indent='  ')}"


def _saving_text(plan: _Plan, saving: kv_budget.PrefixSaving) -> str:
    rows = [
        ("requests", f"{saving.requests} with {counted(saving.prefix_tokens, 'token')} in common"),
        ("apart", counted(saving.blocks_unshared, "block")),
        ("shared", f"{counted(saving.blocks_shared, 'block')}, {saving.saved:.1%} saved"),
    ]
    if saving.tail_tokens and saving.requests > 1:
        aligned = saving.prefix_tokens - saving.tail_tokens + plan.block_size
        rows += [
            (f"why not {saving.saved_if_tail_were_shared:.1%}",
             f"{counted(saving.full_blocks, 'full block')} for all, but the prefix ends "
             f"{counted(saving.tail_tokens, 'token')} into the next: each request writes that block itself"),
            ("aligned", f"a prefix of {aligned} tokens would save {saving.saved_if_tail_were_shared:.1%}"),
        ]  # fmt: skip  # laid out as a table
    if plan.sharing is not None and plan.sharing_tables is not None:
        rows += [
            ("fits", f"{counted(plan.sharing, 'request')} of {plan.geometry.context} tokens, the prefix held once"),
            ("tables", f"{size_text(plan.sharing_tables)} of block tables for them, on top"),
        ]
    return table(rows, indent="  ")
