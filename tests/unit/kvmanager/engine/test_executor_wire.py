"""Step plans and results as messages, field by field."""

import random
from array import array
from dataclasses import replace
from itertools import pairwise

import pytest

from pagekv.kvmanager.engine.executor_wire import pack_token_ids, step_bytes, step_request, step_result
from pagekv.kvmanager.engine.recovery import WrongAnswer
from pagekv.kvmanager.kvcache.block_hash import root_digest
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.request.logprobs import TokenLogprobs
from pagekv.kvmanager.request.stream import RequestStream
from pagekv.kvmanager.scheduling.sequence import LiveRequest, Seq
from pagekv.kvmanager.scheduling.step_plan import BlockCopy, CopyKind, CopyList, NewSeq, StepPlan
from pagekv.steps.v1 import executor_service_pb2 as pb


def new_sequence(sampling: SamplingParams, index: int = 0) -> NewSeq:
    command = GenerateCommand("r", [5, 6, 7], sampling, resumed_tokens=1)
    request = LiveRequest(command, RequestStream("r", 1), 0, root_digest("model", "", ""))
    tokens = array("I", [5, 6, 7])
    sequence = Seq(request, index, tokens, num_prompt=2, max_total=9, key=(0, 0, index))
    return NewSeq(sequence, 41, tokens, array("i", [8, 9]), 2)


def test_a_step_with_everything() -> None:
    sampling = SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        min_tokens=2,
        seed=2**64 - 1,
        stop_token_ids=(9, 4),
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logprobs=0,
        logit_bias={3: -1.0},
    )
    # 8 is read before it is written, so its writing begins another operation.
    moves = CopyList(BlockCopy(CopyKind.COPY, *pair) for pair in [(7, 12), (8, 13), (9, 8), (7, 14)])
    plan = StepPlan([1, 2], moves, [new_sequence(sampling, index=6)], [3, 3], [10, 11], [41, 5], [2, 0])
    assert step_request(plan, 2**63, 7, (1, 4)) == pb.StepRequest(
        epoch=2**63,
        step=7,
        memory_ops=[
            pb.MemoryOp(kind=pb.MEMORY_OP_KIND_COPY, sources=[7, 8], destinations=[12, 13]),
            pb.MemoryOp(kind=pb.MEMORY_OP_KIND_COPY, sources=[9, 7], destinations=[8, 14]),
        ],
        finished_seqs=[1, 2],
        new_seqs=[
            pb.NewSequence(
                seq_id=41,
                token_ids=[5, 6, 7],
                num_prompt_tokens=2,
                block_ids=[8, 9],
                computed_tokens=2,
                sampling=pb.StepSampling(
                    temperature=0.5,
                    top_p=0.25,
                    top_k=3,
                    min_p=0.125,
                    repetition_penalty=1.5,
                    presence_penalty=-1,
                    frequency_penalty=2,
                    seed=2**64 - 1,
                    sequence_index=6,
                    min_tokens=2,
                    banned_until_min=[1, 4, 9],
                    bias_token_ids=[3],
                    biases=[-1],
                    logprobs=0,
                ),
            )
        ],
        append_seqs=[3, 3],
        append_blocks=[10, 11],
        scheduled_seqs=[41, 5],
        scheduled_tokens=[2, 0],
    )


def test_copies_of_one_operation_may_all_happen_at_once() -> None:
    """One that depends on an earlier one begins the next operation: the executor refuses it otherwise."""

    def operations(*copies: tuple[int, int]) -> list[list[tuple[int, int]]]:
        message = step_request(StepPlan([1], CopyList(BlockCopy(CopyKind.COPY, *pair) for pair in copies)), 1, 1, ())
        return [list(zip(op.sources, op.destinations, strict=True)) for op in message.memory_ops]

    assert operations((1, 2), (3, 4), (1, 5)) == [[(1, 2), (3, 4), (1, 5)]]
    assert operations((1, 2), (3, 1)) == [[(1, 2)], [(3, 1)]]
    assert operations((1, 2), (2, 3)) == [[(1, 2)], [(2, 3)]]
    assert operations((1, 2), (3, 2), (4, 5)) == [[(1, 2)], [(3, 2), (4, 5)]]
    assert operations() == []


