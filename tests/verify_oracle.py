"""An exact oracle for small problems: Gordan's system by a textbook tableau over fractions, Bland's rule.

It shares nothing with the package: no floating point, no revised simplex, no integer scaling.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np


def is_argmaxable(W, active, bias=None, nonnegative=False) -> bool:
    """Whether some x (``nonnegative``: some x ≥ 0) has ``y_i(w_i·x + c_i) > 0`` for all i, decided exactly.

    With x ≥ 0 the alternative is ``Σ λ_i y_i w_i ≤ 0``: one slack variable for each column.
    """
    n = len(W)
    sign = [1 if i in set(map(int, active)) else -1 for i in range(n)]
    rows = [[sign[i] * Fraction(float(v)) for v in W[i]] for i in range(n)]
    if bias is not None:
        rows = [[*row, sign[i] * Fraction(float(bias[i]))] for i, row in enumerate(rows)]
        rows.append([Fraction(0)] * (len(rows[0]) - 1) + [Fraction(1)])
    if nonnegative:
        width = len(W[0])
        rows += [[Fraction(int(j == c)) for c in range(len(rows[0]))] for j in range(width)]
    return not _has_nonnegative_solution(rows)


def is_top(W, active, bias=None, nonnegative=False) -> bool:
    """Whether for some x (``nonnegative``: some x ≥ 0) every logit of the active labels is above every other.

    Decided exactly from differences of rows.
    """
    chosen = set(map(int, active))
    others = [j for j in range(len(W)) if j not in chosen]
    full = [[Fraction(float(v)) for v in row] for row in W]
    if bias is not None:
        full = [[*row, Fraction(float(c))] for row, c in zip(full, bias, strict=True)]
    rows = [[a - b for a, b in zip(full[i], full[j], strict=True)] for i in chosen for j in others]
    if bias is not None and rows:
        rows.append([Fraction(0)] * (len(rows[0]) - 1) + [Fraction(1)])
    if nonnegative and rows:
        rows += [[Fraction(int(j == c)) for c in range(len(rows[0]))] for j in range(len(W[0]))]
    return not rows or not _has_nonnegative_solution(rows)


def _has_nonnegative_solution(rows) -> bool:
    """Whether λ ≥ 0 exists with ``Σ λ_i rows_i = 0`` and ``Σ λ_i = 1``: phase one of the simplex method."""
    m, width = len(rows), len(rows[0])
    # Equations: one per column, and the sum; one artificial variable each; right-hand side last.
    table = [[rows[i][j] for i in range(m)] for j in range(width)] + [[Fraction(1)] * m]
    for r, line in enumerate(table):
        line += [Fraction(int(r == s)) for s in range(width + 1)] + [Fraction(int(r == width))]
    basis = [m + r for r in range(width + 1)]
    cost = [-sum(line[c] for line in table) for c in range(m)] + [Fraction(0)] * (width + 1)
    cost.append(-sum(line[-1] for line in table))
    while True:
        entering = next((c for c in range(m + width + 1) if cost[c] < 0), None)
        if entering is None:
            return cost[-1] == 0
        ratios = [(line[-1] / line[entering], basis[r], r) for r, line in enumerate(table) if line[entering] > 0]
        assert ratios, "phase one is bounded"
        _, _, r = min(ratios)
        pivot = table[r][entering]
        table[r] = [v / pivot for v in table[r]]
        for s, line in enumerate(table):
            if s != r and line[entering]:
                factor = line[entering]
                table[s] = [a - factor * b for a, b in zip(line, table[r], strict=True)]
        factor = cost[entering]
        cost = [a - factor * b for a, b in zip(cost, table[r], strict=True)]
        basis[r] = entering


def degenerate_matrix(rng: np.random.Generator, kind: str, n: int, d: int) -> np.ndarray:
    """A small matrix of the kind that breaks floating-point reasoning."""
    if kind == "gaussian":
        return rng.standard_normal((n, d))
    if kind == "float32":
        return rng.standard_normal((n, d)).astype(np.float32)
    W = rng.integers(-2, 3, (n, d)).astype(float)
    if kind == "duplicates":
        W = rng.standard_normal((n, d))
        W[rng.integers(0, n, n // 2)] = W[rng.integers(0, n)]
    elif kind == "antipodal":
        W = rng.standard_normal((n, d))
        W[rng.integers(0, n)] = -W[rng.integers(0, n)] * rng.choice([1.0, 0.5, 3.0])
    elif kind == "zero rows":
        W[rng.integers(0, n)] = 0
    elif kind == "rank one":
        W = np.outer(rng.integers(-2, 3, n), rng.integers(1, 4, d)).astype(float)
    elif kind == "low rank":
        W = rng.integers(-2, 3, (n, max(1, d - 1))) @ rng.integers(-1, 2, (max(1, d - 1), d)).astype(float)
    elif kind == "scaled":
        W = rng.standard_normal((n, d)) * 10.0 ** rng.integers(-12, 12, (n, 1))
    elif kind == "tiny":
        W = W * 2.0**-1000
    elif kind == "huge":
        W = rng.standard_normal((n, d)) * 2.0**1000
    elif kind == "one ulp":
        W = np.nextafter(W, rng.choice([-9.0, 9.0], (n, d)))
        W[rng.integers(0, n, n // 2)] = rng.integers(-2, 3, d)
    elif kind == "thin":
        W = rng.integers(-2, 3, (n, d)) + rng.integers(-1, 2, (n, d)) * 2.0**-40
    return W


KINDS = (
    "gaussian",
    "float32",
    "integers",
    "duplicates",
    "antipodal",
    "zero rows",
    "rank one",
    "low rank",
    "scaled",
    "thin",
)

EXTREMES = ("tiny", "huge", "one ulp")
