"""The speculative decode loop, its protocols, and its statistics.

Design
------
One loop serves both functions: plain decoding is speculative decoding whose blocks hold no drafts. A
block is one call of the target model::

    drafts d1..dK with rows q1..qK          drafter.propose
    logits after [pending, d1, .., dK]      target.forward      K + 1 rows
    j accepted drafts and one more token    acceptance rule
    drop the K - j drafts behind them       target.rollback
    tell the drafter what was committed     drafter.commit

The last committed token is always *pending*: it is not in the target's state yet, and opens the next
call. So the row that judges the first draft and the rows that judge the others come out of one call.

**Law.** Under a lossless rule the committed tokens have the law of plain decoding, whatever the drafter
does, if (1) `q_i` is the distribution that `d_i` was drawn from, given everything before it, and (2) the
coins are independent of the drafts. Hence two generators: the drafter's and the verifier's are children
0 and 1 of ``numpy.random.SeedSequence(seed)``. Handing out the tokens of a block one at a time changes
nothing, since all of them are decided before the first is handed out; neither does a caller who stops.
Nor do policies: they choose depth and draft temperature of a block by what happened in the blocks before
it. A draft that its own row says was impossible breaks (1), and is an error.

**Consistency.** A block takes effect at one instant, when the statistics take it up: `TokenStream` shows
as many tokens as the statistics count. An exception inside a block, KeyboardInterrupt included, leaves
the tokens and the statistics of all blocks before it, and ends the stream, because the models' states
are then anyone's guess. The exception is the one that was raised, with a note that tells where. An
exception in the caller's own code, between two tokens, ends nothing.

References
----------
Y. Leviathan, M. Kalman, Y. Matias, "Fast Inference from Transformers via Speculative Decoding",
arXiv:2211.17192. C. Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling",
arXiv:2302.01318.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Literal, Protocol, TypeVar, cast

import numpy as np

from mtplx.arguments import as_count, as_integer
from mtplx.decisions import BlockDecision, Rule, as_rule
from mtplx.distributions import (
    BatchedSparseDistributions,
    Distribution,
    SamplerConfig,
    SparseDistribution,
)

__all__ = [
    "CallableDrafter",
    "DepthPolicy",
    "DraftTemperaturePolicy",
    "Drafter",
    "GenerationStats",
    "ModelDrafter",
    "Policy",
    "PromptLookupDrafter",
    "TargetModel",
    "TokenKind",
    "TokenStream",
    "generate",
    "speculative_generate",
]

TokenKind = Literal["accepted", "correction", "bonus"]
"""How a token was committed: an accepted draft, the draw that replaced a rejected one, or the draw that
follows a block without a rejection (every token of plain decoding is one)."""

BackendName = Literal["compiled", "reference"]

StateT = TypeVar("StateT")


class TargetModel(Protocol[StateT]):
    """A language model that the loop can decode with."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, V."""

    def start(self, prompt: Sequence[int], /) -> StateT:
        """Decode all but the last token of `prompt`; ValueError if it is empty."""

    def forward(self, state: StateT, tokens: Sequence[int], /) -> Any:
        """Append `tokens` to `state` and give the logits after each: an array of shape [n, V].

        The loop has read the rows before it calls the model again, so they may be a view of a buffer.
        """

    def rollback(self, state: StateT, n: int, /) -> None:
        """Un-decode the last `n` tokens exactly, or raise ValueError and change nothing."""


class Drafter(Protocol):
    """A source of drafts."""

    def start(self, prompt: Sequence[int], /) -> None:
        """Begin a text. Everything said before is forgotten."""

    def propose(
        self, depth: int, config: SamplerConfig, rng: np.random.Generator, /
    ) -> tuple[Sequence[int], Sequence[Distribution] | BatchedSparseDistributions | None]:
        """Draft at most `depth` tokens after the committed ones.

        Gives the drafts and, for each, the distribution it was drawn from given the drafts before it;
        None stands for point masses (tokens that were copied or chosen, not drawn). Fewer tokens are
        fine, none at all too, but whether to draft one more may depend only on what was there before it
        was drawn: a drawn draft that is dropped since its probability is low makes the text differ from
        the target's law. (Stop behind such a draft, not before it.)
        """

    def commit(self, tokens: Sequence[int], /) -> None:
        """Take note of the tokens that follow the committed ones: accepted drafts, then one draw."""


class DepthPolicy(Protocol):
    """Chooses how many tokens to draft."""

    @property
    def current_depth(self) -> int:
        """Depth of the next block; 0 or less drafts nothing."""

    def observe(self, attempted: int, accepted: int, /) -> None:
        """Learn that `accepted` of the `attempted` drafts of a block were accepted; 0 of 0 if none were."""