def test_moves_between_the_pools_keep_their_order() -> None:
    """Device and host ids mean different blocks, so only a block that is written twice begins another operation."""
    out, back, copy = CopyKind.SWAP_OUT, CopyKind.SWAP_IN, CopyKind.COPY
    moves = [
        BlockCopy(out, 1, 2),
        BlockCopy(out, 2, 1),
        BlockCopy(back, 3, 1),
        BlockCopy(back, 3, 2),
        BlockCopy(back, 4, 1),
        BlockCopy(copy, 1, 5),
    ]
    message = step_request(StepPlan([1], CopyList(moves)), 1, 1, ())
    assert [(op.kind, list(op.sources), list(op.destinations)) for op in message.memory_ops] == [
        (pb.MEMORY_OP_KIND_SWAP_OUT, [1, 2], [2, 1]),
        (pb.MEMORY_OP_KIND_SWAP_IN, [3, 3], [1, 2]),
        (pb.MEMORY_OP_KIND_SWAP_IN, [4], [1]),
        (pb.MEMORY_OP_KIND_COPY, [1], [5]),
    ]


def test_ends_that_do_not_count_are_not_banned() -> None:
    def banned(sampling: SamplingParams) -> list[int]:
        message = step_request(StepPlan([], new=[new_sequence(sampling)]), 1, 1, (1, 4))
        assert not message.new_seqs[0].sampling.HasField("logprobs")
        return list(message.new_seqs[0].sampling.banned_until_min)

    assert banned(SamplingParams(stop_token_ids=(9,))) == []
    assert banned(SamplingParams(min_tokens=1, stop_token_ids=(9,), ignore_eos=True)) == [9]


def test_a_result_with_log_probabilities() -> None:
    result = step_result(
        pb.StepResult(
            epoch=1,
            step=3,
            sampled_seqs=[7, 8],
            sampled_tokens=[70, 80],
            logprobs=[pb.SampledLogprobs(seq_id=8, chosen=-0.5, top_token_ids=[81, 80], top_logprobs=[-0.25, -0.5])],
            computed_tokens=5,
            execute_us=6,
            idle_us=7,
            threads=65536,
            rank_us=[9, 8],
        )
    )
    assert result.rank_us == (9, 8)
    assert (result.step, result.sampled_seq_ids, result.sampled_tokens) == (3, [7, 8], [70, 80])
    assert result.logprobs == {8: TokenLogprobs(80, -0.5, ((81, -0.25), (80, -0.5)))}
    assert (result.computed_tokens, result.execute_us, result.idle_us, result.threads) == (5, 6, 7, 65536)


def row(**fields: object) -> pb.SampledLogprobs:
    given: dict[str, object] = {"seq_id": 7, "chosen": -0.5, "top_token_ids": [1, 2], "top_logprobs": [-0.5, -1]}
    return pb.SampledLogprobs(**(given | fields))  # type: ignore[arg-type]  # fields are what the message has


SAMPLED = {"sampled_seqs": [7, 8], "sampled_tokens": [70, 80]}
NAN_REASON = pb.SEQUENCE_FAILURE_NOT_A_NUMBER


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rank_us": [1] * 1025}, "rank_us: must be at most 1024 numbers"),
        ({"rank_us": [2**41]}, "rank_us: must be at most 1024 numbers"),
        (
            {"sampled_seqs": [7]},
            r"sampled_tokens: must have as many .* sampled_seqs \(1\), has 2",
        ),
        ({"logprobs": [row(seq_id=9)]}, r"logprobs\.seq_id: must be of sampled_seqs, and each once, got 9"),
        ({"logprobs": [row(), row()]}, r"logprobs\.seq_id: must be of sampled_seqs, and each once, got 7"),
        ({"logprobs": [row(top_logprobs=[-1])]}, r"logprobs\.top_logprobs: must have .* top_token_ids \(2\), has 1"),
        ({"logprobs": [row(chosen=float("nan"))]}, r"logprobs: must be finite, got nan of sequence 7"),
        ({"logprobs": [row(top_logprobs=[-1, float("-inf")])]}, r"logprobs: must be finite, got -inf of sequence 7"),
        ({"logprobs": [row(top_logprobs=[float("inf"), float("-inf")])]}, r"logprobs: must be finite, got inf"),
        ({"logprobs": [row(chosen=0.5)]}, r"logprobs: must be at most 0, got 0.5 of sequence 7"),
        ({"logprobs": [row(top_logprobs=[2, -1])]}, r"logprobs: must be at most 0, got 2.0 of sequence 7"),
        ({"logprobs": [row(top_logprobs=[-2, -1])]}, r"logprobs\.top_token_ids: must be best first and each once"),
        ({"logprobs": [row(top_token_ids=[3, 3])]}, r"logprobs\.top_token_ids: must be best first and each once"),
        (
            {"execute_us": 2**64 - 1},
            r"execute_us: must be from 0 to 1099511627776 microseconds, got 18446744073709551615",
        ),
        ({"idle_us": 2**40 + 1}, r"idle_us: must be from 0 to 1099511627776 microseconds, got 1099511627777"),
        ({"threads": 65537}, r"threads: must be from 0 to 65536, got 65537"),
        ({"failed_seqs": [9]}, r"failed_reasons: must have as many entries as failed_seqs \(1\), has 0"),
        ({"failed_reasons": [NAN_REASON]}, r"failed_reasons: must have as many entries as failed_seqs \(0\), has 1"),
        ({"failed_seqs": [9, 9], "failed_reasons": [NAN_REASON] * 2}, r"failed_seqs: must have each sequence once"),
    ],
)
def test_a_result_that_makes_no_sense_is_refused_by_field(fields: dict[str, object], words: str) -> None:
    with pytest.raises(WrongAnswer, match=r"^StepResult\." + words):
        step_result(pb.StepResult(**(SAMPLED | fields)))  # type: ignore[arg-type]  # fields are what the message has


