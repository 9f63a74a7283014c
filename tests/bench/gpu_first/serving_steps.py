"""Steps that run a model: the two-layer comparison of part 1, and part 3."""

from __future__ import annotations

import asyncio
import gc
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu_first.failures import checked_failures
from gpu_first.floors import FLOORS
from gpu_first.in_process import (
    GREEDY,
    REHEARSED,
    TOP_P,
    InProcess,
    Sizes,
    StepTime,
    allocate,
    decode_seconds,
    mixed_seconds,
    prompts_for,
    step_seconds,
)
from gpu_first.llama import llama_3_8b, two_layers, write_model
from gpu_first.step import Context
from pagekv.executor.backend.interface import Sampling
from pagekv.executor.cuda.backend import CudaBackend
from pagekv.executor.cuda.fused_decoder import FusedLayers
from pagekv.executor.cuda.torch_sampler import TorchSampling

MODEL_BYTES = 20 * 2**30
"""Room for the weights of Llama 3 8B, with a little to spare."""
SAME_TOKENS = 40
FEW_SEQUENCES = 16
"""Of backends whose tokens are compared: they have ten pools in all, and record a ladder of graphs for each, of 23 or
28 where 1,024 sequences would have 103 or 124."""
WHOLE = "whole"
"""The file that is written last into the model's folder."""


def sizes_of(context: Context) -> Sizes:
    """Sizes of the context: real or of a rehearsal."""
    return REHEARSED if context.small else Sizes()


def backend_of(context: Context, directory: Path, **options: Any) -> CudaBackend:
    """A backend over a model on the GPU, or on its stub."""
    if context.small:
        from support.executor import cuda_stub

        # Recording graphs emulates each of them, and twice.
        stubbed = {"dtype": "float32", "kv_memory": 2**26, "max_sequences": 8}
        return CudaBackend(directory, "bench", cuda_stub.device(), **{**stubbed, **options})
    from pagekv.executor.cuda.device import CudaDevice

    return CudaBackend(directory, "bench", CudaDevice(), **options)


def give_memory_back() -> None:
    """Frees memory before the next model is loaded; callers have deleted their references to the last one."""
    gc.collect()
    torch.cuda.empty_cache()


# --- part 1: tokens


def step_llama(context: Context) -> None:
    """Greedy and seeded tokens of a batch that a graph fits and of one that it fills up, with graphs and without.

    In bf16 batches of 8, which graphs do not fill up: matrix products of another size may round otherwise. In float32
    batches of 5 too.
    """
    torch.manual_seed(3)
    directory = context.folder / "two-layers"
    write_model(directory, two_layers(), torch.device("cpu"), spread=0.3)
    small = context.small
    most = 8 if small else FEW_SEQUENCES
    sizes = Sizes(prompt_tokens=40, short=1, long=SAME_TOKENS, batches=(8,), chunk=1)
    if small:
        sizes = replace(REHEARSED, prompt_tokens=3, long=4, batches=(8,))
    for dtype, batch in (("float32", 3), ("bfloat16", 2)) if small else (("float32", 5), ("bfloat16", 8)):
        answers = []
        for graphs in (True, False):
            options = {"dtype": dtype, "graphs": graphs, "kv_memory": 2**26, "max_sequences": most}
            backend = backend_of(context, directory, **options)
            check_is_ours(context, backend, f"{dtype}: ", graphs=graphs)
            allocate(backend, sizes)
            outputs = [_tokens(backend, batch, sizes, sampling) for sampling in (GREEDY, TOP_P)]
            answers.append(outputs)
            captured, replayed = backend.runner.graphs.num_captured, backend.runner.graphs.num_replayed
            if graphs:
                context.log.check(f"{dtype}: graphs were replayed", replayed > 0, captured=captured, replayed=replayed)
                context.log.check(f"{dtype}: a sequence whose logits are NaN fails alone", _fails_alone(backend))
            del backend
            give_memory_back()
        different = sum(a != b for a, b in zip(_flat(answers[0]), _flat(answers[1]), strict=True))
        context.log.check(
            f"{dtype}, batch {batch}: tokens with graphs are those without", different == 0, error=different
        )
        distinct = len(set(_flat(answers[1])))
        context.log.check(f"{dtype}: the model says more than one thing", distinct > 4, error=distinct)
        context.say(f"{dtype}: {different} of {len(_flat(answers[0]))} tokens differ, {distinct} distinct")
    if not context.small:  # the stub records whatever it is given
        from pagekv.executor.cuda.device import CudaDevice

        for check, passed in checked_failures(CudaDevice()).items():
            context.log.check(f"after a failure: {check}", passed)


