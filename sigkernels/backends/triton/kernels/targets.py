"""The targets of a block of rows and labels inside a kernel: positives of sets, or numbers of any dtype."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def entries_from(indices, offsets, row, in_row, first):
    """Where the labels from ``first`` on begin in each row, and where the row ends: a binary search, all rows at once."""
    low = tl.load(offsets + row, mask=in_row, other=0)
    end = tl.load(offsets + row + 1, mask=in_row, other=0)
    high = end
    while tl.max(high - low, axis=0) > 0:
        middle = (low + high) >> 1
        open_ = low < high
        below = open_ & (tl.load(indices + middle, mask=open_, other=0) < first)
        low = tl.where(below, middle + 1, low)
        high = tl.where(open_ & (below == 0), middle, high)
    return low, end


@triton.jit
def entry_at(indices, position, end, wanted):
    """The label of the entries at ``position``, where ``wanted``; behind all labels where a row has no more."""
    return tl.load(indices + position, mask=wanted & (position < end), other=9223372036854775807)


@triton.jit
def place_of(upcoming, first, count, BN: tl.constexpr):
    """The column of an entry, int32; BN where it lies behind the block's ``count`` labels, or the row has no more."""
    here = tl.minimum(upcoming - first, BN).to(tl.int32)
    return tl.where(here < count, here, BN)


@triton.jit
def negate_positives(
    value,  # [BM, BN]
    indices,  # [nnz] int64, ascending in each row
    unknown,  # [nnz] uint8: entries that say nothing
    upcoming, position, end,  # [BM]: the label of the first entry from the block's first label on, and where it stands
    first,  # the block's first label among all, int64
    count,  # the labels from there on; the sets may hold others
    UNKNOWN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """``value`` with the sign of positive labels changed, where something is known, and the first entry behind the block.

    A row has few entries in a block: they are compared one at a time. What goes through the loop is the value itself: a
    mask would have to be brought into its layout afterwards.
    """
    column = tl.arange(0, BN)[None, :]
    place = place_of(upcoming, first, count, BN)
    missing = tl.zeros((BM, BN), tl.int32)
    while tl.min(place, axis=0) < BN:
        hit = column == place[:, None]
        if UNKNOWN:
            silent = tl.load(unknown + position, mask=place < BN, other=0).to(tl.int32)
            missing |= hit.to(tl.int32) & silent[:, None]
        value = tl.where(hit, -value, value)
        hits = place < BN
        position += hits.to(tl.int64)
        upcoming = tl.where(hits, entry_at(indices, position, end, hits), upcoming)
        place = place_of(upcoming, first, count, BN)
    return value, missing == 0, upcoming, position


@triton.jit
def mark_positives(
    indices, offsets,
    marks,  # [≥ words, batch] int32, out
    row, in_row, batch, first, labels, words, WORDS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """The positives of the rows among so many labels from ``first`` on, as bits of so many words.

    Entries are read ENTRIES at a time: most rows have few more, and a search in them would wait for memory at every step.
    """
    low = tl.load(offsets + row, mask=in_row, other=0)
    end = tl.load(offsets + row + 1, mask=in_row, other=0)
    for start in range(0, words, WORDS):
        word = start + tl.arange(0, WORDS)[:, None]
        nothing = tl.zeros((WORDS, row.shape[0]), tl.int32)
        tl.store(marks + word.to(tl.int64) * batch + row[None, :], nothing, mask=(word < words) & in_row[None, :])
    high = end
    while tl.max(high - low, axis=0) > ENTRIES:
        middle = (low + high) >> 1
        far = high - low > ENTRIES
        below = far & (tl.load(indices + middle, mask=far, other=0) < first)
        low = tl.where(below, middle, low)
        high = tl.where(far & (below == 0), middle, high)
    tl.debug_barrier()  # marks are empty
    while tl.max(end - low, axis=0) > 0:
        at = low[:, None] + tl.arange(0, ENTRIES)[None, :]
        label = tl.load(indices + at, mask=at < end[:, None], other=9223372036854775807) - first
        here = (label >= 0) & (label < labels)
        bit = tl.where(here, label, 0).to(tl.int32)
        tl.atomic_or(marks + (bit // 32).to(tl.int64) * batch + row[:, None], 1 << (bit & 31), mask=here, sem="relaxed")
        low = tl.where(tl.max(label, axis=1) < labels, low + ENTRIES, end)


@triton.jit(do_not_specialize=["label_start", "batch", "labels"])
def mark_kernel(
    indices, offsets, marks, label_start, batch, labels,
    WORDS: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """The positives among a layer's labels, ``marks [ceil(labels / 32), B]``: ROWS rows in WORDS words."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(0) * WORDS
    first = (tl.zeros((), tl.int64) + word) * 32 + label_start
    marks += word.to(tl.int64) * batch
    words = tl.minimum(tl.cdiv(labels, 32) - word, WORDS)
    count = tl.minimum(labels - word * 32, WORDS * 32)
    mark_positives(indices, offsets, marks, row, row < batch, batch, first, count, words, WORDS, ENTRIES)


@triton.jit
def sign_changes(a, b):
    """All bits zero but the sign, which is set where those of a and b, else the same numbers, differ."""
    if a.dtype == tl.float64:
        changes = a.to(tl.int64, bitcast=True) ^ b.to(tl.int64, bitcast=True)
    else:
        changes = a.to(tl.int32, bitcast=True) ^ b.to(tl.int32, bitcast=True)
    return changes


@triton.jit
def soft_targets(dense, row_stride, step, row, label, mask, ACC: tl.constexpr):
    """``y [BM, BN]`` of numbers of any dtype in ACC."""
    place = row[:, None] * row_stride + label[None, :] * step
    return tl.load(dense + place, mask=mask, other=0.0).to(ACC)
