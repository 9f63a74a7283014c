"""Layer three: greedy tokens do not depend on how a sequence is brought about, rules M1 to M8, M10 to M12 and M17.

Each rule brings a sequence about in another way than its answer and holds the tokens against it, so no model has to be
known. An answer is right because the simplest way has nothing that could go wrong; see `answers`.
"""

from __future__ import annotations

import random

from pagekv.conformance.answers import NUM_OUTPUTS
from pagekv.conformance.kit import Kit
from pagekv.conformance.played import COPY, SWAP_IN, SWAP_OUT, Played, PlayedEpoch, copying
from pagekv.conformance.target import NUM_BLOCKS, NUM_HOST_BLOCKS
from pagekv.conformance.verdict import NotTested, Rule
from pagekv.steps.v1 import executor_service_pb2 as pb

# Salt of prompts that continue another one's beginning.
TAIL = 77


def block_ids_mean_nothing(kit: Kit) -> None:
    ids = list(range(NUM_BLOCKS))
    shuffled = random.Random(1).sample(ids, NUM_BLOCKS)
    for words, free in (("blocks from the last down", ids), ("blocks in no order", shuffled)):
        with kit.epoch(free) as epoch:
            for prompt in kit.answers.prompts[:2]:
                kit.answers.compare(epoch.alone(prompt, NUM_OUTPUTS), words)


def chunks_are_as_one_prompt(kit: Kit) -> None:
    size = kit.target.block_size
    for chunks in ([size + 1, 1], [max(1, size - 1), 1, size], [1, 1, 1, max(1, size - 2)]):
        with kit.epoch() as epoch:
            seqs = [epoch.sequence(prompt) for prompt in kit.answers.prompts]
            for seq in seqs:
                _enter_in_chunks(epoch, seq, chunks)
            epoch.decode(2)
            for seq in seqs:
                kit.answers.compare(seq, f"a prompt of {seq.num_prompt} in chunks of {chunks} and the rest")


def _enter_in_chunks(epoch: PlayedEpoch, seq: Played, chunks: list[int]) -> None:
    """The sequence enters and computes its prompt, chunk by chunk, while the others sit out."""
    enter = [seq]
    for chunk in [*chunks, seq.length]:
        if left := seq.num_prompt - seq.computed:
            epoch.step(enter, counts={seq: min(chunk, left)}, others=0)
            enter = []


