"""The manager's flags: defaults, environment, and refusals that name flag and bounds."""

from __future__ import annotations

import json

import pytest

from pagekv.common.flags import declarations
from pagekv.executor.config import ExecutorConfig
from pagekv.kvmanager.config import EXECUTOR_FLAGS, ManagerConfig, parse_config
from pagekv.kvmanager.engine.config import EngineConfig
from pagekv.kvmanager.observe.flags import ObserveConfig
from pagekv.kvmanager.scheduling.limits import SchedulerLimits
from pagekv.kvmanager.scheduling.swapping import SwapPolicy

DEFAULTS = ManagerConfig(
    listen="127.0.0.1:50051",
    insecure=False,
    tokenizer="auto",
    grace_s=30.0,
    log_level="info",
    log_format="text",
    port_file="",
    reflection=True,
    observe=ObserveConfig(),
    engine=EngineConfig(
        executor="127.0.0.1:50052",
        block_size=16,
        num_device_blocks=0,
        num_host_blocks=0,
        max_model_len=0,
        max_queue=1024,
        priority_aging=256,
        pipeline_depth=2,
        step_timeout_s=60.0,
        take_over=False,
        eviction_policy="slru",
        max_pinned_share=0.5,
        limits=SchedulerLimits(
            max_batch_tokens=2048, max_running=256, watermark=0.01, prefix_cache=True, swap=SwapPolicy("auto")
        ),
    ),
)


def test_defaults() -> None:
    assert parse_config([], {}) == DEFAULTS
    assert parse_config(["--tokenizer", ""], {}) == DEFAULTS


def test_every_flag_is_an_environment_variable_and_the_flag_wins() -> None:
    env = {
        "PAGEKV_LISTEN": "unix:/run/pagekv",
        "PAGEKV_INSECURE": "on",
        "PAGEKV_TOKENIZER": "none",
        "PAGEKV_GRACE_S": "0.5",
        "PAGEKV_LOG_LEVEL": "debug",
        "PAGEKV_LOG_FORMAT": "json",
        "PAGEKV_PORT_FILE": "/tmp/port",
        "PAGEKV_REFLECTION": "no",
        "PAGEKV_EXECUTOR": "executor:1",
        "PAGEKV_BLOCK_SIZE": "256",
        "PAGEKV_NUM_DEVICE_BLOCKS": "7",
        "PAGEKV_NUM_HOST_BLOCKS": "9",
        "PAGEKV_PREEMPTION": "swap",
        "PAGEKV_WRITE_BACK": "on",
        "PAGEKV_MAX_MODEL_LEN": "100",
        "PAGEKV_MAX_QUEUE": "3",
        "PAGEKV_PIPELINE_DEPTH": "1",
        "PAGEKV_STEP_TIMEOUT_S": "2",
        "PAGEKV_TAKE_OVER": "1",
        "PAGEKV_MAX_BATCH_TOKENS": "64",
        "PAGEKV_MAX_RUNNING": "5",
        "PAGEKV_WATERMARK": "0.25",
        "PAGEKV_PREFIX_CACHE": "off",
        "PAGEKV_PARTIAL_HITS": "off",
        "PAGEKV_PRIORITY_AGING": "5",
        "PAGEKV_EVICTION_POLICY": "lru",
        "PAGEKV_MAX_PINNED_SHARE": "0.75",
        "PAGEKV_HTTP_LISTEN": "127.0.0.1:0",
        "PAGEKV_HTTP_NAMES": "GPU1.example, gpu1",
        "PAGEKV_PAGE_TEXT": "on",
        "PAGEKV_GATEWAY_API": "on",
        "PAGEKV_OTLP_ENDPOINT": "http://collector:4318/",
        "PAGEKV_KV_EVENTS": "on",
        "PAGEKV_KV_EVENTS_ENDPOINT": "ipc:///tmp/events",
        "PAGEKV_KV_EVENTS_REPLAY_ENDPOINT": "tcp://[::1]:5558",
        "PAGEKV_RECORD": "/tmp/trace",
        "PAGEKV_RECORD_STEPS": "/tmp/steps",
    }
    observe = ObserveConfig(
        http_listen="127.0.0.1:0",
        http_names=("gpu1.example", "gpu1"),
        page_text=True,
        gateway_api=True,
        kv_events=True,
        kv_events_endpoint="ipc:///tmp/events",
        kv_events_replay_endpoint="tcp://[::1]:5558",
        record="/tmp/trace",
        record_steps="/tmp/steps",
        otlp_endpoint="http://collector:4318/v1/traces",
    )
    engine = EngineConfig(
        executor="executor:1",
        block_size=256,
        num_device_blocks=7,
        num_host_blocks=9,
        max_model_len=100,
        max_queue=3,
        priority_aging=5,
        pipeline_depth=1,
        step_timeout_s=2.0,
        take_over=True,
        eviction_policy="lru",
        max_pinned_share=0.75,
        limits=SchedulerLimits(64, 5, 0.25, False, partial_hits=False, swap=SwapPolicy("swap"), write_back=True),
        block_ages=True,
    )
    expected = ManagerConfig(
        "unix:/run/pagekv", True, "none", 0.5, "debug", "json", "/tmp/port", False, engine=engine, observe=observe
    )
    assert parse_config([], env) == expected
    assert parse_config(["--max-queue", "9"], env).engine.max_queue == 9


