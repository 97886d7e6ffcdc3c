"""How many tiles a banded attention has, and how long SMs take for them together."""

from __future__ import annotations

import functools

import numpy as np

from pallas_kernels.attention.problem import AttentionProblem

Band = tuple[int | None, int | None]


@functools.lru_cache(maxsize=4096)
def tile_counts(
    rows: int, cols: int, block_rows: int, block_cols: int, band: Band
) -> tuple[np.ndarray, np.ndarray]:
    """Counts the tiles that a kernel visits for each block of rows.

    Args:
      rows, cols: of the scores.
      block_rows, block_cols: of a tile.
      band: (lo, hi): column j is visible to row i iff lo <= j - i <= hi; None is no
        limit.

    Returns:
      Of each block of rows, int64: the tiles with a visible score, and those of them
      that also have an invisible one, by the band or past the last column.
    """
    low, high = band
    first_row = np.arange(0, rows, block_rows)
    last_row = np.minimum(first_row + block_rows, rows) - 1
    zeros, ends = np.zeros_like(first_row), np.full_like(first_row, cols)
    # columns that some row sees: [begin, end); that all rows see: [inner, until)
    begin = zeros if low is None else np.clip(first_row + low, 0, cols)
    end = ends if high is None else np.clip(last_row + high + 1, 0, cols)
    inner = zeros if low is None else np.clip(last_row + low, 0, cols)
    until = ends if high is None else np.clip(first_row + high + 1, 0, cols)
    visited = np.where(end > begin, -(-end // block_cols) - begin // block_cols, 0)
    whole = np.maximum(until // block_cols - -(-inner // block_cols), 0)
    return visited, np.where(visited > 0, visited - np.minimum(whole, visited), 0)


def transposed(band: Band) -> Band:
    """The band of the scores with queries and keys exchanged."""
    low, high = band
    return (None if high is None else -high), (None if low is None else -low)


def makespan(jobs: np.ndarray, copies: int, slots: int, tail: float) -> float:
    """Returns when the last job ends.

    Equal jobs take whole waves. Unequal ones fill the gaps, and at the end the slots
    wait for the last jobs: `tail` of the longest one on average.

    Args:
      jobs: the times of the different jobs.
      copies: of each.
      slots: how many run at once.
      tail: as above, 0 (longest first) to 1 (longest last).
    """
    longest, count = float(jobs.max()), jobs.size * copies
    waves = -(-count // slots) * longest
    if count <= slots or float(jobs.min()) == longest:
        return waves
    even = float(jobs.sum()) * copies / slots
    return min(waves, max(longest, even + tail * longest))


def key_reads(problem: AttentionProblem, block_q: int, slots: int, l2: int) -> float:
    """Returns how often each key and value is read from the main memory.

    CTAs that run together and share a key-value head read it once, through the L2;
    so do all CTAs of a head while what is in use fits into the L2.

    Args:
      problem: what is computed.
      block_q: query rows of a CTA.
      slots: CTAs that run together.
      l2: its bytes.
    """
    depth = problem.head_dim + problem.value_dim
    sharing = -(-problem.q_len // block_q) * problem.group  # CTAs of a key-value head
    heads_at_once = max(1.0, slots / sharing)
    in_use = heads_at_once * problem.k_len * depth * 2
    return 1.0 if in_use <= l2 else max(1.0, sharing / slots)


def side_bytes(problem: AttentionProblem, share: float) -> tuple[float, float]:
    """Returns the bytes of bias and mask from the main memory, and through the L2.

    Args:
      problem: what is computed.
      share: of the scores, in the tiles visited.
    """
    scores = problem.q_len * problem.k_len * share
    everywhere = problem.batch * problem.heads * scores
    size = {"float32": 4, "float64": 8}.get(problem.bias_dtype or "", 2)
    memory = cache = 0.0
    for shape, itemsize in ((problem.bias, size), (problem.mask, 1)):
        if shape is None:
            continue
        batch, heads, queries, keys = shape
        # a row or column of a broadcast side stays in the SM
        tile = (scores if queries > 1 and keys > 1 else queries * keys) * itemsize
        memory += batch * heads * tile
        cache += tile * problem.batch * problem.heads
    return memory, min(cache, everywhere * size)