class DraftTemperaturePolicy(Protocol):
    """Chooses the temperature that drafts are drawn at."""

    @property
    def current_temperature(self) -> float:
        """Draft temperature of the next block."""

    def observe(self, attempted: int, accepted: int, /) -> None:
        """Learn that `accepted` of the `attempted` drafts of a block were accepted; 0 of 0 if none were."""


Policy = DepthPolicy | DraftTemperaturePolicy
"""What `speculative_generate` takes as ``policy``: see `mtplx.policy`. One object may be both."""


class _Backend(Protocol):
    """What the loop needs of `mtplx.sampling` and of `mtplx.reference`."""

    def distribution_from_logits(
        self, logits: Any, config: SamplerConfig, *, token_counts: Mapping[int, int] | None
    ) -> Distribution: ...

    def sparse_distribution_from_logits(
        self, logits: Any, config: SamplerConfig, *, token_counts: Mapping[int, int] | None
    ) -> SparseDistribution: ...

    def sample_from_distribution(self, probs: Distribution, rng: np.random.Generator) -> int: ...

    def verify_block(
        self,
        target: Any,
        draft: Any,
        draft_tokens: Sequence[int],
        rng: np.random.Generator,
        *,
        rule: Rule,
        check_draft: bool,
    ) -> BlockDecision: ...


_BACKENDS = {
    "compiled": ("mtplx.sampling", "mtplx.verification"),
    "reference": ("mtplx.reference", "mtplx.reference"),
}


def _load_backend(name: str) -> _Backend:
    if name not in _BACKENDS:
        raise ValueError(f"unknown backend {name!r}; known are {', '.join(map(repr, _BACKENDS))}")
    sampling, verification = map(importlib.import_module, _BACKENDS[name])
    names = ("distribution_from_logits", "sparse_distribution_from_logits", "sample_from_distribution")
    functions = {function: getattr(sampling, function) for function in names}
    return cast(_Backend, SimpleNamespace(**functions, verify_block=verification.verify_block))


def _distribution(
    backend: _Backend, logits: Any, config: SamplerConfig, token_counts: Mapping[int, int] | None = None
) -> Distribution:
    # Sparse and dense forms hold the same numbers and decide alike; with top-k on the sparse one saves
    # writing V of them.
    if config.top_k is not None and 0 < config.top_k < len(logits):
        return backend.sparse_distribution_from_logits(logits, config, token_counts=token_counts)
    return backend.distribution_from_logits(logits, config, token_counts=token_counts)


class ModelDrafter:
    """A language model, usually a smaller one, as a drafter.

    Parameters
    ----------
    model : TargetModel
        Decodes one draft a call. Its vocabulary must be the target's.
    backend : {"compiled", "reference"}
        Module that turns its logits into distributions and draws from them.

    Raises
    ------
    ValueError
        If `backend` is unknown.

    Examples
    --------
    >>> import numpy as np
    >>> from mtplx.distributions import SamplerConfig
    >>> from mtplx.models.ngram import NGramModel
    >>> drafter = ModelDrafter(NGramModel([0, 1, 2] * 4, vocab_size=3, order=2), backend="reference")
    >>> drafter.start([2, 0])
    >>> tokens, rows = drafter.propose(3, SamplerConfig(temperature=0.0), np.random.default_rng(0))
    >>> tokens, len(rows)
    ([1, 2, 0], 3)
    """

    def __init__(self, model: TargetModel[Any], *, backend: BackendName = "compiled") -> None:
        self.model = model
        self._backend = _load_backend(backend)
        self._state: Any = None
        # Committed tokens that the state does not hold yet, and the tokens it holds that may still be
        # rejected, with the committed token before them. One of the two lists is always empty.
        self._pending: list[int] = []
        self._ahead: list[int] = []

    def start(self, prompt: Sequence[int], /) -> None:
        """Decode all but the last token of `prompt`; ValueError if it is empty."""
        self._state = self.model.start(prompt)
        self._pending = [prompt[-1]]
        self._ahead = []

    def propose(
        self, depth: int, config: SamplerConfig, rng: np.random.Generator, /
    ) -> tuple[list[int], list[Distribution]]:
        """Draw `depth` tokens and give them with the distributions they were drawn from.

        Penalties in `config` do not apply: the loop's target counts tokens, a drafter does not.
        """
        self.commit(())
        drafts: list[int] = []
        rows: list[Distribution] = []
        new = self._pending
        # The last draft is drawn but not decoded: most often nobody asks for the row after it.
        for _ in range(depth):
            logits = self.model.forward(self._state, new)
            # At once, so that a later exception finds the lists telling what the state holds.
            self._ahead.append(new[-1])
            self._pending = []
            row = _distribution(self._backend, logits[-1], config)
            token = self._backend.sample_from_distribution(row, rng)
            drafts.append(token)
            rows.append(row)
            new = [token]
        return drafts, rows

    def commit(self, tokens: Sequence[int], /) -> None:
        """Keep of the drafts what `tokens` confirms and roll the model back over the others."""
        committed = (self._ahead[:1] or self._pending) + list(tokens)
        kept = 0
        # One committed token stays out of the state: the next row is the one after it.
        for decoded, token in zip(self._ahead, committed[:-1], strict=False):
            if decoded != token:
                break
            kept += 1
        if kept < len(self._ahead):
            self.model.rollback(self._state, len(self._ahead) - kept)
        self._ahead = []
        self._pending = committed[kept:]


