"""The decode loop: its law, both protocols, penalties, the ends of texts, statistics, interrupts.

Frequency tests compare whole continuations with the exact law of plain decoding, enumerated by the
straight-line statement `plain_row` below. Seeds are fixed; `FALSE_ALARM` bounds the chance that a correct
loop would have failed for one choice of seeds. The same test must reject a loop with a planted fault.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from mtplx.decoding import (
    Drafter,
    GenerationStats,
    ModelDrafter,
    TokenStream,
    generate,
    speculative_generate,
)
from mtplx.distributions import NonFiniteLogitsError, SamplerConfig
from mtplx.models.ngram import NGramPair, default_corpus, train_pair

FALSE_ALARM = 1e-6
MODULES = {"compiled": "mtplx.sampling", "reference": "mtplx.reference"}
EXISTING = [name for name, module in MODULES.items() if importlib.util.find_spec(module)]

GREEDY = SamplerConfig(temperature=0.0)


@pytest.fixture(params=EXISTING)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair() -> NGramPair:
    return train_pair(default_corpus())


# --- small models


class ToyState:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens


class ToyModel:
    """Logits that depend on the last two tokens, from a seeded table; `calls` records what was asked."""

    def __init__(self, seed: int, V: int = 4, scale: float = 1.5) -> None:
        self.vocab_size = V
        self.table = np.random.default_rng(seed).normal(0.0, scale, size=(V, V, V))
        self.calls: list[tuple[str, Any]] = []

    def row(self, text: Sequence[int]) -> np.ndarray:
        before, last = ([0, *text])[-2:]
        return self.table[before, last]

    def start(self, prompt: Sequence[int]) -> ToyState:
        self.calls = []
        return ToyState(list(prompt[:-1]))

    def forward(self, state: ToyState, tokens: Sequence[int]) -> np.ndarray:
        self.calls.append(("forward", list(tokens)))
        rows = []
        for token in tokens:
            state.tokens.append(token)
            rows.append(self.row(state.tokens))
        return np.array(rows)

    def rollback(self, state: ToyState, n: int) -> None:
        if not 0 <= n <= len(state.tokens):
            raise ValueError(n)
        self.calls.append(("rollback", n))
        del state.tokens[len(state.tokens) - n :]


class FixedDrafter:
    """Proposes given tokens as point masses, block after block."""

    def __init__(self, *blocks: Sequence[int]) -> None:
        self.blocks = blocks
        self.committed: list[list[int]] = []
        self._next: Iterator[Sequence[int]] = iter(())

    def start(self, prompt: Sequence[int]) -> None:
        self.committed = []
        self._next = iter(self.blocks)

    def propose(self, depth: int, config: SamplerConfig, rng: np.random.Generator) -> tuple[list[int], None]:
        return list(next(self._next, ()))[:depth], None

    def commit(self, tokens: Sequence[int]) -> None:
        self.committed.append(list(tokens))


def plain_row(logits: np.ndarray, config: SamplerConfig, completion: Sequence[int]) -> np.ndarray:
    """The distribution of the next token, stated without any function of the package."""
    logits = np.array(logits, dtype=np.float64)
    for token, count in Counter(completion).items():
        logits[token] -= config.frequency_penalty * count + config.presence_penalty
    if config.temperature <= 0:
        return (np.arange(len(logits)) == logits.argmax()).astype(np.float64)
    p = np.exp((logits - logits.max()) / config.temperature)
    p /= p.sum()
    kept = np.zeros_like(p)
    before = 0.0
    for rank, token in enumerate(sorted(range(len(p)), key=lambda token: (-p[token], token))):
        if (config.top_k and rank >= config.top_k) or (0 < config.top_p < 1 and before >= config.top_p):
            break
        kept[token] = p[token]
        before += p[token]
    return kept / kept.sum()


def plain_law(
    model: ToyModel,
    prompt: Sequence[int],
    config: SamplerConfig,
    length: int,
    stop_tokens: Sequence[int] = (),
) -> dict[tuple[int, ...], float]:
    """The exact law of plain decoding: every continuation with its probability."""
    law: dict[tuple[int, ...], float] = {}
    growing: dict[tuple[int, ...], float] = {(): 1.0}
    while growing:
        text, probability = growing.popitem()
        if len(text) == length or (text and text[-1] in stop_tokens):
            law[text] = probability
            continue
        row = plain_row(model.row([*prompt, *text]), config, text)
        for token in np.flatnonzero(row).tolist():
            growing[(*text, token)] = probability * float(row[token])
    assert math.isclose(sum(law.values()), 1.0)
    return law


def p_value(law: dict[tuple[int, ...], float], texts: list[tuple[int, ...]]) -> float:
    """Pearson's chi-square test of `texts` against `law`, rare texts pooled until 10 are expected."""
    counts = Counter(texts)
    if not law.keys() >= counts.keys():
        return 0.0
    expected: list[float] = []
    observed: list[int] = []
    pooled_expected, pooled_observed = 0.0, 0
    for text, probability in sorted(law.items(), key=lambda item: item[1]):
        pooled_expected += probability * len(texts)
        pooled_observed += counts[text]
        if pooled_expected >= 10:
            expected.append(pooled_expected)
            observed.append(pooled_observed)
            pooled_expected, pooled_observed = 0.0, 0
    expected[-1] += pooled_expected
    observed[-1] += pooled_observed
    assert len(expected) > 10
    return float(chisquare(observed, expected).pvalue)


