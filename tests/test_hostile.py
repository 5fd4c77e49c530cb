"""Callers' objects that change, raise or call back while they are read; rows in no common shape."""

import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
from mtplx._csampling import dispatch
from mtplx._csampling.distributions import restore

from mtplx import batch, reference, sampling, verification
from mtplx.distributions import BatchedSparseDistributions, SamplerConfig, SparseDistribution

PLAIN = SamplerConfig(1.0, 1.0, 0)


def test_ids_that_vanish_while_they_are_read():
    class Clearing:
        def __index__(self):
            tokens.clear()
            return 1

    tokens = [Clearing(), 1, 2]
    row = np.array([0.2, 0.3, 0.5])
    with pytest.raises(IndexError):
        verification.verify_block([row] * 4, [row] * 3, tokens, np.random.default_rng(0))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, RuntimeError])
@pytest.mark.parametrize("side", ["target", "draft"])
def test_rows_that_raise(kind, side):
    class Raising:
        def __len__(self):
            return 1

        def __getitem__(self, i):
            raise kind

    rows = {"target": [[0.5, 0.5]], "draft": [[0.5, 0.5]], side: Raising()}
    rng = np.random.default_rng(0)
    with pytest.raises(kind):
        verification.verify_block(rows["target"], rows["draft"], [0], rng)
    assert rng.random() == np.random.default_rng(0).random()  # the lock is free, and nothing was drawn


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_while_it_is_found_out_what_an_argument_is(kind):
    class Shy:
        """What it is, is asked in Python code, and a signal handler may raise there."""

        @property
        def __class__(self):
            raise kind

        def __len__(self):
            return 1

        def __getitem__(self, i):
            return [0.5, 0.5]

    logits = [[0.5, 0.5]]
    for call in (
        lambda: verification.verify_block(Shy(), None, []),
        lambda: verification.verify_block([[0.5, 0.5]], Shy(), [0]),
        lambda: sampling.apply_penalties(logits[0], Shy(), 1.0),
        lambda: sampling.distribution_from_logits(logits[0], PLAIN, penalty_overlay=Shy()),
        lambda: verification.verify_block_from_logits(logits, None, [], PLAIN, token_counts=Shy()),
        lambda: verification.verify_block_from_logits(logits, None, [], PLAIN, penalty_overlay=Shy()),
        lambda: verification.verify_batch_from_logits([logits], None, [[]], PLAIN, token_counts=Shy()),
    ):
        with pytest.raises(kind):
            call()


def test_a_distribution_that_was_never_initialised():
    empty = SparseDistribution.__new__(SparseDistribution)
    for call in (
        lambda: sampling.sample_from_distribution(empty),
        lambda: sampling.verify_one_token(empty, empty, 0),
        lambda: sampling.residual_distribution(empty, empty),
        lambda: verification.verify_block([empty], None, []),
    ):
        with pytest.raises(TypeError, match="never initialised"):
            call()


def test_rows_are_checked_before_the_number_that_they_are_drawn_with():
    for row in ([0.0, 0.0], [np.nan, 1.0], [-1.0, 2.0], [np.inf, 1.0]):
        for rule, tokens in (("exact", []), ("match", []), ("match", [0]), ("greedy", [])):
            rng = np.random.default_rng(0)
            with pytest.raises(ValueError, match="row 0"):
                verification.verify_block([row] * (len(tokens) + 1), None, tokens, rng, rule=rule)
            assert rng.random() == np.random.default_rng(0).random()


@pytest.mark.parametrize("V", [2047, 2048, 4096, 151_936])
def test_greedy_from_logits_ranks_by_probability(isa, V):
    masked = np.full(V, -np.inf)
    masked[7] = 0.0
    near = np.random.default_rng(0).normal(size=V)
    near[100], near[50] = 9.0, np.nextafter(9.0, 0.0)  # equal probabilities at T = 100: the lowest id wins
    for row, temperature, expected in ((masked, 1.0, 7), (np.zeros(V), 1.0, 0), (near, 100.0, 50)):
        config = SamplerConfig(temperature, 1.0, 0)
        assert int(np.argmax(sampling.softmax(row, temperature))) == expected
        decision = verification.verify_block_from_logits([row], [], [], config, rule="greedy")
        assert decision.tokens.tolist() == [expected]


def test_a_worker_that_passes_its_own_pool_on():
    logits = np.random.default_rng(0).normal(0, 3, (8, 151_936)).astype(np.float32)
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(batch.distributions_from_logits, logits, SamplerConfig(), executor=pool)
            for _ in range(2)
        ]
        one, other = (call.result(timeout=60) for call in calls)
    assert one == other == batch.distributions_from_logits(logits, SamplerConfig())


