"""Ranges of independent work, given to an executor of the caller's.

There is no pool of our own: pools hang after a fork, and a second thread runtime beside that of a tensor
library aborts the process. Who has an executor passes it; each of its workers gets one contiguous range.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

WORTHWHILE_LOGITS = 600_000
"""Logits whose work (some 0.5 ns each) is worth handing to another thread, which costs some 20 us."""

WORTHWHILE_PROBABILITIES = 1_200_000
"""The same of probabilities, of which some 0.2 ns each are work."""


def worker_count(executor: Any) -> int:
    """How many workers an executor has; 2 where it does not tell."""
    return int(getattr(executor, "_max_workers", 2) or 2)


def run_ranges(executor: Any, run: Callable[[int, int], None], count: int, *, least: int = 1) -> None:
    """Call ``run(first, last)`` for contiguous ranges that cover ``range(count)``.

    Parameters
    ----------
    executor : concurrent.futures.Executor or None
        None: everything in the calling thread, which takes the first range in any case.
    run : callable
    count : int
    least : int
        Fewest items that are worth a range of their own.
    """
    workers = 1 if executor is None else max(1, min(worker_count(executor), count // max(least, 1)))
    bounds = [count * i // workers for i in range(workers + 1)]
    ranges = list(pairwise(bounds))
    futures: list[Any] = []
    failed: BaseException | None = None
    try:
        for first, last in ranges[1:]:
            futures.append(executor.submit(run, first, last))
        run(*ranges[0])
        for future, (first, last) in zip(futures, ranges[1:], strict=True):
            # What no worker has begun is done here: in a call from one of the executor's own workers
            # there may be nobody else to do it.
            if future.cancel():
                run(first, last)
    except BaseException as error:
        failed = error
    for future in futures:
        # Everything that was handed out has ended before anything is raised.
        if not future.cancel():
            late = future.exception()
            failed = failed or late
    if failed is not None:
        raise failed