def sampled_texts(decode: Callable[[int], TokenStream], n: int) -> tuple[list[tuple[int, ...]], Counter[str]]:
    texts, kinds = [], Counter[str]()
    for seed in range(n):
        stream = decode(seed)
        texts.append(tuple(stream))
        kinds.update(stream.kinds)
    return texts, kinds


# --- the law

PROMPT = [1, 2]
SAMPLES = {"compiled": 2500, "reference": 1500}  # texts; fewer where each takes longer
LAWS = {
    "plain temperatures": (SamplerConfig(0.7, 1.0, 0), SamplerConfig(1.3, 1.0, 0), ()),
    "truncated": (SamplerConfig(1.0, 0.9, 3), SamplerConfig(0.6, 0.95, 2), ()),
    "penalties and a stop token": (SamplerConfig(0.9, 1.0, 0, 0.6, 0.9), SamplerConfig(0.8, 1.0, 0), (3,)),
}


@pytest.mark.parametrize("name", LAWS)
def test_speculative_text_has_the_law_of_plain_decoding(name: str, backend: str) -> None:
    config, draft_config, stop_tokens = LAWS[name]
    target = ToyModel(1)
    drafter = ModelDrafter(ToyModel(2, scale=1.0), backend=backend)

    def decode(seed: int) -> TokenStream:
        return speculative_generate(
            target,
            drafter,
            PROMPT,
            config=config,
            draft_config=draft_config,
            depth=2,
            max_tokens=4,
            stop_tokens=stop_tokens,
            seed=seed,
            backend=backend,
        )

    texts, kinds = sampled_texts(decode, SAMPLES[backend])
    assert p_value(plain_law(target, PROMPT, config, 4, stop_tokens), texts) > FALSE_ALARM
    assert min(kinds[kind] for kind in ("accepted", "correction", "bonus")) > SAMPLES[backend] / 10


def test_plain_text_has_the_law_of_plain_decoding(backend: str) -> None:
    config, _, stop_tokens = LAWS["penalties and a stop token"]
    target = ToyModel(1)

    def decode(seed: int) -> TokenStream:
        return generate(
            target, PROMPT, config=config, max_tokens=4, stop_tokens=stop_tokens, seed=seed, backend=backend
        )

    texts, kinds = sampled_texts(decode, SAMPLES[backend])
    assert p_value(plain_law(target, PROMPT, config, 4, stop_tokens), texts) > FALSE_ALARM
    assert set(kinds) == {"bonus"}


def test_point_mass_drafts_keep_the_law(backend: str) -> None:
    config = SamplerConfig(0.8, 1.0, 0, frequency_penalty=0.5)
    target = ToyModel(1)
    drafter = FixedDrafter([0, 3], [2, 2])

    def decode(seed: int) -> TokenStream:
        return speculative_generate(
            target, drafter, PROMPT, config=config, depth=2, max_tokens=4, seed=seed, backend=backend
        )

    texts, kinds = sampled_texts(decode, SAMPLES[backend])
    assert p_value(plain_law(target, PROMPT, config, 4), texts) > FALSE_ALARM
    assert min(kinds[kind] for kind in ("accepted", "correction", "bonus")) > SAMPLES[backend] / 20


