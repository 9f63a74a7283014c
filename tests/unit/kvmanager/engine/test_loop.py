"""The engine loop over a link that the test scripts: what it makes of late, odd and lost answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest
from support.engine.engine_harness import DESCRIPTION, VOCAB, Bench, Link, command, config, expect, read, run, until

from pagekv.common.errors import AlreadyExists, InvalidRequest, Overloaded, Unavailable
from pagekv.kvmanager.engine import loop as engine_loop
from pagekv.kvmanager.engine.capacity import longest_sequence
from pagekv.kvmanager.engine.executor_client import AttachRefused, ExecutorLink, ExecutorLost
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.observer import Observer, RequestEnd
from pagekv.kvmanager.engine.sizing import plan_deployment
from pagekv.kvmanager.engine.views import ResetCounts
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.request.command import FinishReason, GenerateCommand, SamplingParams
from pagekv.kvmanager.scheduling.sequence import LiveRequest
from pagekv.kvmanager.scheduling.step_plan import StepResult
from pagekv.kvmanager.scheduling.swapping import SwapPolicy


def test_tokens_come_through_and_blocks_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        streams = [engine.submit(command(f"r{i}", [i, 1, 2, 3, 4])) for i in range(5)]
        assert [await read(stream) for stream in streams] == [expect([i, 1, 2, 3, 4]) for i in range(5)]

    run(monkeypatch, body)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "bend",
    [
        lambda outcome: replace(outcome, computed_tokens=outcome.computed_tokens + 1),
        lambda outcome: replace(outcome, sampled_seq_ids=[999], sampled_tokens=[1]),
        lambda outcome: replace(outcome, sampled_tokens=[]),
        lambda outcome: replace(outcome, step=outcome.step + 1),
    ],
)
def test_an_answer_that_does_not_fit_its_step_costs_an_epoch_and_no_token(
    monkeypatch: pytest.MonkeyPatch, depth: int, bend: Callable[[StepResult], StepResult]
) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        def once(outcome: StepResult) -> StepResult:
            if outcome.step < 3 or len(bench.attaches) > 1:
                return outcome
            return bend(outcome)

        bench.bend = once
        assert await read(engine.submit(command("a", [1, 2, 3]))) == expect([1, 2, 3])
        assert len(bench.attaches) == 2

    run(monkeypatch, body, pipeline_depth=depth)


def test_an_answer_that_nobody_asked_for_costs_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        assert bench.link is not None
        bench.link._outcomes.append(StepResult(1, [], [], {}, 0, 0, 0))
        bench.link._wake()
        assert await read(engine.submit(command("a", [1, 2, 3]))) == expect([1, 2, 3])
        assert len(bench.attaches) == 2

    run(monkeypatch, body)


def test_the_step_timeout_counts_a_steps_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step sent ahead waits for the one before it, which is no fault of the executor."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.step_s = 0.6
        assert await read(engine.submit(command("a", [1, 2, 3]))) == expect([1, 2, 3])
        assert len(bench.attaches) == 1

    run(monkeypatch, body, step_timeout_s=1.0)


def test_a_step_without_an_answer_costs_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.step_s = 60
        stream = engine.submit(command("a", [1, 2, 3]))
        await until(lambda: bool(bench.plans))
        bench.step_s = 0
        assert await read(stream) == expect([1, 2, 3])
        assert len(bench.attaches) == 2

    run(monkeypatch, body, step_timeout_s=0.2)


def test_an_executor_that_comes_back_smaller_gets_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.step_s = 0.01
        streams = [engine.submit(command(f"r{i}", [i, 1, 2])) for i in range(6)]
        await until(lambda: len(bench.plans) >= 3)
        bench.description = replace(DESCRIPTION, max_sequences=2)
        assert bench.link is not None
        bench.link.lose()
        assert [await read(stream) for stream in streams] == [expect([i, 1, 2]) for i in range(6)]
        assert len(bench.attaches) == 2

    run(monkeypatch, body)


def test_another_model_ends_requests_and_keeps_the_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        await read(engine.submit(command("a", [1, 2, 3])))
        before = engine.queries.stats()
        bench.description = replace(DESCRIPTION, model_fingerprint="beef", eos_token_ids=tuple(range(VOCAB)))
        assert bench.link is not None
        bench.link.lose()
        await until(lambda: len(bench.attaches) >= 2)
        assert engine.queries.stats().generated_tokens_total == before.generated_tokens_total == 6
        with pytest.raises(Unavailable, match="came back with another model"):
            engine.submit(replace(command("read for the first", [1, 2, 3]), model_fingerprint="f00d"))
        # Nothing of the first model is hit, and the second one's end-of-sequence ids count.
        tokens, finish = await read(engine.submit(command("b", [1, 2, 3])))
        assert (len(tokens), finish) == (1, FinishReason.STOP)

    run(monkeypatch, body)


def test_a_smaller_pool_ends_the_requests_that_no_longer_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.step_s = 0.01
        large = engine.submit(command("large", [1, 2, 3], max_tokens=40))
        small = engine.submit(command("small", [1, 2, 3]))
        await until(lambda: len(bench.plans) >= 3)
        bench.description = replace(DESCRIPTION, device_kv_bytes=5)
        assert bench.link is not None
        bench.link.lose()
        assert await read(small) == expect([1, 2, 3])
        with pytest.raises(Unavailable, match="smaller pool"):
            await read(large)
        with pytest.raises(InvalidRequest, match=r"need 6 blocks, the pool has 5"):
            engine.submit(command("x", [1, 2, 3], max_tokens=19))
        assert await read(engine.submit(command("y", [1, 2, 3], max_tokens=18))) == expect([1, 2, 3], 18)

    run(monkeypatch, body)


def test_fewer_slots_end_the_searches_that_need_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """All beams must be there at once: such a search would wait for ever, and everything else behind it."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.step_s = 0.01
        sampling = SamplingParams(temperature=0.0, max_tokens=20, beam_width=4)
        wide = engine.submit(GenerateCommand("wide", [1, 2, 3], sampling))
        plain = engine.submit(command("plain", [4, 5], max_tokens=20))
        await until(lambda: len(bench.plans) >= 6)
        bench.description = replace(DESCRIPTION, max_sequences=3)
        assert bench.link is not None
        bench.link.lose()
        with pytest.raises(Unavailable, match="fewer sequences"):
            await read(wide)
        assert await read(plain) == expect([4, 5], 20)

    run(monkeypatch, body)


