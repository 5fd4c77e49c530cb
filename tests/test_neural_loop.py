"""The loop on a model with state: rollback to the bit, greedy and sampled text, ends, errors, interrupts.

The model is the transformer of `support.transformer`; its planted rollback bugs are caught by the same check
that it passes. Frequency tests: see `support.statistics` for the rate of false alarms.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.statistics import law_refuted
from support.transformer import (
    BUGS,
    EvictedTooEarly,
    OffByOne,
    PredictionHead,
    StaleRow,
    Transformer,
    normalised,
    rotated,
)

from mtplx.decoding import ModelDrafter, PromptLookupDrafter, TokenStream, generate, speculative_generate
from mtplx.distributions import SamplerConfig
from mtplx.reference import distribution_from_logits

GREEDY = SamplerConfig(temperature=0.0)
SAMPLED = SamplerConfig(1.0, 1.0, 0)
WINDOW = 8
DEPTHS = [1, 2, 3, 5, 8]
PROMPTS = [[1, 2, 3], [5, 5, 7, 9, 11], [20, 4, 20, 4, 20]]


@pytest.fixture(params=[None, WINDOW], ids=["whole text", "sliding window"])
def window(request: pytest.FixtureRequest) -> int | None:
    return request.param


# --- the model itself


def all_at_once(model: Transformer, tokens: Sequence[int]) -> np.ndarray:
    """The logits after each token, by attention as a masked matrix: an independent statement."""
    n = len(tokens)
    x = model.embedding[list(tokens)]
    i, j = np.mgrid[:n, :n]
    visible = (j <= i) if model.window is None else (j <= i) & (j > i - model.window)
    for layer in model.layers:
        y = np.array([normalised(row, layer["attention norm"]) for row in x])

        def heads(name: str, count: int, rows: np.ndarray, layer: Any = layer) -> np.ndarray:
            return (rows @ layer[name].T).reshape(n, count, model.head_size)

        q = np.array([rotated(row, at) for at, row in enumerate(heads("q", model.heads, y))])
        k = np.array([rotated(row, at) for at, row in enumerate(heads("k", model.key_heads, y))])
        v = heads("v", model.key_heads, y)
        k, v = (np.repeat(rows, model.heads // model.key_heads, axis=1) for rows in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(model.head_size)
        weights = np.where(visible, np.exp(scores - scores.max()), 0.0)
        weights /= weights.sum(axis=2, keepdims=True)
        x = x + np.einsum("hij,jhd->ihd", weights, v).reshape(n, model.width) @ layer["o"].T
        y = np.array([normalised(row, layer["feed norm"]) for row in x])
        gate = y @ layer["gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["up"].T)) @ layer["down"].T
    return np.array([model.unembedding @ normalised(row, model.final_norm) for row in x])


def random_text(seed: int, n: int, V: int = 24) -> list[int]:
    return np.random.default_rng(seed).integers(0, V, n).tolist()


def test_the_model_is_the_transformer_it_is_meant_to_be(window: int | None) -> None:
    model = Transformer(1, window=window)
    text = random_text(0, 30)
    logits = model.forward(model.start(text[:1]), text)
    # Some dozens of sums of dozens of terms, in another order.
    assert np.abs(logits - all_at_once(model, text)).max() < 1e-11
    assert np.abs(logits).max() > 1.0


def test_logits_do_not_depend_on_how_tokens_are_cut_into_calls(window: int | None) -> None:
    model = Transformer(1, window=window)
    text = random_text(1, 40)
    whole = model.forward(model.start(text[:2]), text[1:])
    for seed in range(5):
        cuts = [0, *sorted(np.random.default_rng(seed).integers(0, 39, 9).tolist()), 39]
        state = model.start(text[:2])
        parts = [model.forward(state, text[1:][a:b]) for a, b in itertools.pairwise(cuts)]
        assert np.concatenate(parts).tobytes() == whole.tobytes()


# --- rollback, to the bit


def first_difference(model: Transformer, seed: int, cycles: int = 10) -> int | None:
    """The first of the cycles "decode some, roll back k" after which the next logits are not those of a
    state that never decoded the k tokens; None if there is none."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, model.vocab_size, 3).tolist()
    state, pure = model.start(text), model.start(text)
    for cycle in range(cycles):
        k = int(rng.integers(1, 7))
        model.forward(state, rng.integers(0, model.vocab_size, k).tolist())
        model.rollback(state, k)
        new = rng.integers(0, model.vocab_size, int(rng.integers(1, 3))).tolist()
        if model.forward(state, new).tobytes() != model.forward(pure, new).tobytes():
            return cycle
    assert pure.position > WINDOW + 1, "the window's edge was not crossed"
    return None


