"""Checks a manager's `Describe` and `Attach` before an epoch is ended or a pool is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from pagekv.common.errors import FailedPrecondition, InvalidRequest, OutOfMemory
from pagekv.executor.backend.interface import BackendDescription, BackendFeature
from pagekv.executor.session.field_checks import check_range
from pagekv.executor.session.step_check import MAX_STEP_TOKENS

# The latest revision of executor_service.proto that this executor implements.
CONTRACT_REVISION = 1
# Bound of the revision that a manager names in `Describe`; it may be later than CONTRACT_REVISION.
MAX_REVISION = 65535
MAX_BLOCK_SIZE = 256
MAX_BLOCKS = 2**31 - 1
MAX_MANAGER_ID = 128


@dataclass(frozen=True, slots=True)
class AttachOrder:
    """The fields of AttachRequest, unchecked: a required feature may be a number that is no `BackendFeature`."""

    manager_id: str
    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    layout: str
    take_over: bool
    required_features: tuple[int, ...]
    contract_revision: int

    @property
    def features(self) -> frozenset[BackendFeature]:
        """The required features. Call only after `check_fit`."""
        return frozenset(map(BackendFeature, self.required_features))


def check_describe(block_size: int, token_budget: int, contract_revision: int) -> None:
    """Checks the fields of DescribeRequest. Raises InvalidRequest."""
    _check_block_size(block_size)
    check_range("token_budget", token_budget, 1, MAX_STEP_TOKENS)
    check_range("contract_revision", contract_revision, 0, MAX_REVISION)


def check_order(order: AttachOrder) -> None:
    """Checks the fields whose bounds are the same for every backend. Raises InvalidRequest, or FailedPrecondition for
    the revision.
    """
    if not 1 <= len(order.manager_id) <= MAX_MANAGER_ID:
        raise InvalidRequest("manager_id", f"must be 1 to {MAX_MANAGER_ID} characters, has {len(order.manager_id)}")
    _check_block_size(order.block_size)
    check_range("num_device_blocks", order.num_device_blocks, 1, MAX_BLOCKS)
    check_range("num_host_blocks", order.num_host_blocks, 0, MAX_BLOCKS)
    if not 1 <= order.contract_revision <= CONTRACT_REVISION:
        raise FailedPrecondition(
            f"contract_revision: must be from 1 to {CONTRACT_REVISION}, which this executor knows, got "
            f"{order.contract_revision}",
            "CONTRACT_REVISION",
            str(order.contract_revision),
        )


def check_fit(order: AttachOrder, description: BackendDescription) -> None:
    """Checks the fields that depend on the backend: features, layout and memory. Raises FailedPrecondition,
    InvalidRequest or OutOfMemory.
    """
    _check_features(order, description)
    if order.layout != description.layout:
        raise InvalidRequest("layout", f"must be {description.layout!r}, got {order.layout[:64]!r}")
    for field, blocks, size in (
        ("num_device_blocks", order.num_device_blocks, description.device_kv_bytes),
        ("num_host_blocks", order.num_host_blocks, description.host_kv_bytes),
    ):
        most = size // description.bytes_per_block
        if blocks > most:
            raise OutOfMemory(
                f"{field}: {blocks} blocks of {description.bytes_per_block} bytes do not fit into {size} bytes: "
                f"at most {most}"
            )


def _check_features(order: AttachOrder, description: BackendDescription) -> None:
    names = {feature.value: f"EXECUTOR_FEATURE_{feature.name}" for feature in BackendFeature}
    for index, number in enumerate(order.required_features):
        if number not in description.features:
            name = names.get(number, f"feature {number}")
            has = ", ".join(names[feature] for feature in description.features) or "none"
            raise FailedPrecondition(
                f"required_features[{index}]: {name} is not supported: this executor has {has}",
                "EXECUTOR_FEATURE",
                name,
            )
    if order.num_host_blocks and BackendFeature.HOST_POOL not in order.required_features:
        raise InvalidRequest(
            "num_host_blocks",
            f"must be 0 unless required_features has EXECUTOR_FEATURE_HOST_POOL, got {order.num_host_blocks}",
        )


def _check_block_size(block_size: int) -> None:
    if not 1 <= block_size <= MAX_BLOCK_SIZE or block_size & (block_size - 1):
        raise InvalidRequest("block_size", f"must be a power of two from 1 to {MAX_BLOCK_SIZE}, got {block_size}")
