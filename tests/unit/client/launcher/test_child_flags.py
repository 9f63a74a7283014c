"""The flags of children that `up` reads: addresses of KV events, the vocabulary of an oracle, and the time to end."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engine.small_tokenizers import byte_level, sentencepiece

from pagekv.client.launcher.child_flags import (
    DEFAULT_ENDPOINT,
    EVENTS_FLAG,
    REPLAY_FLAG,
    event_endpoints,
    grace_s,
    vocabulary_args,
)
from pagekv.executor.config import ExecutorConfig
from pagekv.kvmanager.config import ManagerConfig, parse_config


def endpoints_of(*args: str, pairs: int = 3, env: dict[str, str] | None = None) -> list[tuple[str, str]]:
    """Addresses at which each manager publishes and replays."""
    found = event_endpoints(["--kv-events", *args], env or {}, pairs)
    return [(each[EVENTS_FLAG], each[REPLAY_FLAG]) for each in found]


def test_every_pair_publishes_its_events_on_ports_of_its_own() -> None:
    assert parse_config(["--kv-events"], {}).observe.kv_events_endpoint == DEFAULT_ENDPOINT
    assert endpoints_of(pairs=2) == [("tcp://127.0.0.1:5557", ""), ("tcp://127.0.0.1:5558", "")]
    beside = endpoints_of("--kv-events-replay-endpoint", "tcp://127.0.0.1:5558")
    assert beside == [(f"tcp://127.0.0.1:{5557 + 2 * pair}", f"tcp://127.0.0.1:{5558 + 2 * pair}") for pair in range(3)]
    assert endpoints_of("--kv-events-endpoint=ipc:///tmp/events", pairs=2)[1] == ("ipc:///tmp/events-2", "")
    assert endpoints_of("--kv-events-endpoint=tcp://*:0") == [("tcp://*:0", "")] * 3
    # Left to the manager to refuse.
    for wrong in ("127.0.0.1:5557", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:x"):
        assert endpoints_of(f"--kv-events-endpoint={wrong}") == [(wrong, "")] * 3


@pytest.mark.parametrize("apart", [*range(1, 13), 30, 60, 64, -2])
def test_no_two_sockets_of_any_pairs_meet(apart: int) -> None:
    for pairs in (1, 2, 7, 64):
        found = endpoints_of(f"--kv-events-replay-endpoint=tcp://127.0.0.1:{5557 + apart}", pairs=pairs)
        assert len({address for both in found for address in both}) == 2 * pairs


def test_events_are_found_in_flags_and_variables_and_the_last_flag_wins() -> None:
    env = {"PAGEKV_KV_EVENTS": "On", "PAGEKV_KV_EVENTS_ENDPOINT": "tcp://127.0.0.1:7000"}
    assert [each[EVENTS_FLAG] for each in event_endpoints([], env, 2)] == [f"tcp://127.0.0.1:700{n}" for n in range(2)]
    assert event_endpoints(["--no-kv-events"], env, 2) == event_endpoints([], {}, 2) == [{}, {}]
    args = ["--kv-events", "--kv-events-endpoint", "tcp://127.0.0.1:1", "--kv-events-endpoint=tcp://127.0.0.1:8000"]
    assert [each[EVENTS_FLAG] for each in event_endpoints(args, env, 2)] == [
        f"tcp://127.0.0.1:800{n}" for n in range(2)
    ]


def test_an_oracle_without_a_model_has_the_vocabulary_of_the_tokenizer(tmp_path: Path) -> None:
    oracle = ["--backend=oracle"]

    def told(*manager_args: str, executor_args: list[str] = oracle, **env: str) -> list[str]:
        return vocabulary_args(executor_args, manager_args, env)

    assert told("--tokenizer=demo") == ["--vocab-size=4096"]
    for tokenizer in (byte_level(), sentencepiece()):
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        assert told("--tokenizer", str(tmp_path)) == [f"--vocab-size={size}"]
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0]]}}')
    assert told(f"--tokenizer={tmp_path}") == ["--vocab-size=2"]
    # A size that is given counts, and what cannot be read is for the manager to say.
    assert told("--tokenizer=demo", executor_args=[*oracle, "--vocab-size", "9"]) == []
    assert told("--tokenizer=demo", executor_args=[*oracle, "--model=demo"]) == []
    assert told("--tokenizer=demo", PAGEKV_MODEL="demo") == []
    assert told(f"--tokenizer={tmp_path / 'nothing'}") == []
    assert told(f"--tokenizer={'x' * 300}") == told("--tokenizer=~no-user/x") == []
    assert told("--tokenizer=none") == told() == []


def test_the_grace_of_a_process_is_found_in_flags_and_variables() -> None:
    assert grace_s("manager", [], {}) == ManagerConfig().grace_s
    assert grace_s("executor", [], {}) == ExecutorConfig().grace_s
    env = {"PAGEKV_GRACE_S": "70"}
    assert grace_s("manager", [], env) == grace_s("executor", [], env) == 70
    assert grace_s("manager", ["--grace-s=120"], env) == 120
    # The process refuses it.
    assert grace_s("manager", ["--grace-s", "long"], env) == 30