@pytest.mark.parametrize("seed", range(8))
def test_after_a_rollback_the_logits_are_those_of_the_path_never_taken(seed: int, window: int | None) -> None:
    assert first_difference(Transformer(1, window=window), seed) is None


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
@pytest.mark.parametrize("seed", range(8))
def test_the_same_check_catches_planted_rollback_bugs(bug: type[Transformer], seed: int) -> None:
    cycle = first_difference(bug(1, window=WINDOW), seed)
    assert cycle is not None
    if bug is EvictedTooEarly:
        assert cycle > 0  # nothing is evicted before the window is full
    else:
        assert first_difference(bug(1), seed) == 0


@pytest.mark.parametrize("n", [-1, 13, 10**6])
def test_more_than_there_is_cannot_be_rolled_back(n: int, window: int | None) -> None:
    model = Transformer(1, window=window)
    text = random_text(2, 12)
    state = model.start([*text, 0])
    assert state.position == 12
    before = copy.deepcopy(state)
    with pytest.raises(ValueError, match=f"{n} tokens: 12 are decoded"):
        model.rollback(state, n)
    assert (state.position, len(state.hidden)) == (12, len(before.hidden))
    assert model.forward(state, [3, 4]).tobytes() == model.forward(before, [3, 4]).tobytes()


def test_what_the_window_has_lost_cannot_be_rolled_back() -> None:
    model = Transformer(1, window=WINDOW, slack=5)
    state = model.start(random_text(3, 40))
    before = copy.deepcopy(state)
    with pytest.raises(ValueError, match="rows are gone"):
        model.rollback(state, 7)
    assert model.forward(state, [3]).tobytes() == model.forward(before, [3]).tobytes()
    model.rollback(state, 1)
    model.rollback(before, 1)
    # What is kept reaches back this far: the row that leaves the window next is the oldest one.
    text = random_text(3, 40)[:-1]
    model.rollback(state, 5)
    assert model.forward(state, [9]).tobytes() == model.forward(model.start([*text[:-5], 9]), [9]).tobytes()


# --- drafters for it


def target_model(window: int | None) -> Transformer:
    return Transformer(1, window=window)


_HEADS: dict[int | None, PredictionHead] = {}


def a_drafter(name: str, target: Transformer) -> Any:
    if name == "model":
        return ModelDrafter(Transformer(1, window=target.window, noise=0.15))
    if name == "head":
        if target.window not in _HEADS:  # fitted once
            _HEADS[target.window] = PredictionHead(target_model(target.window))
        head = copy.copy(_HEADS[target.window])
        head.target = target
        return head
    return PromptLookupDrafter(2)


DRAFTERS = ["model", "head", "look-up"]


def speculate(target: Transformer, drafter: str, prompt: Sequence[int], **settings: Any) -> TokenStream:
    settings = {"config": GREEDY, "max_tokens": 60, **settings}
    return speculative_generate(target, a_drafter(drafter, target), prompt, **settings)


def check_state(stream: TokenStream, target: Transformer, prompt: Sequence[int]) -> None:
    """The target holds all tokens but the pending one, and answers as if it had decoded nothing else."""
    text = [*prompt, *stream.tokens]
    state = copy.deepcopy(target.latest)
    assert state.position == len(text) - 1
    logits = target.forward(state, text[-1:])
    fresh = copy.copy(target)
    assert logits.tobytes() == fresh.forward(fresh.start(text), text[-1:]).tobytes()


def check_statistics(stream: TokenStream) -> None:
    stats = stream.stats
    assert stats.tokens == len(stream.tokens) == len(stream.kinds)
    assert stats.drafted_by_depth == sorted(stats.drafted_by_depth, reverse=True)
    assert stats.drafted_tokens == sum(stats.drafted_by_depth)
    assert stats.accepted_tokens == stream.kinds.count("accepted") == sum(stats.accepted_by_depth)
    assert stats.correction_tokens == stream.kinds.count("correction") == sum(stats.rejected_by_depth)
    for drafted, tested, accepted, rejected in zip(
        stats.drafted_by_depth,
        stats.tested_by_depth,
        stats.accepted_by_depth,
        stats.rejected_by_depth,
        strict=True,
    ):
        assert accepted + rejected <= tested <= drafted
    for mean in stats.mean_accept_probability_by_depth:
        assert np.isnan(mean) or 0.0 <= mean <= 1.0 + 1e-12


