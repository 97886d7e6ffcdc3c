"""The table of passes.  Add a pass: one file here, one row, one test row."""

from __future__ import annotations

# name -> "module:class"
PASSES: dict[str, str] = {
    "inline-calls": "hlo_tools.passes.native_cleanup:InlineCalls",
    "cse": "hlo_tools.passes.native_cleanup:Cse",
    "dce": "hlo_tools.passes.native_cleanup:Dce",
    "drop-precision": "hlo_tools.passes.drop_precision:DropPrecision",
    "fold-constants": "hlo_tools.passes.fold_constants:FoldConstants",
    "fold-transposes": "hlo_tools.passes.fold_transposes:FoldTransposes",
    "collapse-shapes": "hlo_tools.passes.collapse_shapes:CollapseShapes",
    "canonicalize-masks": "hlo_tools.passes.canonicalize_masks:CanonicalizeMasks",
    "fold-scales": "hlo_tools.passes.fold_scales:FoldScales",
    "fold-converts": "hlo_tools.passes.fold_converts:FoldConverts",
    "simplify-algebra": "hlo_tools.passes.simplify_algebra:SimplifyAlgebra",
    "merge-branches": "hlo_tools.passes.merge_branches:MergeBranches",
    "prune-regions": "hlo_tools.passes.prune_regions:PruneRegions",
    "hoist-loop-invariants": (
        "hlo_tools.passes.hoist_loop_invariants:HoistLoopInvariants"
    ),
    "outline-attention": "hlo_tools.passes.outline_attention:OutlineAttention",
    "bind-kernels": "hlo_tools.passes.bind_kernels:BindKernels",
    "outline-patterns": "hlo_tools.passes.outline_patterns:OutlinePatterns",
    "bind-patterns": "hlo_tools.passes.bind_patterns:BindPatterns",
    "prune-loops": "hlo_tools.passes.prune_loops:PruneLoops",
    "inline-composites": "hlo_tools.passes.inline_composites:InlineComposites",
}

# name -> spec
ALIASES: dict[str, str] = {
    "normalize": (
        "inline-calls,drop-precision,cse,collapse-shapes,fold-transposes,canonicalize-masks,"
        "fold-converts,collapse-shapes,cse,fold-transposes,dce"
    ),
    "clean": "cse,dce",
    # Simplifications that are worth it by themselves; see docs/graph_passes.md.
    "simplify": (
        "fold-constants,simplify-algebra,merge-branches,prune-regions,"
        "fold-constants,simplify-algebra,cse,dce"
    ),
    # Levels of optimization.
    "O0": "",
    "O1": "simplify",
    "O2": "default",
    "O3": "default,simplify,hoist-loop-invariants,clean",
    "default": (
        "normalize,outline-attention,bind-kernels,outline-patterns,bind-patterns,"
        "inline-composites,prune-loops,clean"
    ),
}