class PromptLookupDrafter:
    """Copies what followed the text's last few tokens where they occurred before.

    The longest ending of at most `max_ngram` tokens that occurred before is looked up, where it occurred
    last, and what followed it is drafted. A copy that reaches the end of the text goes on with its own
    drafts, so that a text that repeats itself is continued to any depth. Nothing is drafted when not even
    the last `min_ngram` tokens occurred before. Drafts are point masses: they are chosen, not drawn.

    One dictionary entry a token and length: proposals cost the same however long the text is.

    Parameters
    ----------
    max_ngram, min_ngram : int
        Longest and shortest ending that is looked up, ``1 <= min_ngram <= max_ngram``.

    Raises
    ------
    ValueError
        If `min_ngram` is below 1 or above `max_ngram`.

    References
    ----------
    N. Yang et al., "Inference with Reference: Lossless Acceleration of Large Language Models",
    arXiv:2304.04487.

    Examples
    --------
    >>> import numpy as np
    >>> from mtplx.distributions import SamplerConfig
    >>> drafter = PromptLookupDrafter()
    >>> drafter.start([5, 6, 7, 8, 5, 6])
    >>> drafter.propose(3, SamplerConfig(), np.random.default_rng(0))
    ([7, 8, 5], None)
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= as_integer(min_ngram, "min_ngram") <= as_integer(max_ngram, "max_ngram"):
            raise ValueError(
                f"1 <= min_ngram <= max_ngram is needed; got min_ngram {min_ngram} and max_ngram {max_ngram}"
            )
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self._text: list[int] = []
        # Where each n-gram was followed last: the index of the token behind it.
        self._followed_at: dict[tuple[int, ...], int] = {}

    def start(self, prompt: Sequence[int], /) -> None:
        """Begin a text with `prompt`, which is looked up in as well."""
        self._text = []
        self._followed_at = {}
        self.commit(prompt)

    def propose(
        self, depth: int, config: SamplerConfig, rng: np.random.Generator, /
    ) -> tuple[list[int], None]:
        """Copy `depth` tokens, or none; `config` and `rng` play no part."""
        size = len(self._text)
        for n in range(min(self.max_ngram, size), self.min_ngram - 1, -1):
            source = self._followed_at.get(tuple(self._text[size - n :]))
            if source is not None:
                drafts = self._text[source : source + depth]
                period = size - source
                while len(drafts) < depth:
                    drafts.append(drafts[-period])
                return drafts, None
        return [], None

    def commit(self, tokens: Sequence[int], /) -> None:
        """Append `tokens` to the text."""
        for token in tokens:
            size = len(self._text)
            for n in range(self.min_ngram, min(self.max_ngram, size) + 1):
                self._followed_at[tuple(self._text[size - n :])] = size
            self._text.append(token)


class CallableDrafter:
    """A function of the text as a drafter, for drafts that need no state of their own.

    Parameters
    ----------
    function : callable
        Called as ``function(text, depth, config, rng)`` with the tokens of prompt and completion (a list of
        its own), the largest number of drafts, the draft's `SamplerConfig`, and the generator to draw from
        (no other: same seed, same tokens). It gives what `Drafter.propose` gives: ``(tokens, rows)``, rows
        of shape [len(tokens), V], each the distribution that the token was drawn from, or None for point
        masses. A token that was drawn may not be dropped for what it is.

    Raises
    ------
    TypeError
        If `function` cannot be called.

    Examples
    --------
    >>> import numpy as np
    >>> from mtplx.distributions import SamplerConfig
    >>> drafter = CallableDrafter(lambda text, depth, config, rng: ([text[-1] + 1] * depth, None))
    >>> drafter.start([3, 4])
    >>> drafter.propose(2, SamplerConfig(), np.random.default_rng(0))
    ([5, 5], None)
    """

    def __init__(
        self,
        function: Callable[
            [list[int], int, SamplerConfig, np.random.Generator],
            tuple[Sequence[int], Sequence[Distribution] | BatchedSparseDistributions | None],
        ],
    ) -> None:
        if not callable(function):
            raise TypeError(f"a function is needed; got {function!r}")
        self.function = function
        self._text: list[int] = []

    def start(self, prompt: Sequence[int], /) -> None:
        """Begin a text with `prompt`."""
        self._text = list(prompt)

    def propose(
        self, depth: int, config: SamplerConfig, rng: np.random.Generator, /
    ) -> tuple[Sequence[int], Sequence[Distribution] | BatchedSparseDistributions | None]:
        """Call the function."""
        return self.function(list(self._text), depth, config, rng)

    def commit(self, tokens: Sequence[int], /) -> None:
        """Append `tokens` to the text."""
        self._text += tokens


@dataclass
class GenerationStats:
    """What a decode did so far; it grows by whole blocks while the text is decoded.

    Lists are by depth: entry 0 belongs to the first draft of a block. Drafts behind a rejection are
    drafted, but neither accepted nor rejected. Every token is an accepted draft, a correction, or a bonus.

    Attributes
    ----------
    drafted_by_depth, accepted_by_depth, rejected_by_depth : list of int
        Drafts that the target's call covered, and what became of them.
    tested_by_depth : list of int
        Drafts whose acceptance probability was computed: those up to the first rejection, and under the
        block rule all.
    accept_probability_sums : list of float
        Sum of the acceptance probabilities of the tested drafts.
    correction_tokens, bonus_tokens : int
        Tokens drawn after a rejection, and after a block without one.
    target_calls : int
        Calls of the target's ``forward``.
    draft_seconds, target_seconds, sampling_seconds, rollback_seconds : float
        Time in the drafter (its ``commit`` included), in the target's ``start`` and ``forward``, in the
        target's distributions with verification, and in the target's ``rollback``.
    """

    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    rejected_by_depth: list[int] = field(default_factory=list)
    tested_by_depth: list[int] = field(default_factory=list)
    accept_probability_sums: list[float] = field(default_factory=list)
    correction_tokens: int = 0
    bonus_tokens: int = 0
    target_calls: int = 0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    sampling_seconds: float = 0.0
    rollback_seconds: float = 0.0

    @property
    def drafted_tokens(self) -> int:
        """Number of drafts."""
        return sum(self.drafted_by_depth)

    @property
    def accepted_tokens(self) -> int:
        """Number of accepted drafts."""
        return sum(self.accepted_by_depth)

    @property
    def tokens(self) -> int:
        """Number of committed tokens."""
        return self.accepted_tokens + self.correction_tokens + self.bonus_tokens

    @property
    def tokens_per_target_call(self) -> float:
        """Committed tokens per call of the target; NaN before the first call."""
        return self.tokens / self.target_calls if self.target_calls else math.nan

    @property
    def mean_accept_probability_by_depth(self) -> list[float]:
        """Mean acceptance probability of the tested drafts; NaN where none was tested.

        Under the block rule that of draft i is the probability of the whole prefix that ends with it.
        """
        return [
            total / count if count else math.nan
            for total, count in zip(self.accept_probability_sums, self.tested_by_depth, strict=True)
        ]

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share that was accepted where all drafts before were; NaN where that never was."""
        return [
            accepted / (accepted + rejected) if accepted + rejected else math.nan
            for accepted, rejected in zip(self.accepted_by_depth, self.rejected_by_depth, strict=True)
        ]

    @property
    def seconds(self) -> float:
        """Time in draft, target, sampling and rollback together."""
        return self.draft_seconds + self.target_seconds + self.sampling_seconds + self.rollback_seconds

    def as_dict(self) -> dict[str, Any]:
        """Give all numbers, derived ones too, as plain values that JSON can hold (None for NaN)."""

        def plain(value: float) -> float | None:
            return None if math.isnan(value) else value

        return {
            "tokens": self.tokens,
            "target_calls": self.target_calls,
            "tokens_per_target_call": plain(self.tokens_per_target_call),
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "correction_tokens": self.correction_tokens,
            "bonus_tokens": self.bonus_tokens,
            "drafted_by_depth": list(self.drafted_by_depth),
            "accepted_by_depth": list(self.accepted_by_depth),
            "rejected_by_depth": list(self.rejected_by_depth),
            "tested_by_depth": list(self.tested_by_depth),
            "acceptance_by_depth": list(map(plain, self.acceptance_by_depth)),
            "mean_accept_probability_by_depth": list(map(plain, self.mean_accept_probability_by_depth)),
            "draft_seconds": self.draft_seconds,
            "target_seconds": self.target_seconds,
            "sampling_seconds": self.sampling_seconds,
            "rollback_seconds": self.rollback_seconds,
        }

    def _add_block(
        self, drafted: int, verdict: _Verdict, draft: float, target: float, sampling: float, rollback: float
    ) -> None:
        depth = max(drafted, len(self.drafted_by_depth))
        after: dict[str, Any] = {
            name: getattr(self, name) + [0] * (depth - len(getattr(self, name)))
            for name in ("drafted_by_depth", "accepted_by_depth", "rejected_by_depth", "tested_by_depth")
        }
        sums = self.accept_probability_sums + [0.0] * (depth - len(self.accept_probability_sums))
        for i in range(drafted):
            after["drafted_by_depth"][i] += 1
        for i in range(verdict.accepted):
            after["accepted_by_depth"][i] += 1
        if verdict.last == "correction":
            after["rejected_by_depth"][verdict.accepted] += 1
        for i, probability in enumerate(verdict.accept_probabilities):
            sums[i] += probability
            after["tested_by_depth"][i] += 1
        after["accept_probability_sums"] = sums
        after["correction_tokens"] = self.correction_tokens + (verdict.last == "correction")
        after["bonus_tokens"] = self.bonus_tokens + (verdict.last == "bonus")
        after["target_calls"] = self.target_calls + 1
        after["draft_seconds"] = self.draft_seconds + draft
        after["target_seconds"] = self.target_seconds + target
        after["sampling_seconds"] = self.sampling_seconds + sampling
        after["rollback_seconds"] = self.rollback_seconds + rollback
        # One call into C: a signal handler runs before it or after it, and sees all of a block or nothing.
        self.__dict__.update(after)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What a rule made of a block: `tokens` are the accepted drafts, then the last token, if any.

    `last` is None when the block ends with an accepted draft that ends the text.
    """

    tokens: list[int]
    accepted: int
    accept_probabilities: list[float]
    last: TokenKind | None


@dataclass(frozen=True, slots=True)
class _Block:
    """A drafted block for an acceptance rule: K drafts, K draft rows or None, and the target's logits.

    There are K + 1 rows of logits, or K: then no token may follow the drafts. `token_counts` counts the
    completion before the block; None when penalties are off.
    """

    drafts: list[int]
    draft_rows: Sequence[Distribution] | None
    target_logits: Any
    token_counts: dict[int, int] | None


class _TargetRows:
    """The target's rows as distributions, each computed when the rule reaches it.

    Row i sees the completion before the block and the drafts before i.
    """

    def __init__(self, backend: _Backend, block: _Block, config: SamplerConfig) -> None:
        self._backend = backend
        self._block = block
        self._config = config

    def __len__(self) -> int:
        return len(self._block.target_logits)

    def __getitem__(self, i: int) -> Distribution:
        counts = self._block.token_counts
        if counts is not None:
            counts = dict(counts)
            for token in self._block.drafts[:i]:
                counts[token] = counts.get(token, 0) + 1
        return _distribution(self._backend, self._block.target_logits[i], self._config, counts)


def _verify(
    backend: _Backend, block: _Block, config: SamplerConfig, rule: Rule, rng: np.random.Generator
) -> _Verdict:
    """Verify a block in one call; rows behind the first rejection never become distributions."""
    rows = _TargetRows(backend, block, config)
    decision = backend.verify_block(rows, block.draft_rows, block.drafts, rng, rule=rule, check_draft=True)
    last: TokenKind | None = None
    if decision.bonus:
        last = "bonus"
    elif len(decision.tokens) > decision.accepted:
        last = "correction"
    return _Verdict(decision.tokens.tolist(), decision.accepted, decision.accept_probabilities.tolist(), last)


def _chooses(policy: Any, attribute: str) -> bool:
    # Not hasattr: the property of a policy may do what is meant for once a block.
    return inspect.getattr_static(policy, attribute, None) is not None


def _as_policies(policy: Any) -> tuple[list[Any], DepthPolicy | None, DraftTemperaturePolicy | None]:
    """All policies, the one that chooses the depth, and the one that chooses the draft temperature."""
    policies = [] if policy is None else list(policy) if isinstance(policy, list | tuple) else [policy]
    depth = [each for each in policies if _chooses(each, "current_depth")]
    temperature = [each for each in policies if _chooses(each, "current_temperature")]
    for each in policies:
        chooses = any(each is choosing for choosing in depth + temperature)
        if not chooses or isinstance(each, type) or not callable(getattr(each, "observe", None)):
            raise TypeError(
                f"{each!r} is no policy: it needs observe(), and current_depth or current_temperature"
            )
    for choosing, what in ((depth, "depth"), (temperature, "draft temperature")):
        if len(choosing) > 1:
            raise ValueError(f"{len(choosing)} policies choose the {what}: {choosing}")
    return policies, depth[0] if depth else None, temperature[0] if temperature else None


class TokenStream(Iterator[int]):
    """An iterator of committed tokens that decodes as it is asked.

    Made by `generate` and `speculative_generate`. See *Consistency* at the head of the module for what an
    interrupt leaves.

    Attributes
    ----------
    stats : GenerationStats
        Statistics of the blocks decoded so far, the one being handed out included.
    """

    def __init__(
        self,
        target: TargetModel[StateT],
        drafter: Drafter | None,
        prompt: Sequence[int],
        *,
        config: SamplerConfig,
        draft_config: SamplerConfig,
        depth: int,
        rule: Rule,
        max_tokens: int,
        stop_tokens: Collection[int],
        seed: int | None,
        policy: Policy | Sequence[Policy] | None,
        backend: BackendName,
    ) -> None:
        self._rule = as_rule(rule)
        depth = as_count(depth, "depth", 1)
        max_tokens = as_count(max_tokens, "max_tokens", 0)
        prompt = [as_integer(token, "a token of the prompt") for token in prompt]
        if not prompt:
            raise ValueError("the prompt is empty: there is no last token to decode from")
        self._backend = _load_backend(backend)
        try:
            draft_seed, verify_seed = np.random.SeedSequence(seed).spawn(2)
        except (TypeError, ValueError) as error:
            raise type(error)(f"seed must be a non-negative integer or None, not {seed!r}") from error
        self._draft_rng = np.random.default_rng(draft_seed)
        self._verify_rng = np.random.default_rng(verify_seed)
        self._target = target
        self._drafter = drafter
        self._config = config
        self._draft_config = draft_config
        self._depth = depth
        self._policies, self._depth_policy, self._temperature_policy = _as_policies(policy)
        self._max_tokens = max_tokens
        if not isinstance(stop_tokens, Iterable):
            raise TypeError(f"stop_tokens must be a collection of tokens, not {stop_tokens!r}")
        self._stop_tokens = frozenset(as_integer(token, "a stop token") for token in stop_tokens)
        penalized = config.presence_penalty != 0 or config.frequency_penalty != 0
        self._token_counts: dict[int, int] | None = {} if penalized else None
        self._pending = prompt[-1]
        self._committed: list[int] = []
        self._kinds: list[TokenKind] = []
        self._handed_out = 0
        self._at = ""  # what a block is doing, for the note on an exception
        self._finished = max_tokens == 0
        self.stats = GenerationStats()
        began = perf_counter()
        self._state: Any = target.start(prompt)
        self.stats.target_seconds = perf_counter() - began
        if drafter is not None:
            began = perf_counter()
            drafter.start(prompt)
            self.stats.draft_seconds = perf_counter() - began

    @property
    def tokens(self) -> list[int]:
        """All tokens committed so far: those handed out, then the rest of the current block."""
        return self._committed[: self.stats.tokens]

    @property
    def kinds(self) -> list[TokenKind]:
        """The kind of each of `tokens`."""
        return self._kinds[: self.stats.tokens]

    @property
    def kind(self) -> TokenKind:
        """The kind of the token that was handed out last; LookupError before the first one."""
        if not self._handed_out:
            raise LookupError("no token was handed out yet")
        return self._kinds[self._handed_out - 1]

    def __next__(self) -> int:
        if self._handed_out == self.stats.tokens:
            if self._finished:
                raise StopIteration
            # Should the block raise, the stream has ended.
            self._finished = True
            try:
                self._finished = self._decode_block()
            except Exception as error:
                where = f"in the {self._at}, after {self.stats.tokens} tokens: the stream has ended"
                if isinstance(error, StopIteration):  # would read as the text's own end (PEP 479)
                    raise RuntimeError(f"StopIteration {where}") from error
                error.add_note(where)
                raise
        self._handed_out += 1
        return self._committed[self._handed_out - 1]

    def _decode_block(self) -> bool:
        """Decode and commit one block; tell whether the text ends with it."""
        began = perf_counter()
        self._at = "drafter's propose"
        drafts, draft_rows = self._propose()
        drafted = perf_counter()
        fed = [self._pending, *drafts]
        if drafts and drafts[-1] in self._stop_tokens:
            # If this draft is accepted the text is over: no row after it, no bonus.
            fed.pop()
        self._at = "target's forward"
        logits = self._target.forward(self._state, fed)
        shape = tuple(np.shape(logits))
        expected = (len(fed), self._target.vocab_size)
        if shape != expected:
            raise ValueError(
                f"the target gave logits of shape {shape} for {len(fed)} tokens; expected {expected}"
            )
        decoded = perf_counter()
        self._at = "verification"
        block = _Block(drafts, draft_rows, logits, self._token_counts)
        verdict = _verify(self._backend, block, self._config, self._rule, self._verify_rng)
        verified = perf_counter()
        # The last of the committed tokens stays out of the state: it is the next block's pending one.
        excess = len(fed) - len(verdict.tokens)
        if excess:
            self._at = "target's rollback"
            self._target.rollback(self._state, excess)
        rolled_back = perf_counter()
        if self._drafter is not None:
            self._at = "drafter's commit"
            self._drafter.commit(verdict.tokens)
        self._at = "policy's observe"
        for policy in self._policies:
            policy.observe(len(drafts), verdict.accepted)
        if self._token_counts is not None:
            for token in verdict.tokens:
                self._token_counts[token] = self._token_counts.get(token, 0) + 1
        self._pending = verdict.tokens[-1]
        self._committed += verdict.tokens
        self._kinds += ["accepted"] * verdict.accepted
        if verdict.last is not None:
            self._kinds.append(verdict.last)
        self.stats._add_block(
            len(drafts),
            verdict,
            draft=drafted - began + perf_counter() - rolled_back,
            target=decoded - drafted,
            sampling=verified - decoded,
            rollback=rolled_back - verified,
        )
        return self._pending in self._stop_tokens or len(self._committed) >= self._max_tokens

    def _propose(self) -> tuple[list[int], Sequence[Distribution] | None]:
        if self._drafter is None:
            return [], None
        depth = self._depth
        if self._depth_policy is not None:
            depth = as_integer(self._depth_policy.current_depth, "the policy's current_depth")
        # A block commits one token more than it has accepted drafts.
        depth = min(depth, self._max_tokens - len(self._committed) - 1)
        if depth < 1:
            return [], None
        config = self._draft_config
        if self._temperature_policy is not None:
            config = replace(config, temperature=self._temperature_policy.current_temperature)
        answer = self._drafter.propose(depth, config, self._draft_rng)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise TypeError(f"the drafter must give a tuple (tokens, rows); got {_brief(answer)}")
        proposed, rows = answer
        drafts = [as_integer(token, "a drafted token") for token in proposed]
        if len(drafts) > depth:
            raise ValueError(f"the drafter proposed {len(drafts)} tokens; asked for at most {depth}")
        checked = None if rows is None else self._checked_rows(rows, len(drafts))
        for i, token in enumerate(drafts):
            if not 0 <= token < self._target.vocab_size:
                raise ValueError(
                    f"the drafter proposed token {token}, outside the target's [0, {self._target.vocab_size})"
                )
            if token in self._stop_tokens:
                # The text ends here or before, so what was drafted behind it is of no use. Every draft up
                # to this one is still tested, which is all that the law asks for.
                return drafts[: i + 1], None if checked is None else checked[: i + 1]
        return drafts, checked

    def _checked_rows(self, rows: Any, count: int) -> Sequence[Distribution]:
        """The drafter's rows as a sequence, `count` of them; dense ones are V long."""
        if isinstance(rows, BatchedSparseDistributions):
            rows = [rows.to_distribution(i) for i in range(len(rows))]
        if not hasattr(rows, "__len__"):
            raise TypeError(f"the drafter's rows must be a sequence or None; got {_brief(rows)}")
        if len(rows) != count:
            raise ValueError(f"the drafter gave {len(rows)} rows for {count} tokens")
        for i, row in enumerate(rows):
            # Verification reads two numbers of a row whose draft is accepted: it would not notice.
            if not isinstance(row, SparseDistribution) and np.shape(row) != (self._target.vocab_size,):
                raise ValueError(
                    f"row {i} of the drafter has shape {np.shape(row)}; expected ({self._target.vocab_size},)"
                )
        return cast(Sequence[Distribution], rows)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def generate(
    target: TargetModel[StateT],
    prompt: Sequence[int],
    *,
    config: SamplerConfig,
    max_tokens: int,
    stop_tokens: Collection[int] = (),
    seed: int | None = None,
    backend: BackendName = "compiled",
) -> TokenStream:
    """Decode plainly: one token per call of the target.

    Parameters
    ----------
    target : TargetModel
        The language model.
    prompt : sequence of int
        At least one token.
    config : SamplerConfig
        Temperature, truncation and penalties. Penalties count the tokens of the completion only.
    max_tokens : int
        Never more tokens than this; 0 gives none.
    stop_tokens : collection of int
        Any of these ends the text and is its last token.
    seed : int, optional
        Same seed, same tokens. None: fresh entropy.
    backend : {"compiled", "reference"}
        Module that samples: `mtplx.sampling` or `mtplx.reference`.

    Returns
    -------
    TokenStream
        An iterator of tokens. All of them are of kind "bonus".

    Raises
    ------
    ValueError
        Empty prompt, negative `max_tokens`, unknown `backend`; during iteration, logits of a wrong shape
        or logits that are no distribution (`mtplx.distributions.NonFiniteLogitsError`).

    Examples
    --------
    >>> from mtplx.distributions import SamplerConfig
    >>> from mtplx.models.ngram import NGramModel
    >>> model = NGramModel([0, 1, 2] * 4, vocab_size=3, order=3)
    >>> greedy = SamplerConfig(temperature=0.0)
    >>> stream = generate(model, [2, 0], config=greedy, max_tokens=5, backend="reference")
    >>> list(stream)
    [1, 2, 0, 1, 2]
    >>> stream.stats.tokens_per_target_call
    1.0
    """
    return TokenStream(
        target,
        None,
        prompt,
        config=config,
        draft_config=config,
        depth=1,
        rule="exact",
        max_tokens=max_tokens,
        stop_tokens=stop_tokens,
        seed=seed,
        policy=None,
        backend=backend,
    )


