"""Draft temperature and depth policies: every choice exact, and the choices those that are described."""

from __future__ import annotations

import doctest
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mtplx import policy as policy_module
from mtplx.decoding import CallableDrafter, ModelDrafter, speculative_generate
from mtplx.distributions import SamplerConfig
from mtplx.models.ngram import NGramModel
from mtplx.oracle import best_depth
from mtplx.policy import (
    AdaptiveDraftTemperature,
    CostModelDepth,
    ExpectedValueDepth,
    StreakDepth,
    resolve_draft_temperature,
)


def test_docstring_examples_run() -> None:
    assert doctest.testmod(policy_module).failed == 0


# --- any draft temperature is exact


@pytest.mark.parametrize("truncation", [(1.0, 0), (0.9, 5)], ids=["whole", "truncated"])
@pytest.mark.parametrize("draft_temperature", [0.0, 0.3, 0.6, 1.0, 1.7, math.inf])
@pytest.mark.parametrize("target_temperature", [0.0, 0.6, 1.2])
def test_the_integrated_marginal_is_the_target_at_any_draft_temperature(
    face: Any, target_temperature: float, draft_temperature: float, truncation: tuple[float, int]
) -> None:
    rng = np.random.default_rng(5)
    V = 12
    config = SamplerConfig(target_temperature, *truncation)
    for _ in range(5):
        logits = rng.normal(0, 2, (2, V))
        logits[1] += logits[0]
        p = face.distribution_from_logits(logits[0], config)
        q = face.distribution_from_logits(logits[1], replace(config, temperature=draft_temperature))
        law = np.zeros(V)
        residual = face.residual_distribution(p, q)
        for x in np.flatnonzero(q):
            accepted = face.acceptance_probability(p, q, int(x))
            law[x] += q[x] * accepted
            law += q[x] * (1.0 - accepted) * residual
        # A dozen terms below 1, each rounded a few times: 1e-14 at worst.
        assert np.abs(law - p).max() <= 1e-12


# --- the curve

CURVE = ((0.2, 0.1), (0.6, 0.4), (1.0, 1.0))


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        (0.2, 0.1),
        (0.6, 0.4),
        (1.0, 1.0),
        (0.4, 0.25),
        (0.8, 0.7),
        (0.0, 0.1),
        (-1.0, 0.1),
        (-math.inf, 0.1),
        (5.0, 1.0),
        (math.inf, 1.0),
        (1, 1.0),
        (np.float32(0.5), 0.325),
    ],
)
def test_the_curve_is_linear_between_its_points_and_flat_outside(target: float, draft: float) -> None:
    for curve in (CURVE, list(reversed(CURVE)), np.array(CURVE), iter(CURVE), [list(p) for p in CURVE]):
        resolved = resolve_draft_temperature(curve, target, default=9.0)
        assert type(resolved) is float
        # Three roundings of numbers below 1.
        assert resolved == pytest.approx(draft, abs=1e-15 if target != np.float32(0.5) else 1e-7)
    if (target, draft) in CURVE:
        assert resolve_draft_temperature(CURVE, target, default=9.0) == draft


def test_a_curve_of_one_point_is_flat() -> None:
    assert {resolve_draft_temperature([(0.5, 0.3)], t, default=9.0) for t in (0.0, 0.5, 2.0)} == {0.3}


@pytest.mark.parametrize(
    ("curve", "target"), [(None, 0.8), ((), 0.8), ([], 0.8), (np.empty((0, 2)), 0.8), (CURVE, None)]
)
def test_without_curve_or_target_the_default_is_given(curve: Any, target: float | None) -> None:
    assert resolve_draft_temperature(curve, target, default=0.55) == 0.55