# --- greedy


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_is_plain_text(drafter: str, depth: int, window: int | None) -> None:
    target = target_model(window)
    kinds = Counter[str]()
    for prompt in PROMPTS[:2]:
        plain = list(generate(target, prompt, config=GREEDY, max_tokens=60))
        stream = speculate(target, drafter, prompt, depth=depth)
        assert list(stream) == plain
        check_statistics(stream)
        check_state(stream, target, prompt)
        kinds.update(stream.kinds)
    assert kinds["accepted"] > 20
    assert kinds["correction"] > 5


@pytest.mark.parametrize("backend", ["compiled", "reference"])
@pytest.mark.parametrize("rule", ["exact", "greedy", "match", "block", "typical"])
def test_greedy_text_is_plain_text_under_every_rule(rule: Any, backend: Any) -> None:
    target = target_model(WINDOW)
    for drafter, prompt in itertools.product(DRAFTERS, PROMPTS[:2]):
        plain = list(generate(target, prompt, config=GREEDY, max_tokens=40))
        # Drafts are drawn, so that with one-hot target rows some are rejected.
        stream = speculate(
            target,
            drafter,
            prompt,
            rule=rule,
            depth=4,
            max_tokens=40,
            draft_config=SAMPLED,
            seed=1,
            backend=backend,
        )
        assert list(stream) == plain
        check_statistics(stream)
        check_state(stream, target, prompt)
        assert min(stream.stats.accepted_tokens, stream.stats.correction_tokens) > 0
        if rule == "block":
            assert stream.stats.tested_by_depth == stream.stats.drafted_by_depth


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_greedy_text_betrays_planted_rollback_bugs(bug: type[Transformer]) -> None:
    differ = 0
    for prompt in PROMPTS:
        plain = list(generate(target_model(WINDOW), prompt, config=GREEDY, max_tokens=60))
        stream = speculative_generate(
            bug(1, window=WINDOW),
            a_drafter("model", target_model(WINDOW)),
            prompt,
            config=GREEDY,
            depth=5,
            max_tokens=60,
        )
        differ += list(stream) != plain
    assert differ == len(PROMPTS)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_with_penalties_is_plain_text(drafter: str, window: int | None) -> None:
    config = replace(GREEDY, presence_penalty=0.4, frequency_penalty=0.3)
    target = target_model(window)
    accepted = 0
    for prompt, depth in zip(PROMPTS, (2, 4, 8), strict=True):
        plain = list(generate(target, prompt, config=config, max_tokens=60))
        stream = speculate(target, drafter, prompt, config=config, depth=depth)
        assert list(stream) == plain
        check_state(stream, target, prompt)
        assert plain != list(generate(target, prompt, config=GREEDY, max_tokens=60))
        accepted += stream.stats.accepted_tokens
    assert accepted > 5


# --- the ends of texts


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_stop_token_ends_the_text_wherever_it_stands_in_a_block(drafter: str) -> None:
    target = target_model(None)
    kinds = Counter[str]()
    for prompt, depth in zip(itertools.cycle(PROMPTS), DEPTHS, strict=False):
        plain = list(generate(target, prompt, config=GREEDY, max_tokens=40))
        for stop in sorted(set(plain)):
            stream = speculate(target, drafter, prompt, depth=depth, max_tokens=40, stop_tokens={stop})
            assert list(stream) == plain[: plain.index(stop) + 1]
            check_state(stream, target, prompt)
            kinds[stream.kinds[-1]] += 1
    # What occurs for the first time cannot be copied, so look-up drafts no stop token but one of the prompt.
    ends = ("correction", "bonus") if drafter == "look-up" else ("accepted", "correction", "bonus")
    assert min(kinds[kind] for kind in ends) > 0


