"""Ranges on the workers of an executor: all of them once, errors in order, nobody waits for nobody."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from mtplx.work import run_ranges


class Inline:
    """An executor that has done everything by the time `submit` returns."""

    def submit(self, call):
        future = Future()
        future.set_result(call())
        return future


@pytest.mark.parametrize("workers", [None, 0, 1, 2, 5])
def test_every_item_once(workers):
    executor = None if workers is None else Inline() if workers == 0 else ThreadPoolExecutor(workers)
    for count in (0, 1, 2, 7, 50, 200):
        for least in (1, 3, 60):
            ranges = []
            run_ranges(executor, lambda first, last, to=ranges: to.append((first, last)), count, least=least)
            ranges.sort()
            assert [i for first, last in ranges for i in range(first, last)] == list(range(count))
            assert len(ranges) == 1 or min(last - first for first, last in ranges) >= least
            assert len(ranges) == 1 or workers not in (None, 1)
    if workers:
        executor.shutdown()


def test_no_more_at_once_than_there_are_workers():
    now, most, lock = 0, 0, threading.Lock()

    def run(first, last):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= 1

    with ThreadPoolExecutor(8) as executor:
        executor._max_workers = 2
        run_ranges(executor, run, 40)
    assert most == 2


def test_a_slow_worker_gets_less():
    done, caller = {}, threading.current_thread()

    def run(first, last):
        here = threading.current_thread()
        time.sleep(0.5 if here is caller else 0.001)
        done[here] = done.get(here, 0) + last - first

    with ThreadPoolExecutor(2) as executor:
        run_ranges(executor, run, 80)
    assert sum(done.values()) == 80
    assert done[caller] == 10


@pytest.mark.parametrize("workers", [None, 2, 4])
def test_the_error_of_the_lowest_range_comes_out_when_all_have_ended(workers):
    running, ended = [], []

    def run(first, last):
        running.append(first)
        try:
            if first <= 20 < last:
                time.sleep(0.05)
                raise ValueError("20")
            if first <= 70 < last:
                raise KeyError("70")
        finally:
            ended.append(first)

    executor = ThreadPoolExecutor(workers) if workers else None
    for _ in range(5):
        with pytest.raises(ValueError, match="20"):
            run_ranges(executor, run, 100)
        assert sorted(running) == sorted(ended)
    if executor:
        executor.shutdown()


def test_an_executor_that_takes_nothing():
    executor, done = ThreadPoolExecutor(2), []
    executor.shutdown()
    with pytest.raises(RuntimeError, match="shutdown"):
        run_ranges(executor, lambda first, last: done.append(first), 10)
    assert done == []


def test_calls_from_the_executors_own_workers():
    with ThreadPoolExecutor(2) as executor:
        done = [[], []]
        both = threading.Barrier(2)

        def call(which):
            both.wait()
            run_ranges(executor, lambda first, last: done[which].extend(range(first, last)), 9)

        for future in [executor.submit(call, which) for which in range(2)]:
            future.result(60.0)
    assert [sorted(each) for each in done] == [list(range(9))] * 2
