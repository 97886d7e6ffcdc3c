"""Writes the smallest program that shows what a culprit does, ready to run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jax.extend.mlir import ir

from hlo_tools import verify
from hlo_tools.bisect import Culprit
from hlo_tools.bisect_module import CheckError, ModuleSubject, NumericCheck
from hlo_tools.module import StableHloModule
from hlo_tools.passes.inline_composites import InlineComposites
from hlo_tools.pipeline import Pass, PassPipeline
from hlo_tools.verify_program import program_tolerance

ORIGINAL, REWRITTEN = "original.mlir", "rewritten.mlir"
INPUTS, SCRIPT = "inputs.npz", "reproduce.py"


@dataclass(frozen=True)
class Reproducer:
    """The files of a reproducer.

    Attributes:
      files: in the order in which to look at them.
      what: what the program in them is, in a few words.
      shows: what running it shows, as a sentence; "" if it shows nothing on random
        inputs.
    """

    files: tuple[Path, ...]
    what: str
    shows: str


def write_reproducer(
    folder: Path, subject: ModuleSubject, pipeline: PassPipeline, culprit: Culprit
) -> Reproducer:
    """Writes a program before and after the culprit, its inputs and a script.

    The program is the one site alone where that fails too, else the whole module.

    Args:
      folder: made if it is not there.
      subject: the module that was bisected.
      pipeline: of the bisection.
      culprit: what it found.
    """
    check = subject.check
    if not isinstance(check, NumericCheck):
        check = NumericCheck(subject.target)
    guilty = pipeline.passes[culprit.position]
    if culprit.groups and guilty.name == "bind-kernels":
        (*_, site) = culprit.groups[0]
        alone = _site_alone(subject, pipeline, culprit.position, site, guilty)
        if alone is not None:
            small = dataclasses.replace(
                subject, text=alone[0], check=check, _candidates={}, _outcomes={}
            )
            shows = _shows(small, alone[1])
            if shows:
                original, spec = small.text, alone[1]
                rewritten = small.candidate(spec).text
                what = f"the operations of {site} alone"
                files = _write(folder, original, rewritten, spec, check, shows)
                return Reproducer(files, what, shows)
    spec = culprit.reduced or culprit.after
    whole = dataclasses.replace(subject, check=check, _outcomes={})
    shows = _shows(whole, spec)
    original = whole.candidate(culprit.before).text or whole.text
    rewritten = whole.candidate(spec).text
    original_spec = spec if rewritten is None else ""
    if rewritten is None:  # what fails is the pass: it starts from the original
        original = whole.text
    files = _write(folder, original, rewritten, original_spec, check, shows)
    return Reproducer(files, "the whole module", shows)


def _shows(subject: ModuleSubject, spec: str) -> str:
    """What is wrong with a candidate on random inputs; "" if nothing is."""
    try:
        found = subject.outcome(spec)
    except CheckError:
        return ""
    return "" if found.good else found.detail


def _site_alone(
    subject: ModuleSubject,
    pipeline: PassPipeline,
    position: int,
    site: str,
    guilty: Pass,
) -> tuple[str, str] | None:
    """A module of one site's operations, and the passes that bind it."""
    spec = str(PassPipeline(pipeline.passes[:position]))
    outlined = subject.candidate(spec)
    if outlined.text is None:
        return None
    module = StableHloModule.parse(outlined.text)
    found = [
        op
        for op in module.walk("stablehlo.composite")
        if site.rpartition("/")[2] == _site_of(op)
    ]
    if len(found) != 1:  # such as a forward and a backward half
        return None
    name = ir.FlatSymbolRefAttr(found[0].attributes["decomposition"]).value
    text = verify.module_of_function(module.functions()[name])
    outline = [one for one in pipeline.passes if one.name == "outline-attention"]
    chosen = [dataclasses.replace(one, skip_sites="") for one in (*outline, guilty)]  # type: ignore[misc]
    return text, str(PassPipeline((*chosen, InlineComposites())))


def _site_of(op: ir.Operation) -> str:
    attributes = ir.DictAttr(op.attributes["composite_attributes"])
    return ir.StringAttr(attributes["site"]).value if "site" in attributes else ""