def check_is_ours(context: Context, backend: CudaBackend, label: str = "", **more: bool) -> None:
    """Checks that layers and sampling are PageKV's. Both are judged at start, and where they are not right,
    transformers and torch serve instead: a figure is then of these.
    """
    context.log.check(f"{label}layers are fused", isinstance(backend.forward, FusedLayers), **more)
    context.log.check(f"{label}tokens are sampled by the kernel", backend.sampler is not TorchSampling, **more)


def _fails_alone(backend: CudaBackend) -> bool:
    """Whether its mates sample the same to the bit, with graphs and steps launched ahead."""
    from support.executor.broken_sequence import KINDS, check_fails_alone

    try:
        for kind in KINDS:
            check_fails_alone(backend, kind, ahead=True)
    except AssertionError:
        return False
    return True


def _tokens(backend: CudaBackend, batch: int, sizes: Sizes, sampling: Sampling) -> list[list[int]]:
    driven = InProcess(backend, prompts_for(batch, sizes.prompt_tokens, 512, 7), sizes.long, sizes, sampling)
    driven.run()
    return list(driven.outputs.values())


def _flat(outputs: list[list[list[int]]]) -> list[int]:
    return [token for kind in outputs for output in kind for token in output]


# --- part 3


def model_folder(context: Context) -> Path:
    """The model's folder: in memory where there is room, since the model is read four times."""
    memory, disk = Path("/dev/shm/pagekv-gpu-first"), context.folder / "model"
    if context.small or (disk / WHOLE).exists() or not memory.parent.is_dir():
        return disk
    room = (memory / WHOLE).exists() or shutil.disk_usage(memory.parent).free >= MODEL_BYTES
    return memory if room else disk


def model(context: Context) -> tuple[Path, int]:
    """The model's folder, written unless it is there whole, and its vocabulary."""
    directory, config = model_folder(context), two_layers() if context.small else llama_3_8b()
    whole = directory / WHOLE
    if not whole.exists():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        write_model(directory, config, torch.device("cpu" if context.small else "cuda"))
        whole.touch()
    return directory, int(config.vocab_size)


def found(context: Context, section: str, case: str, batch: int, took: StepTime, **more: int) -> None:
    """Prints and records the time of a step, or that the time is not above the noise."""
    try:
        columns = took.columns(batch)
    except ValueError as error:
        context.log.note(f"{section}, {case}: {error}")
        context.say(f"{section}, {case}: not measured: {error}")
        return
    counts = {case: columns["tok_per_s"]} if section == "with graphs" and case in FLOORS else {}
    context.log.found(section, {"case": case, **columns, **more, "counts_for": counts})
    rate = ", ".join([f"{columns['tok_per_s']:.0f} tok/s", *(f"{name} {value}" for name, value in more.items())])
    context.say(f"{section}, {case}: {columns['step_ms']:.2f} ms a step, {rate}")


def step_model(context: Context) -> None:
    """Writes the model."""
    started = time.perf_counter()
    directory, _ = model(context)
    context.log.fact("model", str(directory))
    context.log.fact("write_model_s", time.perf_counter() - started)