class OneSidedDrafter(ModelDrafter):
    """The planted fault: drafts are drawn at the draft temperature, their rows given at the target's."""

    def propose(self, depth: int, config: SamplerConfig, rng: np.random.Generator, /) -> Any:
        drafts, _ = super().propose(depth, config, rng)
        text = list(self._state.tokens)
        text += drafts[-1:]
        rows = []
        for i in range(len(drafts)):
            before = text[: len(text) - len(drafts) + i]
            rows.append(plain_row(self.model.row(before), replace(config, temperature=0.7), ()))
        return drafts, rows


def test_the_frequency_test_catches_a_draft_temperature_on_one_side_only(backend: str) -> None:
    config, draft_config, _ = LAWS["plain temperatures"]
    target = ToyModel(1)

    def decode_with(drafter: Drafter, draft_config: SamplerConfig) -> Callable[[int], TokenStream]:
        return lambda seed: speculative_generate(
            target,
            drafter,
            PROMPT,
            config=config,
            draft_config=draft_config,
            depth=2,
            max_tokens=4,
            seed=seed,
            backend=backend,
        )

    law = plain_law(target, PROMPT, config, 4)
    drafter = OneSidedDrafter(ToyModel(2, scale=1.0), backend=backend)
    texts, _ = sampled_texts(decode_with(drafter, draft_config), SAMPLES[backend])
    assert p_value(law, texts) < FALSE_ALARM
    # At the same temperature on both sides that drafter is a correct one: it is the fault that was caught.
    texts, _ = sampled_texts(decode_with(drafter, replace(draft_config, temperature=0.7)), SAMPLES[backend])
    assert p_value(law, texts) > FALSE_ALARM


# --- greedy text of a real model

PROMPTS = ["The", "class Point:\n    def", "If the object is", "3.14 = "]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("config", [GREEDY, replace(GREEDY, presence_penalty=0.4, frequency_penalty=0.3)])
def test_greedy_tokens_are_those_of_plain_decoding(
    pair: NGramPair, depth: int, config: SamplerConfig, backend: str
) -> None:
    kinds = Counter[str]()
    for text in PROMPTS:
        prompt = pair.tokenizer.encode(text)
        plain = generate(pair.target, prompt, config=config, max_tokens=80, backend=backend)
        stream = speculative_generate(
            pair.target,
            ModelDrafter(pair.draft, backend=backend),
            prompt,
            config=config,
            depth=depth,
            max_tokens=80,
            backend=backend,
        )
        assert list(stream) == list(plain)
        kinds.update(stream.kinds)
        assert sum(stream.stats.rejected_by_depth) == stream.kinds.count("correction")
    assert kinds["accepted"] > 20
    assert kinds["correction"] > 20


@pytest.mark.parametrize(
    ("presence", "frequency"), [(0.0, 0.0), (1.5, 0.0), (0.0, 0.4), (0.7, 0.3), (-0.2, 0.1)]
)
def test_penalties_count_the_completion_before_each_position(
    pair: NGramPair, presence: float, frequency: float, backend: str
) -> None:
    config = replace(GREEDY, presence_penalty=presence, frequency_penalty=frequency)
    prompt = pair.tokenizer.encode("the the the the")
    expected: list[int] = []
    state = pair.target.start(prompt)
    pending = prompt[-1]
    for _ in range(60):
        row = plain_row(pair.target.forward(state, [pending])[0], config, expected)
        pending = int(row.argmax())
        expected.append(pending)

    stream = speculative_generate(
        pair.target,
        ModelDrafter(pair.draft, backend=backend),
        prompt,
        config=config,
        depth=4,
        max_tokens=60,
        backend=backend,
    )
    assert list(stream) == expected
    assert min(stream.kinds.count(kind) for kind in ("accepted", "correction")) > 5
    if presence or frequency:
        plain = generate(pair.target, prompt, config=GREEDY, max_tokens=60, backend=backend)
        assert expected != list(plain)


def test_penalties_see_the_drafts_of_their_own_block(backend: str) -> None:
    # Token 2 wins every row by 1; with penalty 1.5 it loses to token 0 as soon as it was emitted once.
    target = ToyModel(0, V=3)
    target.table[:] = [1.0, 0.0, 2.0]
    config = replace(GREEDY, presence_penalty=1.5)
    stream = speculative_generate(
        target, FixedDrafter([2, 2, 2]), [2], config=config, depth=3, max_tokens=4, backend=backend
    )
    assert [next(stream), next(stream)] == [2, 0]
    assert stream.stats.accepted_by_depth == [1, 0, 0]
    assert stream.stats.rejected_by_depth == [0, 1, 0]


