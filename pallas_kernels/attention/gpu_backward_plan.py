"""How the backward kernel for Hopper GPUs is cut, and what its warpgroups share."""

from __future__ import annotations

from dataclasses import dataclass

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels import hopper
from pallas_kernels.attention.gpu_forward_plan import ForwardConfig
from pallas_kernels.attention.gpu_schedule import heads_together, place
from pallas_kernels.attention.gpu_scores import Scores, Span
from pallas_kernels.attention.problem import AttentionProblem
from pallas_kernels.kernel import KernelConfig

KEYS_OF_WARPGROUP = 64


@dataclass(frozen=True)
class BackwardConfig(KernelConfig):
    """How the backward kernel is cut.

    Attributes:
      block_q: queries of a tile: 64, or 64 for each compute warpgroup.
      stages: tiles of queries that are in shared memory at a time.
      compute_warpgroups: each keeps 64 keys.
      deep: two warpgroups keep the same 64 keys, one their dV and one their dK; for
        head dims above 128.
      two_kernels: dQ comes from a kernel of its own, in which nothing is added in
        memory.
    """

    block_q: int = 64
    stages: int = 2
    compute_warpgroups: int = 2
    deep: bool = False
    two_kernels: bool = False

    @property
    def key_groups(self) -> int:
        """Groups of 64 keys that a block has."""
        return 1 if self.deep else self.compute_warpgroups

    @property
    def dout_stages(self) -> int:
        """Tiles of dout that are in shared memory at a time."""
        return 1 if self.deep else self.stages

    @property
    def block_kv(self) -> int:
        """Keys of a block."""
        return KEYS_OF_WARPGROUP * self.key_groups

    def shared_bytes(self, problem: AttentionProblem, wants_bias: bool) -> int:
        """Returns how much shared memory a block takes."""
        depth = problem.head_dim + problem.value_dim
        keys = self.block_kv * depth * 2
        queries = self.stages * self.block_q * (problem.head_dim * 2 + 4)
        queries += self.dout_stages * self.block_q * (problem.value_dim * 2 + 4)
        scores = self.block_kv * self.block_q
        wide = 4 * scores * (wants_bias or self.deep)
        total = keys + queries + wide + 1024
        if self.two_kernels:
            return total
        rows, columns = self.dq_part(problem.head_dim)
        dq = self.compute_warpgroups * rows * columns * 4
        return total + 2 * 2 * scores + dq

    def registers(self) -> tuple[int, int]:
        """Registers of a compute thread and of a copying one."""
        return {1: (240, 40), 2: (240, 24), 3: (160, 32)}[self.compute_warpgroups]

    def queries_kernel(self, problem: AttentionProblem) -> ForwardConfig:
        """Returns how the kernel for dQ alone is cut."""
        depth = max(problem.head_dim, problem.value_dim)
        return ForwardConfig(
            block_kv=128 if depth <= 64 else 64,
            stages=2 if depth <= 128 else 1,
            compute_warpgroups=2,
            persistent=False,
        )

    def queries_shared_bytes(self, problem: AttentionProblem) -> int:
        """Returns how much shared memory a block of that kernel takes."""
        config = self.queries_kernel(problem)
        rows = config.block_q + config.stages * config.block_kv
        return 2 * (problem.head_dim + problem.value_dim) * rows + 1024

    def dq_part(self, head_dim: int) -> tuple[int, int]:
        """Rows and columns of dQ that a warpgroup has on their way to memory."""
        if self.deep:
            return self.block_q, 64
        if self.block_q == 64 * self.compute_warpgroups:
            return 64, head_dim
        return self.block_q, head_dim // self.compute_warpgroups


@dataclass(frozen=True)
class Kernel:
    problem: AttentionProblem
    config: BackwardConfig
    scores: Scores
    wants_bias: bool
    interpret: bool

    @property
    def has_dq(self) -> bool:
        """Whether this kernel computes dQ too."""
        return not self.config.two_kernels

    @property
    def tiles(self) -> int:
        """Tiles of keys of one head."""
        return pl.cdiv(self.problem.k_len, self.config.block_kv)

    @property
    def work(self) -> int:
        """Tiles of keys in all."""
        return self.problem.batch * self.problem.kv_heads * self.tiles

    def tile_inside(self, tile):
        """Returns a tile of queries, the last one if there is no such."""
        return jnp.minimum(tile, pl.cdiv(self.problem.q_len, self.config.block_q) - 1)

    def place(self):
        """Returns (batch, key-value head, first key) of the block."""
        problem, together = self.problem, 1
        heads = problem.batch * problem.kv_heads
        low, high = problem.band
        if (low is None) != (high is None):
            # q and dout of a query head, and its dq in float32
            row = 6 * problem.head_dim + 2 * problem.value_dim
            together = heads_together(heads, problem.q_len * row)
        head, tile = place(lax.axis_index("block"), self.tiles, heads, together)
        if high is None and low is not None:
            tile = self.tiles - 1 - tile  # the longest come first
        return (
            lax.div(head, problem.kv_heads),
            lax.rem(head, problem.kv_heads),
            tile * self.config.block_kv,
        )


class Side:
    """What both kinds of warpgroups know."""

    def __init__(self, kernel: Kernel, refs: dict, scratch: dict):
        self.kernel, self.refs, self.scratch = kernel, refs, scratch
        self.batch, self.kv_head, self.key = kernel.place()
        groups = kernel.config.compute_warpgroups
        self.together = groups + 2  # Pallas's own barriers come before
        self.free = self.together + 1
        self.dout_free = self.free + kernel.config.stages  # if it is not `free`
        self.compute_threads = hopper.WARPGROUP * groups
        self.everyone = self.compute_threads + hopper.WARPGROUP

    def span(self, own) -> Span:
        """Returns the tiles of queries that the block needs."""
        return self.kernel.scores.span_of_queries(
            self.refs, self.batch, self.key, own, KEYS_OF_WARPGROUP
        )

    def turned(self, tile, span: Span):
        """Returns which tile of queries comes in the place of a tile.

        Without a band all blocks need all of them: each begins elsewhere, so that they
        do not all add to the same dq.
        """
        if self.kernel.problem.band != (None, None):
            return tile
        count = span.end - span.first
        start = lax.div(self.key, self.kernel.config.block_q)
        return span.first + lax.rem(tile - span.first + start, jnp.maximum(count, 1))

    def head(self, member):
        """Returns a query head of the block's key-value head."""
        return self.kv_head * self.kernel.problem.group + member

    def each_head(self, body, state):
        """Folds body(member, state) over the query heads."""
        if self.kernel.problem.group == 1:
            return body(0, state)
        return lax.fori_loop(0, self.kernel.problem.group, body, state)