def test_what_no_flag_says_is_decided() -> None:
    engine = parse_config([], {}).engine
    decided = (engine.max_unread, engine.step_attempts, engine.protected_share, engine.limits.preemption_limit)
    assert decided == (4096, 3, 0.2, 3)


def test_blocks_have_ages_where_a_page_shows_them() -> None:
    port = ["--http-listen", "127.0.0.1:0"]
    assert parse_config(port, {}).engine.block_ages
    assert not parse_config([], {}).engine.block_ages


@pytest.mark.parametrize(
    ("argv", "env", "words"),
    [
        (["--block-size", "24"], {}, "--block-size: must be a power of two from 1 to 256, got '24'"),
        (["--listen", "50051"], {}, "--listen: must be host:port"),
        (["--executor", "host:99999"], {}, "--executor: must be host:port"),
        (["--num-device-blocks", "-1"], {}, "--num-device-blocks: must be a whole number from 0"),
        (["--num-host-blocks", "x"], {}, "--num-host-blocks: must be a whole number from 0"),
        (["--preemption", "drop"], {}, "--preemption: invalid choice: 'drop' (choose from"),
        (["--max-batch-tokens", "0"], {}, "--max-batch-tokens: must be a whole number from 1 to 65536"),
        (["--max-running", "x"], {}, "--max-running: must be a whole number from 1 to 65536, got 'x'"),
        (["--max-queue", "0"], {}, "--max-queue: must be a whole number from 1 to 1000000"),
        # No request would fit.
        (["--max-model-len", "1"], {}, "--max-model-len: must be 0 or a whole number from 2 to 2147483647, got '1'"),
        (["--watermark", "nan"], {}, "--watermark: must be a number from 0 to 0.5, got 'nan'"),
        (["--eviction-policy", "fifo"], {}, "--eviction-policy: invalid choice: 'fifo' (choose from"),
        (["--pipeline-depth", "3"], {}, "--pipeline-depth: must be a whole number from 1 to 2, got '3'"),
        (["--step-timeout-s", "0"], {}, "--step-timeout-s: must be a number from 0.1 to 3600"),
        (["--otlp-endpoint", "localhost:4318"], {}, "--otlp-endpoint: must be a URL such as http://127.0.0.1:4318"),
        (["--http-names", "gpu1.example:80"], {}, "--http-names: must be names such as gpu1.example, with commas"),
        (["--http-listen", "unix:/x"], {}, "--http-listen: must be host:port with a port from 0 to 65535, or empty"),
        (["--kv-events-endpoint", "127.0.0.1:5557"], {}, "--kv-events-endpoint: must be tcp://host:port with a port"),
        (["--kv-events-endpoint", "tcp://*:x"], {}, "--kv-events-endpoint: must be tcp://host:port with a port"),
        (["--grace-s", "-1"], {}, "--grace-s: must be a number from 0 to 3600"),
        (["--kv-events-endpoint=tcp://*:0"], {}, "--kv-events-endpoint: has no effect without --kv-events"),
        (["--kv-events-replay-endpoint=tcp://*:0"], {}, "--kv-events-replay-endpoint: has no effect without --kv-e"),
        (["--page-text"], {}, "--page-text: has no effect without --http-listen"),
        (["--http-names", "a"], {}, "--http-names: has no effect without --http-listen"),
        (["--write-back", "--no-prefix-cache"], {}, "--write-back: has no effect without --prefix-cache"),
        (["--partial-hits"], {"PAGEKV_PREFIX_CACHE": "off"}, "--partial-hits: has no effect without --prefix-cache"),
        (
            ["--kv-events-endpoint=tcp://*:0", "--no-kv-events"],
            {},
            "--kv-events-endpoint: has no effect without --kv-events",
        ),
        (["--log-level", "loud"], {}, "--log-level: invalid choice: 'loud'"),
        ([], {"PAGEKV_MAX_QUEUE": "0"}, "--max-queue (from PAGEKV_MAX_QUEUE): must be"),
        ([], {"PAGEKV_LOG_FORMAT": "xml"}, "PAGEKV_LOG_FORMAT: must be one of text, json, got 'xml'"),
        ([], {"PAGEKV_PREFIX_CACHE": "maybe"}, "PAGEKV_PREFIX_CACHE: must be true or false"),
    ],
)
def test_a_bad_value_is_refused_by_name(
    argv: list[str], env: dict[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config(argv, env)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "env"),
    [
        (["--log-format=json", "--max-queue=0"], {}),
        (["--max-queue=0", "--log-format", "json"], {"PAGEKV_LOG_FORMAT": "text"}),
        ([], {"PAGEKV_LOG_FORMAT": "json", "PAGEKV_MAX_QUEUE": "0"}),
        (["--log-format", "text", "--max-queue=0", "--log-format", "json", "--no-such-flag"], {}),
    ],
)
def test_a_refusal_is_a_line_of_the_log_where_that_is_json(
    argv: list[str], env: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It was text among JSON."""
    with pytest.raises(SystemExit) as caught:
        parse_config(argv, env)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert (told["level"], told["service"], told["message"]) == ("error", "kvmanager", "cannot start")
    assert "--max-queue" in told["reason"]


def test_a_refusal_is_text_where_the_log_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(["--log-format=text", "--max-queue=0"], {"PAGEKV_LOG_FORMAT": "json"})
    assert capsys.readouterr().err.startswith("pagekv-manager: argument --max-queue: must be")


@pytest.mark.parametrize(
    ("argv", "env"),
    [
        # Variables are for many commands.
        ([], {"PAGEKV_KV_EVENTS_ENDPOINT": "tcp://[::1]:0", "PAGEKV_HTTP_NAMES": "", "PAGEKV_PAGE_TEXT": "on"}),
        (["--kv-events"], {"PAGEKV_KV_EVENTS_ENDPOINT": "tcp://[::1]:0"}),
        (["--kv-events-endpoint", "tcp://[::1]:0"], {"PAGEKV_KV_EVENTS": "on"}),
        # Nothing is published, so nobody listens there.
        ([], {"PAGEKV_KV_EVENTS_ENDPOINT": "tcp://*:0"}),
        (["--page-text"], {"PAGEKV_HTTP_LISTEN": "127.0.0.1:0"}),
        ([], {"PAGEKV_WRITE_BACK": "on", "PAGEKV_PREFIX_CACHE": "off"}),
        # Turned off twice.
        (["--no-page-text"], {}),
        (["--no-prefix-cache", "--no-partial-hits", "--no-write-back"], {}),
    ],
)
def test_what_is_not_asked_for_on_the_command_line_is_not_refused(argv: list[str], env: dict[str, str]) -> None:
    parse_config(argv, env)


@pytest.mark.parametrize(
    ("argv", "env", "flag"),
    [
        (["--listen", "0.0.0.0:50051"], {}, "--listen"),
        (["--listen", "gpu1.example:50051"], {}, "--listen"),
        ([], {"PAGEKV_LISTEN": "[::]:50051"}, "--listen (from PAGEKV_LISTEN)"),
        (["--http-listen", "10.0.0.7:8080"], {}, "--http-listen"),
        (["--kv-events", "--kv-events-endpoint", "tcp://*:5557"], {}, "--kv-events-endpoint"),
        (["--kv-events", "--kv-events-replay-endpoint", "tcp://eth0:5558"], {}, "--kv-events-replay-endpoint"),
    ],
)
def test_a_port_that_other_machines_reach_has_to_be_accepted(
    argv: list[str], env: dict[str, str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config(argv, env)
    assert caught.value.code == 2
    line = capsys.readouterr().err.splitlines()[0]
    assert f"argument {flag}: other machines could connect to " in line
    assert "accept that with --insecure (PAGEKV_INSECURE=on)" in line
    name = flag.partition(" ")[0].removeprefix("--")
    for accepted in (parse_config([*argv, "--insecure"], env), parse_config(argv, env | {"PAGEKV_INSECURE": "on"})):
        assert list(accepted.open_listeners()) == [name]


def test_a_flag_of_the_executor_is_said_to_be_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    own = {each.name for each in declarations(ManagerConfig)}
    assert {*EXECUTOR_FLAGS} == {each.name for each in declarations(ExecutorConfig)} - own
    with pytest.raises(SystemExit):
        parse_config(["--kv-memory", "1GiB"], env={})
    assert capsys.readouterr().err.startswith(
        "pagekv-manager: unrecognized arguments: --kv-memory 1GiB; --kv-memory is a flag of pagekv-executor\n"
    )


def test_help_shows_a_variable_with_a_percent_sign(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_config(["--help"], {"PAGEKV_TOKENIZER": "/models/100%sure"})
    assert ended.value.code == 0
    assert "/models/100%sure" in capsys.readouterr().out
