"""A group of ranks in this process: rank 0's backend, and others on threads behind socket pairs."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from support.executor.executor_steps import ALL_FEATURES

from pagekv.executor.backend.interface import Backend
from pagekv.executor.oracle.backend import OracleModel
from pagekv.executor.ranks.follower import LEADER, Follower
from pagekv.executor.ranks.leader import GroupBackend, Leader
from pagekv.executor.ranks.link import RankLink
from pagekv.executor.ranks.watch import RankWatch
from pagekv.executor.session.step_check import EpochLimits
from pagekv.steps.v1 import executor_service_pb2 as pb

# Bounds a hang alone.
TIMEOUT_S = 120.0
MODEL = OracleModel(vocab_size=64, max_model_len=256)
LIMITS = EpochLimits(4, 20, 0, 64, 256, 8, 128, ALL_FEATURES)


def message(number: int, epoch: int = 5) -> pb.StepRequest:
    """The first step enters a sequence; others decode it."""
    if number > 1:
        return pb.StepRequest(epoch=epoch, step=number)
    sampling = pb.StepSampling(top_p=1, repetition_penalty=1)
    new = pb.NewSequence(seq_id=1, token_ids=[1, 2, 3], num_prompt_tokens=3, block_ids=range(20), sampling=sampling)
    return pb.StepRequest(epoch=epoch, step=1, new_seqs=[new], scheduled_seqs=[1], scheduled_tokens=[3])


@dataclass
class RankGroup:
    """The group as rank 0 has it. `lost` are the reasons for which ranks would have ended."""

    backend: GroupBackend
    followers: list[Follower]
    links: list[RankLink]
    threads: list[threading.Thread]
    lost: list[str] = field(default_factory=list)

    @property
    def leader(self) -> Leader:
        return self.backend.leader

    def close(self) -> None:
        """Ends the group in order. Idempotent."""
        self.leader.stop()
        for thread in self.threads:
            thread.join(TIMEOUT_S)
        for link in self.links:
            link.close()
        for follower in self.followers:
            follower.watch.stop()
            follower.watch.links[LEADER].close()


def rank_group(own: Backend, *others: Backend, timeout_s: float = TIMEOUT_S) -> RankGroup:
    """A group whose rank 0 has the backend `own`, and whose other ranks these."""
    lost: list[str] = []
    pairs = [socket.socketpair() for _ in others]
    links = {rank: RankLink(pair[0]) for rank, pair in enumerate(pairs, 1)}
    followers = [Follower(RankWatch({LEADER: RankLink(pair[1])}, timeout_s, lost.append)) for pair in pairs]
    leader = Leader(RankWatch(links, timeout_s, lost.append))
    threads = [
        threading.Thread(target=follower.run, args=(backend,), daemon=True)
        for follower, backend in zip(followers, others, strict=True)
    ]
    for thread in threads:
        thread.start()
    return RankGroup(GroupBackend(own, leader), followers, list(links.values()), threads, lost)


@contextmanager
def running_group(own: Backend, *others: Backend, timeout_s: float = TIMEOUT_S) -> Iterator[RankGroup]:
    """The same, ended with the statement."""
    group = rank_group(own, *others, timeout_s=timeout_s)
    try:
        yield group
    finally:
        group.close()
