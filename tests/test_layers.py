"""The direction of imports and the size limits, read off the source.

`LAYERS` is the whole rule: a unit may import the units of its own row and of the
rows above it. A unit is a package, or one file or subpackage of `hlo_tools`. Imports
inside functions count too, as does `if TYPE_CHECKING`: a layer that can name a
higher one is a layer that knows it.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]

LAYERS: tuple[tuple[str, ...], ...] = (
    ("hlo_tools.errors", "hlo_tools._jax", "hlo_tools.version"),
    (
        "hlo_tools.module",
        "hlo_tools.composites",
        "hlo_tools.gradients",
        "hlo_tools.targets",
        "hlo_tools.chips",
        "hlo_tools.report",
        "hlo_tools.rewriting",
        "hlo_tools.matching",
        "hlo_tools.inlining",
        "hlo_tools.loops",
    ),
    (
        "hlo_tools.pipeline",
        "hlo_tools.passes",
        "hlo_tools.binding",
        "hlo_tools.patterns",
        "hlo_tools.sharding_plan",
        "hlo_tools.sharding_propagation",
        "hlo_tools.site_sharding",
        "hlo_tools.verify",
        "hlo_tools.hlo",
        "hlo_tools.decompile",
    ),
    ("hlo_tools.driver",),
    ("hlo_tools.stage",),
    # `hlo_tools` itself is its __init__.py, the public names.
    (
        "hlo_tools",
        "hlo_tools.testing",
        "hlo_tools.runner",
        "hlo_tools.bisect",
        "hlo_tools.dumping",
        "hlo_tools.dump_page",
    ),
    ("pallas_kernels", "sharding"),
    ("hlo_tools.llm", "hlo_tools.cli", "hlo_tools.__main__"),
)
PACKAGES = ("hlo_tools", "pallas_kernels", "sharding")
# Rows do not say this: these two share one and must not know each other.
STRANGERS = ({"pallas_kernels", "sharding"},)
# The one file that may name JAX's private modules.
PRIVATE_JAX_FILE = "hlo_tools._jax"

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60  # without the docstring
# `import hlo_tools` must load none of these.
LAZY = ("flax", "optax", "equinox", "triton", "jax_triton", "libtpu", "rich", "typer")


@dataclass(frozen=True)
class SourceFile:
    """One Python file of the three packages, parsed."""

    name: str  # dotted
    path: Path
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    def at(self, node: ast.AST) -> str:
        return f"{self.path.relative_to(REPO)}:{getattr(node, 'lineno', 1)}"


@dataclass(frozen=True)
class Import:
    """One imported module, `module` for `import module` or `from module import x`."""

    source: SourceFile
    node: ast.Import | ast.ImportFrom
    module: str
    at_module_level: bool

    def __str__(self) -> str:
        return f"{self.source.at(self.node)}: {self.source.name} imports {self.module}"


def read_files() -> dict[str, SourceFile]:
    files = {}
    for package in PACKAGES:
        for path in sorted((REPO / package).rglob("*.py")):
            parts = path.relative_to(REPO).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text(encoding="utf-8")
            files[name] = SourceFile(name, path, text, ast.parse(text, str(path)))
    return files


FILES = read_files()


def imported_modules(
    source: SourceFile, node: ast.Import | ast.ImportFrom
) -> Iterator[str]:
    """Modules that a statement imports; a submodule named by `from x import y` too."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:  # ruff bans relative imports; resolve them all the same
        up = node.level - 1 if source.is_package else node.level
        parts = source.name.split(".")
        base = ".".join(parts[: len(parts) - up] + ([base] if base else []))
    names = [f"{base}.{alias.name}" for alias in node.names]
    yield from (name for name in names if name in FILES)
    if any(name not in FILES for name in names):
        yield base


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports_of(source: SourceFile) -> list[Import]:
    found = []

    def visit(node: ast.AST, top: bool) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.extend(
                Import(source, node, module, top)
                for module in imported_modules(source, node)
            )
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        below = top and not inside and not is_type_checking(node)
        for child in ast.iter_child_nodes(node):
            visit(child, below)

    visit(source.tree, True)
    return found


IMPORTS = [imported for source in FILES.values() for imported in imports_of(source)]