def test_nothing_is_under_way_when_an_error_is_raised():
    logits = np.zeros((16, 151_936), dtype=np.float32)
    logits[0, 5] = np.nan
    before = threading.active_count()
    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(ValueError, match="row 0"):
            batch.distributions_from_logits(logits, SamplerConfig(), executor=pool)
        assert pool._work_queue.empty()
    assert threading.active_count() == before


def test_an_executor_of_other_processes_is_refused():
    with ProcessPoolExecutor(1) as pool, pytest.raises(TypeError, match="process"):
        verification.verify_batch([[[1.0]]], None, [[]], executor=pool)


def test_a_block_without_rows_has_nothing_to_penalise():
    config = SamplerConfig(presence_penalty=1.0)
    for face in (reference, verification):
        decision = face.verify_block_from_logits([], [], [], config, token_counts={9: 1})
        assert decision.tokens.size == 0


@pytest.mark.parametrize("seed", range(40))
def test_coins_on_the_accept_probability_of_logits(isa, seed):
    """Coins at, just below and just above p/q: the rough sums cannot tell, the exact ones must."""
    from support.generators import scripted

    rng = np.random.default_rng(seed)
    V = 4096
    target = rng.normal(0, 2, (2, V)).astype(np.float32)
    draft = target[:1] + rng.normal(0, 0.5, (1, V)).astype(np.float32)
    p, q = sampling.softmax(target[0]), sampling.softmax(draft[0])
    below = np.flatnonzero((p < q) & (p > 1e-6))
    token = int(below[rng.integers(below.size)])
    ratio = sampling.acceptance_probability(p, q, token)
    step = 2.0**-53
    before = dispatch.fallback_counts()["accept_test"]
    for coin in (ratio, ratio - step, ratio + step, ratio * (1 - 1e-7), ratio * (1 + 1e-7)):
        coin = np.floor(coin / step) * step  # what a generator can give
        decision = verification.verify_block_from_logits(
            target, draft, [token], PLAIN, rng=scripted(coin, 0.5)
        )
        assert (decision.accepted == 1) == (coin <= ratio)
        assert decision.accept_probabilities[0] == ratio
    assert dispatch.fallback_counts()["accept_test"] == before + 5
    verification.verify_block_from_logits(target, draft, [token], PLAIN, rng=scripted(ratio / 2, 0.5))
    assert dispatch.fallback_counts()["accept_test"] == before + 5  # far from the ratio nothing is in doubt