def test_the_queue_counts_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        streams = [engine.submit(command("a", [1], n=3)), engine.submit(command("b", [2], n=2))]
        with pytest.raises(AlreadyExists):
            engine.submit(command("a", [1]))
        with pytest.raises(Overloaded, match="5 sequences wait, at most 6"):
            engine.submit(command("c", [3], n=2))
        streams.append(engine.submit(command("c", [3])))
        assert [await read(stream) for stream in streams] == [expect([i]) for i in (1, 2, 3)]
        assert engine.queries.stats().rejected_requests_total == 1

    run(monkeypatch, body, max_queue=6)


def test_answers_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes theirs, or leaves without, makes room. Live requests do not count."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        streams = [engine.submit(command("a", [1], n=2)), engine.submit(command("b", [2]))]
        await until(lambda: engine.queries.stats().running_sequences + engine.queries.stats().waiting_sequences == 0)
        with pytest.raises(Overloaded, match="3 sequences have ended whose readers have not taken them, at most 3"):
            engine.submit(command("c", [3]))
        assert await read(streams[0]) == expect([1])
        engine.release(streams[0])
        engine.release(streams[0])
        assert engine.queries.stats().unread_sequences == 1
        streams.append(engine.submit(command("c", [3])))
        engine.release(streams.pop())
        assert engine.queries.stats().aborted_requests_total == 1
        streams.append(engine.submit(command("d", [4])))
        streams.append(engine.submit(command("e", [4])))
        await until(lambda: engine.queries.stats().running_sequences + engine.queries.stats().waiting_sequences == 0)
        with pytest.raises(Overloaded, match="3 sequences have ended"):
            engine.submit(command("f", [3]))
        assert engine.queries.stats().rejected_requests_total == 2

    run(monkeypatch, body, max_unread=3)


def test_a_sequence_that_ended_before_the_others_counts_as_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits no more and runs no more; what it said is held nevertheless."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.step_s = 0.005
        stream = engine.submit(command("a", [1, 2], n=3, max_tokens=40))
        await until(lambda: engine.queries.stats().running_sequences == 3)
        engine.finish_sequence(stream, 0)
        engine.finish_sequence(stream, 2)
        assert (engine.queries.stats().running_sequences, engine.queries.stats().unread_sequences) == (1, 2)
        with pytest.raises(Overloaded, match="2 sequences have ended whose readers have not taken them, at most 2"):
            engine.submit(command("b", [3]))
        engine.release(stream)
        assert engine.queries.stats().unread_sequences == 0
        searching = SamplingParams(max_tokens=4, beam_width=3)
        search = engine.submit(GenerateCommand("beams", [1, 2], searching, 2))
        await read(search)
        assert engine.queries.stats().unread_sequences == 2
        engine.release(search)
        failing = engine.submit(command("b", [3], max_tokens=40))
        await until(lambda: engine.queries.stats().running_sequences == 1)
        bench.description = replace(DESCRIPTION, model_fingerprint="other")
        assert bench.link is not None
        bench.link.lose()
        with pytest.raises(Unavailable):
            await read(failing)
        assert engine.queries.stats().unread_sequences == 1
        engine.release(failing)
        assert engine.queries.stats().unread_sequences == 0

    run(monkeypatch, body, max_unread=2)


