"""The work of attention's forward and backward kernels on Hopper, tile by tile.

Forward: a CTA has `block_q` queries, tiles are of `block_kv` keys; 2 products.
Backward, one kernel: a CTA has `block_kv` keys, tiles are of `block_q` queries; 5
products, and each tile adds its part of dq to float32 in memory.
Backward, two kernels: one as above without dq (4 products), one with `block_q_dq`
queries a CTA and tiles of `block_kv_dq` keys for dq (3 products).
"""

from __future__ import annotations

from collections.abc import Mapping

from hlo_tools.chips import gpu_chip
from hlo_tools.targets import Target
from pallas_kernels.attention.hopper_model import (
    OVERHEAD_REGISTERS,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
    GridWork,
    TileWork,
    add_predictions,
    kernel_terms,
    stream_prediction,
)
from pallas_kernels.attention.hopper_tiles import (
    key_reads,
    side_bytes,
    tile_counts,
    transposed,
)
from pallas_kernels.attention.problem import AttentionProblem
from pallas_kernels.kernel import Prediction

ITEM = 2  # bytes of bfloat16 and float16
Constants = Mapping[str, float]


def _depth(dim: int) -> int:
    """A head dim as the products see it: whole steps of 16."""
    return -(-dim // 16) * 16


def forward_registers(
    problem: AttentionProblem, rows: int, block_kv: int, keep_probs: bool = True
) -> int:
    """Returns the registers a thread needs in the forward kernel.

    Args:
      problem: what is computed.
      rows: of a warpgroup.
      block_kv: keys of a tile.
      keep_probs: probabilities stay while the next scores are made.
    """
    accumulators = rows * problem.value_dim / WARPGROUP_THREADS
    scores = rows * block_kv / WARPGROUP_THREADS
    probs = scores / 2 if keep_probs else 0
    return round(accumulators + scores + probs) + OVERHEAD_REGISTERS


def forward_smem(
    problem: AttentionProblem, block_q: int, block_kv: int, stages: int
) -> int:
    """Returns the shared memory of the forward kernel, in bytes.

    The result is staged in the place of q; barriers take less than a KiB.
    """
    keys = block_kv * (problem.head_dim + problem.value_dim) * ITEM
    queries = block_q * max(problem.head_dim, problem.value_dim) * ITEM
    return queries + stages * keys + 1024


def _operations(problem: AttentionProblem, plain: float, constants: Constants) -> float:
    """Float32 operations a score."""
    sides = (problem.bias is not None) + (problem.mask is not None)
    total = plain + sides * constants["side_operations"]
    if problem.softcap is not None:
        total += constants["softcap_operations"]
    return total


def _masks_everywhere(problem: AttentionProblem) -> bool:
    return problem.segments or problem.q_lengths or problem.k_lengths


def forward_prediction(
    problem: AttentionProblem,
    block_q: int,
    block_kv: int,
    stages: int,
    warpgroups: int,
    target: Target,
    constants: Constants,
    spilled: float = 0,
) -> Prediction:
    """Predicts the forward kernel.

    Args:
      problem: what is computed.
      block_q, block_kv: queries of a CTA, keys of a tile.
      stages: of the pipeline of keys and values.
      warpgroups: that compute.
      target: a Hopper GPU.
      constants: of the model.
      spilled: registers a thread beyond those it can have.
    """
    visited, masked = tile_counts(
        problem.q_len, problem.k_len, block_q, block_kv, problem.band
    )
    if _masks_everywhere(problem):
        masked = visited
    depth, value_depth = _depth(problem.head_dim), _depth(problem.value_dim)
    scores = block_q * block_kv
    operations = _operations(problem, constants["score_operations"], constants)
    keys = block_kv * (depth + value_depth) * ITEM
    share = min(1.0, float(visited.sum()) * scores / (problem.q_len * problem.k_len))
    side_memory, side_cache = side_bytes(problem, share)
    groups = block_q / WARPGROUP_ROWS  # each reads all keys and values
    tile = TileWork(
        flops=2 * scores * (depth + value_depth),
        exps=scores * (2 if problem.softcap is not None else 1),
        operations=scores * operations
        + block_q * value_depth * constants["rescale_operations"],
        masked_operations=scores * constants["mask_operations"],
        smem_bytes=groups * keys + block_q * depth * ITEM,
        load_bytes=keys,
        l2_bytes=keys,
        spilled=spilled,
        threads=warpgroups * WARPGROUP_THREADS,
        fixed_cycles=constants["tile_cycles"],
        stages=stages,
    )
    chip = gpu_chip(target.spec)
    reads = key_reads(problem, block_q, chip.cores, chip.l2_bytes)
    queries = _query_bytes(problem, ITEM)
    grid = GridWork(
        visited=visited,
        masked=masked,
        copies=problem.batch * problem.heads,
        memory_bytes=queries + reads * _key_bytes(problem) + side_memory,
        l2_bytes=queries + side_cache,
    )
    return kernel_terms(tile, grid, target, constants)


def _query_bytes(problem: AttentionProblem, item: int) -> float:
    """Of q and out, or of dq and dout."""
    rows = problem.batch * problem.heads * problem.q_len
    return rows * (problem.head_dim + problem.value_dim) * item


def _key_bytes(problem: AttentionProblem) -> float:
    """Of k and v, or of dk and dv."""
    rows = problem.batch * problem.kv_heads * problem.k_len
    return rows * (problem.head_dim + problem.value_dim) * ITEM


def backward_registers(
    problem: AttentionProblem,
    block_q: int,
    block_kv: int,
    warpgroups: int,
    products: tuple[str, ...],
) -> int:
    """Returns the registers a thread needs in a backward kernel.

    dk and dv, or dq, stay in registers from tile to tile. Beside them are the scores
    and the gradients of the probabilities, whose place the half as wide results and
    a tile's part of dq take afterwards.

    Args:
      problem: what is computed.
      block_q, block_kv: of a tile of scores.
      warpgroups: that share the tile.
      products: of "dk", "dv", "dq" (kept) and "dq part" (of one tile).
    """
    threads = warpgroups * WARPGROUP_THREADS
    kept = {
        "dk": block_kv * problem.head_dim,
        "dv": block_kv * problem.value_dim,
        "dq": block_q * problem.head_dim,
    }
    accumulators = sum(kept.get(name, 0) for name in products) / threads
    scores = block_q * block_kv / threads
    part = block_q * problem.head_dim / threads if "dq part" in products else 0
    return round(accumulators + max(2 * scores, scores + part)) + OVERHEAD_REGISTERS


def dkv_smem(
    problem: AttentionProblem, block_q: int, block_kv: int, stages: int, has_dq: bool
) -> int:
    """Returns the shared memory of a kernel that has `block_kv` keys, in bytes.

    k, v; stages of q, dout, logsumexp and delta; with dq, the gradients of a tile's
    scores and its part of dq in float32. dk and dv are staged in the place of k, v.
    """
    depth = problem.head_dim + problem.value_dim
    keys = block_kv * depth * ITEM
    stage = block_q * (depth * ITEM + 8)
    dq = block_q * (block_kv * ITEM + problem.head_dim * 4) if has_dq else 0
    return keys + stages * stage + dq + 1024


def dq_smem(problem: AttentionProblem, block_q: int, block_kv: int, stages: int) -> int:
    """Returns the shared memory of a kernel that has `block_q` queries, in bytes."""
    depth = problem.head_dim + problem.value_dim
    queries = block_q * (depth * ITEM + 8)
    return queries + stages * block_kv * depth * ITEM + 1024


def dkv_prediction(
    problem: AttentionProblem,
    block_q: int,
    block_kv: int,
    stages: int,
    warpgroups: int,
    target: Target,
    constants: Constants,
    has_dq: bool,
    spilled: float = 0,
) -> Prediction:
    """Predicts the kernel with a block of keys a CTA, over tiles of queries.

    Args: as `forward_prediction`; `has_dq`: whether each tile adds to dq.
    """
    band = transposed(problem.band)
    visited, masked = tile_counts(problem.k_len, problem.q_len, block_kv, block_q, band)
    if _masks_everywhere(problem):
        masked = visited
    depth, value_depth = _depth(problem.head_dim), _depth(problem.value_dim)
    queries = block_q * (depth + value_depth) * ITEM
    # scores and gradients of the probabilities: keys once, queries by each
    # warpgroup; dv and dk: queries again
    smem = block_kv * (depth + value_depth) * ITEM + 2 * warpgroups * queries
    flops = 4 * block_q * block_kv * (depth + value_depth)
    l2_bytes = queries
    if has_dq:
        flops += 2 * block_q * block_kv * depth
        groups = block_q / WARPGROUP_ROWS
        smem += 2 * block_q * block_kv * ITEM + groups * block_kv * depth * ITEM
        smem += 2 * block_q * depth * 4  # out of registers, and into the L2
        l2_bytes += 2 * block_q * depth * 4  # the L2 reads what it adds to
    tile = _backward_tile(
        problem, block_q * block_kv, constants, flops, smem, queries, l2_bytes,
        spilled, warpgroups, stages,
    )  # fmt: skip
    share = visited.sum() * block_q * block_kv / (problem.q_len * problem.k_len)
    grid = _backward_grid(problem, visited, masked, float(share), by_keys=True)
    return kernel_terms(tile, grid, target, constants)


def dq_prediction(
    problem: AttentionProblem,
    block_q: int,
    block_kv: int,
    stages: int,
    warpgroups: int,
    target: Target,
    constants: Constants,
    spilled: float = 0,
) -> Prediction:
    """Predicts the kernel with a block of queries a CTA, over tiles of keys, for dq.

    Args: as `forward_prediction`.
    """
    visited, masked = tile_counts(
        problem.q_len, problem.k_len, block_q, block_kv, problem.band
    )
    if _masks_everywhere(problem):
        masked = visited
    depth, value_depth = _depth(problem.head_dim), _depth(problem.value_dim)
    keys = block_kv * (depth + value_depth) * ITEM
    groups = block_q / WARPGROUP_ROWS
    smem = block_q * (depth + value_depth) * ITEM
    smem += groups * (keys + block_kv * depth * ITEM)
    flops = 2 * block_q * block_kv * (2 * depth + value_depth)
    tile = _backward_tile(
        problem, block_q * block_kv, constants, flops, smem, keys, keys, spilled,
        warpgroups, stages,
    )  # fmt: skip
    share = visited.sum() * block_q * block_kv / (problem.q_len * problem.k_len)
    grid = _backward_grid(problem, visited, masked, float(share), by_keys=False)
    return kernel_terms(tile, grid, target, constants)


def _backward_tile(
    problem, scores, constants, flops, smem, load_bytes, l2_bytes, spilled,
    warpgroups, stages,
) -> TileWork:  # fmt: skip
    operations = constants["backward_score_operations"]
    return TileWork(
        flops=flops,
        exps=scores * (2 if problem.softcap is not None else 1),
        operations=scores * _operations(problem, operations, constants),
        masked_operations=scores * constants["mask_operations"],
        smem_bytes=smem,
        load_bytes=load_bytes,
        l2_bytes=l2_bytes,
        spilled=spilled,
        threads=warpgroups * WARPGROUP_THREADS,
        fixed_cycles=constants["backward_tile_cycles"],
        stages=stages,
    )


def _backward_grid(problem, visited, masked, share: float, by_keys: bool) -> GridWork:
    side_memory, side_cache = side_bytes(problem, min(1.0, share))
    queries, keys = _query_bytes(problem, ITEM), _key_bytes(problem)
    # q, dout, k, v in; dk and dv of each query head, or dq, out
    memory = queries + keys
    memory += keys * problem.group if by_keys else queries / 2
    return GridWork(
        visited=visited,
        masked=masked,
        copies=problem.batch * problem.heads,
        memory_bytes=memory + side_memory,
        l2_bytes=memory + side_cache,
    )


def delta_prediction(
    problem: AttentionProblem, target: Target, constants: Constants
) -> Prediction:
    """Predicts what comes before: the sum of out * dout of each row."""
    rows = problem.batch * problem.heads * problem.q_len
    return stream_prediction(
        rows * (2 * problem.value_dim * ITEM + 4), target, constants
    )


def dq_traffic_prediction(
    problem: AttentionProblem, target: Target, constants: Constants
) -> Prediction:
    """Predicts the zeros that float32 dq starts from, and its rounding at the end."""
    elements = problem.batch * problem.heads * problem.q_len * problem.head_dim
    return add_predictions(
        stream_prediction(4 * elements, target, constants),
        stream_prediction((4 + ITEM) * elements, target, constants),
    )


def group_prediction(
    problem: AttentionProblem, target: Target, constants: Constants
) -> Prediction:
    """Predicts the sum of dk and dv over the query heads of a group."""
    if problem.group == 1:
        return Prediction(())
    total = _key_bytes(problem) * (problem.group + 1)
    return stream_prediction(total, target, constants)
