"""The drop-in inside an engine's own loop: the engine's code, with its NumPy sampler replaced by one import.

An engine has its models, its caches and its loop; all it takes from outside are functions of one row. The
loop below is written against those names. It runs with `mtplx.sampling`, and with the NumPy definition
`mtplx.reference`, which gives the same tokens from the same seed, always, and takes longer.

Run it: python examples/engine_loop.py
"""

from __future__ import annotations

from time import perf_counter
from types import ModuleType

import numpy as np

from mtplx import reference, sampling
from mtplx.distributions import SamplerConfig
from mtplx.models.ngram import NGramPair, default_corpus, train_pair

TARGET = SamplerConfig(temperature=0.8, top_p=0.95, top_k=40)
DRAFT = SamplerConfig(temperature=0.6, top_p=1.0, top_k=40)  # another one is fine: q is what was drawn from
DEPTH = 4


def decode(pair: NGramPair, prompt: str, n: int, sampler: ModuleType, seed: int) -> tuple[list[int], float]:
    """An engine's loop: draft, check, roll back. Gives the tokens, and the seconds spent on sampling."""
    rng = np.random.default_rng(seed)
    target, draft = pair.target, pair.draft
    tokens = pair.tokenizer.encode(prompt)
    start = len(tokens)
    target_state, draft_state = target.start(tokens), draft.start(tokens)
    sampling_seconds = 0.0

    def timed(function, *arguments):
        nonlocal sampling_seconds
        began = perf_counter()
        result = function(*arguments)
        sampling_seconds += perf_counter() - began
        return result

    while len(tokens) < start + n:
        drafts, q = [], []
        fed = tokens[-1:]
        for _ in range(DEPTH):
            logits = draft.forward(draft_state, fed)[-1]
            q.append(timed(sampler.sparse_distribution_from_logits, logits, DRAFT))
            drafts.append(timed(sampler.sample_from_distribution, q[-1], rng))
            fed = drafts[-1:]
        rows = target.forward(target_state, [tokens[-1], *drafts])

        accepted = 0
        for x, row in zip(drafts, q, strict=True):
            p = timed(sampler.sparse_distribution_from_logits, rows[accepted], TARGET)
            decision = timed(sampler.verify_one_token, p, row, x, rng)
            tokens.append(decision.token_id)
            if not decision.accepted:
                break
            accepted += 1
        else:
            p = timed(sampler.sparse_distribution_from_logits, rows[DEPTH], TARGET)
            tokens.append(timed(sampler.sample_from_distribution, p, rng))

        # All but the last token stay decoded. The draft never decoded its last draft.
        target.rollback(target_state, DEPTH - accepted)
        if accepted == DEPTH:
            draft.forward(draft_state, drafts[-1:])
        else:
            draft.rollback(draft_state, DEPTH - 1 - accepted)
    return tokens[start : start + n], sampling_seconds


def main() -> None:
    pair = train_pair(default_corpus())
    prompt = "If the class"
    compiled, fast = decode(pair, prompt, 200, sampling, seed=5)
    plain, slow = decode(pair, prompt, 200, reference, seed=5)
    assert compiled == plain, "the two faces must give the same tokens"
    print(prompt + pair.tokenizer.decode(compiled))
    print(f"\n{len(compiled)} tokens, the same from both; sampling took {slow / fast:.0f}x longer with NumPy")


if __name__ == "__main__":
    main()