def test_what_has_ended_needs_no_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences point at their request. Were it to point back, prompts of a hundred thousand tokens would stay for
    thousands of requests, until a full collection.
    """
    ended: list[tuple[LiveRequest, int]] = []

    class Noting(Observer):
        def ended(self, request: LiveRequest, end: RequestEnd) -> None:
            ended.append((request, len(request.sequences)))

    async def body(engine: EngineLoop, bench: Bench) -> None:
        await read(engine.submit(command("read", [1], n=2)))
        engine.release(engine.submit(command("left", [2], n=3)))

    run(monkeypatch, body, observers=[Noting()])
    assert [(request.command.request_id, was, request.sequences) for request, was in ended] == [
        ("read", 2, []),
        ("left", 3, []),
    ]


def test_a_request_that_ends_before_its_sequences_part_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its others wait for the first one's prompt, which is under way."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.step_s = 0.05
        left, other = engine.submit(command("left", [4, 5, 6], n=3)), engine.submit(command("other", [1, 2, 3]))
        await until(lambda: len(bench.plans) > 0)
        assert [view.state for view in engine.queries.block_tables("left") or []] == ["running", "forking", "forking"]
        engine.release(left)
        assert await read(other) == expect([1, 2, 3])

    run(monkeypatch, body, pipeline_depth=1)


def test_what_no_deployment_of_this_size_can_ever_take_is_refused_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as RESOURCE_EXHAUSTED, which says to come back."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        with pytest.raises(InvalidRequest, match=r"from 1 to 6 \(--max-queue\), got 7") as caught:
            engine.submit(command("a", [1], n=7))
        assert caught.value.field == "sampling_params.n"
        beams = SamplingParams(max_tokens=2, beam_width=33)
        with pytest.raises(InvalidRequest, match=r"from 0 to 8 \(--max-running .*\), got 33"):
            engine.submit(GenerateCommand("b", [1], beams))
        assert engine.queries.stats().rejected_requests_total == 0

    run(monkeypatch, body, max_queue=6)


def test_the_context_may_be_longer_than_what_the_pool_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Needed and available blocks are named then, here and where the prompt is read."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        assert engine.model is not None
        assert engine.model.max_model_len == 200
        assert longest_sequence(engine.model) == 5 * 4 + 1
        with pytest.raises(InvalidRequest, match=r"from 1 to 18, got 19: 22 tokens need 6 blocks, the pool has 5"):
            engine.submit(command("x", [1, 2, 3], max_tokens=19))
        assert await read(engine.submit(command("y", [1, 2, 3], max_tokens=18))) == expect([1, 2, 3], 18)

    run(monkeypatch, body, num_device_blocks=5)


def test_the_host_pool_is_as_large_as_flag_and_executor_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """CHECKLIST D14: both pools are in the configuration, and in what is served."""
    with_host = replace(DESCRIPTION, host_kv_bytes=24)
    swap = replace(config().limits, swap=SwapPolicy("swap"))
    assert plan_deployment(with_host, config(limits=swap)).num_host_blocks == 24
    assert plan_deployment(with_host, config(limits=swap, num_host_blocks=9)).num_host_blocks == 9
    assert plan_deployment(with_host, config(limits=replace(swap, swap=SwapPolicy("recompute")))).num_host_blocks == 0
    with pytest.raises(AttachRefused, match=r"--num-host-blocks 25 needs 25 bytes .* allows 24: at most 24 blocks"):
        plan_deployment(with_host, config(limits=swap, num_host_blocks=25))


def test_a_preempted_request_is_swapped_out_and_its_stream_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:

    async def body(engine: EngineLoop, bench: Bench) -> None:
        streams = [engine.submit(command(f"r{i}", [i, 5, 6, 7, 8], max_tokens=12)) for i in range(4)]
        for i, stream in enumerate(streams):
            assert await read(stream) == expect([i, 5, 6, 7, 8], 12)
        stats = engine.queries.stats()
        assert stats.num_host_blocks == 40
        assert stats.host_held_blocks == 0
        assert 0 < stats.swap_preemptions_total <= stats.preemptions_total
        assert stats.swapped_out_blocks_total > 0

    limits = replace(config().limits, swap=SwapPolicy("swap"))
    monkeypatch.setattr("support.engine.engine_harness.DESCRIPTION", replace(DESCRIPTION, host_kv_bytes=40))
    run(monkeypatch, body, num_device_blocks=9, limits=limits)


def test_looking_a_prompt_up_counts_its_full_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        await read(engine.submit(command("a", list(range(8)))))
        assert engine.queries.lookup_prefix(list(range(8)), CacheIdentity()).device_tokens == 8
        assert engine.queries.lookup_prefix(list(range(7)), CacheIdentity()).device_tokens == 4
        assert engine.queries.lookup_prefix(list(range(8)), CacheIdentity(namespace="other")).device_tokens == 0
        assert engine.queries.reset_prefix_cache(force=False) == ResetCounts(3)
        assert engine.queries.lookup_prefix(list(range(8)), CacheIdentity()).device_tokens == 0

    run(monkeypatch, body)


@pytest.mark.parametrize(("policy", "share", "cached"), [("lru", 0.5, 0), ("slru", 0.5, 8), ("slru", 0.0, 0)])
def test_blocks_are_evicted_as_the_flags_say(
    monkeypatch: pytest.MonkeyPatch, policy: str, share: float, cached: int
) -> None:
    """CHECKLIST G9, G10: two blocks were hit, then 100 blocks are read once in a pool of 64."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        prefix = list(range(8))
        for number in range(2):
            await read(engine.submit(command(f"hit {number}", [*prefix, 40 + number], 1)))
        for token in range(10, 14):
            await read(engine.submit(command(f"scan {token}", [token] * 100, 1)))
        assert engine.queries.lookup_prefix([*prefix, 49], CacheIdentity()).device_tokens == cached

    run(monkeypatch, body, eviction_policy=policy, protected_share=share)


