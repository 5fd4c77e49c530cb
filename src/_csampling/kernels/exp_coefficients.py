"""Coefficients of exp.h: near-minimax polynomials by Chebyshev interpolation (needs mpmath).

Prints the numbers as they stand in exp.h, with the largest relative error of each polynomial over
its interval before rounding. Run:
python src/_csampling/kernels/exp_coefficients.py
"""

import mpmath as mp

mp.mp.dps = 50


def interpolate(function, half_width, degree):
    """Coefficients, lowest first, of the polynomial through `degree` + 1 Chebyshev nodes."""
    nodes = [half_width * mp.cos(mp.pi * (2 * i + 1) / (2 * (degree + 1))) for i in range(degree + 1)]
    powers = mp.matrix(degree + 1, degree + 1)
    for i, node in enumerate(nodes):
        for j in range(degree + 1):
            powers[i, j] = node**j
    return list(mp.lu_solve(powers, mp.matrix([function(node) for node in nodes])))


def worst(approximation, function, half_width, steps=4000):
    points = [half_width * (mp.mpf(2 * i + 1) / steps - 1) for i in range(steps)]
    return max(abs(approximation(x) / function(x) - 1) for x in points)


def show(name, coefficients, error):
    print(f"{name}: relative error {mp.nstr(error, 3)} = 2^{mp.nstr(mp.log(error, 2), 4)}")
    print("    " + ", ".join(float(c).hex() for c in coefficients))


def horner(coefficients, x):
    return mp.polyval(coefficients[::-1], x)


# exp(r) = 1 + r + r^2 q(r) on |r| <= ln(2)/2, widened for the rounding of the argument's reduction.
width = mp.log(2) / 2 * mp.mpf("1.0001")
q = interpolate(lambda r: (mp.expm1(r) - r) / r**2, width, 9)
show("exp, float64", q, worst(lambda r: 1 + r + r * r * horner(q, r), mp.exp, width))


# 2^f on |f| <= 1/2.
def power_of_two(f):
    return mp.power(2, f)


half = mp.mpf("0.5001")
short = interpolate(power_of_two, half, 5)
show("2^f, float32, short", short, worst(lambda f: horner(short, f), power_of_two, half))
long = interpolate(power_of_two, half, 6)
show("2^f, float32, long", long, worst(lambda f: horner(long, f), power_of_two, half))

high = mp.mpf(float.fromhex("0x1.62e42fefa3800p-1"))  # ln 2 to 42 bits: n * high is exact for |n| < 2^11
print("ln 2 =", float(high).hex(), "+", float(mp.log(2) - high).hex())
log2e = 1 / mp.log(2)
print("log2 e =", float(log2e).hex())

# log(m) = 2 atanh(s), s = (m-1)/(m+1), m in [sqrt(1/2), sqrt 2]; (atanh(s)/s - 1)/s^2 as a polynomial in s^2.
top = ((mp.sqrt(2) - 1) / (mp.sqrt(2) + 1)) ** 2
a = interpolate(
    lambda t: (mp.atanh(mp.sqrt(t + top / 2)) / mp.sqrt(t + top / 2) - 1) / (t + top / 2), top / 2, 8
)
# Shift the interval back to [0, top].
shifted = [mp.mpf(0)] * 9
for k, coefficient in enumerate(a):
    for j in range(k + 1):
        shifted[j] += coefficient * mp.binomial(k, j) * (-top / 2) ** (k - j)
show("log", shifted, worst(lambda x: x * (1 + (x * x) * horner(shifted, x * x)), mp.atanh, mp.sqrt(top)))
