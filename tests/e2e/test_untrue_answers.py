"""An executor that lies costs epochs, one that gives a sequence up costs a request; no stream gets a wrong token."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import grpc
import pytest
from support.clients.calls import Caller, request_for
from support.clients.stack import running_manager, running_stand_in
from support.executor.expected_tokens import expected_tokens
from support.executor.lying_executor import FAILING, LIES, VOCAB

from pagekv.v1 import inference_service_pb2 as inference_pb

pytestmark = pytest.mark.e2e


def expected(prompt: list[int], new: int) -> list[int]:
    return expected_tokens(prompt, new, vocab_size=VOCAB)


def test_no_lie_is_believed(tmp_path: Path) -> None:
    prompts = [[index + 1, 5, 7] for index in range(4)]

    async def main(target: str) -> int:
        async with Caller(target) as caller:
            requests = [request_for(prompt, max_tokens=120, logprobs=2) for prompt in prompts]
            results = await caller.generate_many(requests)
            assert [result.tokens for result in results] == [expected(prompt, 120) for prompt in prompts]
            return (await caller.idle_stats()).executor_restarts_total

    with running_stand_in("lying_executor.py", ["lies"], tmp_path) as executor, running_manager(executor) as stack:
        assert asyncio.run(main(stack.target)) == len(LIES)
        log = stack.manager.log.read_text()
    assert re.findall(r"StepResult\.([a-z_.]+):", log) == [field for field, _ in LIES]
    assert "invariant" not in log
    assert "Traceback" not in log


def test_a_sequence_that_fails_ends_its_request_alone(tmp_path: Path) -> None:
    """One sequence, several, and beams; nothing of them is hit, and the epoch goes on."""
    prefix = list(range(100, 140))
    prompts = [[*prefix, index, 7] for index in range(4)]
    bad = [
        request_for([*prefix, FAILING], max_tokens=20),
        request_for([*prefix, FAILING], max_tokens=20, n=3),
        request_for([*prefix, FAILING], max_tokens=20, beam_width=3),
    ]

    async def main(target: str) -> None:
        async with Caller(target) as caller:
            good = [caller.generate(request_for(prompt, max_tokens=60)) for prompt in prompts]
            running = [asyncio.create_task(one) for one in good]
            for request in bad:
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await caller.generate_all(request)
                assert ended.value.code() is grpc.StatusCode.INTERNAL
                assert "its logits are not numbers" in (ended.value.details() or "")
                assert any(
                    b"SEQUENCE_FAILED" in value
                    for _, value in ended.value.trailing_metadata() or ()
                    if isinstance(value, bytes)
                )
            results = await asyncio.gather(*running)
            assert [result.tokens for result in results] == [expected(prompt, 60) for prompt in prompts]
            again = await caller.generate(request_for([*prefix, 1, 9], max_tokens=20))
            assert again.tokens == expected([*prefix, 1, 9], 20)
            stats = await caller.idle_stats()
            assert (stats.executor_restarts_total, stats.failed_requests_total) == (0, len(bad))

    with running_stand_in("lying_executor.py", ["truth"], tmp_path) as executor, running_manager(executor) as stack:
        asyncio.run(main(stack.target))
        assert "Traceback" not in stack.manager.log.read_text()


def test_requests_that_need_a_feature_which_the_executor_lacks(tmp_path: Path) -> None:
    """The oracle has no penalties: refused by field, never ignored; and the model's description tells beforehand."""

    async def main(target: str) -> None:
        async with Caller(target) as caller:
            info = await caller.inference.GetModelInfo(inference_pb.GetModelInfoRequest())
            assert "penalties" not in info.features
            assert {"logprobs", "min_tokens"} <= {*info.features}
            assert (info.sampler, info.kv_dtype) == ("oracle-1", "digest")
            assert re.fullmatch("[0-9a-f]{64}", info.model_fingerprint)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await caller.generate(request_for([1, 2, 3], presence_penalty=1.0))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            words = "sampling_params.presence_penalty: must be absent: the executor has no penalties"
            assert refused.value.details() == words

    with running_stand_in("lying_executor.py", ["truth"], tmp_path) as executor, running_manager(executor) as stack:
        asyncio.run(main(stack.target))
