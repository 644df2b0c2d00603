"""Codes: fixed columns whose rows are nearly orthogonal, so that every small set of labels has a wide region.

``C`` is ``[n, c]``, ``c = 2^m`` with m even, rows of norm 1. The labels come in blocks of c; label ``i = a·c + b``
has the row (``t = 0 … c-1``)::

    c_i(t) = (-1)^(Q_a(t) + ⟨b, t⟩) / √c          ⟨b, t⟩ = parity of b & t: the Sylvester-Hadamard matrix

Only the bits ``Q_a(t)`` differ between blocks. For the first c/2 blocks they are those of the Kerdock code. With
``F = GF(2^(m-1))`` and ``t = x + 2^(m-1)·ε``, ``x ∈ F``, ``ε ∈ {0, 1}``::

    Q_a(x, ε) = Σ_{i=1}^{(m-2)/2} Tr((a x)^(2^i + 1)) + ε·Tr(a x)     (mod 2),  a = block number, as an element of F

so ``Q_a`` is one fixed function of the product ``a x``, and a block is a gather from a table of c bits. Elements of F
are polynomials over GF(2) written as binary numbers, modulo the primitive polynomial in ``PRIMITIVE``.

All inner products of different rows are 0 or ±1/√c, up to ``c²/2`` labels. Blocks beyond that take their bits from one
fixed random stream: the same kernels, but no bound that holds for every set.

Nothing is stored per label: a block's logits are the features, signs flipped by ``Q_a``, after one fast
Walsh-Hadamard transform, which is its own transpose.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .bounded_cache import BoundedCache
from .validation import CODES, check_codes, check_int, smallest_codes

__all__ = [
    "CODES",
    "CodeGuarantee",
    "check_codes",
    "code_adjoint",
    "code_logits",
    "code_matrix",
    "code_rows",
    "code_witness",
    "coherence",
    "fwht",
    "guarantee",
    "guaranteed_size",
    "sign_bits",
    "smallest_codes",
]

# c → the primitive polynomial of GF(c/2): x³+x+1, x⁵+x²+1, x⁷+x+1, x⁹+x⁴+1, x¹¹+x²+1
PRIMITIVE = {16: 0b1011, 64: 0b100101, 256: 0b10000011, 1024: 0b1000010001, 4096: 0b100000000101}
_SEED = 0x6B6572646F636B  # of the random blocks; Philox gives the same bits on every platform
_PHILOX_BITS = 256  # that one step of Philox's counter gives


@functools.cache
def _field(codes: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """``log x`` for x = 1 … q-1 in F, and ``Q(g^j, ε)`` for j = 0 … 2q-3, ``[2, 2(q-1)]``, so that logs simply add."""
    q = codes // 2
    degree = q.bit_length() - 1
    powers = np.empty(q - 1, dtype=np.int64)  # g^j, g = the polynomial x
    value = 1
    for j in range(q - 1):
        powers[j] = value
        value = (value << 1) ^ (PRIMITIVE[codes] if value & (q >> 1) else 0)
    log = np.empty(q, dtype=np.int64)
    log[powers] = np.arange(q - 1)

    def trace(exponents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tr(g^e) = Σ_i (g^e)^(2^i), which is 0 or 1."""
        conjugates = [powers[exponents * 2**i % (q - 1)] for i in range(degree)]
        return functools.reduce(np.bitwise_xor, conjugates)

    exponents = np.arange(q - 1, dtype=np.int64)
    forms = [trace(exponents * (2**i + 1)) for i in range(1, (degree + 1) // 2)]
    quadratic = functools.reduce(np.bitwise_xor, forms)
    table = np.stack([quadratic, quadratic ^ trace(exponents)]).astype(np.uint8)
    return log[1:], np.tile(table, 2)


def sign_bits(codes: int, blocks: range) -> NDArray[np.uint8]:
    """``Q_a(t)`` for the blocks a of a range with step 1, ``[len(blocks), c]`` of 0 and 1."""
    bits = np.zeros((len(blocks), codes), dtype=np.uint8)
    q = codes // 2
    kerdock = range(blocks.start, min(blocks.stop, q))
    if kerdock:
        log, table = _field(codes)
        for row, a in zip(bits, kerdock, strict=False):
            if a:  # Q_0 = 0, and Q_a = 0 at x = 0
                product = log + log[a - 1]
                row[1:q], row[q + 1 :] = table[0, product], table[1, product]
    drawn = range(max(blocks.start, q), blocks.stop)
    if drawn:
        bits[drawn.start - blocks.start :] = _random_bits(drawn.start * codes, len(drawn) * codes).reshape(-1, codes)
    return bits


def _random_bits(first: int, count: int) -> NDArray[np.uint8]:
    """The bits ``first … first + count - 1`` of the fixed random stream."""
    step, skip = divmod(first, _PHILOX_BITS)
    words = np.random.Philox(key=_SEED, counter=step).random_raw(-(-(skip + count) // 64))
    return np.unpackbits(words.astype("<u8").view(np.uint8), bitorder="little")[skip : skip + count]


def code_rows(codes: int, labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """The exact rows of C for ``labels``, ``[len(labels), c]``: every entry is ±1/√c, a power of two."""
    labels = np.asarray(labels, dtype=np.int64)
    if not (len(labels) and codes):
        return np.zeros((len(labels), codes))
    used, which = np.unique(labels // codes, return_inverse=True)
    bits = np.concatenate([sign_bits(codes, range(a, a + 1)) for a in used.tolist()])
    if len(labels) >= codes:
        signs = (1 - 2 * bits.astype(np.float64)) / math.sqrt(codes)
        rows = hadamard(codes)[labels % codes].astype(np.float64)
        rows *= signs[which]
        return rows
    bits, parity = bits[which], (labels % codes)[:, None] & np.arange(codes)
    for shift in (8, 4, 2, 1):
        parity ^= parity >> shift
    return (1 - 2 * (bits ^ (parity & 1)).astype(np.float64)) / math.sqrt(codes)


def code_matrix(
    num_labels: int, codes: int, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
) -> Tensor:
    """C, ``[n, c]``; exact in every floating point dtype."""
    num_labels = check_int("num_labels", num_labels, 1)
    codes = check_codes(codes, num_labels)
    if not codes:
        return torch.zeros(num_labels, 0, dtype=dtype, device=device)
    return torch.from_numpy(code_rows(codes, np.arange(num_labels))).to(device, dtype)


# The transform


@functools.cache
def hadamard(size: int) -> NDArray[np.float32]:
    """The Sylvester-Hadamard matrix, ``[size, size]`` of ±1."""
    matrix = np.ones((1, 1), dtype=np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def fwht(x: Tensor) -> Tensor:
    """The Walsh-Hadamard transform over the last dimension, ``[…, c] → […, c]``, without a scale: its own transpose.

    ``H_c = H_√c ⊗ H_√c``, so with the features as a matrix M ``[√c, √c]`` it is ``H M H``: 2·√c multiplications per
    entry, in matrix products that every library and every device has. c is a power of 4.
    """
    side = math.isqrt(x.shape[-1])
    matrix = torch.from_numpy(hadamard(side)).to(x.device, x.dtype)
    squares = x.reshape(*x.shape[:-1], side, side)
    return (matrix @ (squares @ matrix)).reshape(x.shape)


_sign_cache: BoundedCache[Tensor] = BoundedCache(16 * 2**20, lambda signs: signs.nbytes)


def _signs(codes: int, blocks: range, like: Tensor) -> Tensor:
    """``(-1)^Q_a(t) / √c``, ``[len(blocks), c]``, never written."""

    def work_out() -> Tensor:
        signs = (1 - 2 * sign_bits(codes, blocks).astype(np.float32)) / math.sqrt(codes)
        with torch.inference_mode(False):  # what is kept outlives the mode it was made in
            return torch.tensor(signs, dtype=like.dtype, device=like.device)

    return _sign_cache.get((codes, blocks, like.dtype, like.device), work_out)


def _blocks(codes: int, start: int, stop: int) -> range:
    return range(start // codes, -(-stop // codes))


def code_logits(x: Tensor, start: int, stop: int) -> Tensor:
    """``x Cᵀ`` for the labels ``start … stop-1``: ``[B, c] → [B, stop-start]``."""
    codes = x.shape[-1]
    blocks = _blocks(codes, start, stop)
    flipped = x[:, None, :] * _signs(codes, blocks, x)
    first = start - blocks.start * codes
    return fwht(flipped).flatten(1)[:, first : first + stop - start]


def code_adjoint(g: Tensor, codes: int, start: int) -> Tensor:
    """``g C`` for the labels ``start … start + m - 1``, the adjoint of ``code_logits``: ``[B, m] → [B, c]``."""
    stop = start + g.shape[1]
    blocks = _blocks(codes, start, stop)
    first = start - blocks.start * codes
    padded = torch.nn.functional.pad(g, (first, len(blocks) * codes - first - g.shape[1]))
    return (fwht(padded.unflatten(1, (len(blocks), codes))) * _signs(codes, blocks, g)).sum(1)


# The guarantee


def coherence(codes: int, num_labels: int) -> float | None:
    """μ, the largest |inner product| of two different rows: 0 in one block, 1/√c up to c²/2 labels, else unknown."""
    if codes == 0 or num_labels > codes * codes // 2:
        return None
    return 0.0 if num_labels <= codes else 1 / math.sqrt(codes)


def guaranteed_size(codes: int, num_labels: int) -> int:
    """The largest r for which every set of r labels has the guarantee; 0 where there is none."""
    mu = coherence(codes, num_labels)
    if mu is None:
        return 0
    return num_labels if mu == 0 else math.isqrt(codes) // 2


class CodeGuarantee(NamedTuple):
    """What the codes promise for every set of r labels, whatever the learnable columns are."""

    margin: float  # of the unscaled witness: every active logit is at least this, every other at most minus this
    scale: float  # how far the witness can be scaled up inside the box
    shift: float  # of the constant feature of the scaled witness: it takes up the middle of the label biases
    room: float  # how far each logit of the scaled and shifted witness is on its side of 0, biases included; or below 0
    radius: float  # of a ball around that witness in which every input predicts the set; at least 0


def middle(bias: tuple[float, float], limit: float) -> tuple[float, float]:
    """The middle of biases between two numbers, as far as ``±limit`` allows, and how far from it a bias may lie."""
    lowest, highest = bias
    centre = min(max((lowest + highest) / 2, -limit), limit)
    return centre, max(highest - centre, centre - lowest)


def guarantee(
    r: int,
    num_labels: int,
    codes: int,
    *,
    max_norm: float,
    bias: tuple[float, float] = (0.0, 0.0),
    box: float = 1e4,
) -> CodeGuarantee | None:
    """The closed form for sets of ``r`` labels, or None where the codes promise nothing.

    With ``u = Σ_{i∈A} c_i``, the constant feature ``-√n·θ``, ``θ = (1+μ)/2``, and every other feature 0, active logits
    are at least and other logits at most minus ``m = (1 - (2r-1)μ)/2``. Biases lie within h of their middle b, which
    ``-√n·b`` more of the constant feature takes away: scaled by the largest t with ``√n·|tθ + b| ≤ box`` and
    ``t·r/√c ≤ box`` the logits are ``t·m - h`` from the threshold.

    max_norm: the largest ‖w_i‖₂ over the rows of the whole classifier matrix; bias: the lowest and the highest one.
    """
    mu = coherence(codes, num_labels)
    if mu is None or (2 * r - 1) * mu >= 1:
        return None
    theta = (1 + mu) / 2
    margin = (1 - (2 * r - 1) * mu) / 2
    limit = box / math.sqrt(num_labels)
    centre, apart = middle(bias, limit)
    scale = min((limit - centre) / theta, box * math.sqrt(codes) / r if r else math.inf)
    room = scale * margin - apart
    return CodeGuarantee(margin, scale, -math.sqrt(num_labels) * centre, room, max(room / max_norm, 0.0))


def code_witness(
    num_labels: int, codes: int, indices: NDArray[np.int64], offsets: NDArray[np.int64]
) -> tuple[float, NDArray[np.float64]]:
    """The witnesses of the closed form: the constant feature ``-√n·θ``, and ``u = Σ_{i∈A} c_i`` per set, ``[sets, c]``.

    The sets are sparse rows: set j holds the labels ``indices[offsets[j]:offsets[j+1]]``.
    """
    mu = coherence(codes, num_labels)
    theta = (1 + (1 / math.sqrt(codes) if mu is None else mu)) / 2
    sums = np.zeros((len(offsets) - 1, codes))
    for row, first, last in zip(sums, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        row += code_rows(codes, indices[first:last]).sum(axis=0)
    return -math.sqrt(num_labels) * theta, sums