def speculative_generate(
    target: TargetModel[StateT],
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    config: SamplerConfig,
    draft_config: SamplerConfig | None = None,
    depth: int = 4,
    rule: Rule = "exact",
    max_tokens: int,
    stop_tokens: Collection[int] = (),
    seed: int | None = None,
    policy: Policy | Sequence[Policy] | None = None,
    backend: BackendName = "compiled",
) -> TokenStream:
    """Decode speculatively: the drafter guesses, the target checks a whole block in one call.

    The text has the law of `generate` with the same `config`, whatever is drafted; at temperature 0 it is
    the same text.

    Parameters
    ----------
    target : TargetModel
        The language model whose text is wanted.
    drafter : Drafter
        Guesses what it will say, for example a `ModelDrafter`.
    prompt : sequence of int
        At least one token.
    config : SamplerConfig
        The target's temperature, truncation and penalties. Penalties count the tokens of the completion
        before each position, the block's own drafts included.
    draft_config : SamplerConfig, optional
        Handed to the drafter; default `config`. Drafters apply no penalties. Any temperature and
        truncation keep the law, for q is the distribution that the drafts were drawn from.
    depth : int, default 4
        K, the drafts per block, at least 1. Blocks near `max_tokens` are shorter, so that no draft is
        useless.
    rule : {"exact", "greedy", "match", "block", "typical"}, Typical or Cascade
        Acceptance rule, see `mtplx.verification`. All but "greedy" (at temperatures above 0), `Typical`
        and `Cascade` are lossless.
    max_tokens : int
        Never more tokens than this; 0 gives none.
    stop_tokens : collection of int
        Any of these ends the text and is its last token.
    seed : int, optional
        Same seed, same tokens. None: fresh entropy. Drafter and verifier draw from generators of their
        own: children 0 and 1 of ``numpy.random.SeedSequence(seed)``.
    policy : DepthPolicy or DraftTemperaturePolicy, or a list or tuple of both, optional
        Chooses the depth of every block instead of `depth`, the temperature of its drafts instead of
        that in `draft_config`, or both; see `mtplx.policy`. It observes every block. Policies carry on
        from where they are: for the same tokens from the same seed, pass a fresh one.
    backend : {"compiled", "reference"}
        Module that samples: `mtplx.sampling` or `mtplx.reference`. Both give the same tokens.

    Returns
    -------
    TokenStream
        An iterator of tokens with live `stats`; `kind` tells how the last token came about.

    Raises
    ------
    ValueError
        Empty prompt, `depth` below 1, negative `max_tokens`, unknown `rule` or `backend`, two policies
        for one thing; during iteration, a drafter that breaks its protocol, logits of a wrong shape, or
        logits that are no distribution (`mtplx.distributions.NonFiniteLogitsError`).
    TypeError
        What is passed as a policy is none; during iteration, a drafter that does not give a pair.

    Examples
    --------
    >>> from mtplx.distributions import SamplerConfig
    >>> from mtplx.models.ngram import NGramModel
    >>> target, draft = (NGramModel([0, 1, 2] * 4, vocab_size=3, order=order) for order in (3, 2))
    >>> stream = speculative_generate(
    ...     target,
    ...     ModelDrafter(draft, backend="reference"),
    ...     [2, 0],
    ...     config=SamplerConfig(temperature=0.0),
    ...     max_tokens=5,
    ...     backend="reference",
    ... )
    >>> list(stream)
    [1, 2, 0, 1, 2]
    >>> stream.stats.target_calls, stream.kinds[-1]
    (1, 'bonus')

    Copies from the text itself, more or fewer of them as they are accepted:

    >>> from mtplx.policy import StreakDepth
    >>> stream = speculative_generate(
    ...     target,
    ...     PromptLookupDrafter(),
    ...     [2, 0],
    ...     config=SamplerConfig(temperature=0.0),
    ...     max_tokens=40,
    ...     policy=StreakDepth(2),
    ... )
    >>> list(stream)[-3:], stream.stats.target_calls
    ([2, 0, 1], 11)
    """
    return TokenStream(
        target,
        drafter,
        prompt,
        config=config,
        draft_config=config if draft_config is None else draft_config,
        depth=depth,
        rule=rule,
        max_tokens=max_tokens,
        stop_tokens=stop_tokens,
        seed=seed,
        policy=policy,
        backend=backend,
    )