def test_the_chosen_token_alone_may_have_a_log_probability() -> None:
    """So for `logprobs` 0: no likeliest stand beside it."""
    row = pb.SampledLogprobs(seq_id=3, chosen=-0.5)
    message = pb.StepResult(sampled_seqs=[3], sampled_tokens=[7], logprobs=[row])
    assert step_result(message).logprobs == {3: TokenLogprobs(7, -0.5, ())}
    row.chosen = 1.0
    with pytest.raises(WrongAnswer, match=r"must be at most 0, got 1\.0 of sequence 3"):
        step_result(pb.StepResult(sampled_seqs=[3], sampled_tokens=[7], logprobs=[row]))


def test_sequences_that_failed_and_why() -> None:
    """A reason that a later version of the contract added is as good as any."""
    message = pb.StepResult(failed_seqs=[3, 5], failed_reasons=[NAN_REASON])
    message.failed_reasons.append(77)  # type: ignore[arg-type]  # from the future
    assert step_result(message).failed == {3: "its logits are not numbers", 5: "unknown reason"}


@pytest.mark.parametrize("length", [1, 5, 200, 5000])
def test_prompts_that_were_packed_ahead_travel_as_any_other(length: int) -> None:
    """In the order of the plan, with the tokens that were generated since, and whatever else the step has."""
    sampling = SamplingParams(logprobs=2)
    plan = StepPlan([1, 2], CopyList([BlockCopy(CopyKind.COPY, 7, 12)]), [], [3], [10], [41], [2])
    for place, packed in enumerate([False, True, False, True, True]):
        new = new_sequence(sampling, index=place)
        request = new.sequence.request
        prompt = [(number * 77_773) % 2**32 for number in range(length)]
        request.command = replace(request.command, prompt_ids=prompt)
        if packed:
            half = length // 2
            parts = array("I", prompt[:half]), array("I", prompt[half:])
            request.packed_prompt = b"".join(map(pack_token_ids, parts))
        tokens = array("I", [*prompt, *range(place)])
        plan.new.append(replace(new, token_ids=tokens))
    message = step_request(plan, 2**63, 7, (1, 4))
    assert [list(new.token_ids)[length:] for new in message.new_seqs] == [[*range(place)] for place in range(5)]
    assert pb.StepRequest.FromString(step_bytes(plan, 2**63, 7, (1, 4))) == message


def test_a_step_without_packed_prompts_is_the_message_itself() -> None:
    plan = StepPlan([1], CopyList(), [new_sequence(SamplingParams())], [3], [10], [41], [2])
    assert step_bytes(plan, 1, 2, ()) == step_request(plan, 1, 2, ()).SerializeToString()


@pytest.mark.parametrize("num", [100, 3000])
def test_many_copies_are_split_where_a_few_are(num: int) -> None:
    """Against the definition, one copy after the other: of each kind, where blocks are written twice and not."""
    chance = random.Random(num)
    for kind in CopyKind:
        for blocks in (10 * num, num // 2):
            twice = blocks < num
            written = [chance.randrange(blocks) for _ in range(num)] if twice else chance.sample(range(blocks), num)
            copies = [BlockCopy(kind, chance.randrange(blocks), each) for each in written]
            plan = StepPlan([1], CopyList(copies))
            found = step_request(plan, 1, 1, ()).memory_ops
            pairs = [pair for op in found for pair in zip(op.sources, op.destinations, strict=True)]
            assert pairs == [(copy.source, copy.destination) for copy in copies]
            for op in found:
                assert len(set(op.destinations)) == len(op.destinations)
            if kind is not CopyKind.COPY:
                assert (len(found) > 1) == twice
                for before, after in pairwise(found):
                    assert after.destinations[0] in before.destinations
