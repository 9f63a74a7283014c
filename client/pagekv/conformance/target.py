"""The executor under test as it describes itself, and the sizes that it is tested with."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from pagekv.conformance.link import Link, Refusal, StepsCall
from pagekv.steps.v1 import executor_service_pb2 as pb

# The revision of the contract whose rules are tested.
REVISION = 1
# An id is never shared, so another run of the kit does not take the executor away from this one.
MANAGER = f"pagekv-conformance-{secrets.token_hex(4)}"
# Tokens of a step at most, but where a refusal is tested.
TOKEN_BUDGET = 512
# Blocks of the device pool, unless a rule needs more, and of the host pool.
NUM_BLOCKS = 48
NUM_HOST_BLOCKS = 8
# The most that are live at once, in the rules of log-probabilities.
NUM_SEQUENCES = 5
# In the order tried: that of managers, then larger, then smaller ones.
BLOCK_SIZES = (16, 32, 64, 128, 256, 8, 4, 2, 1)
FEATURES = {
    name.removeprefix("EXECUTOR_FEATURE_").lower(): number for name, number in pb.ExecutorFeature.items() if number
}


class Untestable(Exception):
    """The executor cannot be tested at all; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Target:
    """An executor that has described itself. `features` are those to test, all of which it has."""

    link: Link
    description: pb.DescribeResponse
    block_size: int
    features: frozenset[Any]

    @property
    def max_blocks(self) -> int:
        """Blocks in the longest table."""
        return -(-self.description.max_model_len // self.block_size)

    @property
    def pool_blocks(self) -> int:
        """Blocks that the device pool can have."""
        return int(self.description.device_kv_bytes // self.description.bytes_per_block)

    @property
    def num_logprobs(self) -> int | None:
        """StepSampling.logprobs with which the margin of a token can be seen; None where it cannot be."""
        known = pb.EXECUTOR_FEATURE_LOGPROBS in self.features and self.description.max_logprobs >= 2
        return 2 if known and self.description.vocab_size >= 2 else None

    def attach_request(
        self,
        manager_id: str = MANAGER,
        *,
        num_blocks: int = NUM_BLOCKS,
        host_blocks: int = 0,
        features: Iterable[Any] | None = None,
        take_over: bool = False,
        **fields: object,
    ) -> pb.AttachRequest:
        """The request of a new epoch; by default all features are required. `fields` of AttachRequest override."""
        request = pb.AttachRequest(
            manager_id=manager_id,
            block_size=self.block_size,
            num_device_blocks=num_blocks,
            num_host_blocks=host_blocks,
            layout=self.description.layout,
            take_over=take_over,
            required_features=sorted(features) if features is not None else sorted(self.features),
            contract_revision=REVISION,
        )
        for name, value in fields.items():
            setattr(request, name, value)
        return request

    def attach(self, *args: Any, **rest: Any) -> int:
        """A new epoch; arguments as of `attach_request`. Raises Refusal."""
        return self.link.attach(self.attach_request(*args, **rest))

    def describe_request(self, **fields: int) -> pb.DescribeRequest:
        """The request that the description answered; `fields` override."""
        return describe_request(**{"block_size": self.block_size, **fields})

    def run(self, epoch: int | None = None) -> StepsCall:
        return self.link.run(epoch)


def describe_request(**fields: int) -> pb.DescribeRequest:
    """A request of Describe, as a manager makes it; `fields` override."""
    return pb.DescribeRequest(**{"token_budget": TOKEN_BUDGET, "contract_revision": REVISION, **fields})


def describe(link: Link, wanted: frozenset[int] | None) -> Target:
    """The executor, with a block size at which the rules can be tested. `wanted`: features to test; None: all. Raises
    Untestable.
    """
    last = f"it accepts none of the block sizes {', '.join(map(str, BLOCK_SIZES))}"
    for block_size in BLOCK_SIZES:
        try:
            description = link.describe(describe_request(block_size=block_size))
        except Refusal as refusal:
            if refusal.field != "block_size":
                hint = ""
                if refusal.code is grpc.StatusCode.UNIMPLEMENTED:
                    hint = ". Is it an executor, and not a manager or a gateway?"
                raise Untestable(f"Describe is refused: {refusal}{hint}") from refusal
            continue
        if not description.bytes_per_block or not description.vocab_size:
            raise Untestable("Describe must say bytes_per_block and vocab_size, above 0")
        features = frozenset(description.features) & frozenset(FEATURES.values())
        if lacking := [
            name for name, number in FEATURES.items() if number in (wanted or ()) and number not in features
        ]:
            raise Untestable(f"--features: Describe does not list {', '.join(lacking)}")
        target = Target(link, description, block_size, features if wanted is None else wanted)
        length = 4 * block_size + 16
        blocks, sequences = target.pool_blocks, description.max_sequences
        if description.max_model_len >= length and blocks >= NUM_BLOCKS and sequences >= NUM_SEQUENCES:
            return target
        last = (
            f"with blocks of {block_size} it has max_model_len {description.max_model_len}, {blocks} blocks and "
            f"max_sequences {sequences}, and must have {length}, {NUM_BLOCKS} and {NUM_SEQUENCES} or more"
        )
    raise Untestable(f"the executor cannot be tested: {last}")