def _in_process(context: Context, graphs: bool) -> None:
    """Rows for every batch, with the counts of graphs beside each figure."""
    log, sizes = context.log, sizes_of(context)
    directory, vocab_size = model(context)
    started = time.perf_counter()
    backend = backend_of(context, directory, graphs=graphs)
    log.fact("load_s", time.perf_counter() - started)
    check_is_ours(context, backend)
    allocate(backend, sizes)
    name = "with graphs" if graphs else "without graphs"
    counts = backend.runner.graphs
    for batch in sizes.batches:
        for kind, sampling in (("greedy", GREEDY), ("top-p", TOP_P)):
            case = f"batch {batch}, {kind}"
            if (kind == "top-p" and not graphs) or not log.begins(name, case):
                continue
            before = counts.num_replayed
            took = decode_seconds(backend, batch, vocab_size, sizes, sampling)
            replayed = counts.num_replayed - before
            if graphs:
                log.check(f"{case}: its graphs were replayed", replayed > 0, error=replayed)
                if not replayed:
                    continue  # no figure of graphs without graphs
            found(context, name, case, batch, took, graphs_recorded=counts.num_captured, graphs_replayed=replayed)
    for decodes in (batch - 1 for batch in sizes.batches[1:]):
        case = f"{decodes} decodes beside a chunk of {sizes.chunk}"
        if log.begins(name, case):
            seconds = mixed_seconds(backend, decodes, vocab_size, sizes)
            rate = (decodes + sizes.chunk) / seconds
            counted = {case: 1 / seconds} if graphs and case in FLOORS else {}
            row = {"case": case, "batch": decodes, "step_ms": seconds * 1e3, "tok_per_s": rate, "counts_for": counted}
            log.found(name, row)
            context.say(f"{name}, {case}: {seconds * 1e3:.2f} ms a step")


def step_with_graphs(context: Context) -> None:
    """In process, with graphs."""
    _in_process(context, graphs=True)


def step_without_graphs(context: Context) -> None:
    """In process, eager."""
    _in_process(context, graphs=False)


def step_profile_step(context: Context) -> None:
    """Three steps of the middle batch under torch's profiler: kernels by name, counted and summed."""
    from torch.profiler import ProfilerActivity, profile

    sizes = sizes_of(context)
    directory, vocab_size = model(context)
    backend = backend_of(context, directory, graphs=False)
    allocate(backend, sizes)
    steps = 3
    driven = InProcess(backend, prompts_for(sizes.batches[1], sizes.prompt_tokens, vocab_size, 1), sizes.long, sizes)
    driven.prefill()
    driven.step(driven.states)
    torch.cuda.synchronize()
    activity = ProfilerActivity.CPU if context.small else ProfilerActivity.CUDA
    with profile(activities=[activity]) as recorded:
        for _ in range(steps if not context.small else 1):
            driven.step(driven.states)
        torch.cuda.synchronize()
    driven.finish()
    total = 0.0
    table = []
    for event in recorded.key_averages():
        if not context.small and event.device_type.name != "CUDA":
            continue  # what the host called, beside what ran
        microseconds = float(event.self_cpu_time_total if context.small else event.self_device_time_total)
        total += microseconds
        table.append((microseconds / steps, event.count / steps, event.key[:90]))
    for rank, (microseconds, launches, name) in enumerate(sorted(table, reverse=True)[:25], 1):
        # With its rank: names of templates are long, and alike where they are cut.
        row = {"case": f"{rank}. {name}", "microseconds": microseconds, "launches": launches}
        context.log.found("kernels of a step", row)
    context.log.fact("step_kernels_us", total / steps)
    context.log.fact("step_launches", sum(launches for _, launches, _ in table))


# --- both processes


@contextmanager
def stack_of(context: Context, directory: Path, sizes: Sizes) -> Iterator[str]:
    """Manager and executor over the model; the manager's address."""
    from support.clients import stack

    stack.START_TIMEOUT_S = 0.6 * context.seconds  # 16 GB of weights and a first compilation; time to say why not
    module = "gpu_first.stub_executor" if context.small else "pagekv.executor"
    manager_args = ["--tokenizer", "", "--max-batch-tokens", str(sizes.token_budget)]
    executor = stack.Process(module, ["--backend", "cuda", "--model", str(directory)], context.folder)
    try:
        executor.start()
        executor.wait_serving()
        with stack.running_manager(executor, manager_args) as running:
            yield running.target
    finally:
        if executor.popen is not None and executor.popen.poll() is None:
            executor.kill()
        sys.stdout.write(executor.tail(15) + "\n")


