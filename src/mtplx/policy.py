"""Draft temperature and depth: what may be chosen freely, because every choice is exact.

Design
------
Verification asks one thing of a draft: that q is the distribution it was drawn from. So any draft
temperature and any depth give the target's law, and may be chosen from block to block by what happened in
the blocks before. What they change is the speed. Three subjects live here:

- `resolve_draft_temperature`: a fixed curve from the target's temperature to the draft's;
- `AdaptiveDraftTemperature`: a controller that looks at how often first drafts are accepted;
- `StreakDepth`, `ExpectedValueDepth`, `CostModelDepth`: the number of drafts a block.

Policies have ``current_temperature`` or ``current_depth``, and ``observe(attempted, accepted)``, which
`mtplx.decoding.speculative_generate` calls once a block. They read no clock and draw nothing: same
observations, same choices, so that a seed fixes the text. They look at numbers of drafts alone, and serve an
engine's own loop as well.

**Acceptance by depth.** `ExpectedValueDepth` and `CostModelDepth` estimate `a_i`, the probability that
draft i is accepted given that those before it were. Counts fade by ``1 - weight`` a block; to them the
estimate one draft earlier is added as if it had been seen `PRIOR_ROUNDS` times. So a depth that has not been
tried, or not for long, is expected to do as well as the one before it, and will be tried again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any, Literal, cast

from mtplx.arguments import as_count, as_integer

__all__ = [
    "AdaptiveDraftTemperature",
    "CostModelDepth",
    "ExpectedValueDepth",
    "StreakDepth",
    "resolve_draft_temperature",
]

PRIOR_ROUNDS = 2.0
MAX_DEPTH = 8


def _number(value: Any, name: str, least: float, most: float = math.inf) -> float:
    """A finite number in [least, most], else ValueError. The smallest subnormal as `least` is "above 0"."""
    number = float(value) if isinstance(value, Real) else math.nan
    if not math.isfinite(number) or not least <= number <= most:
        raise ValueError(f"{name} must be a finite number {_range(least, most)}; got {value!r}")
    return number


def _range(least: float, most: float) -> str:
    low, high = (str(limit).removesuffix(".0") for limit in (least, most))
    if least == math.ulp(0.0):
        return "above 0" if most == math.inf else f"above 0 and at most {high}"
    return f"of at least {low}" if most == math.inf else f"in [{low}, {high}]"


def _require_counts(attempted: int, accepted: int) -> None:
    if not 0 <= as_integer(accepted, "accepted") <= as_integer(attempted, "attempted"):
        raise ValueError(f"{accepted} of {attempted} drafts cannot have been accepted")


# ---- draft temperature -----------------------------------------------------------------------------


def resolve_draft_temperature(
    curve: Iterable[Sequence[float]] | None, target_temperature: float | None, *, default: float
) -> float:
    """Give the draft temperature that a curve has at the target's temperature.

    Parameters
    ----------
    curve : iterable of (target temperature, draft temperature), or None
        Points in any order, all temperatures finite and not negative. Between two points the curve is
        linear, outside of them flat.
    target_temperature : float or None
        Infinity is right of every point; a negative one (greedy) left of every point, as 0 is.
    default : float
        Given back, as it is, when there is no curve (None or no points) or no target temperature.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        A point that is no pair of finite numbers >= 0; two points with the same target temperature; a
        `target_temperature` that is NaN or no number. The curve is checked even when it is not used.

    Examples
    --------
    >>> curve = ((0.2, 0.1), (0.6, 0.4), (1.0, 1.0))
    >>> [round(resolve_draft_temperature(curve, t, default=0.6), 9) for t in (0.0, 0.2, 0.4, 0.8, 1.5)]
    [0.1, 0.1, 0.25, 0.7, 1.0]
    >>> resolve_draft_temperature(None, 0.8, default=0.6)
    0.6
    """
    points = _points(curve)
    if target_temperature is None:
        return default
    if not isinstance(target_temperature, Real) or math.isnan(target_temperature):
        raise ValueError(f"target_temperature must be a number; got {target_temperature!r}")
    if not points:
        return default
    before = points[0]
    for point in points:
        if target_temperature <= point[0]:
            if target_temperature == point[0] or point is before:
                return point[1]
            part = (target_temperature - before[0]) / (point[0] - before[0])
            return float(before[1] + part * (point[1] - before[1]))
        before = point
    return before[1]


def _points(curve: Iterable[Sequence[float]] | None) -> list[tuple[float, float]]:
    """The points of a curve by ascending target temperature."""
    if curve is None:
        return []
    points = []
    try:
        given = list(curve)
    except TypeError:
        raise ValueError(f"a draft temperature curve is a sequence of pairs; got {curve!r}") from None
    for point in given:
        try:
            target, draft = point
        except (TypeError, ValueError):
            raise ValueError(
                f"a point of a draft temperature curve is a pair (target, draft); got {point!r}"
            ) from None
        points.append(
            (
                _number(target, "a target temperature", 0.0),
                _number(draft, "a draft temperature", 0.0),
            )
        )
    points.sort()
    for (one, first), (other, second) in pairwise(points):
        if one == other:
            raise ValueError(
                f"two points of the curve are for the target temperature {one}: {first}, {second}"
            )
    return points


class AdaptiveDraftTemperature:
    """Raises the draft temperature while first drafts are accepted, and lowers it when they are not.

    A lower temperature leaves the drafter its likeliest tokens, which the target accepts most readily; where
    nearly all drafts are accepted, a higher one can come nearer to the target's own spread. Neither is a
    law: which temperature is best for a pair of models, ``mtplx sweep`` measures. The controller climbs and
    descends in steps, with hysteresis:

    - The *average* is that of "the first draft of the block was accepted". The first `seed_rounds` blocks
      give its plain mean, and nothing changes before; then every block weighs `weight`. Blocks without
      drafts are no rounds.
    - Above `boost_above` the temperature is boosted by `step`, at most to `ceiling`.
    - Below `drop_below` it drops by `step`, at most to `floor`, and the controller is disarmed: it does
      not drop again until the average has been above `rearm_above`. So a text that is hard to draft costs
      one step, not all of them.
    - After a change, `dwell` blocks pass before the next one.

    Parameters
    ----------
    temperature : float
        Where to begin, in [`floor`, `ceiling`].
    step : float, default 0.1
        Size of a change, above 0.
    floor, ceiling : float
        Limits of the temperature, ``0 < floor <= ceiling``.
    weight : float
        In (0, 1].
    seed_rounds, dwell : int
        At least 1.
    drop_below, rearm_above, boost_above : float
        Thresholds, ``0 <= drop_below <= rearm_above <= boost_above <= 1``.

    Attributes
    ----------
    average : float
        NaN before the first round.
    rounds : int
        Blocks with drafts so far.

    Raises
    ------
    ValueError
        An argument outside of what is said above.

    Examples
    --------
    >>> controller = AdaptiveDraftTemperature(0.7)
    >>> for _ in range(12):
    ...     controller.observe(attempted=4, accepted=0)
    >>> round(controller.current_temperature, 9), controller.state
    (0.6, 'disarmed')
    """

    def __init__(
        self,
        temperature: float,
        *,
        step: float = 0.1,
        floor: float = 0.45,
        ceiling: float = 1.0,
        weight: float = 0.02,
        seed_rounds: int = 12,
        dwell: int = 24,
        boost_above: float = 0.85,
        drop_below: float = 0.70,
        rearm_above: float = 0.78,
    ) -> None:
        self.floor = _number(floor, "floor", math.ulp(0.0))
        self.ceiling = _number(ceiling, "ceiling", self.floor)
        self._temperature = _number(temperature, "temperature", self.floor, self.ceiling)
        self.step = _number(step, "step", math.ulp(0.0))
        self.weight = _number(weight, "weight", math.ulp(0.0), 1.0)
        self.boost_above = _number(boost_above, "boost_above", 0.0, 1.0)
        self.rearm_above = _number(rearm_above, "rearm_above", 0.0, self.boost_above)
        self.drop_below = _number(drop_below, "drop_below", 0.0, self.rearm_above)
        for name, count in (("seed_rounds", seed_rounds), ("dwell", dwell)):
            as_count(count, name, 1)
        self.seed_rounds = seed_rounds
        self.dwell = dwell
        self.average = math.nan
        self.rounds = 0
        self._armed = True
        self._change_from = seed_rounds  # the round from which on a change is allowed

    @property
    def current_temperature(self) -> float:
        """Draft temperature of the next block."""
        return self._temperature

    @property
    def state(self) -> Literal["seeding", "armed", "disarmed"]:
        """Whether the average is still being seeded, and if not, whether a drop is allowed."""
        if self.rounds < self.seed_rounds:
            return "seeding"
        return "armed" if self._armed else "disarmed"

    def observe(self, attempted: int, accepted: int) -> None:
        """Learn that `accepted` of the `attempted` drafts of a block were accepted.

        Raises
        ------
        ValueError
            If that cannot be.
        """
        _require_counts(attempted, accepted)
        if not attempted:
            return
        first = float(accepted > 0)
        self.rounds += 1
        if self.rounds == 1:
            self.average = first
        elif self.rounds <= self.seed_rounds:
            self.average += (first - self.average) / self.rounds
        else:
            self.average += self.weight * (first - self.average)
        if self.rounds < self.seed_rounds:
            return
        if self.average > self.rearm_above:
            self._armed = True
        if self.rounds < self._change_from:
            return
        if self.average > self.boost_above:
            changed = min(self._temperature + self.step, self.ceiling)
        elif self.average < self.drop_below and self._armed:
            changed = max(self._temperature - self.step, self.floor)
        else:
            return
        if changed != self._temperature:
            self._armed = changed > self._temperature
            self._temperature = changed
            self._change_from = self.rounds + self.dwell


# ---- depth -----------------------------------------------------------------------------------------


def _require_depths(minimum: int, maximum: int, least: int) -> None:
    if not least <= as_integer(minimum, "minimum") <= as_integer(maximum, "maximum"):
        raise ValueError(
            f"{least} <= minimum <= maximum is needed; got minimum {minimum} and maximum {maximum}"
        )


class StreakDepth:
    """One draft more after a streak of blocks accepted whole, one fewer after a streak of rejections.

    A block counts as accepted whole if all of at least `current_depth` drafts were accepted. One that was
    shorter (the drafter had no more to say, the text was about to end) and met no rejection says nothing,
    and ends no streak.

    Parameters
    ----------
    depth : int, default 4
        Where to begin, in [`minimum`, `maximum`].
    minimum, maximum : int
        Limits, ``1 <= minimum <= maximum``.
    raise_after, lower_after : int, default 2
        Lengths of the streaks, at least 1.

    Raises
    ------
    ValueError
        An argument outside of what is said above.

    Examples
    --------
    >>> policy = StreakDepth(4)
    >>> policy.observe(4, 4)
    >>> policy.observe(4, 4)
    >>> policy.current_depth
    5
    """

    def __init__(
        self,
        depth: int = 4,
        *,
        minimum: int = 1,
        maximum: int = MAX_DEPTH,
        raise_after: int = 2,
        lower_after: int = 2,
    ) -> None:
        _require_depths(minimum, maximum, 1)
        if not minimum <= as_integer(depth, "depth") <= maximum:
            raise ValueError(f"depth must be in [{minimum}, {maximum}]; got {depth}")
        for name, length in (("raise_after", raise_after), ("lower_after", lower_after)):
            as_count(length, name, 1)
        self.minimum = minimum
        self.maximum = maximum
        self.raise_after = raise_after
        self.lower_after = lower_after
        self._depth = depth
        self._streak = 0  # of blocks accepted whole; below 0, of rejections

    @property
    def current_depth(self) -> int:
        """Depth of the next block."""
        return self._depth

    def observe(self, attempted: int, accepted: int) -> None:
        """Learn that `accepted` of the `attempted` drafts of a block were accepted.

        Raises
        ------
        ValueError
            If that cannot be.
        """
        _require_counts(attempted, accepted)
        if accepted < attempted:
            self._streak = min(self._streak, 0) - 1
        elif attempted >= self._depth:
            self._streak = max(self._streak, 0) + 1
        if self._streak >= self.raise_after:
            self._depth = min(self._depth + 1, self.maximum)
            self._streak = 0
        elif -self._streak >= self.lower_after:
            self._depth = max(self._depth - 1, self.minimum)
            self._streak = 0


class _AcceptanceByDepth:
    """Estimates of the acceptance at every depth; see the head of the module."""

    def __init__(self, prior: float, weight: float, maximum: int) -> None:
        self.prior = _number(prior, "prior", 0.0, 1.0)
        self.weight = _number(weight, "weight", math.ulp(0.0), 1.0)
        self._tested = [0.0] * maximum
        self._accepted = [0.0] * maximum

    @property
    def acceptance(self) -> list[float]:
        """For each depth, the estimated probability of acceptance given that the drafts before were."""
        estimates = []
        before = self.prior
        for tested, accepted in zip(self._tested, self._accepted, strict=True):
            before = (accepted + PRIOR_ROUNDS * before) / (tested + PRIOR_ROUNDS)
            estimates.append(before)
        return estimates

    def observe(self, attempted: int, accepted: int) -> None:
        """Learn that `accepted` of the `attempted` drafts of a block were accepted.

        Raises
        ------
        ValueError
            If that cannot be.
        """
        _require_counts(attempted, accepted)
        kept = 1.0 - self.weight
        for i in range(len(self._tested)):
            self._tested[i] = kept * self._tested[i] + (i < min(accepted + 1, attempted))
            self._accepted[i] = kept * self._accepted[i] + (i < accepted)


class ExpectedValueDepth(_AcceptanceByDepth):
    """As deep as a draft is expected to bring more than it costs.

    Draft i adds ``a_1 a_2 .. a_i`` tokens to the block on average. With a price for a draft, in tokens,
    the best depth maximises ``a_1 + a_1 a_2 + .. - depth * cost``; gains never grow with depth, so it
    is the deepest draft that adds at least `cost`.

    Parameters
    ----------
    cost : float
        What one draft costs, in tokens, >= 0: for a drafter that takes a tenth of the time of plain
        decoding for a token, 0.1.
    minimum, maximum : int
        Limits of the depth, ``1 <= minimum <= maximum``.
    prior : float, default 0.8
        Acceptance to expect before anything is observed, in [0, 1].
    weight : float, default 0.02
        How fast observations fade, in (0, 1].

    Raises
    ------
    ValueError
        An argument outside of what is said above.

    Examples
    --------
    >>> policy = ExpectedValueDepth(0.4, prior=0.8)
    >>> policy.current_depth  # .8, .64, .512, .41 and then .33
    4
    >>> policy.observe(4, 0)
    >>> policy.current_depth  # .53 is expected at every depth now: .53, then .28
    1
    """

    def __init__(
        self,
        cost: float,
        *,
        minimum: int = 1,
        maximum: int = MAX_DEPTH,
        prior: float = 0.8,
        weight: float = 0.02,
    ) -> None:
        _require_depths(minimum, maximum, 1)
        super().__init__(prior, weight, maximum)
        self.cost = _number(cost, "cost", 0.0)
        self.minimum = minimum
        self.maximum = maximum

    @property
    def current_depth(self) -> int:
        """Depth of the next block."""
        depth, gain = 0, 1.0
        for chance in self.acceptance:
            gain *= chance
            if gain < self.cost:
                break
            depth += 1
        return max(depth, self.minimum)


class CostModelDepth(_AcceptanceByDepth):
    """The depth that gives the most tokens for the time, ``(1 + a_1 + a_1 a_2 + ..) / t(depth)``.

    Parameters
    ----------
    time : float, sequence of float, or callable
        What a block costs, in any unit. A number is the time of one draft over that of a target call:
        ``t(d) = 1 + d * time``. A sequence holds t(0), t(1), .. up to the largest depth; a callable gives
        t(d). Measure it beforehand: a policy that read a clock would make the text depend on it.
    minimum : int, default 0
        0 allows plain decoding where drafting does not pay. Nothing is observed then, the estimates
        return to `prior` as they fade, and drafting is tried again after a few times ``1 / weight`` blocks
        if it paid with that.
    maximum : int, optional
        Default 8, or what a sequence has.
    prior, weight
        As in `ExpectedValueDepth`.

    Raises
    ------
    ValueError
        A time that is not finite and positive (a ratio: not negative), too few of them, no time at all;
        limits that make no sense.

    See Also
    --------
    mtplx.oracle.best_depth : the same maximum for given acceptances.

    Examples
    --------
    >>> CostModelDepth(0.1, prior=0.8).current_depth, CostModelDepth(0.9, prior=0.8).current_depth
    (6, 0)
    >>> CostModelDepth([1.0, 1.1, 2.5], prior=0.8).current_depth
    1
    """

    def __init__(
        self,
        time: float | Sequence[float] | Callable[[int], float],
        *,
        minimum: int = 0,
        maximum: int | None = None,
        prior: float = 0.8,
        weight: float = 0.02,
    ) -> None:
        if callable(time):
            maximum = MAX_DEPTH if maximum is None else maximum
            _require_depths(minimum, maximum, 0)
            times = [time(depth) for depth in range(maximum + 1)]
        elif isinstance(time, Real):
            ratio = _number(time, "time", 0.0)
            maximum = MAX_DEPTH if maximum is None else maximum
            _require_depths(minimum, maximum, 0)
            times = [1.0 + depth * ratio for depth in range(maximum + 1)]
        else:
            try:
                times = list(cast(Sequence[float], time))
            except TypeError:
                raise ValueError(
                    f"time must be a number, a sequence of numbers or a callable; got {time!r}"
                ) from None
            maximum = len(times) - 1 if maximum is None else maximum
            _require_depths(minimum, maximum, 0)
            if len(times) <= maximum:
                raise ValueError(f"depths up to {maximum} need {maximum + 1} times; got {len(times)}")
        super().__init__(prior, weight, maximum)
        self.times = [
            _number(value, f"the time of depth {depth}", math.ulp(0.0))
            for depth, value in enumerate(times[: maximum + 1])
        ]
        self.minimum = minimum
        self.maximum = maximum

    @property
    def current_depth(self) -> int:
        """Depth of the next block: the smallest among equals."""
        best, best_rate = self.minimum, -math.inf
        tokens = gain = 1.0
        for depth, chance in enumerate([1.0, *self.acceptance]):
            if depth:
                gain *= chance
                tokens += gain
            rate = tokens / self.times[depth]
            if depth >= self.minimum and rate > best_rate:
                best, best_rate = depth, rate
        return best
