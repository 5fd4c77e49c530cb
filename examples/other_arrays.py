"""Logits of another library, verified without a copy: any CPU array with DLPack, bfloat16 included.

The stand-in below knows DLPack and nothing else, as a tensor of another library does: NumPy could not make
sense of it by itself. Where torch is installed, its tensors are verified too.

Run it: python examples/other_arrays.py
"""

from __future__ import annotations

import importlib.util
import tracemalloc
from typing import Any

import numpy as np

from mtplx.batch import distributions_from_logits, sample_rows
from mtplx.distributions import SamplerConfig
from mtplx.verification import verify_block_from_logits

V = 151_936
K = 5
CONFIG = SamplerConfig(temperature=0.7, top_p=0.95, top_k=40)


class Tensor:
    """An array that speaks DLPack alone."""

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory

    def __dlpack__(self, **options: Any) -> Any:
        return self._memory.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._memory.__dlpack_device__()


def verify(target: Any, draft: Any, drafts: list[int]) -> tuple[list[int], int]:
    """The tokens of a block, and the most memory that the call needed at once, in bytes."""
    tracemalloc.start()
    decision = verify_block_from_logits(target, draft, drafts, CONFIG, rng=np.random.default_rng(3))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return decision.tokens.tolist(), peak


def main() -> None:
    rng = np.random.default_rng(0)
    target = rng.normal(0, 3, (K + 1, V)).astype(np.float32)
    draft = target[:K] + rng.normal(0, 0.2, (K, V)).astype(np.float32)
    drafts = sample_rows(distributions_from_logits(draft, CONFIG), rng).tolist()

    tokens, _ = verify(target, draft, drafts)
    foreign, peak = verify(Tensor(target), Tensor(draft), drafts)
    assert foreign == tokens
    size = target.nbytes + draft.nbytes
    assert peak < size // 20, f"{peak} bytes for {size} bytes of logits: something was copied"
    print(f"float32 over DLPack: tokens {foreign}")
    print(f"{size / 1e6:.1f} MB of logits were read in place: {peak / 1e3:.0f} kB at most beside them")

    # The memory is the other library's: what it writes there is what is read.
    before = target[0, drafts[0]]
    target[0, drafts[0]] = -np.inf
    assert verify(Tensor(target), Tensor(draft), drafts)[0][0] != drafts[0]
    target[0, drafts[0]] = before

    if importlib.util.find_spec("torch") is None:
        print("torch is not installed: its tensors are left out")
        return
    import torch

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tensors = [torch.from_numpy(rows).to(dtype) for rows in (target, draft)]
        # Drawn anew: rounded logits are another distribution.
        drafts = sample_rows(distributions_from_logits(tensors[1], CONFIG), rng).tolist()
        tokens, peak = verify(*tensors, drafts)
        assert peak < size // 20
        print(f"{dtype} of torch: tokens {tokens}, {peak / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