@pytest.mark.parametrize(
    ("curve", "message"),
    [
        (0.7, "0.7"),
        ([0.7], "got 0.7"),
        ([(0.1, 0.2, 0.3)], r"\(0.1, 0.2, 0.3\)"),
        ([(0.1,)], r"\(0.1,\)"),
        ({0.2: 0.1}, "got 0.2"),
        ([("0.1", 0.2)], "'0.1'"),
        ([(0.1, None)], "None"),
        ([(0.1, math.nan)], "nan"),
        ([(math.inf, 0.2)], "inf"),
        ([(-0.1, 0.2)], "-0.1"),
        ([(0.1, -0.2)], "-0.2"),
        ("ab", "'a'"),
        ([(0.2, 0.1), (0.6, 0.4), (0.2, 0.3)], "temperature 0.2: 0.1, 0.3"),
        ([(0.2, 0.1), (0.2, 0.1)], "temperature 0.2"),
    ],
)
@pytest.mark.parametrize("target", [0.4, None])
def test_malformed_curves_are_refused(curve: Any, message: str, target: float | None) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_draft_temperature(curve, target, default=0.6)


@pytest.mark.parametrize("target", [math.nan, "0.5"])
@pytest.mark.parametrize("curve", [CURVE, None])
def test_a_target_temperature_that_is_none_is_refused(curve: Any, target: Any) -> None:
    with pytest.raises(ValueError, match=str(target)):
        resolve_draft_temperature(curve, target, default=0.6)


# --- the controller


def watch(controller: AdaptiveDraftTemperature, firsts: str) -> list[float]:
    """The temperature after each block; "1": its first draft was accepted, "0": it was not."""
    temperatures = []
    for first in firsts:
        controller.observe(3, 2 * int(first))
        temperatures.append(round(controller.current_temperature, 9))
    return temperatures


def test_nothing_changes_while_the_average_is_seeded() -> None:
    controller = AdaptiveDraftTemperature(0.7)
    assert math.isnan(controller.average)
    for i, first in enumerate("00101101001", start=1):
        watch(controller, first)
        assert controller.state == "seeding"
        assert controller.current_temperature == 0.7
        assert controller.average == pytest.approx("00101101001"[:i].count("1") / i)
    watch(controller, "1")
    assert controller.state == "disarmed"  # 6 of 12: below .70, it has dropped
    assert controller.average == pytest.approx(0.5)
    assert controller.current_temperature == pytest.approx(0.6)
    watch(controller, "1")
    assert controller.average == pytest.approx(0.5 + 0.02 * 0.5)


def test_boosts_keep_their_distance_and_end_at_the_ceiling() -> None:
    temperatures = watch(AdaptiveDraftTemperature(0.75), "1" * 100)
    changes = [i + 1 for i in range(1, 100) if temperatures[i] != temperatures[i - 1]]
    assert changes == [12, 36, 60]
    assert [temperatures[i - 1] for i in changes] == [0.85, 0.95, 1.0]


def test_a_drop_disarms_until_the_average_has_recovered() -> None:
    controller = AdaptiveDraftTemperature(0.7)
    # Half of the first drafts are accepted, for ever: one step down, not all the way.
    assert set(watch(controller, "01" * 6)[-1:] + watch(controller, "01" * 100)) == {0.6}
    assert controller.state == "disarmed"
    # Upwards through .70 and .78: armed again, nothing changes below .85.
    while controller.average <= 0.78:
        assert controller.state == "disarmed"
        assert watch(controller, "1") == [0.6]
    assert controller.state == "armed"
    # Down again below .70: the second drop, for enough rounds have passed.
    while controller.average >= 0.70:
        assert controller.state == "armed"
        assert controller.current_temperature == pytest.approx(0.6)
        watch(controller, "0")
    assert controller.current_temperature == pytest.approx(0.5)
    assert controller.state == "disarmed"
    # And the third ends at the floor, where there is nothing left to drop to: it stays armed.
    for _ in range(2):
        while controller.average <= 0.78:
            watch(controller, "1")
        while controller.average >= 0.69:
            watch(controller, "0")
        watch(controller, "0" * 24)
    assert controller.current_temperature == 0.45
    assert controller.state == "armed"


def test_between_the_thresholds_nothing_changes() -> None:
    # Three of four: .75 on average, never above .85 or below .70 once seeded.
    controller = AdaptiveDraftTemperature(0.7)
    assert set(watch(controller, "1110" * 200)) == {0.7}
    assert controller.state == "armed"
    assert 0.70 < controller.average < 0.85


