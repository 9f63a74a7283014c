"""Layer three: greedy tokens do not depend on how a sequence is brought about, rules M1 to M8, M10 to M12 and M17.

Each rule brings a sequence about in another way than its answer and holds the tokens against it, so no model has to be
known. An answer is right because the simplest way has nothing that could go wrong; see `answers`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pagekv.conformance.answers import NUM_OUTPUTS
from pagekv.conformance.kit import Kit, Rule
from pagekv.conformance.played import COPY, SWAP_IN, SWAP_OUT, PlayedEpoch, PlayedSequence, copying
from pagekv.conformance.target import NUM_BLOCKS, NUM_HOST_BLOCKS
from pagekv.conformance.verdict import NotTested
from pagekv.steps.v1 import executor_service_pb2 as pb


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


def _enter_in_chunks(epoch: PlayedEpoch, seq: PlayedSequence, chunks: list[int]) -> None:
    """The sequence enters and computes its prompt, chunk by chunk, while the others sit out."""
    enter = [seq]
    for chunk in [*chunks, seq.length]:
        if left := seq.num_prompt - seq.computed:
            epoch.step(enter, counts={seq: min(chunk, left)}, others=0)
            enter = []


def _shared(epoch: PlayedEpoch, owner: PlayedSequence, cached: int, tail: Sequence[int]) -> PlayedSequence:
    """A sequence whose first `cached` tokens are the owner's, over the owner's full blocks; its tail is its own."""
    seq = epoch.sequence([*owner.tokens[:cached], *tail])
    seq.blocks, seq.computed = owner.blocks[: cached // epoch.target.block_size], cached
    return seq


def prefixes_are_reused(kit: Kit) -> None:
    size, prompt = kit.target.block_size, kit.answers.prompts[0]
    # Lengths of the part that is reused and of the other. The third sequence computes one token alone, as one that
    # decodes does.
    lengths = [(2 * size, size // 2 + 2), (size, size // 2 + 2), (2 * size, 1), (2 * size, size // 2 + 3)]
    tails = [kit.answers.tail(prompt[:cached], own) for cached, own in lengths]
    with kit.epoch() as epoch:
        owner = epoch.sequence(prompt)
        epoch.step([owner])
        readers = [_shared(epoch, owner, cached, tail) for (cached, _), tail in zip(lengths, tails, strict=True)]
        epoch.step(readers[:-1])
        epoch.decode(1)
        epoch.step(finish=[owner])
        epoch.step(readers[-1:])
        epoch.decode(2)
        kit.answers.compare(owner, "the sequence whose blocks are shared")
        for seq, (cached, _) in zip(readers, lengths, strict=True):
            what = "gone" if seq is readers[-1] else "live"
            kit.answers.compare(
                seq, f"{seq.num_prompt} tokens, {cached} of them in blocks of a sequence that is {what}"
            )
    with kit.epoch() as epoch:
        owner = epoch.sequence(prompt)
        epoch.give_blocks(owner, owner.length)
        reader = _shared(epoch, owner, 2 * size, tails[0])
        epoch.step([reader, owner])
        epoch.decode(2)
        kit.answers.compare(reader, "over blocks that another sequence writes in the same step")
    with kit.epoch() as epoch:
        owner = epoch.sequence(prompt)
        epoch.step([owner], counts={owner: 1})
        epoch.step(others=owner.length - 1)
        reader = _shared(epoch, owner, 2 * size, tails[0])
        epoch.step([reader])
        epoch.decode(1)
        kit.answers.compare(reader, "over blocks that were appended to another sequence in one step")


def copies_serve_and_part(kit: Kit) -> None:
    size, prompt = kit.target.block_size, kit.answers.prompts[0]
    # The third block is partly full; copied over two operations, and the full ones with it in one.
    cached = 2 * size + size // 2
    tails = [kit.answers.tail(prompt[:cached], size // 2 + more) for more in (2, 3)]
    with kit.epoch() as epoch:
        owner = epoch.sequence(prompt)
        epoch.step([owner])
        first, second, third, fourth, between = (epoch.free.pop() for _ in range(5))
        ops = [
            # The third one to two blocks at once, as for a fork into several sequences.
            copying(COPY, [*owner.blocks[:3], owner.blocks[2]], [second, first, between, fourth]),
            copying(COPY, [between], [third]),
        ]
        other, fork = (_shared(epoch, owner, cached, tail) for tail in tails)
        other.blocks, fork.blocks = [second, first, third], [second, first, fourth]
        epoch.step([other, fork], ops=ops)
        epoch.decode(NUM_OUTPUTS - 1)
        kit.answers.compare(other, "a sequence over copied blocks")
        kit.answers.compare(fork, "a sequence over the second copy of a block that one operation copies twice")
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
        # The first one comes back twice, from the same host blocks.
        seqs.append(seqs[0])
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
    cached = 2 * size + size // 2
    tail = kit.answers.tail(prompts[0][:cached], size // 2 + 2)
    with kit.epoch() as epoch:
        leaving, staying = epoch.sequence(prompts[0]), epoch.sequence(prompts[2])
        epoch.step([leaving, staying])
        copies = [epoch.free.pop() for _ in range(3)]
        heir = _shared(epoch, leaving, cached, tail)
        heir.blocks = copies
        # Under the number and in the blocks of the one that leaves, the last of which a live table gets.
        newcomer = epoch.sequence(prompts[1])
        newcomer.seq_id = leaving.seq_id
        newcomer.blocks = leaving.blocks[:2]
        epoch.free.append(leaving.blocks[2])
        epoch.step([heir, newcomer], finish=[leaving], ops=[copying(COPY, leaving.blocks[:3], copies)])
        epoch.decode(NUM_OUTPUTS - 1)
        kit.answers.compare(heir, "over copies of blocks that the same step gives away")
        kit.answers.compare(newcomer, "in blocks that leave their sequence in the same step")
        kit.answers.compare(staying, "with a block appended that leaves its sequence in the same step")
    if pb.EXECUTOR_FEATURE_HOST_POOL in kit.target.features:
        _operations_keep_their_order(kit)


def _operations_keep_their_order(kit: Kit) -> None:
    """The first blocks of two sequences change places by way of the host: every operation needs the one before."""
    size, prompts = kit.target.block_size, kit.answers.prompts[:2]
    tails = [kit.answers.tail(prompt[:size], size // 2 + 2) for prompt in prompts]
    with kit.epoch(host_blocks=1) as epoch:
        leaving = [epoch.sequence(prompt) for prompt in prompts]
        epoch.step(leaving)
        heirs = [_shared(epoch, leaving[i], size, tails[i]) for i in (0, 1, 0)]
        here, there, third = leaving[0].blocks[0], leaving[1].blocks[0], epoch.free.pop()
        ops = [
            copying(SWAP_OUT, [here], [0]),
            copying(COPY, [there], [here]),
            copying(SWAP_IN, [0], [there]),
            copying(COPY, [there], [third]),
        ]
        for heir, block in zip(heirs, (there, here, third), strict=True):
            heir.blocks = [block]
        epoch.step(heirs, finish=leaving, ops=ops)
        epoch.decode(NUM_OUTPUTS - 1)
        for heir in heirs:
            kit.answers.compare(heir, "over blocks of one step's SWAP_OUT, COPY, SWAP_IN and COPY, in this order")


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


RULES: tuple[Rule, ...] = (
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
