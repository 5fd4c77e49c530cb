"""The functions that verify in production, run through every way their coins and draws can fall.

`mtplx.oracle` asks decision functions for thresholds and puts them together itself. Here nothing is put
together: `verify_block` and `verify_tree` are run as they are (their bodies, `decide`), once for each
sequence of outcomes, by a stream whose coins are no numbers but things to be compared with. So what is
integrated out includes which row a correction is drawn from, in which order coins are asked for, and all
else that is control flow. It takes many runs: K <= 3 and small trees.
"""

from contextlib import nullcontext

from mtplx.decisions import TokenTree, as_rule, as_tree_rule
from mtplx.reference import blocks, trees
from mtplx.reference.rows import Lazy, as_distribution


class Choices:
    """One run: the choices of a script, then the first option each time something else is asked."""

    def __init__(self, script):
        self.script = script
        self.taken = []
        self.options = []
        self.probability = 1.0

    def choose(self, options):
        """One of (value, probability) pairs; those of probability 0 are no options."""
        options = [option for option in options if option[1] > 0.0]
        at = len(self.taken)
        index = self.script[at] if at < len(self.script) else 0
        self.taken.append(index)
        self.options.append(len(options))
        value, probability = options[index]
        self.probability *= probability
        return value


def law_of(program):
    """The law of what ``program(choices)`` returns."""
    law, script = {}, []
    while True:
        choices = Choices(script)
        result = program(choices)
        law[result] = law.get(result, 0.0) + choices.probability
        script = choices.taken
        while script and script[-1] + 1 == choices.options[len(script) - 1]:
            script.pop()
        if not script:
            return law
        script[-1] += 1


class Coin:
    """Uniform in [low, high), which is what comparisons have shown so far."""

    def __init__(self, choices):
        self.choices, self.low, self.high = choices, 0.0, 1.0

    def __le__(self, threshold):
        below = min(max(threshold - self.low, 0.0) / (self.high - self.low), 1.0)
        below = self.choices.choose([(True, below), (False, 1.0 - below)])
        if below:
            self.high = min(self.high, threshold)
        else:
            self.low = threshold
        return below


class EveryStream:
    """A stream as `mtplx.reference.streams` has them, whose numbers take all their values."""

    def __init__(self, choices):
        self.choices = choices

    def coin(self, i):
        return Coin(self.choices)

    def token(self, lane, weights):
        ids, values = weights
        total = values.sum()
        ids = range(values.size) if ids is None else ids.tolist()
        return self.choices.choose([(token, value / total) for token, value in zip(ids, values, strict=True)])

    def held(self):
        return nullcontext()


def drawn_from(choices, row):
    return choices.choose(list(enumerate(row)))


def block_law(rule, target, draft, depth):
    """The law of the tokens of `verify_block`, and of how many were accepted."""
    chosen = as_rule(rule)

    def program(choices):
        tokens = Lazy(depth, lambda i: drawn_from(choices, draft(prefix(i))))

        def prefix(i):
            return tuple(tokens[j] for j in range(i))

        block = blocks.Block(
            tokens,
            Lazy(depth + 1, lambda i: as_distribution(target(prefix(i)), "target_p")),
            Lazy(depth, lambda i: as_distribution(draft(prefix(i)), "draft_q")),
            True,
        )
        decision = blocks.decide(block, chosen, EveryStream(choices), False)
        return tuple(decision.tokens.tolist()), decision.accepted

    return law_of(program)


def tree_law(rule, target, draft, parents, replacement):
    """The law of the tokens of `verify_tree`, and of how many were accepted."""
    chosen = as_tree_rule(rule, replacement)
    n = len(parents)
    children = [[child for child in range(n) if parents[child] == node] for node in range(-1, n)]

    def program(choices):
        def drafted_token(node):
            siblings = children[parents[node] + 1]
            row = draft(prefix(parents[node])).copy()
            if not replacement:
                row[[tokens[sibling] for sibling in siblings if sibling < node]] = 0.0
            return drawn_from(choices, row / row.sum())

        def prefix(node):
            return () if node == -1 else (*prefix(parents[node]), tokens[node])

        tokens = Lazy(n, drafted_token)
        drafted = trees.Drafted(
            tokens,
            children,
            Lazy(n + 1, lambda row: as_distribution(target(prefix(row - 1)), "target_p")),
            Lazy(n + 1, lambda row: as_distribution(draft(prefix(row - 1)), "draft_q")),
            False,
        )
        decision = trees.decide(drafted, chosen, replacement, EveryStream(choices))
        assert tuple(decision.tokens[:-1]) == prefix(decision.path[-1] if decision.accepted else -1)
        return tuple(decision.tokens.tolist()), decision.accepted

    return law_of(program)


def grown_tree_law(rule, target, draft, grow):
    """The law of the tokens of `verify_tree`, of trees whose shape is no constant.

    ``grow(draw, tokens)`` draws node after node, as ``draw(parent)``, which gives its index; it may look at
    `tokens`, those drawn so far, and may return a list of the nodes to hand over, in a new order.
    """
    chosen = as_tree_rule(rule, True)

    def program(choices):
        tokens, parents = [], []

        def prefix(node):
            return () if node == -1 else (*prefix(parents[node]), tokens[node])

        def draw(parent):
            token = drawn_from(choices, draft(prefix(parent)))
            tokens.append(token)
            parents.append(parent)
            return len(tokens) - 1

        handed_over = grow(draw, tokens)
        if handed_over is None:
            handed_over = range(len(tokens))
        prefixes = [(), *(prefix(node) for node in handed_over)]
        tree = TokenTree([tokens[node] for node in handed_over], [parents[node] for node in handed_over])
        rows = [[model(prefix) for prefix in prefixes] for model in (target, draft)]
        decision = trees.decide(trees._opened(*rows, tree, False), chosen, True, EveryStream(choices))
        return tuple(decision.tokens.tolist())

    return law_of(program)


def tokens_alone(law):
    summed = {}
    for (tokens, _), probability in law.items():
        summed[tokens] = summed.get(tokens, 0.0) + probability
    return summed
