"""Beam search over the pool: the right hypotheses, shared blocks, copies before writes, nothing left behind."""

import pytest
from support.engine.fake_executor import beam_search, expected_beams
from support.engine.scheduler_driver import VOCAB, Driver, copies, finished, results
from support.executor.wire_driver import WireDriver, expected_results

from pagekv.kvmanager.scheduling.sequence import LiveRequest, SeqStatus


def expect(prompt: list[int], width: int, n: int, max_tokens: int, ends: tuple[int, ...] = ()) -> list[list[int]]:
    search = beam_search(width, n, 1.0, False, max_tokens, frozenset(ends))
    return [list(tokens) for tokens in expected_beams(prompt, search, VOCAB)]


def live(request: LiveRequest) -> list[list[int]]:
    return [sequence.block_table.tolist() for sequence in request.sequences]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 9])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_hypotheses_are_those_of_the_search(length: int, width: int, depth: int) -> None:
    driver = Driver(depth=depth)
    prompt = list(range(length))
    request = driver.submit(prompt, max_tokens=9, n=width, beam_width=width)
    driver.drain()
    assert results(request) == expect(prompt, width, width, 9)
    assert driver.pool.num_active == 0
    assert driver.executor.live == {}


def test_beams_share_full_blocks_and_copy_the_one_they_write() -> None:
    """A beam that goes on from the same parent shares what is full and copies what it writes."""
    driver = Driver(depth=1)
    request = driver.submit(list(range(9)), max_tokens=8, beam_width=3)
    driver.step()
    tables = live(request)
    assert len(tables) == 3
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 3
    plan = driver.plan()
    assert plan is not None
    assert [source for source, _ in copies(plan)] == [tables[0][2]] * 2
    shared = len({block for table in tables for block in table})
    assert shared == 5
    assert driver.pool.num_active == shared


def test_a_dropped_beam_gives_its_private_blocks_back_in_that_step() -> None:
    driver = Driver(depth=1, num_blocks=64)
    request = driver.submit(list(range(6)), max_tokens=12, beam_width=4)
    for _ in range(40):
        if not driver.step():
            break
        held = {block for table in live(request) for block in table if not finished(request)}
        assert driver.pool.num_active == len(held)
    assert driver.pool.num_active == 0


@pytest.mark.parametrize("num_blocks", [16, 20, 28])
def test_searches_and_decodes_that_preempt_each_other_all_come_out_right(num_blocks: int) -> None:
    driver = Driver(num_blocks=num_blocks, max_running=8)
    searches = [driver.submit([i, 1, 2, 3, 4], max_tokens=9, n=2, beam_width=4) for i in range(3)]
    plain = [driver.submit([i, 5, 6], max_tokens=12) for i in range(3)]
    driver.drain()
    assert driver.scheduler.counters.preemptions > 0
    for i, request in enumerate(searches):
        assert results(request) == expect([i, 1, 2, 3, 4], 4, 2, 9)
    assert all(finished(request) for request in plain)


def test_searches_that_wait_for_each_other_are_broken_up() -> None:
    """Each needs more slots than the other leaves: one gives way, and both finish."""
    driver = Driver(num_blocks=24, max_running=4, depth=2)
    requests = [driver.submit([i, 1, 2, 3, 4], max_tokens=6, beam_width=3) for i in range(4)]
    driver.drain()
    for i, request in enumerate(requests):
        assert results(request) == expect([i, 1, 2, 3, 4], 3, 1, 6)


def test_beams_that_wait_hold_more_blocks_than_the_executor_has_slots() -> None:
    """Four beams beside three decodes, four slots: they compute in turns and never five at once."""
    driver = WireDriver(max_running=4, depth=2)
    plain = [driver.submit([i, 5, 6], max_tokens=30) for i in range(3)]
    driver.step()
    search = driver.submit(list(range(6)), max_tokens=6, n=4, beam_width=4)
    driver.drain()
    assert results(search) == expected_results(search.command, driver.vocab, ())
    assert all(finished(request) for request in plain)


