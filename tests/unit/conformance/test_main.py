"""The command: exit status, one line a rule, one JSON object, and an executor that is not there."""

from __future__ import annotations

import json
import time
from unittest import mock

import grpc
import pytest
from support.executor.judged import Edit, toy

from pagekv.conformance import main as command
from pagekv.conformance.keepalive import IdleConnection
from pagekv.conformance.main import feature_list, main


def run(*args: str, edits: tuple[Edit, ...] = ()) -> int:
    """Exit status against the toy, with an idle connection that pings more often."""
    with (
        toy(*edits) as address,
        mock.patch.object(command, "IdleConnection", lambda target: IdleConnection(target, 200)),
    ):
        return main(["--executor", address, *args])


def test_one_line_a_rule_and_exit_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "toy executor of no model, contract revision 1"
    assert lines[2] == "P1 ok Describe during an epoch changes nothing"
    assert "M5 skipped: no host_pool" in lines
    assert lines[-1] == "59 rules hold, 0 are broken, 8 were skipped"


def test_json_is_one_object_and_a_broken_rule_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json", "--features", "none", edits=(("max_steps_in_flight=2", "max_steps_in_flight=1"),)) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["backend"], answer["holds"], answer["failed"], answer["features"]) == ("toy", False, 2, [])
    failed = {each["rule"]: each["why"] for each in answer["rules"] if each["outcome"] == "failed"}
    assert failed == {
        "P9": "max_steps_in_flight is 1, below 2",
        "P12": f"max_steps_in_flight is 1, not from 2 to {2**31 - 1}",
    }


def test_an_executor_that_is_not_there_is_exit_3_soon(capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    assert main(["--executor", "127.0.0.1:1"]) == 3
    assert time.monotonic() - begin < 120
    assert "no gRPC server answers at 127.0.0.1:1: start the executor" in capsys.readouterr().err


def test_json_says_that_an_executor_cannot_be_tested(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--executor", "127.0.0.1:1", "--json"]) == 3
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert (answer["executor"], answer["holds"]) == ("127.0.0.1:1", None)
    assert err == f"pagekv-conformance: {answer['why']}\n"


def test_wrong_usage_with_json_is_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--json"])
    assert caught.value.code == 2
    message = "the following arguments are required: --executor"
    assert json.loads(capsys.readouterr().err) == {"error": {"code": "USAGE", "message": message}}


def test_a_server_of_something_else_is_exit_3(capsys: pytest.CaptureFixture[str]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    assert main(["--executor", f"127.0.0.1:{port}"]) == 3
    server.stop(0)
    err = capsys.readouterr().err
    assert "Describe is refused: UNIMPLEMENTED" in err
    assert "Is it an executor, and not a manager" in err


@pytest.mark.parametrize(
    "args", [[], ["--executor", "nowhere"], ["--executor", "a:1", "--features", "wings"], ["--executor", "a:1", "--x"]]
)
def test_wrong_usage_is_exit_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2
    assert "--" in capsys.readouterr().err


def test_ctrl_c_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with mock.patch.object(command, "judge", interrupted):
        assert run() == 130
    assert capsys.readouterr().err == "pagekv-conformance: stopped\n"


def test_feature_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert feature_list("host_pool,penalties") == {1, 5}
    assert feature_list("none") == frozenset()
    with pytest.raises(SystemExit):
        main(["--executor", "a:1", "--features", "penalties,wings"])
    names = "host_pool, logprobs, logit_bias, min_tokens, penalties"
    said = capsys.readouterr().err
    assert f"argument --features: must be none or some of {names}, got 'wings'" in said