# --- seeds


@pytest.mark.parametrize(
    "config", [SamplerConfig(), SamplerConfig(1.0, 1.0, 0, 0.5, 0.5), SamplerConfig(0.8, 0.9, None)]
)
def test_a_seed_gives_the_same_tokens_on_every_backend(pair: NGramPair, config: SamplerConfig) -> None:
    prompt = pair.tokenizer.encode("The function")
    texts = []
    for backend in (*EXISTING, EXISTING[0]):
        stream = speculative_generate(
            pair.target,
            ModelDrafter(pair.draft, backend=backend),
            prompt,
            config=config,
            draft_config=replace(config, temperature=0.9),
            max_tokens=150,
            seed=11,
            backend=backend,
        )
        texts.append((list(stream), stream.kinds))
    assert all(text == texts[0] for text in texts)
    other = speculative_generate(
        pair.target,
        ModelDrafter(pair.draft, backend=EXISTING[0]),
        prompt,
        config=config,
        max_tokens=150,
        seed=12,
        backend=EXISTING[0],
    )
    assert list(other) != texts[0][0]


def test_without_a_seed_texts_differ(backend: str) -> None:
    target = ToyModel(1)
    config = SamplerConfig(2.0, 1.0, 0)
    texts = {tuple(generate(target, [0], config=config, max_tokens=50, backend=backend)) for _ in range(2)}
    assert len(texts) == 2


def test_a_drafter_with_nothing_to_say_leaves_plain_decoding(backend: str) -> None:
    target = ToyModel(1)
    config = SamplerConfig(1.0, 1.0, 0)
    plain = generate(target, [0], config=config, max_tokens=30, seed=5, backend=backend)
    silent = speculative_generate(
        target, FixedDrafter(), [0], config=config, max_tokens=30, seed=5, backend=backend
    )
    assert list(silent) == list(plain)
    assert silent.stats.drafted_by_depth == []
    assert silent.stats.target_calls == 30


# --- what the models are asked


def test_the_target_is_fed_pending_and_drafts_and_rolled_back_exactly(backend: str) -> None:
    target = ToyModel(1)
    prompt = [1, 2, 3]
    stream = speculative_generate(
        target,
        ModelDrafter(ToyModel(2), backend=backend),
        prompt,
        config=SamplerConfig(1.0, 1.0, 0),
        depth=3,
        max_tokens=60,
        seed=0,
        backend=backend,
    )
    blocks: list[list[str]] = []
    pending, before = prompt[-1], 0
    while True:
        token = next(stream, None)
        if token is None:
            break
        # A new block begins when the call for this token decoded one.
        forwards = [tokens for name, tokens in target.calls if name == "forward"]
        if forwards:
            assert len(forwards) == 1
            fed = forwards[0]
            assert fed[0] == pending
            block, kinds = stream.tokens[before:], stream.kinds[before:]
            accepted = kinds.count("accepted")
            assert fed[1 : 1 + accepted] == block[:accepted]
            rejected = len(fed) - 1 - accepted
            assert [n for name, n in target.calls if name == "rollback"] == ([rejected] if rejected else [])
            assert stream._state.tokens == [*prompt, *stream.tokens][:-1]
            pending, before = stream.tokens[-1], len(stream.tokens)
            blocks.append(kinds)
            target.calls.clear()
    assert len(stream.tokens) == 60
    assert {len(kinds) for kinds in blocks} == {1, 2, 3, 4}


@pytest.mark.parametrize("seed", range(20))
def test_a_model_drafter_goes_on_from_the_committed_text(seed: int, backend: str) -> None:
    rng = np.random.default_rng(seed)
    config = SamplerConfig(1.0, 1.0, 0)
    text = [0]
    drafter = ModelDrafter(ToyModel(2), backend=backend)
    drafter.start(text)
    for _ in range(12):
        depth = int(rng.integers(0, 4))
        drafts, rows = drafter.propose(depth, config, np.random.default_rng(seed))
        fresh = ModelDrafter(ToyModel(2), backend=backend)
        fresh.start(text)
        expected, expected_rows = fresh.propose(depth, config, np.random.default_rng(seed))
        assert drafts == expected
        assert [np.asarray(row).tobytes() for row in rows] == [
            np.asarray(row).tobytes() for row in expected_rows
        ]
        # Any number of drafts may be kept, with or without one more token, or the proposal forgotten.
        committed = drafts[: int(rng.integers(0, depth + 1))]
        if rng.random() < 0.7:
            committed.append(int(rng.integers(0, 4)))
        if rng.random() < 0.9:
            drafter.commit(committed)
            text += committed


