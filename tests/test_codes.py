"""Kerdock codes: their inner products, their transform, and the guarantee that rests on them."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch

from sigkernels.codes import (
    CODES,
    check_codes,
    code_adjoint,
    code_logits,
    code_matrix,
    code_rows,
    code_witness,
    coherence,
    fwht,
    guarantee,
    guaranteed_size,
    sign_bits,
    smallest_codes,
)

WIDTHS = CODES[1:]


@pytest.mark.parametrize("codes", [16, 64])
def test_every_inner_product_is_zero_or_one_value(codes):
    rows = code_matrix(codes * codes // 2, codes).numpy()
    products = rows @ rows.T
    np.fill_diagonal(products, 0)
    assert set(np.unique(np.abs(products)).tolist()) == {0, 1 / math.sqrt(codes)}


@pytest.mark.parametrize("codes", WIDTHS)
def test_blocks_are_mutually_unbiased(codes):
    """Complete for every width: Q_a + Q_b is Q_1 + Q_{b/a} after x → x/a, so the pairs (0, 1) and (1, b) are all pairs.

    The inner products of two blocks are the transform of (-1)^(Q_a + Q_b); within a block rows are orthogonal.
    """
    bits = sign_bits(codes, range(codes // 2))
    others = np.delete(bits, 1, axis=0) ^ bits[1]
    spectrum = fwht(1 - 2 * torch.from_numpy(others).float())
    assert (spectrum.abs() == math.isqrt(codes)).all()


@pytest.mark.parametrize("codes", WIDTHS)
def test_sampled_inner_products(codes):
    n = codes * codes // 2
    labels = np.random.default_rng(0).choice(n, size=min(n, 400), replace=False)
    rows = code_rows(codes, labels)
    products = rows @ rows.T
    assert (np.diag(products) == 1).all()
    np.fill_diagonal(products, 0)
    assert set(np.unique(np.abs(products)).tolist()) <= {0, 1 / math.sqrt(codes)}
    assert (np.abs(rows) == 1 / math.sqrt(codes)).all()


@pytest.mark.parametrize(
    ("codes", "digest"),
    [
        (16, "6f2bd2767b70d893"),
        (64, "fa79ff8313e173e1"),
        (256, "f99c42763ae78c9f"),
        (1024, "8380d96e99edda46"),
        (4096, "94941f70b47862be"),
    ],
)
def test_bits_are_pinned(codes, digest):
    """Saved heads hold no codes: the bits may never change. Half of these blocks are Kerdock's, half are random."""
    bits = sign_bits(codes, range(codes // 2 - 8, codes // 2 + 8))
    assert hashlib.sha256(np.packbits(bits).tobytes()).hexdigest()[:16] == digest


def test_bits_follow_the_definition():
    """Against the field's arithmetic written out: products and traces of polynomials."""
    degree, polynomial = 5, 0b100101

    def times(a: int, b: int) -> int:
        product = 0
        for i in range(degree):
            product ^= (a << i) if b >> i & 1 else 0
        for i in reversed(range(degree, 2 * degree)):
            product ^= (polynomial << (i - degree)) if product >> i & 1 else 0
        return product

    def power(a: int, exponent: int) -> int:
        value = 1
        for _ in range(exponent):
            value = times(value, a)
        return value

    def trace(a: int) -> int:
        value = 0
        for i in range(degree):
            value ^= power(a, 2**i)
        return value

    bits = sign_bits(64, range(32))
    for a in range(32):
        for x in range(32):
            y = times(a, x)
            form = trace(power(y, 3)) ^ trace(power(y, 5))
            assert (bits[a, x], bits[a, x + 32]) == (form, form ^ trace(y)), (a, x)


@pytest.mark.parametrize("codes", [16, 256])
def test_ranges_agree_with_the_whole(codes):
    blocks = codes // 2 + 40  # some beyond the Kerdock code
    whole = sign_bits(codes, range(blocks))
    for first, last in [(0, 3), (5, 5), (codes // 2 - 3, codes // 2 + 7), (codes // 2 + 13, blocks)]:
        assert np.array_equal(sign_bits(codes, range(first, last)), whole[first:last])
    n = blocks * codes - 5
    matrix = code_matrix(n, codes, dtype=torch.float32)
    for start, stop in [(3, 11), (codes - 1, 3 * codes + 2), (n - codes - 9, n), (7, 7)]:
        assert np.array_equal(code_rows(codes, np.arange(start, stop)), matrix[start:stop].double().numpy())


def test_random_blocks_look_random():
    bits = sign_bits(256, range(128, 628))
    assert abs(bits.mean() - 0.5) < 0.005
    signs = 1 - 2 * bits.astype(np.float64)
    products = signs @ signs.T / 256
    np.fill_diagonal(products, 0)
    assert np.abs(products).max() < 0.45 and abs(products.std() - 1 / 16) < 0.002


@pytest.mark.parametrize("codes", WIDTHS)
def test_transform(codes):
    x = torch.randn(3, codes, dtype=torch.float64)
    want = x
    step = 1
    while step < codes:  # the butterflies
        low, high = want.view(3, -1, 2, step).unbind(2)
        want = torch.stack([low + high, low - high], 2).view(3, codes)
        step *= 2
    torch.testing.assert_close(fwht(x), want)
    torch.testing.assert_close(fwht(fwht(x)), codes * x)


@pytest.mark.parametrize(("start", "stop"), [(0, 40), (5, 9), (13, 37), (32, 48), (119, 200), (20, 20)])
def test_logits_and_their_adjoint(start, stop):
    x = torch.randn(4, 16, dtype=torch.float64)
    matrix = code_matrix(200, 16)[start:stop]
    torch.testing.assert_close(code_logits(x, start, stop), x @ matrix.T)
    g = torch.randn(4, stop - start, dtype=torch.float64)
    torch.testing.assert_close(code_adjoint(g, 16, start), g @ matrix)


def test_logits_have_gradients():
    x = torch.randn(2, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: code_logits(x, 7, 45), x)
    assert code_logits(torch.randn(0, 16), 3, 30).shape == (0, 27)
    assert code_adjoint(torch.randn(0, 27), 16, 3).shape == (0, 16)


@pytest.mark.parametrize(("codes", "n"), [(16, 128), (64, 2048), (64, 777), (256, 11_732), (1024, 9000), (64, 60)])
def test_guarantee_holds_for_random_sets(codes, n):
    draw = np.random.default_rng(codes)
    matrix = code_matrix(n, codes).numpy()
    for r in range(guaranteed_size(codes, n) + 1 if n > codes else 6):
        for _ in range(10):
            active = np.sort(draw.choice(n, size=r, replace=False))
            constant, u = code_witness(n, codes, active, np.array([0, r]))
            found = guarantee(r, n, codes, max_norm=1.5, box=1e4)
            assert found is not None
            logits = matrix @ u[0] + constant / math.sqrt(n)
            signs = np.where(np.isin(np.arange(n), active), 1, -1)
            assert (signs * logits).min() >= found.margin * (1 - 1e-12) > 0
            assert found.scale * np.abs(np.append(u[0], constant)).max() <= 1e4 * (1 + 1e-12)
            assert found.scale * (signs * logits).min() / 1.5 >= found.radius * (1 - 1e-12)


@pytest.mark.parametrize("bias", [(-11.0, -3.0), (2.0, 9.0), (-3.0, 2.0), (-200.0, -190.0), (-1e6, 0.0)])
def test_the_constant_feature_takes_the_middle_of_the_biases_away(bias):
    """The witness stays in the box, and every logit is as far on its side of 0 as it says."""
    n, codes, box = 11_732, 256, 1e4
    draw = np.random.default_rng(0)
    biases = draw.uniform(*bias, n)
    biases[:2] = bias
    for r in range(guaranteed_size(codes, n) + 1):
        active = np.sort(draw.choice(n, size=r, replace=False))
        constant, u = code_witness(n, codes, active, np.array([0, r]))
        found = guarantee(r, n, codes, max_norm=2.0, bias=bias, box=box)
        assert found is not None
        constant = found.scale * constant + found.shift
        assert max(abs(constant), np.abs(found.scale * u).max()) <= box * (1 + 1e-12)
        logits = code_logits(torch.from_numpy(found.scale * u), 0, n)[0].numpy() + constant / math.sqrt(n) + biases
        signs = np.where(np.isin(np.arange(n), active), 1, -1)
        assert (signs * logits).min() >= found.room - 1e-9 * box
        assert found.radius == max(found.room / 2, 0)
        unshifted = guarantee(r, n, codes, max_norm=2.0, box=box)
        assert unshifted is not None
        assert found.room >= unshifted.room - max(map(abs, bias))


def test_guarantee_in_numbers():
    """The example of the documentation: a box of 1e4, 1, 4 and 8 of 11,732 labels, constant column and codes alone."""
    norm = math.sqrt(1 + 1 / 11_732)
    radii = [guarantee(r, 11_732, 256, max_norm=norm).radius for r in (1, 4, 8)]
    np.testing.assert_allclose(radii, [81.46, 48.88, 5.43], rtol=1e-3)
    assert guarantee(9, 11_732, 256, max_norm=norm) is None
    assert guarantee(1, 32_769, 256, max_norm=norm) is None
    assert guarantee(4, 11_732, 256, max_norm=norm, bias=(-1e6, 1e6)).radius == 0
    assert guarantee(0, 11_732, 256, max_norm=1.0).radius == pytest.approx(1e4 / math.sqrt(11_732))


def test_coherence_and_sizes():
    assert coherence(256, 32_768) == 1 / 16 and coherence(256, 32_769) is None and coherence(0, 5) is None
    assert coherence(256, 256) == 0
    assert [guaranteed_size(c, c * c // 2) for c in WIDTHS] == [2, 4, 8, 16, 32]
    assert guaranteed_size(16, 10) == 10 and guaranteed_size(16, 129) == 0
    assert [smallest_codes(n) for n in (100, 129, 20_000, 10**6, 10**8)] == [16, 64, 256, 4096, 4096]


def test_refusals():
    assert check_codes(np.int64(64), 100) == 64 and check_codes(0, 100) == 0
    with pytest.raises(ValueError, match=r"codes must be one of 0, 16, 64, 256, 1024, 4096, got 32.*codes=64"):
        check_codes(32, 2000)
    with pytest.raises(ValueError, match="codes must be at least 0, got -1"):
        check_codes(-1, 2000)
    with pytest.raises(TypeError, match=r"codes must be a whole number, got 16\.0"):
        check_codes(16.0, 2000)
    assert code_matrix(50, 0).shape == (50, 0)