def test_a_fork_takes_blocks_from_those_behind_it_and_never_from_its_own_search() -> None:
    """The front of the running order is never preempted, whether it decodes or forks."""
    driver = Driver(num_blocks=12, block_size=8, prefix_cache=False)
    search = driver.submit(list(range(9)), max_tokens=16, n=4, beam_width=4)
    behind = [driver.submit([i, 5, 6], max_tokens=30) for i in range(8)]
    driver.drain()
    assert results(search) == expect(list(range(9)), 4, 4, 16)
    assert all(sequence.preemptions == 0 for sequence in search.sequences)
    assert sum(request.sequences[0].preemptions for request in behind) > 0
    assert all(finished(request) for request in behind)


def test_beams_held_back_by_the_watermark_go_on_when_the_others_have_ended() -> None:
    """The watermark protects those that run beside it: once they are gone it must not be waited for."""
    driver = Driver(num_blocks=10, block_size=16, watermark=0.5, prefix_cache=False)
    plain = driver.submit([1, 2], max_tokens=14)
    search = driver.submit(list(range(20)), max_tokens=8, beam_width=4)
    while len(search.sequences) < 4:
        driver.step()
    driver.scheduler.preempt_all()
    driver.drain()
    assert finished(plain)
    assert results(search) == expect(list(range(20)), 4, 1, 8)


@pytest.mark.parametrize("lost", [False, True])
def test_a_beam_that_has_reported_reports_again_after_preemption(lost: bool) -> None:
    """Reports of some beams before all were preempted must not decide while the others are still to come."""
    prompt = [1, 2, 3, 4, 5]
    driver = Driver(max_batch_tokens=3, depth=1)
    request = driver.submit(prompt, max_tokens=8, beam_width=4)
    while [s.candidates is None for s in request.sequences].count(False) != 3:
        assert driver.step()
    if lost:
        driver.lose_executor()
    else:
        driver.scheduler.preempt_all()
    assert [s.candidates for s in request.sequences] == [None] * 4
    driver.drain()
    assert results(request) == expect(prompt, 4, 1, 8)


def test_copies_that_are_never_made_are_never_hit() -> None:
    """Beams that share nothing copy full blocks too; preempted before that, they leave nothing behind as cached."""
    driver = Driver(block_size=2, fork_sharing=False, depth=1)
    search = driver.submit(list(range(7)), max_tokens=8, n=3, beam_width=3)
    driver.step()
    assert len(search.sequences) == 3
    # The blocks that the parent offered are gone, so that equal ones would be taken.
    driver.pool.clear_prefix_table()
    driver.scheduler.preempt_all()
    driver.drain()
    assert results(search) == expect(list(range(7)), 3, 3, 8)


def test_abort_and_a_lost_executor_in_the_middle_of_a_search() -> None:
    driver = Driver(depth=2)
    gone = driver.submit(list(range(5)), max_tokens=9, beam_width=3)
    stays = driver.submit(list(range(6)), max_tokens=9, beam_width=3)
    for _ in range(5):
        driver.step()
    driver.plan()
    driver.abort(gone)
    driver.check()
    assert all(sequence.state is SeqStatus.FINISHED for sequence in gone.sequences)
    driver.step()
    driver.plan()
    driver.lose_executor()
    driver.check()
    driver.drain()
    assert results(stays) == expect(list(range(6)), 3, 1, 9)
    assert driver.pool.num_active == 0


def test_a_search_ends_with_its_end_tokens() -> None:
    ends = tuple(range(0, VOCAB, 3))
    driver = Driver(eos=ends[:2])
    request = driver.submit([4, 5, 6], max_tokens=20, n=3, beam_width=3, stop_token_ids=ends[2:])
    driver.drain()
    assert results(request) == expect([4, 5, 6], 3, 3, 20, ends)
    assert any(tokens[-1] in ends for tokens in results(request))