def test_a_model_drafter_decodes_no_token_twice(backend: str) -> None:
    model = ToyModel(2)
    drafter = ModelDrafter(model, backend=backend)
    drafter.start([0, 1])
    drafts, _ = drafter.propose(3, GREEDY, np.random.default_rng(0))
    assert model.calls == [("forward", [1]), ("forward", drafts[:1]), ("forward", drafts[1:2])]
    drafter.commit([*drafts, 3])
    model.calls.clear()
    drafter.propose(1, GREEDY, np.random.default_rng(0))
    assert model.calls == [("forward", [drafts[2], 3])]


def test_draft_rows_are_drawn_without_penalties(backend: str) -> None:
    seen: list[SamplerConfig] = []

    class Spy(ModelDrafter):
        def propose(self, depth: int, config: SamplerConfig, rng: np.random.Generator, /) -> Any:
            seen.append(config)
            return super().propose(depth, config, rng)

    # The draft is the target: without penalties on either side every draft would be accepted.
    config = SamplerConfig(1.0, 1.0, 0, 1.0, 1.0)
    stream = speculative_generate(
        ToyModel(1),
        Spy(ToyModel(1), backend=backend),
        [0],
        config=config,
        max_tokens=40,
        seed=0,
        backend=backend,
    )
    list(stream)
    assert set(seen) == {config}
    assert stream.stats.correction_tokens > 0
    unpenalized = replace(config, presence_penalty=0.0, frequency_penalty=0.0)
    stream = speculative_generate(
        ToyModel(1),
        Spy(ToyModel(1), backend=backend),
        [0],
        config=unpenalized,
        max_tokens=40,
        seed=0,
        backend=backend,
    )
    list(stream)
    assert stream.stats.correction_tokens == 0


# --- the ends of texts


@pytest.mark.parametrize("depth", [1, 3, 8])
@pytest.mark.parametrize("max_tokens", range(8))
def test_never_more_than_max_tokens(max_tokens: int, depth: int, backend: str) -> None:
    stream = speculative_generate(
        ToyModel(1),
        ModelDrafter(ToyModel(2), backend=backend),
        [0],
        config=SamplerConfig(1.0, 1.0, 0),
        depth=depth,
        max_tokens=max_tokens,
        seed=3,
        backend=backend,
    )
    assert len(list(stream)) == max_tokens
    assert stream.stats.tokens == max_tokens
    assert next(stream, None) is None


def test_blocks_near_the_end_draft_no_more_than_they_can_commit(backend: str) -> None:
    target = ToyModel(1)
    stream = speculative_generate(
        target,
        ModelDrafter(ToyModel(1), backend=backend),
        [0],
        config=SamplerConfig(1.0, 1.0, 0),
        depth=4,
        max_tokens=8,
        seed=0,
        backend=backend,
    )
    assert len(list(stream)) == 8
    # Draft and target agree, so a block of 4 + 1 tokens is followed by one of 2 + 1.
    assert [len(tokens) for _, tokens in target.calls] == [5, 3]
    assert stream.stats.drafted_by_depth == [2, 2, 1, 1]
    assert stream.kinds == ["accepted"] * 4 + ["bonus"] + ["accepted"] * 2 + ["bonus"]


def counting_model() -> ToyModel:
    """Greedy text 0 1 2 3 4 5 0 1 ..."""
    model = ToyModel(0, V=6)
    model.table[:] = np.roll(np.eye(6), 1, axis=1)
    return model