def step_both_processes(context: Context) -> None:
    """Steps of decodes through both processes, and requests that arrive over time."""
    from support.clients.calls import Caller, request_for

    log, sizes = context.log, sizes_of(context)
    directory, vocab_size = model(context)

    async def generate(target: str, prompts: Sequence[list[int]], new: int) -> float:
        async with Caller(target) as caller:
            requests = [request_for(prompt, max_tokens=new, ignore_eos=True) for prompt in prompts]
            started = time.perf_counter()
            results = await caller.generate_many(requests)
            seconds = time.perf_counter() - started
        if any(len(result.tokens) != new for result in results):
            raise RuntimeError(f"a stream has other than {new} tokens: {[len(r.tokens) for r in results]}")
        return seconds

    begun = time.perf_counter()
    with stack_of(context, directory, sizes) as target:
        log.fact("both_processes_start_s", time.perf_counter() - begun)

        def run(batch: int, new: int, seed: int) -> float:
            return asyncio.run(generate(target, prompts_for(batch, sizes.prompt_tokens, vocab_size, 1000 + seed), new))

        for batch in sizes.batches:
            if log.begins("both processes", case := f"batch {batch}, greedy"):
                found(context, "both processes", case, batch, step_seconds(partial(run, batch), sizes))
        for rate in (50.0,) if context.small else (4.0, 16.0):
            if log.begins("arrivals", case := f"{rate:g} requests a second"):
                row = asyncio.run(_arrivals(target, rate, vocab_size, context.small))
                log.found("arrivals", {"case": case, **row})
                context.say(f"arrivals, {case}: {row}")


async def _arrivals(target: str, rate: float, vocab_size: int, small: bool) -> dict[str, Any]:
    """Requests that arrive at random, so that most steps have prompts beside decodes."""
    from pagekv.client.aio import AsyncPageKVClient
    from pagekv.client.planning.load_test import Workload, make_jobs, run_jobs

    prompt, output = ((4, 6), (2, 3)) if small else ((256, 1024), (64, 192))
    workload = Workload(
        requests=4 if small else int(rate * 8),
        concurrency=None,
        rate=rate,
        prompt_tokens=prompt,
        output_tokens=output,
        shared_prefix=0,
        temperature=0.0,
        seed=5,
    )
    async with AsyncPageKVClient(target) as client:
        report = await run_jobs(client, workload, make_jobs(workload, vocab_size, (), []), lambda done, tokens: None)
    if report.errors:
        raise RuntimeError(f"requests failed: {report.errors}")
    row: dict[str, Any] = {"output_tok_per_s": report.output_tokens_per_s, "workload": workload.shape()}
    for name, spread in (("ttft", report.ttft_s), ("inter_token", report.inter_token_s)):
        if spread is not None:
            row |= {f"{name}_{key}_ms": value * 1e3 for key, value in asdict(spread).items() if key in ("p50", "p99")}
    return row


# --- the peer


def step_transformers(context: Context) -> None:
    """The same model by transformers' continuous batching over its own paged cache."""
    from transformers import GenerationConfig, LlamaForCausalLM
    from transformers.generation import ContinuousBatchingConfig

    log, sizes = context.log, replace(sizes_of(context), rounds=1)
    directory, vocab_size = model(context)
    dtype = torch.float32 if context.small else torch.bfloat16
    started = time.perf_counter()
    peer: Any = LlamaForCausalLM.from_pretrained(directory, dtype=dtype)
    peer = peer.to("cpu" if context.small else "cuda").train(False)
    log.fact("transformers_load_s", time.perf_counter() - started)
    batching = ContinuousBatchingConfig(max_batch_tokens=sizes.token_budget)

    def run(batch: int, new: int, seed: int) -> float:
        config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        started = time.perf_counter()
        outputs = peer.generate_batch(
            prompts_for(batch, sizes.prompt_tokens, vocab_size, seed),
            generation_config=config,
            continuous_batching_config=batching,
        )
        seconds = time.perf_counter() - started
        lengths = [len(output.generated_tokens) for output in outputs.values()]
        if lengths != [new] * batch:  # it logs what went wrong, and returns what it has
            raise RuntimeError(f"transformers generated {lengths} tokens instead of {batch} times {new}")
        return seconds

    for batch in reversed(sizes.batches):
        if log.begins("transformers", case := f"batch {batch}, greedy"):
            found(context, "transformers", case, batch, step_seconds(partial(run, batch), sizes))
