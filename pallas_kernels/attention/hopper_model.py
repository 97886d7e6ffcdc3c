"""Predicted times of the Hopper attention kernels, from what an SM does in a cycle.

A CTA keeps a block of rows and goes over tiles of columns. Of each tile, the tensor
cores have products to make and the other units exponentials and float32 arithmetic;
warpgroups take turns, so most of the shorter of the two is hidden behind the longer
(ping-pong). Around that: what each tile and each CTA costs once, loads that come too
late, registers that do not fit, SMs that wait for the last CTA, and the traffic of
the L2 and of the main memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hlo_tools.chips import GpuChip, gpu_chip
from hlo_tools.targets import Target
from pallas_kernels.attention.hopper_tiles import makespan
from pallas_kernels.kernel import Prediction, Term

WARPGROUP_THREADS = 128
WARPGROUP_ROWS = 64  # of the M dim of a wgmma
# What a thread holds beside accumulators and scores: addresses, row sums, counters.
# FlashAttention-3 takes 128x176 tiles at head dim 128 and not 128x192, so 32 to 44.
OVERHEAD_REGISTERS = 40
# Compute warpgroups -> registers a thread; the producer's and theirs are 64 K.
MOST_REGISTERS = {1: 240, 2: 240, 3: 160}

_RATES = "so that head dims 128 and 256 have the ratio of their best H100 rates"
_ESTIMATE = "an estimate, to be fitted"
# benchmarks/selector_crosscheck.py
_TILES = (
    "the best of some 50 settings against the tiles that tokamax 0.0.17 stores for"
    " 72 shapes on an H100; to be fitted"
)
_ISSUE = "instructions counted in the algorithm; to be fitted"
# name -> (value, source)
CONSTANTS: dict[str, tuple[float, str]] = {
    # of the rate at boost clock: what power leaves of it
    "tensor_efficiency": (0.82, "large bfloat16 products on an H200: 790-820 TFLOP/s"),
    # of the shorter of tensor cores and other units
    "overlap": (0.70, _RATES),
    # float32 operations a score: scale and subtract, maximum, sum, half a convert
    "score_operations": (4.0, _ISSUE),
    "backward_score_operations": (8.0, _ISSUE),
    # and an accumulator element a tile, rescaled while the next product waits for it
    "rescale_operations": (4.0, _TILES),
    # a score of a tile that is masked: position, compare, select
    "mask_operations": (4.0, _ISSUE),
    # a score with a bias or a mask from memory: address, load, add
    "side_operations": (6.0, _ISSUE),
    # a score with a softcap, beside its tanh
    "softcap_operations": (3.0, _ISSUE),
    # cycles a tile: barriers, the reduction over 4 threads, issue of the products
    "tile_cycles": (150.0, _ESTIMATE),
    "backward_tile_cycles": (300.0, _ESTIMATE),
    # cycles a CTA: launch, barriers set up, first loads, result stored
    "cta_cycles": (3000.0, _ESTIMATE),
    # cycles from the issue of a TMA load to its data
    "load_cycles": (1000.0, "of published TMA latencies, 600 to 1000, the longest"),
    # of the traffic behind arithmetic, or the reverse
    "memory_overlap": (1.0, _TILES),
    "l2_efficiency": (0.65, _ESTIMATE),
    "memory_efficiency": (0.9, "copy on an H200: 4.3 of 4.8 TB/s"),
    # share of the unevenness of the CTAs that SMs wait for at the end
    "tail": (0.5, _ESTIMATE),
}  # fmt: skip
# Shares, and what is at most the whole.
AT_MOST_ONE = frozenset(
    name
    for name in CONSTANTS
    if name.endswith("efficiency") or name in ("overlap", "memory_overlap", "tail")
)


def default_constants() -> dict[str, float]:
    """Returns name -> value."""
    return {name: value for name, (value, _) in CONSTANTS.items()}


@dataclass(frozen=True)
class TileWork:
    """What one tile costs a CTA, in operations; bytes for memory.

    Attributes:
      flops: of the tensor cores.
      exps: of the special-function units.
      operations: float32.
      masked_operations: float32, more in a masked tile.
      smem_bytes: read and written by products and staging.
      load_bytes: by TMA into one stage.
      l2_bytes: all traffic with the L2, loads included.
      spilled: registers a thread beyond those it can have.
      threads: of the compute warpgroups.
      fixed_cycles: of the tile itself.
      stages: tiles of the pipeline, the one in use included.
    """

    flops: float
    exps: float
    operations: float
    masked_operations: float
    smem_bytes: float
    load_bytes: float
    l2_bytes: float
    spilled: float
    threads: int
    fixed_cycles: float
    stages: int


@dataclass(frozen=True)
class GridWork:
    """What the whole of one kernel does beside its tiles.

    Attributes:
      visited, masked: int [blocks of rows], tiles of each.
      copies: CTAs of each block of rows: batch elements times heads.
      memory_bytes: traffic of the main memory.
      l2_bytes: of the L2, beside the tiles'.
    """

    visited: np.ndarray
    masked: np.ndarray
    copies: int
    memory_bytes: float
    l2_bytes: float


@dataclass(frozen=True)
class TileCycles:
    """Cycles of one tile, by unit; `busy` and `exposed` as in `Term`."""

    tensor: float
    other: float
    exps: float
    exposed_other: float
    masking: float
    fixed: float
    spill: float
    wait: float

    @property
    def plain(self) -> float:
        """All that a tile without a mask takes."""
        inner = self.tensor + self.exposed_other
        return inner + self.fixed + self.spill + self.wait


def tile_cycles(
    work: TileWork, chip: GpuChip, constants: Mapping[str, float]
) -> TileCycles:
    """Returns what a tile takes of each unit."""
    tensor = work.flops / chip.matmul_flops / constants["tensor_efficiency"]
    # products read their operands from shared memory while they are made
    tensor = max(tensor, (work.smem_bytes + work.load_bytes) / chip.smem_bytes)
    exps = work.exps / chip.exps
    other = exps + work.operations / chip.fmas
    hidden = constants["overlap"] * min(tensor, other)
    # a register goes out and comes back, 4 bytes each way, through the L1
    spill = 8 * work.spilled * work.threads / chip.smem_bytes
    busy = tensor + other - hidden + work.fixed_cycles + spill
    bandwidth = chip.l2_bandwidth * constants["l2_efficiency"] / chip.clock / chip.cores
    # a stage is two loads, each with a barrier of its own; its buffers are free when
    # the slower warpgroup is done with them
    arrives = constants["load_cycles"] + work.load_bytes / 2 / bandwidth
    wait = max(0.0, arrives - (work.stages - 1) * busy)
    return TileCycles(
        tensor=tensor,
        other=other,
        exps=exps,
        exposed_other=other - hidden,
        masking=work.masked_operations / chip.fmas,
        fixed=work.fixed_cycles,
        spill=spill,
        wait=wait,
    )


def kernel_terms(
    tile: TileWork, grid: GridWork, target: Target, constants: Mapping[str, float]
) -> Prediction:
    """Predicts one kernel: a CTA at a time on each SM.

    Args:
      tile: the work of a tile.
      grid: the work around them.
      target: a Hopper GPU.
      constants: as `default_constants`.
    """
    chip = gpu_chip(target.spec)
    cycles = tile_cycles(tile, chip, constants)
    jobs = grid.visited * cycles.plain + grid.masked * cycles.masking
    # a block of rows that sees nothing still writes its zeros
    jobs = jobs + constants["cta_cycles"]
    end = makespan(jobs, grid.copies, chip.cores, constants["tail"])
    even = float(jobs.sum()) * grid.copies / chip.cores

    tiles = float(grid.visited.sum()) * grid.copies / chip.cores / chip.clock
    masked = float(grid.masked.sum()) * grid.copies / chip.cores / chip.clock
    ctas = grid.visited.size * grid.copies
    compute = end / chip.clock
    l2_bytes = grid.l2_bytes + tile.l2_bytes * float(grid.visited.sum()) * grid.copies
    l2 = l2_bytes / (chip.l2_bandwidth * constants["l2_efficiency"])
    bandwidth = target.spec.memory_bandwidth * constants["memory_efficiency"]
    memory = grid.memory_bytes / bandwidth
    slower = max(l2, memory)
    exposed = slower - constants["memory_overlap"] * min(compute, slower)
    launch = target.spec.launch_seconds
    once = constants["cta_cycles"] * ctas / chip.cores / chip.clock
    # what the units take beside exponentials is the rest of `other`
    exps = cycles.exps / cycles.other if cycles.other else 0.0
    other, seen = tiles * cycles.other, tiles * cycles.exposed_other
    terms = (
        Term("tensor cores", tiles * cycles.tensor, tiles * cycles.tensor),
        Term("exponentials", exps * other, exps * seen),
        Term("arithmetic", (1 - exps) * other, (1 - exps) * seen),
        Term("masks", masked * cycles.masking, masked * cycles.masking),
        Term("tiles", tiles * cycles.fixed, tiles * cycles.fixed),
        Term("spills", tiles * cycles.spill, tiles * cycles.spill),
        Term("late loads", tiles * cycles.wait, tiles * cycles.wait),
        Term("CTAs", once, once),
        Term("waves", (end - even) / chip.clock, (end - even) / chip.clock),
        Term("L2", l2, exposed if l2 >= memory else 0.0),
        Term("HBM", memory, exposed if memory > l2 else 0.0),
        Term("launch", launch, launch),
    )
    return Prediction(terms, {"CTAs": ctas, "waves": ctas / chip.cores})


def scaled_prediction(prediction: Prediction, factor: float) -> Prediction:
    """Returns a prediction all of whose terms take `factor` times as long."""
    terms = tuple(
        Term(term.name, term.busy * factor, term.exposed * factor)
        for term in prediction.terms
    )
    return Prediction(terms, prediction.notes)


def add_predictions(*parts: Prediction) -> Prediction:
    """Returns the prediction of kernels that run one after another."""
    names = dict.fromkeys(term.name for part in parts for term in part.terms)
    terms = []
    for name in names:
        same = [t for part in parts for t in part.terms if t.name == name]
        busy, exposed = sum(t.busy for t in same), sum(t.exposed for t in same)
        terms.append(Term(name, busy, exposed))
    notes = {
        name: sum(part.notes.get(name, 0) for part in parts)
        for name in dict.fromkeys(name for part in parts for name in part.notes)
    }
    return Prediction(tuple(terms), notes)


def stream_prediction(
    memory_bytes: float, target: Target, constants: Mapping[str, float]
) -> Prediction:
    """Predicts a kernel that only reads and writes the main memory."""
    bandwidth = target.spec.memory_bandwidth * constants["memory_efficiency"]
    seconds = memory_bytes / bandwidth
    launch = target.spec.launch_seconds
    return Prediction((Term("HBM", seconds, seconds), Term("launch", launch, launch)))
