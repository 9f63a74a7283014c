"""Time says nothing of what another tenant has cached, or the same one in another namespace."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import NamedTuple

import grpc
import pytest
from support.clients.calls import request_for
from support.clients.protected_stack import ProtectedStack, protected_stack

from pagekv.v1 import inference_service_pb2_grpc

# With steps so small a prompt that nobody has cached takes eight of them, and a hit one.
PROMPT, BATCH = 128, 16
# Of both kinds together. Where there is no difference the standard error of the area is 0.013, so that it leaves the
# bounds by chance in one run of ten thousand; of 500 samples it would in one of twenty.
SAMPLES = 2000
TRIAL = 100
MOST_OFF = 0.05
# As many are enough where their area is nearer still, which it is in nine of ten runs without a difference. Their
# standard error is 0.018: an area of 0.57 gets through here in one run of 65, and through all of them in one of
# sixteen.
FIRST_SAMPLES = 1000
FIRST_MOST_OFF = 0.03

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProtectedStack]:
    folder = tmp_path_factory.mktemp("timing")
    (folder / "tenants.toml").write_text("[default]\n")
    flags = [f"--tenants={folder / 'tenants.toml'}", f"--max-batch-tokens={BATCH}", "--num-device-blocks=1024"]
    with protected_stack(folder, manager_args=flags) as opened:
        yield opened


class Side(NamedTuple):
    """A tenant, and the namespace that its prompts are in."""

    tenant: str
    namespace: str = ""


class Sides:
    """A victim that caches prompts, and an observer with a clock; both may be one."""

    def __init__(self, channel: grpc.Channel, victim: Side, observer: Side) -> None:
        self._inference = inference_service_pb2_grpc.InferenceServiceStub(channel)
        self._victim, self._observer = victim, observer
        self._chance = random.Random()
        # Seconds, and whether the prompt was cached.
        self._taken: list[tuple[float, bool]] = []

    def _prompt(self) -> list[int]:
        return [self._chance.randrange(3, 250) for _ in range(PROMPT)]

    def _first_s(self, side: Side, prompt: list[int]) -> float:
        metadata = (("authorization", f"Bearer {side.tenant}-key"),)
        request = request_for(prompt, 1, ignore_eos=True)
        request.cache.namespace = side.namespace
        begin = time.perf_counter()
        messages = self._inference.Generate(request, metadata=metadata, timeout=120)
        next(messages)
        taken = time.perf_counter() - begin
        for _ in messages:
            pass
        return taken

    def _sample(self, *, cached: bool) -> float:
        """Seconds to the observer's first token, for a prompt that the victim has just sent or one that nobody has."""
        # Both are made before, so that as much time lies between the calls either way.
        sent, unknown = self._prompt(), self._prompt()
        self._first_s(self._victim, sent)
        return self._first_s(self._observer, sent if cached else unknown)

    def area(self, samples: int) -> float:
        """The chance that of one sample of each kind the cached one was faster (the area under the ROC curve): 0.5
        where time says nothing. So many are taken besides those of earlier calls, in random order, so that whatever
        else the machine does meets both alike.
        """
        kinds = [True, False] * (samples // 2)
        self._chance.shuffle(kinds)
        self._taken += [(self._sample(cached=cached), cached) for cached in kinds]
        # Wilcoxon's rank sum; no two times of this clock are the same but by a chance that does not matter.
        ranks = sum(rank for rank, (_, cached) in enumerate(sorted(self._taken), 1) if not cached)
        half = len(self._taken) // 2
        return (ranks - half * (half + 1) / 2) / (half * half)


def nothing_is_told(stack: ProtectedStack, victim: Side, observer: Side) -> None:
    """Of a victim whose hits the clock would show, as it shows the observer's own."""
    with stack.channel() as channel:
        assert Sides(channel, observer, observer).area(TRIAL) > 0.8
        sides = Sides(channel, victim, observer)
        first = area = sides.area(FIRST_SAMPLES)
        if abs(first - 0.5) > FIRST_MOST_OFF:
            area = sides.area(SAMPLES - FIRST_SAMPLES)
    print(f"AUC {first:.3f}, then {area:.3f}")
    assert abs(area - 0.5) <= MOST_OFF


def test_time_to_first_token_does_not_tell_what_another_tenant_has_cached(stack: ProtectedStack) -> None:
    nothing_is_told(stack, Side("alice"), Side("bob"))


@pytest.mark.nightly  # the root of a chain is made of tenant and namespace alike
def test_time_to_first_token_does_not_tell_what_is_cached_in_another_namespace(stack: ProtectedStack) -> None:
    """Of one tenant, as of all callers of a manager without identities."""
    nothing_is_told(stack, Side("alice", "first"), Side("alice", "second"))