@pytest.mark.parametrize(
    ("drafts", "stop", "kinds", "fed"),
    [
        # What is drafted behind a stop token is dropped, and no row after the stop token is asked for.
        ([1, 2, 3], 2, ["accepted", "accepted"], [0, 1]),
        ([1, 5, 3], 2, ["accepted", "correction"], [0, 1, 5, 3]),
        ([1, 2, 3], 4, ["accepted", "accepted", "accepted", "bonus"], [0, 1, 2, 3]),
        # A drafted stop token that is rejected ends nothing.
        ([1, 4, 3], 4, ["accepted", "correction", "bonus", "bonus"], [0, 1]),
    ],
    ids=["accepted", "correction", "bonus", "rejected"],
)
def test_a_stop_token_ends_the_text_and_is_its_last(
    drafts: list[int], stop: int, kinds: list[str], fed: list[int], backend: str
) -> None:
    target = counting_model()
    drafter = FixedDrafter(drafts)
    stream = speculative_generate(
        target, drafter, [0], config=GREEDY, depth=3, max_tokens=20, stop_tokens={stop}, backend=backend
    )
    assert list(stream) == list(range(1, stop + 1))
    assert stream.kinds == kinds
    assert target.calls[0] == ("forward", fed)
    assert next(stream, None) is None
    assert list(itertools.chain(*drafter.committed)) == stream.tokens
    assert stream._state.tokens == [0, *stream.tokens][:-1]
    assert stream.stats.tokens == len(kinds)


def test_plain_decoding_stops_too(backend: str) -> None:
    stream = generate(
        counting_model(), [0], config=GREEDY, max_tokens=20, stop_tokens=np.array([3, 5]), backend=backend
    )
    assert list(stream) == [1, 2, 3]


# --- statistics


def check_identities(stats: GenerationStats, kinds: Sequence[str]) -> None:
    assert stats.tokens == len(kinds) == stats.accepted_tokens + stats.correction_tokens + stats.bonus_tokens
    assert kinds.count("accepted") == stats.accepted_tokens
    assert kinds.count("correction") == stats.correction_tokens == sum(stats.rejected_by_depth)
    assert kinds.count("bonus") == stats.bonus_tokens
    # Every call commits one token that is no draft, but for one whose accepted drafts end the text.
    assert stats.target_calls - (stats.correction_tokens + stats.bonus_tokens) in (0, 1)
    assert stats.drafted_by_depth == sorted(stats.drafted_by_depth, reverse=True)
    assert stats.drafted_tokens == sum(stats.drafted_by_depth)
    tested = [a + r for a, r in zip(stats.accepted_by_depth, stats.rejected_by_depth, strict=True)]
    assert all(t <= d for t, d in zip(tested, stats.drafted_by_depth, strict=True))
    # A draft is tested where the one before it was accepted, if there is one.
    assert all(t <= a for t, a in zip(tested[1:], stats.accepted_by_depth, strict=False))
    for count, share, mean in zip(
        tested, stats.acceptance_by_depth, stats.mean_accept_probability_by_depth, strict=True
    ):
        if count:
            assert 0 <= share <= 1
            assert 0 <= mean <= 1 + 1e-12
        else:
            assert math.isnan(share)
            assert math.isnan(mean)


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("config", [GREEDY, SamplerConfig(1.0, 1.0, 0)])
def test_statistics_are_live_and_add_up(depth: int, config: SamplerConfig, backend: str) -> None:
    stream = speculative_generate(
        ToyModel(1),
        ModelDrafter(ToyModel(2), backend=backend),
        [0],
        config=config,
        draft_config=SamplerConfig(1.0, 1.0, 0),
        depth=depth,
        max_tokens=100,
        stop_tokens=(),
        seed=1,
        backend=backend,
    )
    stats = stream.stats
    handed_out: list[int] = []
    kinds: list[str] = []
    check_identities(stats, [])
    assert math.isnan(stats.tokens_per_target_call)
    for token in stream:
        assert type(token) is int
        handed_out.append(token)
        kinds.append(stream.kind)
        assert stream.tokens[: len(handed_out)] == handed_out
        assert stats.tokens - len(handed_out) <= depth
        check_identities(stats, stream.kinds)
    assert stream.stats is stats
    assert stream.tokens == handed_out
    assert stream.kinds == kinds
    assert stats.tokens_per_target_call == 100 / stats.target_calls > 1
    parts = (stats.draft_seconds, stats.target_seconds, stats.sampling_seconds, stats.rollback_seconds)
    assert min(parts) > 0
    assert stats.seconds == pytest.approx(sum(parts))
    restored = json.loads(json.dumps(stats.as_dict(), allow_nan=False))
    assert restored["tokens"] == 100
    assert restored["accepted_by_depth"] == stats.accepted_by_depth