def unit_of(module: str) -> str:
    """The row entry of `LAYERS` that a module of ours belongs to.

    A file named after a unit is a part of it: `report_text.py` of `report`.
    """
    head, *rest = module.split(".")
    if head != "hlo_tools" or not rest:
        return head
    unit = f"{head}.{rest[0]}"
    whole = f"{head}.{rest[0].partition('_')[0]}"
    return whole if layer_of(unit) is None and layer_of(whole) is not None else unit


def layer_of(unit: str) -> int | None:
    for index, row in enumerate(LAYERS):
        if unit in row:
            return index
    return None


def is_ours(module: str) -> bool:
    return module.split(".")[0] in PACKAGES


def test_every_file_has_a_layer() -> None:
    unknown = [name for name in FILES if layer_of(unit_of(name)) is None]
    assert not unknown, f"add to LAYERS in {Path(__file__).name}: {unknown}"


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_down(package: str) -> None:
    wrong = []
    for imported in IMPORTS:
        importer, target = unit_of(imported.source.name), unit_of(imported.module)
        if importer.split(".")[0] != package or not is_ours(imported.module):
            continue
        here, there = layer_of(importer), layer_of(target)
        if here is None or there is None or there > here:
            wrong.append(f"{imported}, a higher layer")
        elif {importer, target} in STRANGERS:
            wrong.append(f"{imported}, which it may not know")
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles() -> None:
    """Imports that run while a module loads form no cycle, so any may come first."""
    edges: dict[str, set[str]] = {name: set() for name in FILES}
    for imported in IMPORTS:
        if imported.at_module_level and imported.module in FILES:
            edges[imported.source.name].add(imported.module)
    done: set[str] = set()
    path: list[str] = []

    def walk(name: str) -> None:
        if name in path:
            cycle = " -> ".join([*path[path.index(name) :], name])
            pytest.fail(f"import cycle: {cycle}")
        if name in done:
            return
        path.append(name)
        for target in sorted(edges[name]):
            walk(target)
        done.add(path.pop())

    for name in sorted(edges):
        walk(name)


# A dotted name with a private part: jax._src.core, jaxlib._hlo, jaxlib.mlir._mlir_libs.
PRIVATE_JAX = re.compile(r"jax(lib)?(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*")


def private_jax_names(source: SourceFile) -> Iterator[str]:
    """Imports, attribute chains and module-name strings that reach private JAX."""
    for node in ast.walk(source.tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]  # importlib.import_module("jax._src.core")
        for name in names:
            if PRIVATE_JAX.fullmatch(name):
                yield f"{source.at(node)}: {name}"


def test_private_jax_is_named_in_one_file_only() -> None:
    wrong = [
        use
        for source in FILES.values()
        if source.name != PRIVATE_JAX_FILE
        for use in private_jax_names(source)
    ]
    assert not wrong, "move these to hlo_tools/_jax.py:\n" + "\n".join(wrong)


def test_long_files_say_why() -> None:
    wrong = []
    for source in FILES.values():
        lines = len(source.text.splitlines())
        docstring = ast.get_docstring(source.tree) or ""
        if lines > MAX_FILE_LINES and not re.search(r"Length: *\S", docstring):
            wrong.append(f"{source.path.relative_to(REPO)}: {lines} lines")
    hint = f"over {MAX_FILE_LINES} lines and no 'Length: <reason>' in the docstring"
    assert not wrong, f"{hint}:\n" + "\n".join(wrong)


def test_functions_are_short() -> None:
    wrong = []
    for source in FILES.values():
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            has_docstring = ast.get_docstring(node) is not None
            start = node.body[0].end_lineno if has_docstring else node.lineno
            lines = (node.end_lineno or 0) - (start or 0)
            if lines > MAX_FUNCTION_LINES:
                wrong.append(f"{source.at(node)}: {node.name} has {lines} lines")
    assert not wrong, f"over {MAX_FUNCTION_LINES} lines:\n" + "\n".join(wrong)


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.smoke
def test_import_loads_jax_alone() -> None:
    # jax itself imports libtpu where it is installed, so look at the difference.
    loaded = run_python(
        "import sys, jax; before = set(sys.modules); import hlo_tools;"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    ).split()
    extra = {*LAZY, "pallas_kernels", "sharding"} & set(loaded)
    assert not extra, f"`import hlo_tools` also imports {sorted(extra)}"


@pytest.mark.smoke
def test_import_works_without_the_optional_packages() -> None:
    blocked = "\n".join(f"sys.modules[{name!r}] = None" for name in LAZY)
    run_python(f"import sys\n{blocked}\nimport hlo_tools")