def test_a_boost_too_far_is_taken_back() -> None:
    controller = AdaptiveDraftTemperature(0.7)
    assert watch(controller, "1" * 12)[-1] == 0.8
    # The average falls below .70 while dwelling; the drop waits for the 24th round after the boost.
    temperatures = watch(controller, "0" * 24)
    assert temperatures == [0.8] * 23 + [0.7]
    assert controller.average == pytest.approx(0.98**24)


def test_blocks_without_drafts_are_no_rounds() -> None:
    controller = AdaptiveDraftTemperature(0.7)
    for _ in range(50):
        controller.observe(0, 0)
    assert controller.rounds == 0
    assert controller.state == "seeding"


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.4},
        {"temperature": 1.1},
        {"temperature": math.nan},
        {"step": 0.0},
        {"floor": 0.0},
        {"floor": 0.8},
        {"ceiling": 0.6},
        {"weight": 0.0},
        {"weight": 1.5},
        {"seed_rounds": 0},
        {"dwell": 0},
        {"boost_above": 1.5},
        {"drop_below": 0.8},
        {"rearm_above": 0.9},
        {"rearm_above": 0.6},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, float]) -> None:
    (value,) = changes.values()
    with pytest.raises(ValueError, match=str(value)):
        AdaptiveDraftTemperature(**{"temperature": 0.7, **changes})


# --- depth

DEPTH_POLICIES = [StreakDepth(), ExpectedValueDepth(0.3), CostModelDepth(0.1), AdaptiveDraftTemperature(0.7)]