def test_mean_acceptance_probabilities_are_those_of_the_rows(backend: str) -> None:
    # One-hot drafts are accepted with p(x); the toy's rows are known.
    target = ToyModel(1)
    config = SamplerConfig(1.0, 1.0, 0)
    expected = []
    for seed in range(10):
        stream = speculative_generate(
            target,
            FixedDrafter([1, 2]),
            [3, 0],
            config=config,
            depth=2,
            max_tokens=3,
            seed=seed,
            backend=backend,
        )
        next(stream)
        first = plain_row(target.row([3, 0]), config, ())[1]
        second = plain_row(target.row([0, 1]), config, ())[2]
        means = stream.stats.mean_accept_probability_by_depth
        assert means[0] == pytest.approx(first)
        accepted = stream.stats.accepted_by_depth[0] == 1
        assert means[1] == pytest.approx(second) if accepted else math.isnan(means[1])
        expected.append(accepted)
    assert len(set(expected)) == 2


def test_the_kind_of_no_token_is_an_error(backend: str) -> None:
    stream = generate(ToyModel(1), [0], config=GREEDY, max_tokens=1, backend=backend)
    with pytest.raises(LookupError):
        _ = stream.kind
    next(stream)
    assert stream.kind == "bonus"


# --- depth policies


def test_a_policy_chooses_the_depth_and_observes(backend: str) -> None:
    class Alternating:
        def __init__(self) -> None:
            self.depths = iter([3, 0, -1, 2, 7, 7, 7, 7])
            self.observed: list[tuple[int, int]] = []

        @property
        def current_depth(self) -> int:
            return next(self.depths)

        def observe(self, attempted: int, accepted: int) -> None:
            self.observed.append((attempted, accepted))

    policy = Alternating()
    target = counting_model()
    stream = speculative_generate(
        target,
        ModelDrafter(counting_model(), backend=backend),
        [0],
        config=GREEDY,
        depth=1,
        max_tokens=20,
        policy=policy,
        backend=backend,
    )
    assert len(list(stream)) == 20
    assert [len(tokens) for _, tokens in target.calls] == [4, 1, 1, 3, 8, 3]
    assert policy.observed == [(3, 3), (0, 0), (0, 0), (2, 2), (7, 7), (2, 2)]


# --- errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "blok"}, "'blok'"),
        ({"backend": "cuda"}, "'cuda'"),
        ({"depth": 0}, "depth must be at least 1; got 0"),
        ({"depth": -3}, "-3"),
        ({"max_tokens": -1}, "-1"),
        ({"prompt": []}, "empty"),
        ({"seed": -1}, None),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_before_anything_is_decoded(
    changes: dict[str, Any], message: str | None
) -> None:
    target = ToyModel(1)
    target.calls = [("untouched", None)]
    arguments: dict[str, Any] = {
        "prompt": [0],
        "config": GREEDY,
        "max_tokens": 3,
        "backend": EXISTING[0],
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        speculative_generate(target, FixedDrafter(), arguments.pop("prompt"), **arguments)
    assert target.calls == [("untouched", None)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 1.5}, "depth must be an integer, not 1.5"),
        ({"max_tokens": "3"}, "max_tokens must be an integer, not '3'"),
        ({"prompt": ["a"]}, "a token of the prompt must be an integer, not 'a'"),
        ({"stop_tokens": [2.5]}, "a stop token must be an integer, not 2.5"),
        ({"stop_tokens": 3}, "stop_tokens must be a collection of tokens, not 3"),
        ({"seed": "x7"}, "seed must be a non-negative integer or None, not 'x7'"),
    ],
    ids=str,
)
def test_arguments_of_wrong_types_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "prompt": [0],
        "config": GREEDY,
        "max_tokens": 3,
        "backend": EXISTING[0],
        **changes,
    }
    with pytest.raises(TypeError, match=message):
        speculative_generate(ToyModel(1), FixedDrafter(), arguments.pop("prompt"), **arguments)


