"""Plays the manager: an epoch with sequences, blocks and steps, each result held against what the step asked for."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagekv.conformance.target import NUM_BLOCKS, Target
from pagekv.conformance.verdict import during, require
from pagekv.steps.v1 import executor_service_pb2 as pb

# Of StepResult.
MAX_THREADS = 65536
COPY, SWAP_OUT, SWAP_IN = pb.MEMORY_OP_KIND_COPY, pb.MEMORY_OP_KIND_SWAP_OUT, pb.MEMORY_OP_KIND_SWAP_IN


def neutral(**fields: Any) -> pb.StepSampling:
    """Greedy sampling with everything else off; `fields` override."""
    return pb.StepSampling(**{"top_p": 1.0, "repetition_penalty": 1.0, **fields})


def copying(kind: pb.MemoryOpKind.ValueType, sources: Sequence[int], destinations: Sequence[int]) -> pb.MemoryOp:
    return pb.MemoryOp(kind=kind, sources=sources, destinations=destinations)


@dataclass(eq=False)
class PlayedSequence:
    """A sequence as its manager knows it. `length` counts also tokens that steps in flight sample."""

    seq_id: int
    tokens: list[int]
    num_prompt: int
    sampling: pb.StepSampling
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    rows: list[pb.SampledLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.length = len(self.tokens)

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def entering(self) -> pb.NewSequence:
        return pb.NewSequence(
            seq_id=self.seq_id,
            token_ids=self.tokens,
            num_prompt_tokens=self.num_prompt,
            block_ids=self.blocks,
            computed_tokens=self.computed,
            sampling=self.sampling,
        )


class PlayedEpoch:
    """An epoch, in a `with` statement; the stream ends with it. `free` blocks are taken from the end."""

    def __init__(
        self, target: Target, free: Iterable[int] | None = None, *, num_blocks: int = NUM_BLOCKS, **attaching: Any
    ) -> None:
        self.target = target
        self.epoch = target.attach(num_blocks=num_blocks, **attaching)
        self.call = target.run(self.epoch)
        self.step_number = 0
        self.live: dict[int, PlayedSequence] = {}
        self.free = list(range(num_blocks - 1, -1, -1) if free is None else free)
        self._next_id = 0
        # Of each step in flight the tokens that it computes and the sequences that sample.
        self._in_flight: deque[tuple[int, list[PlayedSequence]]] = deque()

    def __enter__(self) -> PlayedEpoch:
        return self

    def __exit__(self, *_: object) -> None:
        self.call.close()

    def sequence(self, tokens: Sequence[int], num_prompt: int | None = None, **sampling: Any) -> PlayedSequence:
        """A sequence that no step has entered yet, with log-probabilities where the executor has them."""
        self._next_id += 1
        if self.target.num_logprobs is not None:
            sampling.setdefault("logprobs", self.target.num_logprobs)
        prompt = len(tokens) if num_prompt is None else num_prompt
        return PlayedSequence(self._next_id, list(tokens), prompt, neutral(**sampling))

    def give_blocks(self, seq: PlayedSequence, num_tokens: int) -> list[int]:
        """Adds free blocks to the table until it holds so many tokens; returns the new ones."""
        missing = -(-num_tokens // self.target.block_size) - len(seq.blocks)
        new = [self.free.pop() for _ in range(missing)]
        seq.blocks += new
        return new

    def send(
        self,
        enter: Sequence[PlayedSequence] = (),
        *,
        finish: Sequence[PlayedSequence] = (),
        ops: Sequence[pb.MemoryOp] = (),
        counts: Mapping[PlayedSequence, int] | None = None,
        others: int = 1,
    ) -> None:
        """Sends a step. Sequences compute what `counts` says, else all where they enter, and `others` where not."""
        self.step_number += 1
        request = pb.StepRequest(epoch=self.epoch, step=self.step_number, memory_ops=ops)
        for seq in finish:
            del self.live[seq.seq_id]
            request.finished_seqs.append(seq.seq_id)
        for seq in enter:
            self.live[seq.seq_id] = seq
        total, sampling = 0, []
        for seq in self.live.values():
            entering = seq in enter
            count = (counts or {}).get(seq, seq.length - seq.computed if entering else others)
            new_blocks = self.give_blocks(seq, seq.computed + count)
            if entering:
                request.new_seqs.append(seq.entering())
            else:
                request.append_seqs.extend([seq.seq_id] * len(new_blocks))
                request.append_blocks.extend(new_blocks)
            if count != 1:
                request.scheduled_seqs.append(seq.seq_id)
                request.scheduled_tokens.append(count)
            seq.computed += count
            total += count
            if count and seq.computed == seq.length:
                seq.length += 1
                sampling.append(seq)
        self._in_flight.append((total, sampling))
        self.call.send(request)

    def receive(self) -> pb.StepResult:
        """The result of the oldest step in flight. Raises BrokenRule where it is not as the step was."""
        total, sampling = self._in_flight.popleft()
        number = self.step_number - len(self._in_flight)
        with during(f"step {number}"):
            result = self.call.result()
        got = (result.epoch, result.step)
        require(got == (self.epoch, number), f"result of epoch, step {got}, not {(self.epoch, number)}")
        where = f"step {number}"
        require(result.computed_tokens == total, f"{where}: computed_tokens {result.computed_tokens}, not {total}")
        require(result.threads <= MAX_THREADS, f"{where}: threads {result.threads}, at most {MAX_THREADS}")
        # Else one that gives every sequence up would have no tokens to be compared.
        failed = list(result.failed_seqs)
        require(not failed, f"{where}: sequences {failed} failed, and nothing in their steps could make them fail")
        expected = {seq.seq_id: seq for seq in sampling}
        sampled = list(result.sampled_seqs)
        require(sorted(sampled) == sorted(expected), f"{where}: sampled_seqs {sorted(sampled)}, not {sorted(expected)}")
        vocab = self.target.description.vocab_size
        require(len(result.sampled_tokens) == len(sampled), f"{where}: sampled_tokens are not as many as sampled_seqs")
        for seq_id, token in zip(sampled, result.sampled_tokens, strict=True):
            require(token < vocab, f"{where}: sampled token {token}, the vocabulary has {vocab}")
            expected[seq_id].tokens.append(token)
        asked = [seq_id for seq_id in sampled if expected[seq_id].sampling.HasField("logprobs")]
        rows = [row.seq_id for row in result.logprobs]
        require(rows == asked, f"{where}: logprobs of sequences {rows}, not {asked}")
        for row in result.logprobs:
            count = min(expected[row.seq_id].sampling.logprobs, vocab)
            found = len(row.top_token_ids), len(row.top_logprobs)
            require(found == (count, count), f"{where}: {found} likeliest tokens and log-probabilities, not {count}")
            odd = [token for token in row.top_token_ids if token >= vocab]
            require(not odd, f"{where}: likeliest tokens {odd}, the vocabulary has {vocab}")
            values = [row.chosen, *row.top_logprobs]
            require(all(map(math.isfinite, values)), f"{where}: log-probabilities {values} are not finite")
            expected[row.seq_id].rows.append(row)
        return result

    def step(self, enter: Sequence[PlayedSequence] = (), **rest: Any) -> pb.StepResult:
        """Sends a step and waits for its result; arguments as of `send`."""
        self.send(enter, **rest)
        return self.receive()

    def decode(self, num_steps: int) -> None:
        """So many steps, in which every live sequence computes one token."""
        for _ in range(num_steps):
            self.step()

    def alone(self, tokens: Sequence[int], num_outputs: int, **sampling: Any) -> PlayedSequence:
        """A sequence that comes, generates and leaves while the others sit out; its blocks are free again."""
        seq = self.sequence(tokens, **sampling)
        idle = dict.fromkeys(self.live.values(), 0)
        self.step([seq], counts=idle)
        for _ in range(num_outputs - 1):
            self.step(counts=idle)
        self.leave(seq)
        return seq

    def leave(self, *seqs: PlayedSequence) -> None:
        """Finishes sequences in a step of their own. Their blocks are free, and the first to be taken again."""
        self.step(finish=seqs, others=0)
        for seq in seqs:
            self.free += reversed(seq.blocks)
