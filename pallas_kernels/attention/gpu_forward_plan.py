"""How the forward kernel for Hopper GPUs is cut, and where its warpgroups meet."""

from __future__ import annotations

from dataclasses import dataclass

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels import hopper
from pallas_kernels.attention.gpu_schedule import heads_together, place
from pallas_kernels.attention.problem import AttentionProblem
from pallas_kernels.kernel import KernelConfig

ROWS_OF_WARPGROUP = 64


@dataclass(frozen=True)
class ForwardConfig(KernelConfig):
    """How the forward kernel is cut.

    Attributes:
      block_kv: keys of a tile; a multiple of 16, and of 8 for the copies.
      stages: tiles of k and of v that are in shared memory at a time.
      compute_warpgroups: each takes 64 queries.
      persistent: blocks take one tile of queries after the other.
      overlap: a warpgroup starts the next scores before it needs their
        exponentials, instead of leaving the overlap to the other warpgroups alone.
    """

    block_kv: int = 128
    stages: int = 2
    compute_warpgroups: int = 2
    persistent: bool = True
    overlap: bool = False

    @property
    def block_q(self) -> int:
        """Queries of a block."""
        return ROWS_OF_WARPGROUP * self.compute_warpgroups

    def shared_bytes(self, problem: AttentionProblem) -> int:
        """Returns how much shared memory a block takes."""
        q = self.block_q * problem.head_dim * 2
        out = self.block_q * problem.value_dim * 2
        depth = problem.head_dim + problem.value_dim
        tiles = self.stages * self.block_kv * depth * 2
        together = max(q, out) if self.shares(problem) else q + out
        return together + tiles + self.block_q * 4 + 1024

    def shares(self, problem: AttentionProblem) -> bool:
        """Whether the result takes the place of q, each warpgroup's of its own."""
        return not self.persistent and problem.head_dim == problem.value_dim

    def registers(self) -> tuple[int, int]:
        """Registers of a compute thread and of a copying one."""
        return {1: (240, 40), 2: (240, 24), 3: (160, 32)}[self.compute_warpgroups]


@dataclass(frozen=True)
class Kernel:
    """One kernel: the problem, cut."""

    problem: AttentionProblem
    config: ForwardConfig
    interpret: bool

    @property
    def tiles(self) -> int:
        """Tiles of queries of one head."""
        return pl.cdiv(self.problem.q_len, self.config.block_q)

    @property
    def work(self) -> int:
        """Tiles of queries in all."""
        return self.problem.batch * self.problem.heads * self.tiles

    def place(self, number):
        """Returns (batch, head, tile of queries) of a piece of work.

        The tiles of one head follow each other, so that its keys stay in the cache,
        unless their lengths differ.
        """
        problem, together = self.problem, 1
        low, high = problem.band
        if high is not None and low is None:
            row = 2 * (problem.head_dim + problem.value_dim)
            size = problem.k_len * row // problem.group
            together = heads_together(problem.batch * problem.heads, size)
        heads = problem.batch * problem.heads
        head, tile = place(number, self.tiles, heads, together)
        if high is not None:
            tile = self.tiles - 1 - tile
        return lax.div(head, problem.heads), lax.rem(head, problem.heads), tile

    def each_work(self, body) -> None:
        """Calls body(number, carry) for what this block does, carry an int32 from 0."""
        block = lax.axis_index("block")
        if not self.config.persistent:
            body(block, block * 0)  # Pallas takes no constant here
            return
        blocks = min(hopper.multiprocessors(), self.work)
        count = lax.div(self.work - block + blocks - 1, blocks)
        lax.fori_loop(0, count, lambda i, c: body(block + i * blocks, c), jnp.int32(0))


class Barriers:
    """The named barriers of a block, and who meets there."""

    def __init__(self, config: ForwardConfig):
        groups = config.compute_warpgroups
        first = groups + 2  # Pallas's own come before
        self.turn = first
        self.k_free = first + groups
        self.v_free = self.k_free + config.stages
        self.q_free = self.v_free + config.stages
        assert self.q_free <= hopper.LAST_BARRIER
        self.groups = groups
        self.everyone = hopper.WARPGROUP * (groups + 1)

    def wait_turn(self, group) -> None:
        if self.groups > 1:
            hopper.sync(self.turn + group, 2 * hopper.WARPGROUP)

    def pass_turn(self, group) -> None:
        """Lets the next warpgroup multiply."""
        if self.groups > 1:
            following = lax.rem(group + 1, self.groups)
            hopper.arrive(self.turn + following, 2 * hopper.WARPGROUP)

    def release(self, barrier) -> None:
        hopper.arrive(barrier, self.everyone)

    def wait_free(self, barrier) -> None:
        hopper.sync(barrier, self.everyone)
