"""HLO text of ../shared for the tests."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1].parent / "shared/corpora/hlo_text"
needs_corpus = pytest.mark.skipif(not ROOT.is_dir(), reason=f"{ROOT} is not here")


def files() -> list[str]:
    """Names of the corpus's files, those of the pairs too."""
    return [str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("*/*"))]


def index() -> list[dict[str, Any]]:
    path = ROOT / "index.json"
    return json.loads(path.read_text()) if path.is_file() else []


def pairs() -> list[dict[str, Any]]:
    path = ROOT / "pairs.json"
    return json.loads(path.read_text()) if path.is_file() else []
