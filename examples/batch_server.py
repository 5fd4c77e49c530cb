"""A batch server's loop: requests join and leave, and no request's tokens depend on its neighbours.

Every step drafts for each active request, calls the target once per request (a real engine: once for all),
and verifies the whole batch in one call. Randomness is keyed: a request's draws come from its own seed and
from the position in its text, so it does not matter who else is in the batch, in which order, when it
joined, or how many workers verify. The last lines check that: each request alone gives the same tokens.

Run it: python examples/batch_server.py
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from mtplx.distributions import SamplerConfig
from mtplx.models.ngram import NGramPair, default_corpus, train_pair
from mtplx.sampling import sample_from_distribution, sparse_distribution_from_logits
from mtplx.verification import DRAFTER_LANE, verify_batch_from_logits

CONFIG = SamplerConfig(temperature=0.6, top_p=0.95, top_k=20)


@dataclass(frozen=True)
class Request:
    """What a client sends. `arrives` is the step at which it does."""

    prompt: str
    seed: int
    max_tokens: int
    config: SamplerConfig = CONFIG
    depth: int = 4
    arrives: int = 0


class Session:
    """An active request: its text and the states of both models."""

    def __init__(self, request: Request, pair: NGramPair) -> None:
        self.request = request
        self.pair = pair
        self.text = pair.tokenizer.encode(request.prompt)
        self.prompt_size = len(self.text)
        self.target_state = pair.target.start(self.text)
        self.draft_state = pair.draft.start(self.text)
        self.draft_decoded = len(self.text) - 1
        self.drafts: list[int] = []

    @property
    def missing(self) -> int:
        return self.prompt_size + self.request.max_tokens - len(self.text)

    def draft(self) -> list[np.ndarray]:
        """Draft a block, and give the logits that each draft was drawn from."""
        self.drafts, logits = [], []
        fed = self.text[self.draft_decoded :]
        for i in range(min(self.request.depth, self.missing - 1)):
            logits.append(self.pair.draft.forward(self.draft_state, fed)[-1])
            row = sparse_distribution_from_logits(logits[-1], self.request.config)
            key = [self.request.seed, len(self.text)]
            stream = np.random.Philox(key=key, counter=[0, DRAFTER_LANE + i, 0, 0])
            self.drafts.append(sample_from_distribution(row, np.random.Generator(stream)))
            fed = self.drafts[-1:]
        return logits

    def check(self) -> np.ndarray:
        """The target's logits after the pending token and after every draft."""
        return self.pair.target.forward(self.target_state, [self.text[-1], *self.drafts])

    def commit(self, tokens: list[int], accepted: int) -> None:
        self.pair.target.rollback(self.target_state, len(self.drafts) - accepted)
        if self.drafts:
            # The draft has decoded the text and all drafts but the last.
            kept = min(accepted, len(self.drafts) - 1)
            self.pair.draft.rollback(self.draft_state, len(self.drafts) - 1 - kept)
            self.draft_decoded = len(self.text) + kept
        self.text += tokens


def serve(
    requests: list[Request], pair: NGramPair, executor: Executor | None = None
) -> Iterator[tuple[Request, list[int]]]:
    """Give each request with its completion, in the order in which they are finished."""
    waiting = list(requests)
    active: list[Session] = []
    step = 0
    while waiting or active:
        active += [Session(request, pair) for request in waiting if request.arrives <= step]
        waiting = [request for request in waiting if request.arrives > step]
        step += 1
        if not active:
            continue
        draft_logits = [session.draft() for session in active]
        decision = verify_batch_from_logits(
            [session.check() for session in active],
            draft_logits,
            [session.drafts for session in active],
            [session.request.config for session in active],
            seeds=[session.request.seed for session in active],
            positions=[len(session.text) for session in active],
            executor=executor,
        )
        for session, row, count, accepted in zip(
            active, decision.tokens, decision.num_tokens, decision.accepted, strict=True
        ):
            session.commit(row[:count].tolist(), int(accepted))
            if session.missing == 0:
                yield session.request, session.text[session.prompt_size :]
        active = [session for session in active if session.missing]


REQUESTS = [
    Request("The", seed=1, max_tokens=40),
    Request("If a class", seed=2, max_tokens=90, depth=6),
    Request("The", seed=3, max_tokens=25, config=SamplerConfig(1.1, 0.9, 0)),
    Request("When", seed=4, max_tokens=60, arrives=3),
    Request("A list", seed=1, max_tokens=30, depth=2, arrives=9),
    Request("Note that", seed=6, max_tokens=1, arrives=9),
    Request("In this case", seed=7, max_tokens=50, arrives=60),
]


def main() -> None:
    pair = train_pair(default_corpus())
    with ThreadPoolExecutor(2) as executor:
        together = dict(serve(REQUESTS, pair, executor))
    for request, tokens in together.items():
        print(f"{request.prompt}{pair.tokenizer.decode(tokens)!r}")
        assert len(tokens) == request.max_tokens
    for request in REQUESTS:
        ((_, alone),) = serve([replace(request, arrives=0)], pair)
        assert alone == together[request], f"{request} depends on its neighbours"
    backwards = dict(serve(REQUESTS[::-1], pair))
    assert backwards == together
    print(f"\n{len(REQUESTS)} requests: together, in another order and alone the same tokens")


if __name__ == "__main__":
    main()
