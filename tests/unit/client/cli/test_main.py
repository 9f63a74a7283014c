"""The command line: what it prints for people and for scripts, and its exit status."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
from typing import Any

import grpc
import pytest
from support.clients.scripted_server import LOST, Fails, ScriptedServer, chunk, complete, free_port
from support.clients.stack import environment

from pagekv.client.cli.main import main, make_parser
from pagekv.client.cli.terminal import Terminal, milliseconds, table
from pagekv.common import errors
from pagekv.v1 import cache_service_pb2 as cache_pb
from pagekv.v1 import inference_service_pb2 as pb


def test_an_error_is_one_line_and_exit_status_1(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.expect("Generate", Fails(errors.InvalidRequest("sampling_params.top_p", "must be above 0, got 0.0")))
    assert main(["generate", "x", "--top-p", "0"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "pagekv: sampling_params.top_p: must be above 0, got 0.0"


def test_a_name_that_leads_nowhere_was_never_reached(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "--target", "nobody.invalid:5", "--timeout", "20"]) == 1
    assert capsys.readouterr().err.startswith("pagekv: cannot reach PageKV at nobody.invalid:5: is it running?")


def test_grpc_writes_nothing_of_its_own_where_the_command_line_asks_a_server_that_ends() -> None:
    """A line of it would stand before what the command says, as when a manager dies while `up` waits for it."""
    # Of HTTP/2: SETTINGS, and GOAWAY with an error.
    settings, goaway = bytes.fromhex("000000040000000000"), bytes.fromhex("0000080700000000000000000000000002")
    script = "import sys, pagekv.client.cli.main, pagekv.client.launcher.stack as p; print(p._serves(sys.argv[1]))"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(30)
        command = [sys.executable, "-c", script, f"127.0.0.1:{listener.getsockname()[1]}"]
        env = {name: value for name, value in environment().items() if name != "GRPC_VERBOSITY"}
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as popen:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(settings)
                connection.recv(4096)
                connection.sendall(goaway)
                out, err = popen.communicate(timeout=30)
    assert (out, err) == ("False\n", "")


def test_a_stack_that_does_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    target = f"127.0.0.1:{free_port()}"
    assert main(["stats", "--target", target]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"cannot reach PageKV at {target}" in err
    assert "pagekv up" in err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "required: COMMAND"),
        ("generate", "one of PROMPT and --token-ids is required"),
        ("generate x --token-ids 1", "one of PROMPT and --token-ids is required"),
        ("generate --token-ids 1,a", "--token-ids: must be token ids with commas between them"),
        ("generate x --temperature hot", "--temperature"),
        ("stats --target nowhere", "--target: must be host:port"),
        ("bench --requests 0", "--requests: must be a whole number from 1 to 1000000"),
        ("bench --prompt-tokens 9:3", "--prompt-tokens: must be N or LO:HI with LO not above HI"),
        ("bench --rate 3 --concurrency 4", "not allowed with argument"),
        ("up --port 99999", "--port: must be a whole number from 0 to 65535"),
        ("up --port 0 --executor-port 0 --manager-args=--listen=x", "--manager-args: set addresses with"),
        ("blocks --limit 10001", "--limit"),
    ],
)
def test_wrong_usage_is_exit_status_2(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: Any = main(command.split())
    except SystemExit as exit:
        status = exit.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_a_bad_environment_variable_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEKV_TARGET", "nowhere")
    with pytest.raises(SystemExit) as caught:
        main(["health"])
    assert caught.value.code == 2
    assert "PAGEKV_TARGET" in capsys.readouterr().err


def test_every_command_has_help_and_json(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = capfd.readouterr().out
    subparsers: Any = next(action for action in make_parser()._actions if hasattr(action, "choices") and action.choices)
    for name in subparsers.choices:
        assert f"    {name}" in listed
        try:
            status: object = main([name, "--help"])  # replay leaves its flags to the process it starts
        except SystemExit as exit:
            status = exit.code
        assert status == 0
        assert "--json" in capfd.readouterr().out


STATS = cache_pb.GetStatsResponse(
    block_size=16,
    num_blocks=100,
    free_blocks=75,
    cached_free_blocks=20,
    active_blocks=25,
    kv_usage=0.25,
    utilization=0.9,
    prefix_hit_rate=0.5,
    prompt_tokens_total=200,
    cached_tokens_total=100,
    executor_attached=True,
    executor_busy_us_total=3,
    executor_idle_us_total=1,
    published_blocks=45,
    pinned_blocks=8,
    pins=2,
    watchers=1,
    block_hit_rate=0.4,
    misses_never_seen_total=5,
    misses_evicted_total=4,
    misses_cleared_total=3,
    misses_diverged_total=2,
    misses_partial_tail_total=1,
    num_host_blocks=20,
    host_cached_blocks=21,
    host_held_blocks=22,
    swap_preemptions_total=23,
    swapped_out_blocks_total=24,
    swapped_in_blocks_total=25,
    written_back_blocks_total=26,
    host_evicted_blocks_total=27,
    unread_sequences=3,
)


def test_stats_for_people_and_scripts(server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    server.expect("GetStats", STATS)
    assert main(["stats"]) == 0
    out = capsys.readouterr().out
    for words in (
        "100 of 16 tokens",
        "25 (25.0%), slots filled 90.0%\n",
        "75, of these 20 still cached",
        "50.0% of tokens, 40.0% of blocks",
        "8 by 2 pins",
        "45, watched by 1",
        "20 blocks, 22 held by preempted sequences, 21 cached, 27 evicted",
        "5 never seen, 4 evicted, 3 cleared, 2 diverged, 1 partial tail",
        "200, 100 of them cached",
        "attached, busy 75.0%",
    ):
        assert words in out
    server.expect("GetStats", STATS)
    assert main(["stats", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prefix_hit_rate"] == 0.5


def test_stats_warn_of_a_pool_with_nothing_to_evict(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """CHECKLIST G12."""
    server.expect("GetStats", cache_pb.GetStatsResponse(kv_usage=0.81))
    assert main(["stats"]) == 0
    assert "0 (81.0%), slots filled 0.0%; above 80% new work preempts rather than evicts" in capsys.readouterr().out


def test_stats_watch_goes_on_until_it_fails(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.expect("GetStats", STATS)
    later = cache_pb.GetStatsResponse()
    later.CopyFrom(STATS)
    later.generated_tokens_total = 1000
    server.expect("GetStats", later)
    server.expect("GetStats", Fails(grpc.StatusCode.INTERNAL))
    assert main(["stats", "--watch", "0.1"]) == 1
    out = capsys.readouterr().out
    assert out.count("KV pool") == 2
    assert "generated    1000 (" in out


@pytest.mark.parametrize(("status", "code"), [("SERVING", 0), ("NOT_SERVING", 1)])
def test_health(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str], status: str, code: int
) -> None:
    from grpc_health.v1 import health_pb2

    reply = health_pb2.HealthCheckResponse(status=status)
    server.expect("Check", reply)
    assert main(["health"]) == code
    assert capsys.readouterr().out == f"{target} {status}\n"
    server.expect("Check", reply)
    assert main(["health", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == {"target": target, "status": status}


BLOCK = cache_pb.BlockInfo(block_id=3, ref_count=2, state=cache_pb.BLOCK_STATE_ACTIVE, block_hash="ab" * 32, pins=1)
SMALL = [
    ("model", "GetModelInfo", pb.GetModelInfoResponse(model_id="m", vocab_size=9, has_tokenizer=True), "ids, text\n"),
    ("lookup hi", "LookupPrefix", cache_pb.LookupPrefixResponse(prompt_tokens=8, device_tokens=4, block_ids=[7]),
     "4 of 8 tokens cached (50%): 4 on the device, 0 on the host\nblocks 7\n"),
    ("blocks", "ListBlocks", cache_pb.ListBlocksResponse(blocks=[BLOCK]),
     "    3  active     2     1  abababababababab  -\n"),
    ("blocks", "ListBlocks", cache_pb.ListBlocksResponse(), "no such blocks\n"),
    ("block-table r", "GetBlockTable",
     cache_pb.GetBlockTableResponse(sequences=[cache_pb.SequenceBlocks(state="running", block_ids=[5, 2])]),
     "sequence 0: running, 0 tokens, 0 computed; blocks 5 2\n"),
    ("reset-cache --force", "ResetPrefixCache", cache_pb.ResetPrefixCacheResponse(removed_blocks=4),
     "4 blocks forgotten; 0 sequences preempted, 0 pins ended\n"),
    ("pin hi --lease 60", "PinPrefix", cache_pb.PinPrefixResponse(pin_id="pin-1", pinned_tokens=32),
     "pin-1: 32 tokens pinned for 60 s\n"),
    ("unpin pin-1", "UnpinPrefix", cache_pb.UnpinPrefixResponse(unpinned_tokens=32), "32 tokens unpinned\n"),
    ("unpin pin-1", "UnpinPrefix", cache_pb.UnpinPrefixResponse(), "no such pin, or its lease was over\n"),
    ("abort r", "Abort", pb.AbortResponse(aborted=["r"]), "aborted: r\n"),
    ("tokenize hi", "Tokenize", pb.TokenizeResponse(token_ids=[4, 5]), "4,5\n"),
    ("detokenize 4,5", "Detokenize", pb.DetokenizeResponse(text="hi"), "hi\n"),
]  # fmt: skip  # laid out as a table


@pytest.mark.parametrize(("command", "method", "reply", "shown"), SMALL)
def test_small_commands(
    server: ScriptedServer,
    target: str,
    capsys: pytest.CaptureFixture[str],
    command: str,
    method: str,
    reply: Any,
    shown: str,
) -> None:
    server.expect(method, reply)
    assert main(command.split()) == 0
    assert shown in capsys.readouterr().out
    server.expect(method, reply)
    assert main([*command.split(), "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


def test_abort_of_nothing_is_exit_status_1(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.expect("Abort", pb.AbortResponse())
    assert main(["abort", "gone"]) == 1


def test_ctrl_c_is_exit_status_130(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Terminal, text: str) -> None:
        raise KeyboardInterrupt

    server.expect("Tokenize", pb.TokenizeResponse(token_ids=[4]))
    monkeypatch.setattr(Terminal, "print", interrupted)
    assert main(["tokenize", "x"]) == 130
    out, err = capsys.readouterr()
    assert (out, err) == ("", "")


def test_bench_reports_what_it_measured(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts: list[list[int]] = []

    def check(request: pb.GenerateRequest) -> None:
        assert request.sampling_params.ignore_eos
        assert request.sampling_params.max_tokens == 2
        prompts.append(list(request.tokenized.input_ids))

    info = pb.GetModelInfoResponse(
        model_id="m", max_model_len=100, vocab_size=50, eos_token_ids=[0], block_size=16, num_device_blocks=7
    )
    command = "bench --requests 4 --concurrency 2 --shared-prefix 8 --prompt-tokens 2:4 --output-tokens 2 --seed 1"

    def expect_run() -> None:
        server.expect("GetModelInfo", info)
        for number in range(4):
            if number == 3:
                server.expect("Generate", Fails(LOST), check=check)
            else:
                server.expect(
                    "Generate",
                    chunk(1, prompt=10, cached=8),
                    chunk(2, done=1),
                    complete(1, 2, prompt=10, cached=8),
                    check=check,
                )

    expect_run()
    assert main([*command.split(), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    report = result["report"]
    assert (report["completed"], report["errors"]) == (3, {"ConnectionLost": 1})
    assert (report["prompt_tokens"], report["cached_tokens"], report["output_tokens"]) == (30, 24, 6)
    assert report["hit_rate"] == 0.8
    assert report["ttft_s"]["p50"] <= report["total_s"]["p50"]
    assert result["workload"]["shape"].startswith(
        "4 requests, closed loop of 2, prompts of 2 to 4 tokens after a shared"
    )
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 1
    assert {len(prompt) for prompt in prompts} <= {10, 11, 12}
    assert all(0 < token < 50 for prompt in prompts for token in prompt)
    first = sorted(prompts)
    prompts.clear()
    expect_run()
    assert main(command.split()) == 1
    out, err = capsys.readouterr()
    assert sorted(prompts) == first
    for words in ("time to first token", "inter-token latency", "p99", "80.0% hits", "1 ConnectionLost", "seed 1"):
        assert words in out
    assert err == ""


def test_bench_refuses_what_does_not_fit(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    info = pb.GetModelInfoResponse(max_model_len=100, vocab_size=50, block_size=16, num_device_blocks=100)
    server.expect("GetModelInfo", info)
    assert main(["bench", "--prompt-tokens", "90", "--output-tokens", "11"]) == 2
    assert "needs 101 tokens, and the server holds 100" in capsys.readouterr().err
    small = pb.GetModelInfoResponse(max_model_len=100, vocab_size=50, block_size=16, num_device_blocks=4)
    server.expect("GetModelInfo", small)
    assert main(["bench", "--prompt-tokens", "60", "--output-tokens", "6"]) == 2
    assert "needs 66 tokens, and the server holds 65" in capsys.readouterr().err
    text = tmp_path / "text"
    text.write_text("short")
    info.max_model_len = 1000
    server.expect("GetModelInfo", info)
    server.expect("Tokenize", pb.TokenizeResponse(token_ids=[1, 2]))
    assert main(["bench", "--text", str(text)]) == 2
    assert "the text has 2 tokens, and the longest prompt needs 256" in capsys.readouterr().err


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_styles_only_on_a_terminal_that_wants_them() -> None:
    for make, env, styled in ((Screen, {}, True), (Screen, {"NO_COLOR": "1"}, False), (io.StringIO, {}, False)):
        out, err = make(), make()
        terminal = Terminal(out, err, env)
        terminal.note("note")
        terminal.print(terminal.bold("loud"))
        terminal.progress(1, 2, "half")
        terminal.error("wrong")
        shown = out.getvalue() + err.getvalue()
        assert ("\x1b" in shown) is styled
        assert ("[██████████████··············] 1/2 half" in shown) is styled
        # The bar is wiped off before anything else is written.
        assert err.getvalue().endswith("\r\x1b[Kwrong\n" if styled else "note\nwrong\n")


def test_tables_and_times() -> None:
    assert table([("a", 10), ("bcd", 2)], ("name", "n"), indent=" ") == " name   n\n a     10\n bcd    2"
    assert table([]) == ""
    rows = [("a", "one two three four five six"), ("b", "seven")]
    assert table(rows, width=24) == "a  one two three four\n   five six\nb  seven"
    assert table(rows, width=10) == table(rows)
    assert [milliseconds(s) for s in (None, 0.0001234, 0.00123, 0.123, 12.3)] == [
        "-", "0.12 ms", "1.2 ms", "123 ms", "12300 ms",
    ]  # fmt: skip  # several entries a line: one each would fill a screen
