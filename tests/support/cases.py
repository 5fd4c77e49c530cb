"""Random cases for the comparison of the two faces: (seed, number) -> case, the same on every run.

The settings are walked through in order, so any 175 cases in a row hold every combination of
temperature, top-p and top-k once; everything else of a case is drawn from a generator of its own.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from support.generators import STEP

TEMPERATURES = (0.0, 0.1, 0.6, 1.0, 2.0)
TOP_PS = (0.0, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0)
TOP_KS = (0, 1, 5, 20, "V")
SETTINGS = tuple(itertools.product(TEMPERATURES, TOP_PS, TOP_KS))

SMALL, MIDDLE, WHOLE = 5_000, 20_000, 151_936
ONE_WHOLE_IN, ONE_MIDDLE_IN = 1_000, 50  # a middling row is long enough for 20 ranks to be few

SHAPES = (
    "flat",
    "equal",
    "normal",
    "wide",
    "peaked",
    "zipf",
    "tied",
    "dyadic",
    "masked",
    "float16",
    "neighbours",
    "levels",
    "vast",
    "subnormal",
    "far",
    "huge",
)
DTYPES = ("float64", "float64", "float32", "float32", "float16", "bfloat16", ">f8", ">f4", "int64", "int16")


@dataclass(frozen=True)
class Case:
    seed: int
    number: int
    shape: str
    dtype: str
    temperature: float
    top_p: float
    top_k: int
    logits: Any  # of `dtype`
    presence: float
    frequency: float
    counts: dict[int, int] | None
    overlay: dict[int, float] | None
    target: Any  # given probabilities, of some real dtype
    draft: Any
    edge: float  # a top-p on, or beside, a partial sum of `target`
    token: int
    draw_seed: int
    uniforms: tuple[float, float]  # on, or beside, steps of the cumulative sums

    def __str__(self) -> str:
        return (
            f"case {self.number} (seed {self.seed}): V={self.target.size} {self.shape} {self.dtype} "
            f"T={self.temperature} top_p={self.top_p} top_k={self.top_k}"
        )


def logits_of(shape: str, V: int, rng: np.random.Generator) -> Any:
    if shape == "flat":
        return rng.normal(size=V) * 1e-3 + rng.normal()
    if shape == "equal":
        return np.full(V, float(rng.integers(-5, 6)))
    if shape == "normal":
        return rng.normal(size=V) * 3.0
    if shape == "wide":
        return rng.normal(size=V) * 200.0
    if shape == "peaked":
        x = rng.normal(size=V)
        x[rng.integers(V)] += rng.uniform(8.0, 40.0)
        return x
    if shape == "zipf":
        return -rng.uniform(0.8, 1.5) * np.log(rng.permutation(V) + 1.0)
    if shape == "tied":
        return rng.integers(-4, 5, V) * 0.5
    if shape == "dyadic":  # probabilities close to multiples of a power of two: sums close to each other
        return rng.integers(-8, 1, V) * np.log(2.0)
    if shape == "masked":
        x = rng.normal(size=V) * 3.0
        x[rng.random(V) < rng.choice([0.5, 0.9, 0.999])] = -np.inf
        x[rng.integers(V)] = rng.normal()
        return x
    if shape == "float16":
        return (rng.normal(size=V) * 4.0).astype(np.float16).astype(np.float64)
    if shape == "neighbours":  # apart as numbers, equal as probabilities
        x = np.where(rng.random(V) < 0.5, 1.0, np.nextafter(1.0, rng.choice([0.0, 2.0])))
        x[rng.integers(V)] = 20.0
        return x
    if shape == "levels":  # a few, whose probabilities may or may not be equal
        step = 2.0 ** -rng.integers(46, 54)
        return rng.normal() * rng.choice([0.0, 1.0, 8.0]) - rng.integers(0, 9, V) * step
    if shape == "vast":
        return rng.normal(size=V) * 10.0 ** rng.uniform(13.0, 300.0)
    if shape == "subnormal":
        return -rng.uniform(690.0, 750.0, V) * (rng.random(V) < 0.9)
    if shape == "far":  # a large common part, which a short float cannot carry
        return rng.normal(size=V) * 3.0 + rng.choice([-1.0, 1.0]) * 10.0 ** rng.uniform(2.0, 13.0)
    return rng.choice([1e308, -1e308, 1.7e308, 0.0, 1e300, -np.inf], V) if V > 1 else np.array([1e308])


def spread(x: Any) -> Any:
    """exp(x - max x)/sum, the plain way: only a source of numbers here, its rounding does not matter."""
    with np.errstate(all="ignore"):
        top = x.max()
        w = np.exp(x - (top if np.isfinite(top) else 0.0))
    return w / w.sum()


def probabilities_of(shape: str, x: Any, rng: np.random.Generator) -> tuple[Any, Any]:
    """A target and a draft row that share none, some or all of their support."""
    V = x.size
    if shape == "dyadic":
        grain = 1 << int(rng.integers(4, 20))
        law = rng.dirichlet(np.full(V, rng.choice([0.1, 1.0])))
        p = rng.multinomial(grain, law) / grain
        q = rng.multinomial(grain, rng.permutation(law) if rng.random() < 0.5 else law) / grain
    elif shape == "subnormal":
        p, q = rng.integers(0, 50, (2, V)) * 5e-324
    elif shape == "huge":
        p, q = rng.random((2, V)) * 1.7e308
    else:
        p = spread(x)
        q = spread(np.where(np.isfinite(x), x, 0.0) + rng.normal(size=V) * rng.choice([0.0, 0.1, 2.0]))
    for row in (p, q):
        if rng.random() < 0.25:  # truncated, as a sampler hands them on
            row[row < np.sort(row)[-min(V, int(rng.integers(1, 40)))]] = 0.0
        if rng.random() < 0.15:
            row *= 10.0 ** rng.uniform(-3, 3) if shape != "huge" else 0.5
        if not row.any():
            row[rng.integers(V)] = 0.25
    if rng.random() < 0.05:
        q = p.copy()
    kind = rng.choice(["float64"] * 6 + ["float32", "float16", "bfloat16", ">f8", "strided"])
    if kind == "strided":
        return np.repeat(p, 2)[::2], q[::-1].copy()[::-1]
    if kind != "float64":
        dtype = np.dtype(ml_dtypes.bfloat16) if kind == "bfloat16" else np.dtype(kind)
        with np.errstate(all="ignore"):
            shorter = p.astype(dtype), q.astype(dtype)
        wide = [row.astype(np.float64) for row in shorter]
        if all(np.isfinite(row).all() and row.any() for row in wide):
            return shorter
    return p, q


def on_a_step(weights: Any, rng: np.random.Generator) -> float:
    """A uniform number next to a step of the cumulative sums."""
    with np.errstate(all="ignore"):
        sums = np.cumsum(weights)
        share = sums[rng.integers(sums.size)] / sums[-1]
    if not np.isfinite(share):
        return float(rng.random())
    step = int(np.floor(share / STEP)) + int(rng.integers(-1, 2))
    return min(max(step, 0), 2**53 - 1) * STEP


def make_case(number: int, seed: int = 0) -> Case:
    rng = np.random.Generator(np.random.PCG64([seed, number]))
    temperature, top_p, top_k = SETTINGS[number % len(SETTINGS)]
    V = int(np.exp(rng.uniform(0, np.log(SMALL + 1.0))))
    if rng.integers(ONE_WHOLE_IN) == 0:
        V = WHOLE
    elif rng.integers(ONE_MIDDLE_IN) == 0:
        V = int(rng.integers(SMALL, MIDDLE))
    shape = str(rng.choice(SHAPES))
    x = logits_of(shape, V, rng)
    dtype = str(rng.choice(DTYPES))
    if shape in (
        "neighbours",
        "levels",
        "vast",
        "far",
        "huge",
    ):  # need the range or the resolution of float64
        dtype = str(rng.choice(["float64", ">f8"]))
    with np.errstate(all="ignore"):
        if dtype.startswith("int"):
            logits = np.clip(np.nan_to_num(np.round(x), neginf=-9.0), -3e4, 3e4).astype(dtype)
        else:
            logits = x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    if not np.isfinite(logits.astype(np.float64).max()):
        logits[0] = 0
    target, draft = probabilities_of(shape, x, rng)
    p, q = target.astype(np.float64), draft.astype(np.float64)

    with np.errstate(all="ignore"):
        partial = float(np.cumsum(np.sort(p)[::-1])[rng.integers(min(V, 400))])
    edge = float(np.nextafter(partial, rng.choice([0.0, partial, 2.0]))) if np.isfinite(partial) else 0.5

    penalised = rng.random() < 0.2
    seen = rng.integers(0, V, min(V, 6)).tolist() if penalised else []
    with np.errstate(all="ignore"):
        law = np.cumsum(q) / np.cumsum(q)[-1]
        drawn = int(np.searchsorted(law, rng.random(), side="right")) if np.isfinite(law).all() else 0
        differences = np.maximum(p - q, 0.0)
    return Case(
        seed=seed,
        number=number,
        shape=shape,
        dtype=dtype,
        temperature=temperature,
        top_p=top_p,
        top_k=V if top_k == "V" else top_k,
        logits=logits,
        presence=float(rng.choice([0.0, 0.5, -3.0])) if penalised else 0.0,
        frequency=float(rng.choice([0.0, 0.3])) if penalised else 0.0,
        counts={token: int(rng.integers(0, 5)) for token in seen} if penalised else None,
        overlay={seen[0]: float(rng.normal()) * 4} if penalised and rng.random() < 0.5 else None,
        target=target,
        draft=draft,
        edge=edge,
        token=min(drawn, V - 1) if rng.random() < 0.8 else int(rng.integers(V)),
        draw_seed=int(rng.integers(1 << 30)),
        uniforms=(on_a_step(p, rng), on_a_step(differences if differences.any() else p, rng)),
    )
