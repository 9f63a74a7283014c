"""Tenants over both processes: nothing of one's cache, requests or limits is another's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.clients.plain_text import plain_text
from support.clients.protected_stack import ProtectedStack, key_section, protected_stack
from support.clients.stack import MANAGER, ORACLE, environment, running_executor
from support.json_lines import json_lines
from support.prompts import as_prompt
from support.waiting import wait_until

from pagekv.v1 import (
    cache_service_pb2,
    cache_service_pb2_grpc,
    inference_service_pb2_grpc,
    operator_service_pb2,
    operator_service_pb2_grpc,
    types_pb2,
)
from pagekv.v1 import inference_service_pb2 as pb

TENANTS = """
[tenants.alice]
floor_blocks = 40
priorities = [0, 5]

[tenants.bob]
max_waiting = 2
tokens_per_minute = 100000

[tenants.olga]
floor_blocks = 8

[tenants.carol]
tokens_per_minute = 64
max_blocks = 4

[tenants.erin]
max_calls = 2

[tenants.frank]
max_calls = 2

[namespaces.public]
read = ["alice", "bob"]
write = ["alice", "carol"]
"""
CAROL = key_section("carol", "carol-key", ["generate"])
DAVE = key_section("dave", "dave-key", ["generate"])
ERIN = key_section("erin", "erin-key", ["generate", "operate"])
FRANK = key_section("frank", "frank-key", ["generate"])
START = [sys.executable, "-m", MANAGER, "--listen=127.0.0.1:0"]
PROMPT = list(range(3, 67))


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProtectedStack]:
    folder = tmp_path_factory.mktemp("tenants")
    (folder / "tenants.toml").write_text(TENANTS)
    args = [
        f"--tenants={folder / 'tenants.toml'}", f"--audit-log={folder / 'audit.jsonl'}", "--num-device-blocks=128",
        "--max-running=4",
    ]  # fmt: skip  # several flags a line
    with protected_stack(folder, manager_args=args, more_identities=(CAROL, DAVE, ERIN, FRANK)) as stack:
        yield stack


def key_of(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {name}-key"),)


class Caller:
    """One tenant's calls."""

    def __init__(self, channel: grpc.Channel, name: str) -> None:
        self._metadata = key_of(name)
        self._inference = inference_service_pb2_grpc.InferenceServiceStub(channel)
        self._cache = cache_service_pb2_grpc.CacheServiceStub(channel)
        self._operator = operator_service_pb2_grpc.OperatorServiceStub(channel)

    def generate(self, prompt: list[int], max_tokens: int = 4, **fields: Any) -> pb.GenerateComplete:
        sampling = types_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = pb.GenerateRequest(prompt=as_prompt(prompt), sampling_params=sampling, only_complete=True, **fields)
        answers = list(self._inference.Generate(request, metadata=self._metadata, timeout=120))
        return answers[-1].complete

    def watch(self) -> Any:
        """A call that has begun, and goes on until it is cancelled."""
        call: Any = self._operator.WatchEvents(operator_service_pb2.WatchEventsRequest(), metadata=self._metadata)
        next(call)
        return call

    def cached(self, prompt: list[int], **fields: Any) -> int:
        return int(self.generate(prompt, **fields).cached_tokens)

    def looked_up(self, prompt: list[int], **fields: Any) -> int:
        request = cache_service_pb2.LookupPrefixRequest(prompt=as_prompt(prompt), **fields)
        return int(self._cache.LookupPrefix(request, metadata=self._metadata, timeout=60).device_tokens)

    def looked_at(self, prompt: list[int]) -> list[Any]:
        """The look-up and the explanation of a prompt, and of one that differs at its end."""
        found: list[Any] = []
        for each in (prompt, [*prompt[:-9], 91]):
            lookup = cache_service_pb2.LookupPrefixRequest(prompt=as_prompt(each))
            found.append(self._cache.LookupPrefix(lookup, metadata=self._metadata, timeout=60))
            explain = cache_service_pb2.ExplainPrefixRequest(prompt=as_prompt(each))
            found.append(self._cache.ExplainPrefix(explain, metadata=self._metadata, timeout=60))
        return found

    def told_of_the_server(self) -> list[Any]:
        """Answers about the model and of the tokenizer."""
        info = self._inference.GetModelInfo(pb.GetModelInfoRequest(), metadata=self._metadata, timeout=60)
        text = pb.TokenizeRequest(prompt=as_prompt("In the beginning"))
        return [info, self._inference.Tokenize(text, metadata=self._metadata, timeout=60)]

    def empty_the_cache(self) -> None:
        """For all tenants, as operators do."""
        request = operator_service_pb2.ResetPrefixCacheRequest(force=True)
        self._operator.ResetPrefixCache(request, metadata=self._metadata, timeout=60)

    def abort(self, request_id: str) -> list[str]:
        answer = self._inference.Abort(pb.AbortRequest(request_ids=[request_id]), metadata=self._metadata, timeout=60)
        return list(answer.aborted_request_ids)


