"""The table of the first half hour's steps."""

from __future__ import annotations

from gpu_first.parts import PART_SECONDS, PARTS, SHORT, STEPS, short_runs, steps_of
from gpu_first.rehearsal import faults_of
from gpu_first.step import FAULTS


def test_parts_take_at_most_nine_minutes_and_say_what_matters_first() -> None:
    assert PART_SECONDS == 540
    assert [steps_of(part)[0].name for part in PARTS] == ["machine", "decode_floors", "model"]
    assert len({step.name for step in STEPS}) == len(STEPS)
    assert all(step.seconds < PART_SECONDS for step in STEPS)


def test_a_short_run_has_what_its_figures_need_first() -> None:
    runs = short_runs()
    assert [name for _, names in runs for name in names] == list(SHORT)
    assert all(names == tuple(step.name for step in steps_of(part) if step.name in names) for part, names in runs)
    assert len(set(SHORT)) == len(SHORT)
    place = {name: at for at, name in enumerate(SHORT)}
    assert max(place[name] for name in ("machine", "smallest", "llama", "correctness")) < place["decode_floors"]
    assert place["model"] < place["with_graphs"] < place["both_processes"]


def test_every_step_of_the_table_exists_and_is_made_to_fail() -> None:
    from gpu_first.step import function_of

    assert all(callable(function_of(step.name)) for step in STEPS)
    for part in PARTS:
        faults = faults_of(part)
        assert list(faults) == [step.name for step in steps_of(part)]
        assert set(faults.values()) == set(FAULTS)
