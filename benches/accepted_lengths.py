"""How many drafts each rule accepts, on the n-gram pair. The table of docs/rules.md.

Run ``python benches/accepted_lengths.py``; ``--contexts 200`` for a quick look. Contexts are positions in
texts that the target itself wrote, the same ones for every rule; all chain rules verify the same drafts,
all tree rules the same trees, each `REPEATS` times with fresh coins. Takes three minutes of processor
time.
"""

import argparse
from dataclasses import dataclass

import numpy as np

from mtplx import reference, sampling
from mtplx.decisions import Cascade, TokenTree, Typical
from mtplx.decoding import generate
from mtplx.distributions import SamplerConfig
from mtplx.models.ngram import NGramState, default_corpus, train_pair

K = 4
REPEATS = 4
CONFIGS = {
    "T = 1": SamplerConfig(1.0, 1.0, 0),
    "T = 0.6, top-p 0.95, top-k 20": SamplerConfig(),
}
GREEDY = SamplerConfig(0.0, 1.0, 0)
CHAIN_RULES = {
    "exact": "exact",
    "block": "block",
    "match": "match",
    "Typical()": Typical(),
    "Cascade(0.3)": Cascade(0.3),
    "Cascade(0.9)": Cascade(0.9),
}
TREE_RULES = [
    ("recursive", True),
    ("recursive", False),
    ("kseq", True),
    ("traversal", True),
    ("traversal", False),
]
# Children at each depth: two twice and then a chain below each of the four; or four chains.
SHAPES = {"2-2-1-1": (2, 2, 1, 1), "4-1-1-1": (4, 1, 1, 1)}


class Rows:
    """Distributions of one model under one configuration, kept by the tokens that they depend on."""

    def __init__(self, model, config):
        self.model, self.config, self.kept = model, config, {}

    def __call__(self, text):
        recent = tuple(text[-self.model.order :])
        if recent not in self.kept:
            logits = self.model.forward(NGramState(list(recent[:-1])), recent[-1:])[0]
            self.kept[recent] = sampling.distribution_from_logits(logits, self.config)
        return self.kept[recent]


@dataclass
class Tally:
    total: float = 0.0
    squares: float = 0.0
    count: int = 0

    def add(self, value):
        self.total += value
        self.squares += value * value
        self.count += 1

    @property
    def mean(self):
        return self.total / self.count

    def __str__(self):
        error = np.sqrt(max(self.squares / self.count - self.mean**2, 0.0) / self.count)
        return f"{self.mean:.2f} ± {error:.2f}"


def drafted_chain(draft, context, rng):
    text, rows = list(context), []
    for _ in range(K):
        rows.append(draft(text))
        text.append(sampling.sample_from_distribution(rows[-1], rng))
    return text[len(context) :], rows


def drafted_tree(draft, context, widths, replacement, rng):
    """A tree, breadth first. Where a row has fewer tokens than that, without replacement, all are drawn."""
    tokens, parents, texts, level = [], [], [list(context)], [-1]
    for width in widths:
        below = []
        for node in level:
            q = draft(texts[node + 1]).copy()
            siblings = width if replacement else min(width, np.count_nonzero(q))
            for _ in range(siblings):
                token = sampling.sample_from_distribution(q, rng)
                if not replacement:
                    q[token] = 0.0
                below.append(len(tokens))
                tokens.append(token)
                parents.append(node)
                texts.append([*texts[node + 1], token])
        level = below
    return TokenTree(tokens, parents), texts


def step_distance(rule, p, q):
    """Exact distance to the target of the law of one step of a lossy rule, in total variation."""
    if isinstance(rule, Cascade):
        emitted = reference.cascade_token_target_distribution(p, q, alpha=rule.alpha, rule=rule.rule)
    else:
        entropy = reference.distribution_entropy(p)
        kept = np.where(p > reference.typical_acceptance_threshold(entropy, rule.eps, rule.delta), q, 0.0)
        emitted = kept + (1.0 - kept.sum()) * p
    return reference.total_variation(p, emitted)


