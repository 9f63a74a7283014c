"""The executor's flags: defaults, environment, and refusals that name the flag and its bounds."""

from __future__ import annotations

import json

import pytest

from pagekv.common.flags import declarations
from pagekv.executor.config import MANAGER_FLAGS, ExecutorConfig, OracleConfig, parse_config
from pagekv.kvmanager.config import ManagerConfig


def test_defaults() -> None:
    config = parse_config([], env={})
    assert (config.listen, config.backend, config.model) == ("127.0.0.1:50052", "auto", "demo")
    assert (config.dtype, config.threads, config.kv_memory, config.memory_share) == ("auto", 0, 0, None)
    assert (config.kv_dtype, config.cuda_graphs) == ("auto", True)
    assert (config.max_sequences, config.grace_s, config.port_file, config.reflection) == (1024, 10.0, "", True)
    assert config.oracle == OracleConfig(0.0, 0, 0, None)


def test_the_oracle_has_no_model_unless_asked() -> None:
    assert parse_config(["--backend", "oracle"], env={}).model == ""
    assert parse_config(["--backend", "oracle", "--model", "demo"], env={}).model == "demo"


def test_environment_is_checked_and_the_flag_wins() -> None:
    env = {"PAGEKV_BACKEND": "oracle", "PAGEKV_STEP_TIME_MS": "5", "PAGEKV_EOS": "3, 4", "PAGEKV_REFLECTION": "no"}
    config = parse_config(["--step-time-ms", "7"], env=env)
    assert (config.backend, config.oracle.step_time_ms, config.oracle.eos_token_ids, config.reflection) == (
        "oracle",
        7.0,
        (3, 4),
        False,
    )


@pytest.mark.parametrize(
    ("argv", "flag", "bounds"),
    [
        (["--listen", "nowhere"], "--listen", "host:port"),
        (["--backend", "tpu"], "--backend", "'tpu'"),
        (["--kv-dtype", "int4"], "--kv-dtype", "fp8"),
        (["--dtype", "int8"], "--dtype", "float32"),
        (["--threads", "-1"], "--threads", "from 0 to 1024, got '-1'"),
        (["--kv-memory", "12 parsecs"], "--kv-memory", "(such as 512MiB), got '12 parsecs'"),
        (["--memory-share", "0.01"], "--memory-share", "from 0.05 to 0.9, got '0.01'"),
        (["--memory-share", "nan"], "--memory-share", "from 0.05 to 0.9, got 'nan'"),
        (["--max-sequences", "0"], "--max-sequences", "from 1 to 65536, got '0'"),
        (["--step-time-ms", "inf"], "--step-time-ms", "from 0 to 60000, got 'inf'"),
        (["--vocab-size", "many"], "--vocab-size", "got 'many'"),
        (["--max-model-len", "1"], "--max-model-len", "0 or a whole number from 2 to 2147483647, got '1'"),
        (["--eos", "1,x"], "--eos", "token ids joined by commas, none, or auto, got '1,x'"),
        (["--eos", ""], "--eos", "got ''"),
        (["--grace-s", "3601"], "--grace-s", "from 0 to 3600"),
        (["--log-level", "loud"], "--log-level", "debug"),
    ],
)
def test_a_bad_value_is_refused_with_flag_and_bounds(
    argv: list[str], flag: str, bounds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config(argv, env={})
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert f"argument {flag}" in message
    assert bounds in message


def test_a_refusal_is_a_line_of_the_log_where_that_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config(["--log-format", "json", "--grace-s", "3601"], env={})
    assert caught.value.code == 2
    told = json.loads(capsys.readouterr().err)
    assert (told["service"], told["message"]) == ("executor", "cannot start")
    assert "--grace-s: must be" in told["reason"]


@pytest.mark.parametrize("address", ["0.0.0.0:50052", "[::]:0", "executor:50052"])
def test_a_port_that_other_machines_reach_has_to_be_accepted(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config(["--listen", address], env={})
    assert caught.value.code == 2
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith(f"pagekv-executor: argument --listen: other machines could connect to {address}")
    assert "--insecure" in line
    assert parse_config(["--listen", address, "--insecure"], env={}).listen == address


def test_a_name_that_nobody_would_check_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(["--manager-name", "other"], {})
    assert "argument --manager-name: has no effect without --tls-client-ca" in capsys.readouterr().err


def test_a_flag_of_the_manager_is_said_to_be_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    own = {each.name for each in declarations(ExecutorConfig)}
    assert {*MANAGER_FLAGS} == {each.name for each in declarations(ManagerConfig)} - own
    for flag in ("--block-size", "--no-kv-events", "--executor=x:1"):
        with pytest.raises(SystemExit):
            parse_config([flag], env={})
        line = capsys.readouterr().err.splitlines()[0]
        assert line.endswith(f"unrecognized arguments: {flag}; {flag.partition('=')[0]} is a flag of pagekv-manager")