def test_an_unknown_instruction_set_is_one_line():
    run = subprocess.run(
        [sys.executable, "-m", "mtplx", "info"],
        env={"MTPLX_ISA": "foo"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert "foo" in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1


def test_an_interrupt_while_a_lock_is_waited_for():
    class Interrupted:
        def acquire(self):
            raise KeyboardInterrupt

    class Held(np.random.PCG64):
        lock = Interrupted()

    waited_for = Held(0)
    before = []  # a generator whose lock is taken first: they are taken in the order of their addresses
    while not before or id(before[-1]) > id(waited_for):
        before.append(np.random.PCG64(1))
        assert len(before) < 100_000
    generators = [np.random.Generator(before[-1]), np.random.Generator(waited_for)]
    rows = np.full((2, 2, 4), 0.25)
    with pytest.raises(KeyboardInterrupt):
        verification.verify_batch(rows, rows[:, :1], [[0], [1]], generators)
    free = []
    thread = threading.Thread(target=lambda: free.append(before[-1].lock.acquire(blocking=False)))
    thread.start()
    thread.join()
    assert free == [True]


@pytest.mark.parametrize("name", ["token_ids", "probs"])
@pytest.mark.parametrize(
    "made",
    [
        SparseDistribution([1, 0], [0.5, 0.5], 4),
        sampling.sparse_distribution_from_logits([0.0, 1.0, 2.0], SamplerConfig(1.0, 1.0, 2)),
        BatchedSparseDistributions([[1, 0]], [[0.5, 0.5]], vocab_size=4),
        BatchedSparseDistributions([[1, 0]] * 2, [[0.5, 0.5]] * 2, vocab_size=4).to_distribution(1),
        batch.distributions_from_logits([[0.0, 1.0, 2.0]], SamplerConfig(1.0, 1.0, 2)),
    ],
)
def test_no_flag_makes_a_distribution_writable(made, name):
    lent = getattr(made, name)
    before = lent.copy()
    while isinstance(lent, np.ndarray):
        with pytest.raises(ValueError, match="WRITEABLE"):
            lent.flags.writeable = True
        lent = lent.base
    np.testing.assert_array_equal(getattr(made, name), before)


def test_arrays_of_a_distribution_outlive_it():
    ids = SparseDistribution(np.arange(1000), np.ones(1000), 1000).token_ids
    np.testing.assert_array_equal(ids, np.arange(1000))


def test_a_distribution_that_is_made_again_while_it_is_made():
    class Again:
        def __index__(self):
            made.__init__([0], [1.0], 2)
            return 1

    made = SparseDistribution.__new__(SparseDistribution)
    with pytest.raises(AttributeError, match="immutable"):
        made.__init__([Again()], [1.0], 2)
    np.testing.assert_array_equal(made.token_ids, [0])


IDS, PROBS = np.array([1, 0]), np.array([0.5, 0.5])


@pytest.mark.parametrize(
    ("token_ids", "probs", "vocab_size"),
    [
        (np.array([4, 0]), PROBS, 4),
        (np.array([-(10**9), 0]), PROBS, 4),
        (np.array([1, 1]), PROBS, 4),
        (np.array([1.0, 0.0]), PROBS, 4),
        (np.array([1]), PROBS, 4),
        (IDS[:0], PROBS[:0], 4),
        (None, PROBS, 4),
        (IDS, np.array([np.nan, 1.0]), 4),
        (IDS, np.array([-0.5, 1.5]), 4),
        (IDS, np.array([np.inf, 1.0]), 4),
        (IDS, np.array([0.0, 0.0]), 4),
        (IDS, np.array([b"a", b"b"]), 4),
        (IDS, PROBS, 0),
        (IDS, PROBS, 1 << 64),
        (IDS, PROBS, "4"),
    ],
)
def test_stored_bits_that_no_distribution_has(token_ids, probs, vocab_size):
    with pytest.raises(ValueError, match=r"token|prob|vocab_size"):
        restore(SparseDistribution, token_ids, probs, vocab_size)
    make, _ = BatchedSparseDistributions([[1, 0]], [[0.5, 0.5]], vocab_size=4).__reduce__()
    rows = [values if values is None else values[np.newaxis] for values in (token_ids, probs)]
    with pytest.raises(ValueError, match=r"token|prob|vocab_size"):
        make(BatchedSparseDistributions, *rows, vocab_size)


def test_something_that_looks_like_a_batch():
    class Lookalike:
        vocab_size = 4
        token_ids = np.array([[10**9]])
        probs = np.array([[1.0]])

        def to_distribution(self, row):
            raise AssertionError

    for face in (reference, verification):
        with pytest.raises(TypeError):
            face.verify_block(Lookalike(), None, [], np.random.default_rng(0))


RACE = """
import sys, threading, time
import numpy as np
from mtplx import batch, sampling, verification
from mtplx.distributions import SamplerConfig, SparseDistribution

V = 40_000
odd = [np.nan, np.inf, -np.inf, 1e300, -1e300, 1e-320, -1.0, 0.0, 0.3, 1.0]
rng = np.random.default_rng(int(sys.argv[2]))
with np.errstate(all="ignore"):
    logits = rng.normal(0, 3, (4, V))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    wild = rng.choice(odd, (4, V))
    rows = [logits, p, np.round(logits), wild, np.where(rng.random((4, V)) < 0.01, wild, logits)]
    rows = np.concatenate(rows).astype(sys.argv[1])
x, out = rows[:2].copy(), np.zeros(V)
token_ids = np.arange(V)
over = threading.Event()

def write(seed):
    rng = np.random.default_rng(seed)
    while not over.is_set():
        x[rng.integers(2)] = rows[rng.integers(len(rows))]
        out[:] = rows[rng.integers(len(rows))]
        x[rng.integers(2), rng.integers(V):] = rows[-1, 0]
        token_ids[:] = rng.choice([0, -1, 2**62])
        token_ids[:] = np.arange(V)

writers = [threading.Thread(target=write, args=(seed,)) for seed in range(2)]
for writer in writers:
    writer.start()
settings = [(1, 0.95, 20), (1, 0.95, 0), (0.6, 0.5, 1000), (0, 1, 0), (0.7, 1, 0), (1, 1, 20), (1e-3, 0.9, 0),
            (50, 0.9, 50)]
a, b = x
calls = {
    "dense": lambda c: sampling.distribution_from_logits(a, c, out=None if rng.random() < 0.5 else out),
    "support": lambda c: sampling.sparse_distribution_from_logits(a, c).token_ids,
    "cut": lambda c: sampling.apply_top_p_top_k(a, c.top_p, c.top_k, out=None if rng.random() < 0.5 else out),
    "cut float64": lambda c: sampling.apply_top_p_top_k(out, c.top_p, c.top_k),
    "order": lambda c: sampling.deterministic_top_k_order(a, c.top_k or 100),
    "softmax": lambda c: sampling.softmax(a, c.temperature, out=None if rng.random() < 0.5 else out),
    "residual": lambda c: sampling.residual_distribution(a, b, out=None if rng.random() < 0.5 else out),
    "made": lambda c: SparseDistribution(token_ids, a, V).token_ids,
    "sample": lambda c: sampling.sample_from_distribution(a, rng),
    "verify": lambda c: sampling.verify_one_token(a, b, 5, rng).token_id,
    "verify one sparse": lambda c: sampling.verify_one_token(
        a, sampling.sparse_distribution_from_logits(b, c), 5, rng).token_id,
    "marginal": lambda c: sampling.speculative_output_marginal(a, b),
    "distance": lambda c: sampling.total_variation(a, b) + sampling.distribution_entropy(a),
    "rows": lambda c: batch.distributions_from_logits(x, c),
    "block": lambda c: verification.verify_block(x, x[1:], [1], rng).tokens,
    "block from logits": lambda c: verification.verify_block_from_logits(x, x[1:], [1], c, rng=rng).tokens,
}
tokens = {"support", "order", "made", "sample", "verify", "verify one sparse", "block", "block from logits"}
end = time.monotonic() + float(sys.argv[3])
try:
    while time.monotonic() < end:
        for setting in settings:
            for name, call in calls.items():
                try:
                    with np.errstate(all="ignore"):
                        result = call(SamplerConfig(*setting))
                except (ValueError, RuntimeError, MemoryError):
                    continue
                if name in tokens:
                    assert np.all((0 <= np.asarray(result)) & (np.asarray(result) < V)), (name, setting)
finally:
    over.set()
"""


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_rows_that_another_thread_writes_over(dtype):
    # Any result will do, or an error; a write out of bounds ends the process, a loop without end the test.
    run = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", RACE, dtype, "0", "2"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("face", [reference, sampling])
@pytest.mark.parametrize("text", ["0.5", b"1"])
def test_text_is_no_number_of_a_penalty(face, text):
    with pytest.raises(TypeError):
        face.apply_penalties([1.0, 2.0], {0: text}, 1.0)
    with pytest.raises(TypeError):
        face.apply_penalties([1.0, 2.0], None, 0.0, 0.0, {0: text})
    with pytest.raises(TypeError):
        face.distribution_from_logits([1.0, 2.0], PLAIN, penalty_overlay={0: text})


@pytest.mark.parametrize("face", [reference, sampling])
def test_a_count_that_changes_the_row_while_it_is_read(face):
    class Changing:
        def __float__(self):
            logits.resize(1, refcheck=False)
            logits[0] = 7.0
            return 1.0

    logits = np.arange(5000.0)
    np.testing.assert_array_equal(face.apply_penalties(logits, {0: Changing()}, 1.0), [6.0])


@pytest.mark.parametrize("rule", ["greedy", "match", "typical"])
@pytest.mark.parametrize("row", ["abc", None, [1j, 0.0], np.zeros((1, 2))])
def test_draft_rows_that_a_rule_never_looks_at(rule, row):
    target = [[0.0, 1.0], [1.0, 0.0]]
    results = [
        face.verify_block_from_logits(
            target, [row], [1], SamplerConfig(0.5, 0.9, 2), rng=np.random.default_rng(0), rule=rule
        ).tokens.tolist()
        for face in (reference, verification)
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("rule", ["exact", "greedy", "match", "typical"])
@pytest.mark.parametrize("sizes", [(3, 5), (5, 3), (2, 4)])
def test_logits_of_rows_that_differ_in_length(sizes, rule, top_k):
    rows = [np.linspace(0.0, 1.0, n) for n in sizes]
    config = SamplerConfig(1.0, 1.0, top_k)
    for seed in range(8):
        results = [
            face.verify_block_from_logits(
                rows, rows[:1], [1], config, rng=np.random.default_rng(seed), rule=rule
            ).tokens.tolist()
            for face in (reference, verification)
        ]
        assert results[0] == results[1]


@pytest.mark.parametrize("face", [reference, verification])
def test_penalties_of_ids_that_a_later_row_has_not(face):
    config = SamplerConfig(0.0, presence_penalty=1.0)
    rows = [[0.0, 9.0, 0.0, 0.0], [0.0, 1.0]]
    with pytest.raises(IndexError, match=r"row 1: token id 3 is outside \[0, 2\)"):
        face.verify_block_from_logits(rows, rows[:1], [1], config, token_counts={3: 1})
    with pytest.raises(IndexError, match=r"row 1: token id 3 is outside \[0, 2\)"):
        face.verify_block_from_logits(rows, rows[:1], [1], config, penalty_overlay={3: 1.0})
    last = face.verify_block_from_logits(
        rows[::-1], [[0.0, 9.0]], [1], config, penalty_overlay=[None, {3: -20.0}]
    )
    assert last.tokens.tolist() == [1, 3]


@pytest.mark.parametrize("face", [reference, verification])
def test_counts_that_no_row_sees(face):
    config = SamplerConfig(presence_penalty=1.0)
    assert face.verify_block_from_logits([], None, [], config, token_counts={0: -1}).tokens.size == 0
