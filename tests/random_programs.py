"""Random small StableHLO programs of the operations that the normalize passes touch.

The inputs are small integers, halves, infinities, NaN and zeros of both signs, so that
arithmetic is exact and no fusion of the backend can change a bit.
"""

import math
import random
import re
from typing import Any

import jax
import ml_dtypes
import numpy as np

FLOATS = ("f32", "f64", "bf16", "f16")
NUMPY = {
    "f32": np.float32, "f64": np.float64, "bf16": ml_dtypes.bfloat16,
    "f16": np.float16, "i1": np.bool_, "i8": np.int8, "i32": np.int32,
    "i64": np.int64, "ui8": np.uint8,
}  # fmt: skip
_DIRECTIONS = ("EQ", "NE", "LT", "LE", "GT", "GE")
_MAX_ELEMENTS = 400


def tensor(shape, kind: str) -> str:
    return "tensor<" + "".join(f"{extent}x" for extent in shape) + kind + ">"


class RandomProgram:
    """One program, made from a seed.

    Attributes:
      text: the module.
      inputs: an array for each argument.
    """

    def __init__(self, seed: int, steps: int):
        self._random = random.Random(seed)
        self._lines: list[str] = []
        self._values: list[tuple[str, tuple[int, ...], str]] = []
        self._arguments = []
        for number in range(self._random.randint(1, 3)):
            rank = self._random.randint(1, 4)
            shape = tuple(self._random.choice((1, 2, 3, 4)) for _ in range(rank))
            kind = self._random.choice((*NUMPY, "f32", "f32"))
            self._arguments.append((f"%a{number}", shape, kind))
        self._values += self._arguments
        makers = [
            getattr(self, name) for name in dir(type(self)) if name.startswith("_make_")
        ]
        for _ in range(steps):
            self._random.choice(makers)(*self._pick(lambda v: v[1]))
        self.text = self._module()
        self.inputs = [self._input(seed, *a[1:]) for a in self._arguments]

    # ------------------------------------------------------------------ pieces

    def _emit(self, code: str, shape, kind: str) -> str:
        name = f"%v{len(self._values)}"
        self._lines.append(f"{name} = stablehlo.{code}")
        self._values.append((name, tuple(shape), kind))
        return name

    def _pick(self, wanted=lambda value: True) -> Any:
        """Returns a value, rather a late one."""
        found = [value for value in self._values if wanted(value)]
        if not found:
            return None
        return found[int(len(found) * self._random.random() ** 0.5)]

    def _number(self, kind: str) -> str:
        if kind == "i1":
            return self._random.choice(("true", "false"))
        if kind not in FLOATS:
            return self._random.choice(("0", "1", "2", "3", "5"))
        numbers = ["0.0", "-0.0", "1.0", "-1.0", "2.0", "0.5", "4.0", "-2.0", "8.0"]
        return self._random.choice(numbers)

    def _splat(self, shape, kind: str) -> str:
        whole = tensor(shape, kind)
        if self._random.random() < 0.5:
            return self._emit(
                f"constant dense<{self._number(kind)}> : {whole}", shape, kind
            )
        scalar = tensor((), kind)
        name = self._emit(f"constant dense<{self._number(kind)}> : {scalar}", (), kind)
        code = f"broadcast_in_dim {name}, dims = [] : ({scalar}) -> {whole}"
        return self._emit(code, shape, kind)

    def _like(self, shape, kind: str) -> str:
        """Returns another value of the same type."""
        found = self._pick(lambda value: value[1:] == (shape, kind))
        if found is None or self._random.random() < 0.4:
            return self._splat(shape, kind)
        return found[0]

    def _either_way(self, left: str, right: str) -> tuple[str, str]:
        return (left, right) if self._random.random() < 0.6 else (right, left)

    # -------------------------------------------------------------- operations

    def _make_transpose(self, name, shape, kind) -> None:
        dims = list(range(len(shape)))
        self._random.shuffle(dims)
        new = [shape[d] for d in dims]
        code = f"transpose {name}, dims = {dims} : "
        self._emit(code + f"({tensor(shape, kind)}) -> {tensor(new, kind)}", new, kind)

    _make_transpose_too = _make_transpose

    def _make_reshape(self, name, shape, kind) -> None:
        new = [x for x in shape if x != 1 or self._random.random() < 0.4]
        while len(new) < 4 and self._random.random() < 0.5:
            new.insert(self._random.randint(0, len(new)), 1)
        if len(new) > 1 and self._random.random() < 0.2:
            new[:2] = [new[0] * new[1]]
        types = f"({tensor(shape, kind)}) -> {tensor(new, kind)}"
        self._emit(f"reshape {name} : {types}", new, kind)

    def _make_broadcast(self, name, shape, kind) -> None:
        rank = self._random.randint(len(shape), max(4, len(shape)))
        dims = sorted(self._random.sample(range(rank), len(shape)))
        new = [self._random.choice((1, 2, 3)) for _ in range(rank)]
        for dim, extent in zip(dims, shape, strict=True):
            if extent != 1:
                new[dim] = extent
        if math.prod(new) <= _MAX_ELEMENTS:
            types = f"({tensor(shape, kind)}) -> {tensor(new, kind)}"
            code = f"broadcast_in_dim {name}, dims = {dims} : {types}"
            self._emit(code, new, kind)

    def _make_arithmetic(self, name, shape, kind) -> None:
        if kind != "i1":
            left, right = self._either_way(name, self._like(shape, kind))
            what = self._random.choice(("add", "subtract", "multiply", "maximum"))
            self._emit(f"{what} {left}, {right} : {tensor(shape, kind)}", shape, kind)

    _make_arithmetic_too = _make_arithmetic

    def _make_negate(self, name, shape, kind) -> None:
        if kind not in ("i1", "ui8"):
            self._emit(f"negate {name} : {tensor(shape, kind)}", shape, kind)

    def _make_scale(self, name, shape, kind) -> None:
        if kind in FLOATS:
            whole = tensor(shape, kind)
            number = self._random.choice(("2.0", "4.0", "0.5", "-1.0", "1.0"))
            factor = self._emit(f"constant dense<{number}> : {whole}", shape, kind)
            what = self._random.choice(("multiply", "divide"))
            self._emit(f"{what} {name}, {factor} : {whole}", shape, kind)

    def _make_convert(self, name, shape, kind) -> None:
        # Floats out of an integer's range have no defined value there.
        kinds = (*FLOATS, "i1") if kind in FLOATS else tuple(NUMPY)
        new = self._random.choice(kinds)
        types = f"({tensor(shape, kind)}) -> {tensor(shape, new)}"
        self._emit(f"convert {name} : {types}", shape, new)

    _make_convert_too = _make_convert

    def _compare(self, left: str, right: str, shape, kind) -> None:
        order = "FLOAT" if kind in FLOATS else "SIGNED"
        order = "UNSIGNED" if kind in ("ui8", "i1") else order
        whole = tensor(shape, kind)
        types = f"({whole}, {whole}) -> {tensor(shape, 'i1')}"
        how = self._random.choice(_DIRECTIONS)
        left, right = self._either_way(left, right)
        self._emit(f"compare {how}, {left}, {right}, {order} : {types}", shape, "i1")

    def _make_compare(self, name, shape, kind) -> None:
        self._compare(name, self._like(shape, kind), shape, kind)

    def _make_positions(self, name, shape, kind) -> None:
        kind = self._random.choice(("i32", "i8", "ui8", "i64"))
        whole = tensor(shape, kind)
        dims = [self._random.randrange(len(shape)) for _ in range(2)]
        left, right = (
            self._emit(f"iota dim = {d} : {whole}", shape, kind) for d in dims
        )
        if self._random.random() < 0.7:
            what = self._random.choice(("add", "subtract"))
            constant = self._splat(shape, kind)
            left = self._emit(f"{what} {left}, {constant} : {whole}", shape, kind)
        if self._random.random() < 0.4:
            left = self._emit(f"subtract {left}, {right} : {whole}", shape, kind)
            right = self._splat(shape, kind)
        self._compare(left, right, shape, kind)

    def _make_select(self, name, shape, kind) -> None:
        mask = self._pick(lambda v: v[2] == "i1" and v[1] in (shape, ()))
        if mask is not None:
            other = self._like(shape, kind)
            on = self._splat(shape, kind) if self._random.random() < 0.3 else name
            types = f"{tensor(mask[1], 'i1')}, {tensor(shape, kind)}"
            self._emit(f"select {mask[0]}, {on}, {other} : {types}", shape, kind)

    _make_select_too = _make_select

    def _make_logic(self, name, shape, kind) -> None:
        mask = self._pick(lambda v: v[2] == "i1" and v[1])
        if mask is not None:
            name, shape, kind = mask
            what = self._random.choice(("and", "or", "xor", "not"))
            other = "" if what == "not" else f", {self._like(shape, kind)}"
            self._emit(f"{what} {name}{other} : {tensor(shape, kind)}", shape, kind)

    def _make_concatenate(self, name, shape, kind) -> None:
        dim = self._random.randrange(len(shape))
        new = [extent * (2 if d == dim else 1) for d, extent in enumerate(shape)]
        if math.prod(new) <= _MAX_ELEMENTS:
            whole, other = tensor(shape, kind), self._like(shape, kind)
            types = f"({whole}, {whole}) -> {tensor(new, kind)}"
            self._emit(f"concatenate {name}, {other}, dim = {dim} : {types}", new, kind)

    def _make_slice(self, name, shape, kind) -> None:
        starts = [self._random.randrange(extent) for extent in shape]
        new = [extent - start for extent, start in zip(shape, starts, strict=True)]
        rows = (f"{s}:{e}" for s, e in zip(starts, shape, strict=True))
        types = f"({tensor(shape, kind)}) -> {tensor(new, kind)}"
        self._emit(f"slice {name} [{', '.join(rows)}] : {types}", new, kind)

    def _make_product(self, name, shape, kind) -> None:
        other = self._pick(lambda v: v[2] == kind and len(v[1]) > 1)
        if kind not in ("f32", "f64", "i32") or other is None:
            return
        pairs: tuple[list, list] = ([], [])  # batch, contracting
        for left in self._random.sample(range(len(shape)), len(shape)):
            taken = {right for pair in pairs for _, right in pair}
            free = [
                right
                for right, extent in enumerate(other[1])
                if extent == shape[left] and right not in taken
            ]
            where = self._random.randrange(3)
            if free and where < 2:
                pairs[where].append((left, self._random.choice(free)))
        batch, contracting = (
            [list(side) for side in zip(*p, strict=True)] for p in pairs
        )
        batch, contracting = batch or [[], []], contracting or [[], []]
        new = [shape[d] for d in batch[0]]
        for side, extents in enumerate((shape, other[1])):
            used = batch[side] + contracting[side]
            new += [extent for d, extent in enumerate(extents) if d not in used]
        if len(new) > 4 or math.prod(new) > _MAX_ELEMENTS:
            return
        code = f"dot_general {name}, {other[0]}, "
        if batch[0]:
            code += f"batching_dims = {batch[0]} x {batch[1]}, "
        code += f"contracting_dims = {contracting[0]} x {contracting[1]} : "
        types = f"({tensor(shape, kind)}, {tensor(other[1], kind)})"
        self._emit(f"{code}{types} -> {tensor(new, kind)}", new, kind)

    # ----------------------------------------------------------- the whole program

    def _module(self) -> str:
        used = set(
            re.findall(r"%[va]\d+", " ".join(x.split("=", 1)[1] for x in self._lines))
        )
        results = [v for v in self._values if v[0] not in used][-6:] or self._values[
            -1:
        ]
        arguments = ", ".join(f"{n}: {tensor(s, k)}" for n, s, k in self._arguments)
        kinds = ", ".join(tensor(shape, kind) for _, shape, kind in results)
        header = f"func.func public @main({arguments}) -> ({kinds})"
        names = ", ".join(name for name, *_ in results)
        body = "\n    ".join([*self._lines, f"return {names} : {kinds}"])
        return f"module {{\n  {header} {{\n    {body}\n  }}\n}}\n"

    def _input(self, seed: int, shape, kind: str) -> jax.Array:
        rng = np.random.default_rng(seed)
        if kind in FLOATS:
            array = rng.integers(-3, 4, shape).astype(np.float64)
            special = rng.choice([np.inf, -np.inf, np.nan, -0.0, 0.5], shape)
            array = np.where(rng.random(shape) < 0.2, special, array)
        else:
            array = rng.integers(0, 2 if kind == "i1" else 5, shape)
        return jax.numpy.asarray(array.astype(NUMPY[kind]))