@pytest.fixture
def callers(tenants: ProtectedStack) -> Iterator[dict[str, Caller]]:
    with tenants.channel() as channel:
        yield {name: Caller(channel, name) for name in ("alice", "bob", "carol", "dave", "erin", "frank", "olga")}


def refused(call: Any, code: str, words: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code().name == code
    assert words in (caught.value.details() or "")


def test_blocks_of_one_tenant_are_found_by_no_other(callers: dict[str, Caller]) -> None:
    alice, bob = callers["alice"], callers["bob"]
    assert alice.cached(PROMPT) == 0
    assert alice.cached(PROMPT) > 0
    assert (alice.looked_up(PROMPT) > 0, bob.looked_up(PROMPT)) == (True, 0)
    assert bob.cached(PROMPT) == 0
    # Its own are found now.
    assert bob.cached(PROMPT) > 0


def test_numbers_of_blocks_are_told_to_operators_alone(callers: dict[str, Caller]) -> None:
    for name in ("alice", "olga"):
        callers[name].generate(PROMPT)
        lookup, explanation, *_ = callers[name].looked_at(PROMPT)
        assert lookup.device_tokens
        assert bool(lookup.block_ids) == (name == "olga")
        assert {block.HasField("block_id") for block in explanation.blocks} == {name == "olga"}


def test_a_shared_namespace_is_read_and_written_by_those_who_may(callers: dict[str, Caller]) -> None:
    alice, bob, carol = callers["alice"], callers["bob"], callers["carol"]
    public = types_pb2.CacheControls(namespace="public")
    prompt = PROMPT[::-1]
    # Bob reads only: his blocks do not enter it.
    assert bob.cached(prompt, cache=public) == 0
    assert alice.cached(prompt, cache=public) == 0
    assert bob.cached(prompt, cache=public) > 0
    write = types_pb2.CacheControls(namespace="public", write=True)
    refused(lambda: bob.generate(prompt, cache=write), "PERMISSION_DENIED", "may not write the shared namespace")
    # Carol writes only: no call of hers tells what is in it.
    assert carol.cached(prompt[:20], cache=public) == 0
    refused(lambda: carol.looked_up(prompt, cache=public), "PERMISSION_DENIED", "may not read the shared namespace")
    olga = callers["olga"]
    refused(lambda: olga.generate([1], cache=public), "PERMISSION_DENIED", "may not use the shared namespace")


def test_two_tenants_may_use_one_request_id(callers: dict[str, Caller]) -> None:
    answers: dict[str, pb.GenerateComplete] = {}

    def ask(name: str) -> None:
        answers[name] = callers[name].generate([7, 8, 9], 200, request_id="the-same")

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("alice", "bob")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers["alice"].token_ids == answers["bob"].token_ids
    assert len(answers["alice"].token_ids) == 200


def test_limits_are_named(callers: dict[str, Caller]) -> None:
    alice, carol = callers["alice"], callers["carol"]
    refused(lambda: alice.generate([1], priority=6), "INVALID_ARGUMENT", "priority: must be from 0 to 5")
    refused(lambda: carol.generate([1], 100), "RESOURCE_EXHAUSTED", "max_blocks")
    # Twice a minute's tokens; of less it is a matter of the clock which call is the first to be refused.
    refused(lambda: [carol.generate(PROMPT[:40], 2) for _ in range(4)], "RESOURCE_EXHAUSTED", "tokens_per_minute")
    # Of nobody else's.
    alice.generate([1])


def test_open_calls_of_a_tenant_are_bounded(tenants: ProtectedStack, callers: dict[str, Caller]) -> None:
    """Over all of its connections, and the calls of others are none of its own."""
    with tenants.channel() as other:
        streams = [callers["erin"].watch(), Caller(other, "erin").watch()]
        words = "max_calls: your tenant has 2 of at most 2"
        refused(lambda: callers["erin"].looked_up([1]), "RESOURCE_EXHAUSTED", words)
        refused(lambda: Caller(other, "erin").generate([1]), "RESOURCE_EXHAUSTED", words)
        callers["alice"].generate([1])
        streams.pop().cancel()
        # A moment until the manager knows.
        wait_until(lambda: lets_in(callers["erin"]))
        streams.pop().cancel()


def lets_in(caller: Caller) -> bool:
    """Whether the manager has room for another call of its tenant."""
    try:
        assert caller.looked_up([1]) == 0
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return False
    return True


def test_calls_that_never_send_their_request_are_open_calls_of_their_tenant(
    tenants: ProtectedStack, callers: dict[str, Caller]
) -> None:
    """Refused where a call is that has sent it; and a caller who is not known need not send it. Of a tenant without
    calls of another test, which the manager may not have ended yet.
    """
    sends = threading.Event()

    def never() -> Iterator[bytes]:
        sends.wait(120)
        return
        yield b""

    def begun(channel: Any, name: str) -> Any:
        return channel.stream_stream("/pagekv.v1.InferenceService/Generate")(never(), metadata=key_of(name))

    try:
        with tenants.channel() as other:
            silent = [begun(other, "frank") for _ in range(3)]
            # The third, whichever that is at the manager.
            wait_until(lambda: any(call.done() for call in silent))
            over = [call for call in silent if call.done()]
            assert over[0].code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            refused(lambda: callers["frank"].looked_up([1]), "RESOURCE_EXHAUSTED", "max_calls: your tenant has 2 of at")
            callers["alice"].generate([1])
            assert begun(other, "nobody").code() is grpc.StatusCode.UNAUTHENTICATED
            assert sum(call.done() for call in silent) == 1
            for call in silent:
                call.cancel()
        wait_until(lambda: lets_in(callers["frank"]))
    finally:
        sends.set()


def test_a_tenant_that_is_not_named_is_refused(callers: dict[str, Caller]) -> None:
    refused(lambda: callers["dave"].generate([1]), "PERMISSION_DENIED", "the tenant dave is not known")


def test_what_limits_and_tenants_refuse_is_written_down(tenants: ProtectedStack, callers: dict[str, Caller]) -> None:
    """As what the gate refuses is."""
    refused(lambda: callers["dave"].looked_up([1]), "PERMISSION_DENIED", "the tenant dave is not known")
    refused(lambda: callers["carol"].generate([1], 100), "RESOURCE_EXHAUSTED", "")
    path = tenants.folder / "audit.jsonl"

    def written(identity: str, call: str, reason: str) -> bool:
        """Whether a refusal of this call is among the lines; earlier calls of the same tenant may be, too."""
        refusals = [line for line in json_lines(path) if line["event"] == "refused" and line["identity"] == identity]
        return any(line["call"].endswith(call) and reason in line["reason"] for line in refusals)

    wait_until(lambda: written("dave", "/LookupPrefix", "dave is not known"))
    wait_until(lambda: written("carol", "/Generate", "your tenant"))


def test_alone_or_beside_an_adversary_a_tenant_sees_the_same(
    tenants: ProtectedStack, callers: dict[str, Caller]
) -> None:
    """Answers, look-ups, explanations and refusals, to the byte; its working set is within its floor."""
    alice, bob = callers["alice"], callers["bob"]

    def workload() -> list[Any]:
        """From an empty cache on."""
        callers["erin"].empty_the_cache()
        seen: list[Any] = []
        for turn in range(6):
            prompt = [70 + turn % 3, *PROMPT[: 20 + turn]]
            answer = alice.generate(prompt, 6, request_id=f"r{turn}")
            seen += [answer.SerializeToString(deterministic=True), alice.abort("another")]
            seen += [each.SerializeToString(deterministic=True) for each in alice.looked_at(prompt)]
            seen += [each.SerializeToString(deterministic=True) for each in alice.told_of_the_server()]
            # A priority that it may not have, and more blocks than there are for it.
            for max_tokens, priority in ((4, 9), (16 * 127, 0)):
                with pytest.raises(grpc.RpcError) as refused:
                    alice.generate([1] * 8, max_tokens, priority=priority)
                seen.append((refused.value.code(), refused.value.details(), refused.value.trailing_metadata()))
        return seen

    alone = workload()
    over = threading.Event()

    def attack() -> None:
        turn = 0
        while not over.is_set():
            turn += 1
            # The other thread has the id now and then.
            with suppress(grpc.RpcError):
                bob.generate([71 + turn % 3, *PROMPT[: 20 + turn % 30], turn % 90], 8, request_id=f"r{turn % 6}")
            bob.abort(f"r{turn % 6}")

    attackers = [threading.Thread(target=attack) for _ in range(2)]
    for thread in attackers:
        thread.start()
    try:
        beside = workload()
    finally:
        over.set()
        for thread in attackers:
            thread.join()
    assert alone == beside


@plain_text
def test_floors_above_the_pool_end_the_start_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text("[tenants.alice]\nfloor_blocks = 500\n")
    identities = tmp_path / "identities.toml"
    identities.touch(0o600)
    identities.write_text(key_section("alice", "alice-key", ["generate"]))
    with running_executor(ORACLE, tmp_path) as executor:
        flags = [f"--identities={identities}", f"--tenants={tmp_path / 'tenants.toml'}", "--num-device-blocks=100"]
        ended = subprocess.run(
            [*START, f"--executor=127.0.0.1:{executor.port}", *flags],
            capture_output=True,
            text=True,
            timeout=240,
            env=environment(),
            check=False,
        )
    assert ended.returncode == 1
    assert "tenants.alice.floor_blocks: the floors are 500 blocks together, the pool has 100" in ended.stderr


def test_the_cluster_secret_must_be_a_secret(tmp_path: Path) -> None:
    identities = tmp_path / "identities.toml"
    identities.touch(0o600)
    identities.write_text(key_section("alice", "alice-key", ["generate"]))
    secret = tmp_path / "secret"
    for content, mode, words in ((b"short", 0o600, "must have from 32 to 1024 bytes"), (os.urandom(32), 0o644, "644")):
        secret.write_bytes(content)
        secret.chmod(mode)
        ended = subprocess.run(
            [*START, f"--identities={identities}", f"--cluster-secret={secret}"],
            capture_output=True,
            text=True,
            timeout=240,
            env=environment(),
            check=False,
        )
        assert (ended.returncode, words in ended.stderr) == (1, True), ended.stderr
