"""What holds for every adapter: greedy text is that of plain decoding, up to the first near tie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mtplx.decoding import generate, speculative_generate
from mtplx.distributions import SamplerConfig

GREEDY = SamplerConfig(temperature=0.0)
DEPTHS = (1, 2, 3, 5, 8)


def require_same_up_to_near_ties(
    model: Any, prompt: Sequence[int], plain: Sequence[int], text: Sequence[int], tolerance: float
) -> None:
    """Fail unless the texts are equal, or part where plain decoding's two best logits are a near tie."""
    for i, (ours, theirs) in enumerate(zip(text, plain, strict=True)):
        if ours == theirs:
            continue
        state = model.start(prompt)
        for token in [prompt[-1], *plain[:i]]:
            row = model.forward(state, [token])[0]
        assert row[theirs] == row.max()
        gap = float(row[theirs] - row[ours])
        assert gap < tolerance, f"token {i}: {theirs} and {ours} are {gap} apart"
        return


def require_greedy_is_plain(
    model: Any, drafters: Iterable[tuple[Any, float]], prompt: Sequence[int], tolerance: float
) -> None:
    """The same of every depth and (drafter, draft temperature); tokens of each kind must have occurred."""
    plain = list(generate(model, prompt, config=GREEDY, max_tokens=60))
    kinds: set[str] = set()
    for drafter, temperature in drafters:
        for depth in DEPTHS:
            stream = speculative_generate(
                model,
                drafter,
                prompt,
                config=GREEDY,
                draft_config=SamplerConfig(temperature=temperature),
                depth=depth,
                max_tokens=60,
                seed=depth,
            )
            require_same_up_to_near_ties(model, prompt, plain, list(stream), tolerance)
            kinds.update(stream.kinds)
    assert kinds == {"accepted", "correction", "bonus"}