@pytest.mark.parametrize("depth", [1, 3, 8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_never_a_token_more_or_less_than_asked_for(drafter: str, depth: int) -> None:
    target = target_model(WINDOW)
    plain = list(generate(target, PROMPTS[1], config=GREEDY, max_tokens=14))
    for max_tokens in range(15):
        stream = speculate(target, drafter, PROMPTS[1], depth=depth, max_tokens=max_tokens)
        assert list(stream) == plain[:max_tokens]
        assert next(stream, None) is None
        check_state(stream, target, PROMPTS[1])


# --- sampled


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_same_seed_same_tokens(drafter: str, window: int | None) -> None:
    texts = {}
    for seed, depth in itertools.product((0, 0, 1), (2, 5)):
        target = target_model(window)
        stream = speculate(target, drafter, PROMPTS[2], config=SAMPLED, depth=depth, seed=seed)
        text = list(stream)
        assert texts.setdefault((seed, depth), text) == text
        check_statistics(stream)
        check_state(stream, target, PROMPTS[2])
        assert min(stream.stats.accepted_tokens, stream.stats.correction_tokens) > 0
    assert texts[0, 2] != texts[1, 2]


class Small(Transformer):
    """Three tokens, a window of four positions that the text crosses. What was decoded once is kept."""

    settings: dict[str, Any] = {  # noqa: RUF012  (a constant)
        "vocab_size": 3,
        "width": 8,
        "layers": 1,
        "heads": 2,
        "key_heads": 1,
        "hidden": 8,
        "window": 4,
        "slack": 4,
        "sharpness": 1.0,
    }

    def __init__(self, **changes: Any) -> None:
        super().__init__(4, **{**self.settings, **changes})
        self._started: dict[tuple[int, ...], Any] = {}

    def start(self, prompt: Sequence[int]) -> Any:
        key = tuple(prompt)
        if key not in self._started:
            self._started[key] = super().start(prompt)
        self.latest = copy.deepcopy(self._started[key])
        return self.latest


class SmallStaleRow(Small, StaleRow):
    pass


class SmallOffByOne(Small, OffByOne):
    pass


LENGTH = 4
SMALL_PROMPT = [0, 1, 2]
SAMPLES = 1200


def law_of_plain_text(config: SamplerConfig) -> np.ndarray:
    """Probabilities of all texts of LENGTH tokens, in the order of `itertools.product`."""
    model = Small()
    law = []
    for text in itertools.product(range(3), repeat=LENGTH):
        rows = model.forward(model.start(SMALL_PROMPT), [SMALL_PROMPT[-1], *text[:-1]])
        shares = [distribution_from_logits(row, config)[token] for row, token in zip(rows, text, strict=True)]
        law.append(np.prod(shares))
    assert np.isclose(sum(law), 1.0)
    return np.array(law)


def counts_of_texts(
    target: Transformer,
    drafter: Any,
    config: SamplerConfig,
    *,
    rule: Any = "exact",
    depth: int = 2,
    make_policy: Any = lambda: None,
) -> tuple[np.ndarray, Counter]:
    counts = np.zeros(3**LENGTH)
    kinds = Counter[str]()
    for seed in range(SAMPLES):
        stream = speculative_generate(
            target,
            drafter,
            SMALL_PROMPT,
            config=config,
            draft_config=SamplerConfig(1.4, 1.0, 0),
            depth=depth,
            rule=rule,
            policy=make_policy(),
            max_tokens=LENGTH,
            seed=seed,
        )
        counts[int("".join(map(str, stream)), 3)] += 1
        kinds.update(stream.kinds)
    return counts, kinds


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sampled_text_has_the_law_of_plain_text(drafter: str) -> None:
    target = Small()
    drafters = {
        "model": lambda: ModelDrafter(Small(noise=0.3)),
        "head": lambda: PredictionHead(target, tokens=200),
        "look-up": lambda: PromptLookupDrafter(1),
    }
    counts, kinds = counts_of_texts(target, drafters[drafter](), SAMPLED)
    assert not law_refuted(counts, law_of_plain_text(SAMPLED))
    assert min(kinds[kind] for kind in ("accepted", "correction", "bonus")) > SAMPLES / 20


@pytest.mark.parametrize("rule", ["block", "match"])
def test_other_lossless_rules_keep_the_law_too(rule: str) -> None:
    # Three drafts: two would not show a wrong block rule.
    counts, kinds = counts_of_texts(Small(), ModelDrafter(Small(noise=0.3)), SAMPLED, rule=rule, depth=3)
    assert not law_refuted(counts, law_of_plain_text(SAMPLED))
    assert min(kinds[kind] for kind in ("accepted", "correction", "bonus")) > SAMPLES / 20


def test_the_frequencies_betray_a_lossy_rule() -> None:
    counts, _ = counts_of_texts(Small(), ModelDrafter(Small(noise=0.3)), SAMPLED, rule="typical")
    assert law_refuted(counts, law_of_plain_text(SAMPLED))


class Erratic:
    """Depth and draft temperature that follow what was accepted, as fast as can be."""

    current_depth = 1
    current_temperature = 0.4

    def observe(self, attempted: int, accepted: int) -> None:
        self.current_depth = 1 + 2 * (accepted == attempted)
        self.current_temperature = 0.4 + accepted


def test_policies_keep_the_law() -> None:
    counts, kinds = counts_of_texts(Small(), ModelDrafter(Small(noise=0.3)), SAMPLED, make_policy=Erratic)
    assert not law_refuted(counts, law_of_plain_text(SAMPLED))
    assert min(kinds[kind] for kind in ("accepted", "correction", "bonus")) > SAMPLES / 20


class Picky(ModelDrafter):
    """The planted fault: whether a draft is shown depends on the draft, so that its row is not its law."""

    def propose(self, depth: int, config: SamplerConfig, rng: np.random.Generator, /) -> Any:
        drafts, rows = super().propose(depth, config, rng)
        return (drafts, rows) if drafts[0] == 0 else ([], [])


def test_the_frequencies_betray_a_depth_that_looks_at_the_drafts() -> None:
    counts, _ = counts_of_texts(Small(), Picky(Small(noise=0.3)), SAMPLED)
    assert law_refuted(counts, law_of_plain_text(SAMPLED))


@pytest.mark.parametrize("bug", [SmallStaleRow, SmallOffByOne], ids=lambda bug: bug.__name__)
def test_the_frequencies_betray_planted_rollback_bugs(bug: type[Small]) -> None:
    counts, _ = counts_of_texts(bug(), ModelDrafter(Small(noise=0.3)), SAMPLED)
    assert law_refuted(counts, law_of_plain_text(SAMPLED))


# --- errors and interrupts in the middle


class Breaking(Transformer):
    """Raises while it decodes its n-th token since the prompt, in the middle of the layers."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.left = -1
        self.error: BaseException = RuntimeError("the accelerator is on fire")

    def start(self, prompt: Sequence[int]) -> Any:
        left, self.left = self.left, -1
        state = super().start(prompt)
        self.left = left
        return state

    def _attend(self, layer: Any, cache: Any, x: Any, position: int) -> np.ndarray:
        if layer is self.layers[-1]:
            self.left -= 1
            if self.left == 0:
                raise self.error
        return super()._attend(layer, cache, x, position)


@pytest.mark.parametrize("error", [RuntimeError("the accelerator is on fire"), KeyboardInterrupt()])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_model_that_raises_leaves_whole_blocks(drafter: str, error: BaseException) -> None:
    whole = speculate(target_model(WINDOW), drafter, PROMPTS[0], config=SAMPLED, seed=3)
    text = list(whole)
    lengths = set()
    for at in range(1, 40):
        target = Breaking(1, window=WINDOW)
        target.left, target.error = at, type(error)(*error.args)
        stream = speculate(target, drafter, PROMPTS[0], config=SAMPLED, seed=3)
        handed_out: list[int] = []
        with pytest.raises(type(error)) as caught:
            handed_out.extend(stream)
        assert caught.value is target.error
        if isinstance(error, Exception):
            assert caught.value.__notes__ == [
                f"in the target's forward, after {len(handed_out)} tokens: the stream has ended"
            ]
        assert handed_out == stream.tokens == text[: len(handed_out)]
        assert list(stream) == []
        check_statistics(stream)
        # The model itself is as it was before the call that failed, and can be used again.
        check_state(stream, target, PROMPTS[0])
        lengths.add(len(handed_out))
    assert len(lengths) > 5


@pytest.mark.parametrize("at", range(1, 9))
def test_a_draft_model_that_raises_can_be_asked_again(at: int) -> None:
    def propose(drafter: ModelDrafter) -> tuple[list[int], list[bytes]]:
        drafts, rows = drafter.propose(4, SAMPLED, np.random.default_rng(7))
        return drafts, [np.asarray(row).tobytes() for row in rows]

    model = Breaking(1)
    drafter, other = ModelDrafter(model), ModelDrafter(target_model(None))
    for each in (drafter, other):
        each.start(PROMPTS[0])
        first = propose(each)[0]
        each.commit([*first[:2], 3])
    model.left = at
    failures = 0
    for _ in range(2):
        try:
            proposed = propose(drafter)
        except RuntimeError:
            failures += 1
        else:
            assert proposed == propose(other)
    assert failures == 1
    drafter.commit([6, 6])
    other.commit([6, 6])
    assert propose(drafter) == propose(other)


def test_a_rollback_that_is_refused_ends_the_stream_with_a_note() -> None:
    target = Transformer(1, window=WINDOW, slack=1)
    stream = speculate(target, "model", PROMPTS[0], config=SAMPLED, depth=8, seed=3)
    with pytest.raises(ValueError, match="rows are gone") as caught:
        list(stream)
    assert caught.value.__notes__[0].startswith("in the target's rollback, after ")
    check_statistics(stream)
    assert next(stream, None) is None