def test_refused_steps_are_tried_again_ever_more_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.broken = True
        stream = engine.submit(command("a", [1, 2, 3]))
        await until(lambda: len(bench.attaches) >= 5)
        pauses = [later - sooner for sooner, later in zip(bench.attaches, bench.attaches[1:], strict=False)]
        assert pauses == sorted(pauses)
        assert pauses[-1] > 4 * pauses[0]
        bench.broken = False
        assert await read(stream) == expect([1, 2, 3])

    run(monkeypatch, body)


def test_idle_time_counts_only_while_there_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.bend = lambda outcome: replace(outcome, idle_us=1000)
        for count in (1, 2):
            await read(engine.submit(command(f"r{count}", [count, 2, 3])))
            await asyncio.sleep(0.05)
            # Of a request's six steps all but the first; that its sequence leaves takes one more, with nothing to do.
            assert engine.queries.stats().steps_total == 7 * count
            assert engine.queries.stats().executor_idle_us_total == 5 * 1000 * count

    run(monkeypatch, body)


def test_only_a_requests_own_reader_can_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id is free as soon as its request has ended, and the reader of the ended one may still be at work."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        first = engine.submit(command("same", [1, 2, 3], n=2))
        await until(lambda: engine.queries.block_tables("same") is None)
        second = engine.submit(command("same", [3, 2, 1]))
        engine.release(first)
        engine.finish_sequence(first, 1)
        engine.finish_sequence(first, 0)
        assert await read(second) == expect([3, 2, 1])
        assert engine.queries.stats().aborted_requests_total == 0
        third = engine.submit(command("same", [3, 2, 1]))
        engine.release(third)
        assert engine.queries.block_tables("same") is None

    run(monkeypatch, body)


def test_the_first_executor_must_go_with_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(engine_loop, "ExecutorLink", lambda target, wake: Link(bench, wake))
    with pytest.raises(AttachRefused, match="at most 64 blocks"):
        asyncio.run(EngineLoop(config(num_device_blocks=65)).run())


def test_the_link_to_the_executor_takes_no_detour_over_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def main() -> None:
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        link = ExecutorLink(f"127.0.0.1:{port}", lambda: None)
        with pytest.raises(ExecutorLost, match="UNIMPLEMENTED"):
            await link.describe(16, 16)
        await link.close()
        await server.stop(None)

    asyncio.run(main())
