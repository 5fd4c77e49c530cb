"""Frequency tests with a stated rate of false alarms.

Seeds are fixed, so a test gives one answer for ever; the rate says how likely a correct sampler would
have been to fail it, and each test shows beside it a planted fault that it does catch.
"""

import numpy as np
from scipy.stats import chi2

FALSE_ALARM = 1e-6


def law_refuted(counts, law, false_alarm=FALSE_ALARM):
    """Pearson's chi-square test: True if counts like these come from `law` less often than `false_alarm`.

    Cells expected fewer than 10 times are pooled, as the chi-square law of the statistic asks; something
    seen where the law has nothing refutes it outright.
    """
    counts, law = np.asarray(counts, dtype=np.float64), np.asarray(law, dtype=np.float64)
    if counts[law == 0.0].any():
        return True
    expected = counts.sum() * law / law.sum()
    rare = expected < 10.0
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    if wanted[-1] < 10.0:  # too little even when pooled: into the largest cell
        largest = int(np.argmax(wanted[:-1]))
        observed[largest] += observed[-1]
        wanted[largest] += wanted[-1]
        observed, wanted = observed[:-1], wanted[:-1]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    return bool(chi2.sf(statistic, max(observed.size - 1, 1)) < false_alarm)
