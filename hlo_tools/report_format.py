"""Words and numbers that the text and the HTML form of a report share."""

import dataclasses
import json
import linecache
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from hlo_tools.report import Candidate, SiteReport

# Attribute name -> letter of the project's shape glossary.
_SIZES = {"batch": "B", "q_len": "T", "k_len": "S", "heads": "H", "kv_heads": "K"}
_SIZES |= {"group": "G", "head_dim": "D", "value_dim": "Dv", "vocab": "V"}

# Attributes that say nothing a reader acts on.
_INTERNAL = ("named", "rows_never_empty", "escapes")


@dataclasses.dataclass(frozen=True)
class SiteGroup:
    """Sites that differ in nothing but their id, such as equal layers.

    Args:
        site: the first of them.
        count: how many there are.
        ids: all their ids, in program order.
    """

    site: SiteReport
    count: int
    ids: tuple[str, ...]

    @property
    def label(self) -> str:
        """The id of the first, with the count when there are more."""
        return self.site.id if self.count == 1 else f"{self.site.id} x{self.count}"


def fold_sites(sites: Iterable[SiteReport]) -> list[SiteGroup]:
    """Group the sites that differ in nothing but their id."""
    groups: dict[str, list[SiteReport]] = {}
    for site in sites:
        data = {k: v for k, v in site.to_dict().items() if k != "id"}
        if data["verify"]:  # equal layers have unequal random errors
            data["verify"] = data["verify"]["passed"]
        groups.setdefault(json.dumps(data, sort_keys=True), []).append(site)
    return [
        SiteGroup(same[0], len(same), tuple(site.id for site in same))
        for same in groups.values()
    ]


def describe_candidate(candidate: Candidate) -> str:
    """One implementation's line: what it would cost, or why it can not run."""
    if not candidate.supported:
        return f"can not run: {candidate.reason or 'no reason given'}"
    parts = [f"predicted {format_seconds(candidate.predicted_seconds)}"]
    if candidate.temp_bytes is not None:
        parts.append(f"{format_bytes(candidate.temp_bytes)} of temp")
    if candidate.reason:
        parts.append(candidate.reason)
    return ", ".join(parts)


def describe_attributes(attributes: Mapping[str, Any]) -> str:
    """The semantics of a site in a few words: sizes, dtypes, flags, values."""
    sizes, dtypes, flags, values = [], [], [], []
    for name, value in attributes.items():
        if name in _INTERNAL or _unremarkable(name, value, attributes):
            continue
        if name in _SIZES:
            sizes.append(f"{_SIZES[name]}{value}")
        elif name == "dtype" or name.endswith("_dtype"):
            dtypes.append(str(value))
        elif name == "score_function":  # a sentence: see the details
            flags.append("own score function")
        elif value is True:
            flags.append(name.removeprefix("has_").replace("_", " "))
        else:
            values.append(f"{name}={format_value(value)}")
    kinds = ["/".join(dict.fromkeys(dtypes))] * bool(dtypes)
    return " ".join(sizes + kinds + flags + values)


def _unremarkable(name: str, value: Any, attributes: Mapping[str, Any]) -> bool:
    """Whether a value is the usual one, which a table need not repeat."""
    if value is None or value is False or value in ("", [], (), {}):
        return True
    if name == "value_dim":
        return value == attributes.get("head_dim")
    if name == "precision":
        return set(_flatten(value)) == {"DEFAULT"}
    if name == "kv_heads":
        return value == attributes.get("heads")
    return (name, value) in (("group", 1), ("offset", 0), ("scale", 1.0))


def _flatten(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def format_value(value: Any) -> str:
    """A setting or attribute: four digits of a float, (a,b) for a list."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return "(" + ",".join(format_value(item) for item in value) + ")"
    return str(value)


def format_seconds(seconds: float | None) -> str:
    """Three digits and a unit; "?" when unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size * 0.9995:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds / 1e-9)} ns"


def format_bytes(count: float) -> str:
    """Three digits and a binary unit."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if abs(count) >= 2**power:
            return f"{_digits(count / 2**power)} {unit}"
    return f"{int(count)} B"


def format_flops(count: float) -> str:
    """Three digits and a decimal unit."""
    for unit, power in (("PFLOP", 15), ("TFLOP", 12), ("GFLOP", 9), ("MFLOP", 6)):
        if abs(count) >= 10**power * 0.9995:
            return f"{_digits(count / 10**power)} {unit}"
    return f"{int(count)} FLOP"


def describe_gradient(gradient: Mapping[str, Any]) -> str:
    """Which gradients a program takes from a site, where, and whether they are bound.

    Args:
        gradient: see `SiteReport`.
    """
    names = [
        name if isinstance(name, str) and not name.isdigit() else f"side {name}"
        for name in gradient.get("wanted", ())
    ]
    what = f"gradient of {', '.join(names)}" if names else "gradient"
    where = short_location(gradient.get("location"))
    bound = "bound together" if gradient.get("bound") else "not bound"
    return what + f" at {where}" * bool(where) + f", {bound}"


def _digits(value: float) -> str:
    decimals = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{decimals}f}"


def printable(text: str) -> str:
    """`text` on one line, without control characters: they can rewrite a terminal."""
    return "".join(
        c if c.isprintable() else " " if c in "\n\t" else repr(c)[1:-1] for c in text
    )


def split_location(location: str) -> tuple[str, int | None]:
    """File and line of "file:line" or "file:line:column"."""
    parts = location.split(":")
    numbers = []
    while len(parts) > 1 and parts[-1].isdigit():
        numbers.append(int(parts.pop()))
    return ":".join(parts), numbers[-1] if numbers else None


def short_location(location: str | None) -> str:
    """`location` relative to the working directory where that is shorter."""
    if not location:
        return ""
    here = os.getcwd() + os.sep
    return location.removeprefix(here)


def source_line(file: str, line: int | None) -> str:
    """That line of the file, or "" when it can not be read."""
    if line is None or not os.path.isfile(file):
        return ""
    return printable(linecache.getline(file, line).rstrip().expandtabs(4))


def caret_line(source: str) -> str:
    """Carets below what `source` says, its indentation left blank."""
    code = source.strip()
    return " " * (len(source) - len(source.lstrip())) + "^" * len(code)