def test_the_drafter_refuses_an_unknown_backend() -> None:
    with pytest.raises(ValueError, match="'cuda'"):
        ModelDrafter(ToyModel(1), backend="cuda")  # type: ignore[arg-type]  # the error is the point


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (([1, 2, 3], None), "proposed 3 tokens; asked for at most 2"),
        (([1, 9], None), "proposed token 9"),
        (([1, -1], None), "proposed token -1"),
        (([1, 2], [np.full(4, 0.25)]), "1 rows for 2 tokens"),
    ],
    ids=["too many", "too large", "negative", "rows"],
)
def test_a_drafter_that_breaks_its_protocol_is_named(
    answer: tuple[list[int], list[np.ndarray] | None], message: str, backend: str
) -> None:
    class Broken(FixedDrafter):
        def propose(self, depth: int, config: SamplerConfig, rng: np.random.Generator) -> Any:
            return answer

    stream = speculative_generate(
        ToyModel(1), Broken(), [0], config=GREEDY, depth=2, max_tokens=9, backend=backend
    )
    with pytest.raises(ValueError, match=message):
        next(stream)
    assert stream.tokens == []
    assert next(stream, None) is None


def test_logits_of_a_wrong_shape_are_named(backend: str) -> None:
    class LastRowOnly(ToyModel):
        def forward(self, state: ToyState, tokens: Sequence[int]) -> np.ndarray:
            return super().forward(state, tokens)[-1:]

    stream = speculative_generate(
        LastRowOnly(1), FixedDrafter([1, 1]), [0], config=GREEDY, max_tokens=9, backend=backend
    )
    with pytest.raises(ValueError, match=r"shape \(1, 4\) for 3 tokens"):
        next(stream)


@pytest.mark.parametrize("config", [GREEDY, SamplerConfig(1.0, 0.9, 2), SamplerConfig(1.0, 1.0, 0)])
def test_logits_that_are_no_distribution_are_an_error(config: SamplerConfig, backend: str) -> None:
    target = ToyModel(1)
    target.table[0, 0, 2] = np.nan
    with pytest.raises(NonFiniteLogitsError):
        next(generate(target, [0, 0], config=config, max_tokens=3, backend=backend))


# --- interrupts


def test_an_interrupt_between_tokens_ends_nothing(backend: str) -> None:
    def decode() -> TokenStream:
        return speculative_generate(
            ToyModel(1),
            ModelDrafter(ToyModel(2), backend=backend),
            [0],
            config=SamplerConfig(1.0, 1.0, 0),
            max_tokens=30,
            seed=4,
            backend=backend,
        )

    def take(stream: TokenStream, n: int) -> None:
        for _ in range(n):
            tokens.append(next(stream))
        raise KeyboardInterrupt

    stream = decode()
    tokens: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        take(stream, 7)
    assert tokens + list(stream) == list(decode())


def test_an_interrupt_anywhere_in_a_block_leaves_whole_blocks(backend: str) -> None:
    """Raise KeyboardInterrupt at every line of the module in turn, as a signal handler would."""
    filename = sys.modules[TokenStream.__module__].__file__
    config = SamplerConfig(1.0, 1.0, 0, 0.2, 0.2)

    def interrupted_decode(line: int) -> tuple[TokenStream, int]:
        seen = 0

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal seen
            if frame.f_code.co_filename != filename:
                return None
            if event == "line":
                seen += 1
                if seen == line:
                    raise KeyboardInterrupt
            return trace

        stream = speculative_generate(
            ToyModel(1),
            ModelDrafter(ToyModel(2), backend=backend),
            [0],
            config=config,
            depth=2,
            max_tokens=8,
            seed=2,
            backend=backend,
        )
        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            for _ in stream:
                pass
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(previous)
        return stream, seen

    whole, lines = interrupted_decode(0)
    assert whole.stats.tokens == 8
    lengths = set()
    for line in range(1, lines + 1):
        stream, _ = interrupted_decode(line)
        tokens, kinds, stats = stream.tokens, stream.kinds, stream.stats
        assert tokens == whole.tokens[: len(tokens)]
        check_identities(stats, kinds)
        lengths.add(len(tokens))
        # What is handed out afterwards is the rest of the same text.
        rest = list(stream)
        assert stream.tokens == whole.tokens[: stats.tokens]
        assert stream.tokens[len(stream.tokens) - len(rest) :] == rest
        check_identities(stats, stream.kinds)
    assert len(lengths) > 2


def test_the_end_of_a_script_inside_a_model_is_not_the_end_of_the_text():
    class Scripted:
        vocab_size = 5

        def start(self, prompt):
            return None

        def forward(self, state, tokens):
            raise StopIteration

        def rollback(self, state, n):
            pass

    with pytest.raises(RuntimeError, match="StopIteration in the target's forward, after 0 tokens"):
        list(generate(Scripted(), [1], config=SamplerConfig(), max_tokens=5))
