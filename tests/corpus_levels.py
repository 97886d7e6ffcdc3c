"""Transforms for the StableHLO self-checking corpus: `corpus_levels:o3` and so on."""

import hlo_tools


def o1(text: str) -> str:
    return hlo_tools.rewrite_text(text, passes="O1")


def o2(text: str) -> str:
    return hlo_tools.rewrite_text(text, passes="O2")


def o3(text: str) -> str:
    return hlo_tools.rewrite_text(text, passes="O3")