def _write(
    folder: Path,
    original: str,
    rewritten: str | None,
    spec: str,
    check: NumericCheck,
    shows: str,
) -> tuple[Path, ...]:
    """Writes the files.

    Args:
      original, rewritten: MLIR text; None if the passes fail.
      spec: passes from the one to the other.
      check: knows the inputs.
      shows: what running it shows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {ORIGINAL: original} | ({REWRITTEN: rewritten} if rewritten else {})
    try:
        inputs = check.reference(original).inputs
    except CheckError:
        inputs = None
    texts[SCRIPT] = _script(check, original, spec, shows, inputs)
    if rewritten is None:  # of an earlier bisection
        (folder / REWRITTEN).unlink(missing_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    files = [SCRIPT, ORIGINAL, *([REWRITTEN] if rewritten else [])]
    if inputs is not None:
        arrays = {f"arg{number}": array for number, array in enumerate(inputs)}
        np.savez(folder / INPUTS, **arrays)  # type: ignore[arg-type]
        files.append(INPUTS)
    return tuple(folder / name for name in files)


_TEMPLATE = '''\
"""Runs {original} and {rewritten} on the inputs in {inputs}.

{shows}
"""

import dataclasses
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from hlo_tools import StableHloModule
from hlo_tools.driver import run_passes
from hlo_tools.targets import Target
from hlo_tools.verify import run_text
from hlo_tools.verify_program import Reference

HERE = Path(__file__).resolve().parent
DTYPES = {dtypes}
PASSES, TARGET = {spec!r}, {target!r}
# STRICT: a tolerance that was given, so that no float32 form is a way out.
PLATFORM, TOLERANCE, STRICT = {platform!r}, {tolerance!r}, {strict!r}


def main() -> int:
    original = (HERE / "{original}").read_text()
    saved = np.load(HERE / "{inputs}")
    # NumPy stores a type that it does not know, such as bfloat16, as plain bytes.
    inputs = [
        saved[f"arg{{number}}"].view(jnp.dtype(dtype))
        for number, dtype in enumerate(DTYPES)
    ]
    reference = Reference.of(original, inputs, PLATFORM)
    if STRICT:
        reference = dataclasses.replace(reference, exact=None)
    try:
        file = HERE / "{rewritten}"
        if file.exists():
            rewritten = file.read_text()
        else:
            module = StableHloModule.parse(original)
            run_passes(module, PASSES, Target.parse(TARGET), strict=True)
            rewritten = module.as_text()
        got = run_text(rewritten, inputs, PLATFORM)
    except Exception as error:
        print(f"fails: {{type(error).__name__}}: {{error}}")
        return 1
    for number, (one, other) in enumerate(zip(got, reference.results, strict=True)):
        one, other = one.astype(np.float64), other.astype(np.float64)
        print(
            f"result {{number}} {{list(one.shape)}}: largest difference "
            f"{{np.abs(one - other).max(initial=0.0):.6g}}, largest value "
            f"{{np.abs(other).max(initial=0.0):.6g}}"
        )
    found = reference.judge(got, TOLERANCE)
    verdict = "agrees" if found.passed else "DIFFERS"
    error, allowed = found.max_error, found.tolerance
    print(f"{{verdict}}: error {{error:.3g}}, allowed {{allowed:.3g}}")
    return int(not found.passed)


if __name__ == "__main__":
    sys.exit(main())
'''


def _script(
    check: NumericCheck,
    original: str,
    spec: str,
    shows: str,
    inputs: Sequence[np.ndarray] | None,
) -> str:
    given = check.tolerance
    return _TEMPLATE.format(
        original=ORIGINAL,
        rewritten=REWRITTEN,
        inputs=INPUTS,
        shows=_sentence(shows or "no difference on random inputs"),
        dtypes=[array.dtype.name for array in inputs or ()],
        spec=spec,
        target=check.target.spec.name,
        platform=check.platform,
        tolerance=program_tolerance(original, check.platform)
        if given is None
        else given,
        strict=given is not None,
    )


def _sentence(text: str) -> str:
    """Text that can stand in a docstring."""
    plain = text.replace("\\", "/").replace('"', "'")
    return f"{plain[:1].upper()}{plain[1:]}."