def contexts_of(pair, config, count):
    """Positions in texts of 200 tokens that the target writes on pieces of the corpus."""
    corpus = pair.tokenizer.encode(default_corpus())
    for text in range(-(-count // 20)):
        start = (text + 1) * 2711 % (len(corpus) - 16)
        prompt = corpus[start : start + 16]
        tokens = list(generate(pair.target, prompt, config=config, max_tokens=200, seed=text))
        for at in range(10, 201, 10)[: count - 20 * text]:
            yield [*prompt, *tokens[:at]]


def measure(pair, config, count):
    """Accepted drafts by (drafts, rule), and distances of lossy rules."""
    target, draft = Rows(pair.target, config), Rows(pair.draft, config)
    best = Rows(pair.draft, GREEDY)
    accepted, distances = {}, {}

    def count_accepted(seed, key, verify, *arguments, **options):
        runs = [
            verify(*arguments, np.random.default_rng([1, seed, run]), **options) for run in range(REPEATS)
        ]
        accepted.setdefault(key, Tally()).add(sum(decision.accepted for decision in runs) / REPEATS)

    for seed, context in enumerate(contexts_of(pair, config, count)):
        drafts, rows = drafted_chain(draft, context, np.random.default_rng([0, seed]))
        targets = [target([*context, *drafts[:i]]) for i in range(K + 1)]
        for name, rule in CHAIN_RULES.items():
            key = "chain of 4", f"`{name}`"
            count_accepted(seed, key, reference.verify_block, targets, rows, drafts, rule=rule)
            if isinstance(rule, Typical | Cascade):
                distances.setdefault(f"`{name}`", Tally()).add(step_distance(rule, targets[0], rows[0]))
        drafts, _ = drafted_chain(best, context, np.random.default_rng(0))
        targets = [target([*context, *drafts[:i]]) for i in range(K + 1)]
        for name in ("exact", "match"):
            key = "chain of the 4 likeliest", f"`{name}`"
            count_accepted(seed, key, reference.verify_block, targets, None, drafts, rule=name)
        for shape, widths in SHAPES.items():
            trees = {
                replacement: drafted_tree(
                    draft, context, widths, replacement, np.random.default_rng([2, seed])
                )
                for replacement in (True, False)
            }
            for rule, replacement in TREE_RULES:
                tree, texts = trees[replacement]
                name = f"`{rule}`" if replacement else f"`{rule}`, without replacement"
                rows = [target(text) for text in texts], [draft(text) for text in texts]
                options = {"rule": rule, "replacement": replacement}
                count_accepted(seed, (f"tree {shape}", name), reference.verify_tree, *rows, tree, **options)
    return accepted, distances


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, default=2000)
    count = parser.parse_args().contexts
    pair = train_pair(default_corpus())
    print(
        f"order {pair.target.order} and {pair.draft.order}, V = {pair.tokenizer.vocab_size}, {count} contexts"
    )
    measured = [measure(pair, config, count) for config in CONFIGS.values()]
    print("| drafts | rule | " + " | ".join(CONFIGS) + " | distance of a step |")
    print("|---|---|" + "---|" * (len(CONFIGS) + 1))
    for drafts, rule in measured[0][0]:
        cells = [str(accepted[drafts, rule]) for accepted, _ in measured]
        apart = [distances[rule].mean for _, distances in measured if rule in distances]
        cells.append(", ".join(f"{distance:.3f}" for distance in apart) or "0")
        print("| " + " | ".join([drafts, rule, *cells]) + " |")
    greedy, _ = measure(pair, GREEDY, count // 4)
    print(f"\nAt T = 0, {count // 4} contexts, each lossless rule: {greedy['chain of 4', '`exact`']}")


if __name__ == "__main__":
    main()