def _shared(kit: Kit, epoch: PlayedEpoch, owner: Played, cached: int, salt: int = TAIL) -> Played:
    """A sequence whose first `cached` tokens are the owner's, over the owner's full blocks; its tail is its own."""
    size = kit.target.block_size
    tail = kit.answers.random_tokens(size // 2 + 2, salt)
    seq = epoch.sequence(owner.tokens[:cached] + tail)
    seq.blocks, seq.computed = owner.blocks[: cached // size], cached
    return seq


def prefixes_are_reused(kit: Kit) -> None:
    size = kit.target.block_size
    with kit.epoch() as epoch:
        owner = epoch.sequence(kit.answers.prompts[0])
        epoch.step([owner])
        live, short = (_shared(kit, epoch, owner, cached * size, TAIL + cached) for cached in (2, 1))
        epoch.step([live, short])
        epoch.decode(1)
        epoch.step(finish=[owner])
        gone = _shared(kit, epoch, owner, 2 * size)
        epoch.step([gone])
        epoch.decode(2)
        kit.answers.compare(owner, "the sequence whose blocks are shared")
        for seq, words in ((live, "live"), (short, "live"), (gone, "gone")):
            kit.answers.compare(seq, f"{seq.num_prompt} tokens over blocks of a sequence that is {words}")
    with kit.epoch() as epoch:
        owner = epoch.sequence(kit.answers.prompts[0])
        epoch.give_blocks(owner, owner.length)
        reader = _shared(kit, epoch, owner, 2 * size)
        epoch.step([reader, owner])
        epoch.decode(2)
        kit.answers.compare(reader, "over blocks that another sequence writes in the same step")


def copies_serve_and_part(kit: Kit) -> None:
    size = kit.target.block_size
    with kit.epoch() as epoch:
        owner = epoch.sequence(kit.answers.prompts[0])
        epoch.step([owner])
        # The third block is partly full; copied over two operations, and the full ones with it in one.
        cached = 2 * size + size // 2
        first, second, third, between = (epoch.free.pop() for _ in range(4))
        ops = [
            copying(COPY, owner.blocks[:3], [second, first, between]),
            copying(COPY, [between], [third]),
        ]
        other = _shared(kit, epoch, owner, cached)
        other.blocks = [second, first, third]
        epoch.step([other], ops=ops)
        epoch.decode(2)
        kit.answers.compare(other, "a sequence over copied blocks")
        kit.answers.compare(owner, "the sequence whose blocks were copied")


def swaps_bring_back(kit: Kit) -> None:
    kit.need(pb.EXECUTOR_FEATURE_HOST_POOL)
    with kit.epoch(host_blocks=NUM_HOST_BLOCKS) as epoch:
        prompts = kit.answers.prompts
        seqs = [epoch.sequence(prompts[0]), epoch.sequence(prompts[1])]
        epoch.step(seqs)
        epoch.decode(1)
        out = [block for seq in seqs for block in seq.blocks]
        host = random.Random(2).sample(range(NUM_HOST_BLOCKS), len(out))
        swap_out = copying(SWAP_OUT, out, host)
        # The blocks are another's before they are needed again.
        other = epoch.sequence(prompts[2])
        epoch.free += seqs[0].blocks
        epoch.step([other], finish=seqs, ops=[swap_out])
        epoch.decode(1)
        back = []
        for seq in seqs:
            again = epoch.sequence(seq.tokens, seq.num_prompt)
            again.computed = seq.computed
            epoch.give_blocks(again, seq.computed)
            back.append(again)
        new = [block for seq in back for block in seq.blocks]
        old = [block for seq, again in zip(seqs, back, strict=True) for block in seq.blocks[: len(again.blocks)]]
        epoch.step(back, ops=[copying(SWAP_IN, [host[out.index(block)] for block in old], new)])
        epoch.decode(2)
        for seq in (*back, other):
            kit.answers.compare(seq, "in blocks that were swapped out" if seq is other else "after a swap out and in")


def sequences_come_again(kit: Kit) -> None:
    with kit.epoch() as epoch:
        seqs = [epoch.sequence(prompt) for prompt in kit.answers.prompts[:2]]
        epoch.step(seqs)
        epoch.decode(2)
        again = [epoch.sequence(seq.tokens, seq.num_prompt) for seq in seqs]
        epoch.step(again, finish=seqs)
        epoch.decode(2)
        for seq in again:
            kit.answers.compare(seq, "a sequence that left and came again")


def step_mates_do_not_matter(kit: Kit) -> None:
    with kit.epoch() as epoch:
        seqs = [epoch.sequence(prompt) for prompt in kit.answers.prompts]
        epoch.step(seqs[:2])
        epoch.step(seqs[2:3])
        epoch.step(seqs[3:], counts={seqs[3]: 1})
        left = seqs[3].length - seqs[3].computed
        epoch.step(counts={seqs[3]: left})
        epoch.decode(2)
        for seq in seqs:
            kit.answers.compare(seq, f"a sequence of {seq.num_prompt} prompt tokens among {len(seqs)}")


def steps_are_pipelined(kit: Kit) -> None:
    with kit.epoch() as epoch:
        first, second = (epoch.sequence(prompt) for prompt in kit.answers.prompts[:2])
        epoch.send([first])
        epoch.send([second])
        for _ in range(NUM_OUTPUTS - 1):
            epoch.send()
        for _ in range(NUM_OUTPUTS + 1):
            epoch.receive()
        for seq in (first, second):
            kit.answers.compare(seq, "steps sent at once")


def a_step_has_an_order(kit: Kit) -> None:
    """Blocks change hands within one step: what leaves is copied first, then its blocks are another's."""
    size, prompts = kit.target.block_size, kit.answers.prompts
    with kit.epoch() as epoch:
        leaving, staying = epoch.sequence(prompts[0]), epoch.sequence(prompts[2])
        epoch.step([leaving, staying])
        cached = 2 * size + size // 2
        copies = [epoch.free.pop() for _ in range(3)]
        heir = _shared(kit, epoch, leaving, cached)
        heir.blocks = copies
        # Under the number and in the blocks of the one that leaves, the last of which a live table gets.
        newcomer = epoch.sequence(prompts[1])
        newcomer.seq_id = leaving.seq_id
        newcomer.blocks = leaving.blocks[:2]
        epoch.free.append(leaving.blocks[2])
        epoch.step([heir, newcomer], finish=[leaving], ops=[copying(COPY, leaving.blocks[:3], copies)])
        epoch.decode(2)
        kit.answers.compare(heir, "over copies of blocks that the same step gives away")
        kit.answers.compare(newcomer, "in blocks that leave their sequence in the same step")
        kit.answers.compare(staying, "with a block appended that leaves its sequence in the same step")


def samples_come_with_the_last_token(kit: Kit) -> None:
    """The check itself is made of every result, where it is received."""
    size = kit.target.block_size
    with kit.epoch() as epoch:
        for prompt in kit.answers.prompts:
            seq = epoch.sequence(prompt)
            _enter_in_chunks(epoch, seq, [size, seq.num_prompt - size - 1])
            epoch.step()
            kit.answers.compare(seq, "a sequence beside others that sit out")


def sitting_out_changes_nothing(kit: Kit) -> None:
    with kit.epoch() as epoch:
        waiting, chunked, mate = (epoch.sequence(prompt) for prompt in kit.answers.prompts[:3])
        epoch.step([waiting, chunked], counts={chunked: 1})
        idle = {waiting: 0, chunked: 0}
        epoch.step([mate], counts=idle)
        epoch.step(counts=idle)
        epoch.step(counts={waiting: 1, chunked: chunked.length - chunked.computed, mate: 0})
        epoch.step(finish=[mate], counts={chunked: 0})
        epoch.decode(2)
        for seq in (waiting, chunked, mate):
            kit.answers.compare(seq, "a sequence that sat steps out")


def failed_sequences_are_told_of(kit: Kit) -> None:
    raise NotTested("no step makes logits that are no numbers")


RULES: tuple[Rule[Kit], ...] = (
    Rule("M1", "block ids mean nothing", block_ids_mean_nothing),
    Rule("M2", "a prompt in chunks is as one at once", chunks_are_as_one_prompt),
    Rule("M3", "computed_tokens over another's blocks", prefixes_are_reused),
    Rule("M4", "COPY: the copy serves, and the two part", copies_serve_and_part),
    Rule("M5", "SWAP_OUT and SWAP_IN bring back what was there", swaps_bring_back),
    Rule("M6", "a sequence that leaves and comes again goes on", sequences_come_again),
    Rule("M7", "sequences of a step do not matter to each other", step_mates_do_not_matter),
    Rule("M8", "steps sent at once give the same", steps_are_pipelined),
    Rule("M10", "a step's parts have an order", a_step_has_an_order),
    Rule("M11", "a sequence samples with its last known token", samples_come_with_the_last_token),
    Rule("M12", "sitting out changes nothing", sitting_out_changes_nothing),
    Rule("M17", "a sequence that fails takes no other with it", failed_sequences_are_told_of),
)