@pytest.mark.parametrize("policy", DEPTH_POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("counts", [(2, 3), (2, -1), (-1, -1)])
def test_counts_that_cannot_be_are_refused(policy: Any, counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"{counts[1]} of {counts[0]}"):
        policy.observe(*counts)


def test_streaks() -> None:
    policy = StreakDepth(3, maximum=4)
    script = [
        ((3, 3), 3),
        ((3, 3), 4),
        ((4, 4), 4),
        ((4, 4), 4),  # the maximum
        ((4, 1), 4),
        ((4, 4), 4),  # a streak of one, then of one the other way
        ((4, 3), 4),
        ((0, 0), 4),  # says nothing
        ((2, 2), 4),  # neither does a short block without a rejection
        ((4, 0), 3),
        ((2, 0), 3),
        ((3, 2), 2),
        ((2, 0), 2),
        ((2, 1), 1),
        ((1, 0), 1),
        ((1, 0), 1),  # the minimum
        ((1, 1), 1),
        ((1, 1), 2),
    ]
    for counts, depth in script:
        policy.observe(*counts)
        assert policy.current_depth == depth


def test_streaks_of_other_lengths() -> None:
    policy = StreakDepth(2, raise_after=3, lower_after=1)
    depths = []
    for counts in [(2, 2), (2, 2), (2, 2), (3, 0), (2, 2)]:
        policy.observe(*counts)
        depths.append(policy.current_depth)
    assert depths == [2, 2, 3, 2, 2]


def simulate(policy: Any, chances: list[float], blocks: int, seed: int = 0) -> list[int]:
    """The depths that a policy chooses where draft i is accepted with probability ``chances[i]``."""
    rng = np.random.default_rng(seed)
    depths = []
    for _ in range(blocks):
        depth = policy.current_depth
        depths.append(depth)
        accepted = 0
        while accepted < depth and rng.random() < chances[accepted]:
            accepted += 1
        policy.observe(depth, accepted)
    return depths


def test_estimates_approach_the_acceptance_at_every_depth() -> None:
    chances = [0.9, 0.7, 0.5, 0.3]
    policy = CostModelDepth(0.0, maximum=4, minimum=4, weight=0.001)
    simulate(policy, chances, 6000)
    # A fading sum of about 1,000 blocks, of which 315 test the fourth draft: deviation .026 there.
    assert policy.acceptance == pytest.approx(chances, abs=0.1)


def test_fading_counts_by_hand() -> None:
    policy = ExpectedValueDepth(0.1, maximum=2, prior=0.5, weight=0.5)
    assert policy.acceptance == [0.5, 0.5]
    policy.observe(2, 1)  # the first accepted, the second rejected
    assert policy.acceptance == pytest.approx([(1 + 2 * 0.5) / 3, (0 + 2 * 2 / 3) / 3])
    policy.observe(1, 0)
    first = (0.5 + 2 * 0.5) / (1.5 + 2)
    assert policy.acceptance == pytest.approx([first, (0 + 2 * first) / (0.5 + 2)])
    policy.observe(0, 0)
    first = (0.25 + 2 * 0.5) / (0.75 + 2)
    assert policy.acceptance == pytest.approx([first, 2 * first / 2.25])


@pytest.mark.parametrize("prior", [0.0, 0.3, 0.6, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("cost", [0.0, 0.05, 0.2, 0.5, 0.9])
def test_the_expected_value_is_maximal(prior: float, cost: float) -> None:
    policy = ExpectedValueDepth(cost, prior=prior, maximum=12)
    values = [sum(prior**i for i in range(1, depth + 1)) - depth * cost for depth in range(13)]
    depth = policy.current_depth
    assert 1 <= depth <= 12
    assert values[depth] == pytest.approx(max(values[1:]), abs=1e-12)


@pytest.mark.parametrize("prior", [0.0, 0.3, 0.6, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.2, 0.5, 0.9])
def test_the_cost_model_is_maximal(prior: float, ratio: float) -> None:
    policy = CostModelDepth(ratio, prior=prior, maximum=20)
    assert policy.current_depth == best_depth(prior, ratio, max_depth=20)
    by_sequence = CostModelDepth([5 + 5 * depth * ratio for depth in range(21)], prior=prior)
    by_function = CostModelDepth(lambda depth: 3 + 3 * depth * ratio, prior=prior, maximum=20)
    for other in (by_sequence, by_function):
        # Units do not matter, but rounding can move the choice between equals.
        tokens = sum(prior**i for i in range(other.current_depth + 1))
        best = sum(prior**i for i in range(policy.current_depth + 1))
        assert tokens / (1 + other.current_depth * ratio) == pytest.approx(
            best / (1 + policy.current_depth * ratio)
        )


def test_times_with_a_step_are_used_up_to_the_step() -> None:
    # A kernel that handles up to four rows at once: the fourth draft would need a second pass.
    policy = CostModelDepth([1.0, 1.05, 1.1, 1.15, 2.2, 2.25], prior=0.6)
    assert policy.current_depth == 3


def test_the_cost_model_stops_drafting_and_tries_again() -> None:
    policy = CostModelDepth(0.3)
    depths = simulate(policy, [0.05] * 8, 2000)
    assert depths[0] > 1
    assert depths.count(0) > 1600
    # The counts fade while nothing is drafted, and drafting is tried again: many times, not just at first.
    retries = [i for i in range(1, 2000) if depths[i] > 0 and depths[i - 1] == 0]
    assert len(retries) > 3
    assert max(simulate(CostModelDepth(0.3, minimum=1), [0.05] * 8, 500)[50:]) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StreakDepth(0), "got 0"),
        (lambda: StreakDepth(9), "got 9"),
        (lambda: StreakDepth(minimum=0), "minimum 0"),
        (lambda: StreakDepth(minimum=5, maximum=4), "minimum 5 and maximum 4"),
        (lambda: StreakDepth(raise_after=0), "raise_after must be at least 1; got 0"),
        (lambda: StreakDepth(lower_after=-1), "-1"),
        (lambda: ExpectedValueDepth(-0.1), "-0.1"),
        (lambda: ExpectedValueDepth(math.nan), "nan"),
        (lambda: ExpectedValueDepth(0.1, minimum=0), "minimum 0"),
        (lambda: ExpectedValueDepth(0.1, prior=1.2), "1.2"),
        (lambda: ExpectedValueDepth(0.1, weight=0.0), "0.0"),
        (lambda: CostModelDepth(-0.5), "-0.5"),
        (lambda: CostModelDepth([1.0, 0.0]), "the time of depth 1 .* got 0.0"),
        (lambda: CostModelDepth([1.0, math.nan]), "nan"),
        (lambda: CostModelDepth([1.0, "2"]), "'2'"),
        (lambda: CostModelDepth([1.0, 2.0], maximum=2), "need 3 times; got 2"),
        (lambda: CostModelDepth([]), "maximum -1"),
        (lambda: CostModelDepth(None), "time must be a number, .* got None"),  # type: ignore[arg-type]  # that is the mistake
        (lambda: CostModelDepth(-0.5), "time must be a finite number of at least 0; got -0.5"),
        (lambda: CostModelDepth([0.0]), "must be a finite number above 0; got 0.0"),
        (lambda: ExpectedValueDepth(0.1, prior=-1), "must be a finite number in \\[0, 1\\]; got -1"),
        (lambda: ExpectedValueDepth(0.1, weight=2), "must be a finite number above 0 and at most 1; got 2"),
        (lambda: CostModelDepth(lambda depth: -depth), "depth 0"),
        (lambda: CostModelDepth(0.1, minimum=-1), "minimum -1"),
    ],
)
def test_depth_settings_that_make_no_sense_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StreakDepth(2.5), "depth must be an integer, not 2.5"),  # type: ignore[arg-type]  # that is the mistake
        (lambda: StreakDepth(raise_after=None), "raise_after must be an integer, not None"),  # type: ignore[arg-type]  # the same
        (lambda: ExpectedValueDepth(0.1, maximum=4.0), "maximum must be an integer, not 4.0"),  # type: ignore[arg-type]  # the same
        (lambda: CostModelDepth(0.1, minimum="1"), "minimum must be an integer, not '1'"),  # type: ignore[arg-type]  # the same
        (lambda: AdaptiveDraftTemperature(0.7, dwell=1.5), "dwell must be an integer, not 1.5"),  # type: ignore[arg-type]  # the same
        (lambda: StreakDepth().observe(2.0, 1), "attempted must be an integer, not 2.0"),  # type: ignore[arg-type]  # the same
    ],
)
def test_settings_that_are_no_integers_are_named(make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("seed", range(5))
def test_limits_hold_whatever_is_observed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    depths = [
        StreakDepth(3, minimum=2, maximum=5),
        ExpectedValueDepth(0.2, minimum=2, maximum=5),
        CostModelDepth(0.1, minimum=2, maximum=5),
        CostModelDepth([1.0, 1.1, 1.3, 1.4]),
    ]
    controller = AdaptiveDraftTemperature(0.6, dwell=5, floor=0.5, ceiling=0.8)
    seen: list[set[int]] = [set() for _ in depths]
    changed_at = []
    chance = 0.9
    for _ in range(1500):
        # Runs of good and bad luck, longer than what the policies remember.
        if rng.random() < 0.01:
            chance = rng.choice([0.1, 0.5, 0.97])
        attempted = int(rng.integers(0, 9))
        accepted = 0
        while accepted < attempted and rng.random() < chance:
            accepted += 1
        before = controller.current_temperature
        controller.observe(attempted, accepted)
        assert 0.5 <= controller.current_temperature <= 0.8
        if controller.current_temperature != before:
            changed_at.append(controller.rounds)
        for policy, depths_seen in zip(depths, seen, strict=True):
            policy.observe(attempted, accepted)
            depths_seen.add(policy.current_depth)
    assert len(changed_at) > 2
    assert min(np.diff([7, *changed_at])) >= 5
    assert seen[0] == {2, 3, 4, 5}
    assert min(seen[1] | seen[2]) == 2
    assert max(seen[1] | seen[2]) == 5
    assert min(seen[3]) >= 0
    assert max(seen[3]) <= 3


# --- in the loop


def pair_of_models() -> tuple[NGramModel, NGramModel]:
    corpus = np.random.default_rng(3).choice(8, size=400, p=np.arange(1, 9) / 36).tolist() + [0, 1, 2, 3] * 30
    target, draft = (NGramModel(corpus, vocab_size=8, order=order) for order in (4, 2))
    return target, draft


def decode(policy: Any, *, seed: int = 1, temperature: float = 0.9, max_tokens: int = 300) -> Any:
    target, draft = pair_of_models()
    return speculative_generate(
        target,
        ModelDrafter(draft),
        [0],
        config=SamplerConfig(temperature, 1.0, 0),
        max_tokens=max_tokens,
        seed=seed,
        policy=policy,
    )


POLICIES = {
    "streak": StreakDepth,
    "expected value": lambda: ExpectedValueDepth(0.4),
    "cost model": lambda: CostModelDepth(0.1),
    "temperature": lambda: AdaptiveDraftTemperature(0.9),
    "both": lambda: [CostModelDepth(0.1), AdaptiveDraftTemperature(0.9)],
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_seed_fixes_the_text_and_policies_do_not_change_greedy_text(name: str) -> None:
    make = POLICIES[name]
    first, second = decode(make()), decode(make())
    assert list(first) == list(second)
    assert len(first.tokens) == 300
    assert list(decode(make(), temperature=0.0)) == list(decode(None, temperature=0.0))


@pytest.mark.parametrize(
    ("name", "drafted", "last"),
    [
        ("streak", [160, 94, 29, 2], 1),
        ("expected value", [160, 79, 18, 5, 1, 1], 2),
        ("cost model", [137, 136, 92, 22, 3, 1], 3),
    ],
)
def test_a_depth_policy_changes_the_depth_in_the_loop(name: str, drafted: list[int], last: int) -> None:
    """Blocks of every depth from 1 up, as many of each as follow from the seed."""
    policy = POLICIES[name]()
    stats = decode(policy).stats
    assert stats.drafted_by_depth == []
    stream = decode(policy)
    list(stream)
    assert stream.stats.drafted_by_depth == drafted
    assert policy.current_depth == last


def test_the_drafter_is_asked_at_the_policys_temperature() -> None:
    seen = []

    def propose(text: list[int], depth: int, config: SamplerConfig, rng: np.random.Generator) -> Any:
        seen.append(config)
        return [0] * depth, None

    class Rising:
        current_temperature = 0.5

        def observe(self, attempted: int, accepted: int) -> None:
            self.current_temperature += 0.25

    target, _ = pair_of_models()
    config = SamplerConfig(0.9, 0.95, 5)
    stream = speculative_generate(
        target,
        CallableDrafter(propose),
        [0],
        config=config,
        draft_config=replace(config, top_k=3),
        max_tokens=20,
        policy=Rising(),
        seed=0,
    )
    list(stream)
    assert seen == [SamplerConfig(0.5 + 0.25 * i, 0.95, 3) for i in range(len(seen))]
    assert len(seen) > 4


def test_one_object_may_choose_both() -> None:
    observed = []
    both = SimpleNamespace(
        current_depth=2, current_temperature=0.3, observe=lambda *counts: observed.append(counts)
    )
    stream = decode(both)
    list(stream)
    assert len(stream.stats.drafted_by_depth) == 2
    assert len(observed) == stream.stats.target_calls
    assert sum(attempted for attempted, _ in observed) == stream.stats.drafted_tokens
    assert sum(accepted for _, accepted in observed) == stream.stats.accepted_tokens


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        (3, TypeError, "3 is no policy"),
        (StreakDepth, TypeError, "StreakDepth.* is no policy"),
        ([StreakDepth(), None], TypeError, "None is no policy"),
        (SimpleNamespace(current_depth=3), TypeError, "is no policy"),
        (SimpleNamespace(observe=print), TypeError, "is no policy"),
        ([StreakDepth(), CostModelDepth(0.1)], ValueError, "2 policies choose the depth"),
        ([AdaptiveDraftTemperature(0.7)] * 2, ValueError, "2 policies choose the draft temperature"),
    ],
)
def test_what_is_no_policy_is_refused(policy: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        decode(policy)


@pytest.mark.parametrize("depth", [2.5, "2", None])
def test_a_depth_that_is_no_integer_is_an_error(depth: Any) -> None:
    class Broken:
        @property
        def current_depth(self) -> Any:
            return depth

        def observe(self, attempted: int, accepted: int) -> None:
            pass

    with pytest.raises(TypeError, match=f"current_depth must be an integer, not {depth!r}"):
        next(decode(Broken()))
