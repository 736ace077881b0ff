"""layers/ and models/ compute only through ops (DESIGN.md, section 4), because NumPy and torch differ in the rest.

The rule, on the syntax tree. A function that takes an array, or a batch of them, is *array code*: it has a parameter
annotated Array, ForwardBatch or Any, or one without annotation. In array code
- there are no arithmetic, comparison or in-place operators (tests with `is`, `in`, `not`, and against strings, are free):
  numbers a layer needs are computed in its constructor;
- of an array only `shape` and `reshape` are used, and basic slices (numbers and a:b; a name alone could be an array);
- arrays are not tested for truth, iterated, assigned into, or handed to sum(), abs(), max() and the like.
An array is a parameter annotated Array, an array field of a batch, what any call returned, or a name given one of these.
What `to_numpy(...)` returns is NumPy on every backend and may be used as such. Code on plain integers is free."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

import octavo
from octavo.ops.api import ForwardBatch

SOURCE = Path(octavo.__file__).parent
ARRAY_TYPES = {"Array", "Any", "ndarray", "Tensor"}
BATCH_FIELDS = {f.name for f in dataclasses.fields(ForwardBatch) if str(f.type).startswith("Array")}
FREE_ATTRIBUTES = {"shape", "reshape"}
NUMBER_MAKERS = {"sum", "abs", "max", "min", "pow", "divmod", "round", "float", "int", "bool", "all", "any"}
EATERS = NUMBER_MAKERS | {"sorted", "list", "tuple", "iter", "map", "zip", "enumerate"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def words(annotation: ast.expr) -> set[str]:
    """Identifiers of an annotation, written as a string or not."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    return {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)} | {
        node.attr for node in ast.walk(annotation) if isinstance(node, ast.Attribute)
    }


def parameters(function: Function) -> list[ast.arg]:
    a = function.args
    every = [*a.posonlyargs, *a.args, *a.kwonlyargs, *(x for x in (a.vararg, a.kwarg) if x)]
    return [arg for arg in every if arg.arg not in ("self", "cls")]


def is_array_code(function: Function) -> bool:
    wanted = (ARRAY_TYPES | {"ForwardBatch"}) - {"Any"}
    given = [words(arg.annotation) if arg.annotation else {"Any"} for arg in parameters(function)]
    if function.name == "__init__":  # a constructor is given numbers and opaque tables; an array there is said to be one
        return any(names & wanted for names in given)
    return any(names & wanted or names == {"Any"} for names in given)


class Checker:
    """Violations of one function of array code."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.arrays = {a.arg for a in parameters(function) if not a.annotation or words(a.annotation) & ARRAY_TYPES}
        self._follow_assignments()

    def _follow_assignments(self) -> None:
        """Names given an array, until nothing is added: assignments may come in any order of the tree."""
        while True:
            before = len(self.arrays)
            for node in ast.walk(self.function):
                if isinstance(node, ast.Assign):
                    pairs = [(target, node.value) for target in node.targets]
                elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                    pairs = [(node.target, node.value)]
                else:
                    continue
                for target, value in pairs:
                    if self.is_array(value):
                        names = [node for node in ast.walk(target) if isinstance(node, ast.Name)]
                        self.arrays |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
            if len(self.arrays) == before:
                return

    def is_array(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self.arrays
        if isinstance(node, ast.Attribute):
            return node.attr in BATCH_FIELDS
        if isinstance(node, ast.Subscript | ast.NamedExpr):
            return self.is_array(node.value)
        if isinstance(node, ast.Tuple):
            return any(self.is_array(element) for element in node.elts)
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            return name not in ("to_numpy", "scope", "len", "range", "isinstance")
        return False

    def violations(self) -> Iterator[tuple[int, str]]:
        for node in ast.walk(self.function):
            for message in self._check(node):
                yield getattr(node, "lineno", self.function.lineno), message

    def _check(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.BinOp | ast.AugAssign):
            yield "an operator"
        elif isinstance(node, ast.UnaryOp):
            if not isinstance(node.op, ast.Not) and not isinstance(node.operand, ast.Constant):
                yield "a sign"
            elif isinstance(node.op, ast.Not) and self.is_array(node.operand) and not isinstance(node.operand, ast.Call):
                yield "an array tested for truth"
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            texts = any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in sides)
            if not texts and not all(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops):
                yield "a comparison"
        elif isinstance(node, ast.Attribute) and self.is_array(node.value) and node.attr not in FREE_ATTRIBUTES:
            yield f"attribute {node.attr!r} of an array"
        elif isinstance(node, ast.Subscript) and self.is_array(node.value):
            if not isinstance(node.ctx, ast.Load):
                yield "an assignment into an array"
            if not self._basic(node.slice):
                yield "an index that is not a basic slice"
        elif isinstance(node, ast.If | ast.While | ast.IfExp) and isinstance(node.test, ast.Name) and self.is_array(node.test):
            yield "an array tested for truth"
        elif isinstance(node, ast.For | ast.comprehension) and self.is_array(node.iter):
            yield "an array iterated"
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in EATERS and any(map(self.is_array, node.args)):
            yield "a builtin given an array"

    def _basic(self, index: ast.expr) -> bool:
        if isinstance(index, ast.Tuple):
            return all(self._basic(part) for part in index.elts)
        if isinstance(index, ast.Slice):
            return not any(self.is_array(part) for part in (index.lower, index.upper, index.step) if part)
        if isinstance(index, ast.UnaryOp):
            index = index.operand
        return (
            isinstance(index, ast.Constant)
            and isinstance(index.value, int)
            and not isinstance(index.value, bool)
            or (isinstance(index, ast.Constant) and index.value is ...)
        )


def check(source: str) -> list[str]:
    """ "line: what" for every violation in a module."""
    found: set[tuple[int, str]] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function) and is_array_code(node):
            found |= {(line, f"{node.name}: {message}") for line, message in Checker(node).violations()}
    return [f"{line}: {message}" for line, message in sorted(found)]


def test_layers_and_models_compute_only_through_ops():
    files = [*(SOURCE / "layers").rglob("*.py"), *(SOURCE / "models").rglob("*.py")]
    assert len(files) > 5
    found = [f"{path.relative_to(SOURCE)}:{line}" for path in files for line in check(path.read_text("utf-8"))]
    assert not found, "\n".join(found)


def test_array_code_is_found():
    """The rule applies to something: every layer's call is array code."""
    trees = [ast.parse(path.read_text("utf-8")) for path in (SOURCE / "layers").glob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, Function) and node.name == "__call__"]
    assert len(calls) >= 5 and all(is_array_code(call) for call in calls)
    assert {"token_ids", "positions", "slot_mapping"} & BATCH_FIELDS == {"token_ids", "positions"}


def function(body: str, signature: str = "self, x: Array, batch: ForwardBatch, n: int") -> str:
    lines = "".join(f"    {line}\n" for line in body.split("\n"))
    return f"def __call__({signature}):\n{lines}"


BAD = [  # bodies of a layer's __call__
    "return x + self.bias", "return x * 2", "x += y", "return -x", "return ~x", "return x @ self.w", "return n - 1", "return x > 0",
    "return x == 0", "return x.T", "return x.sum()", "return x.astype(int)", "return x.dtype", "return x.copy()", "return x.numpy()",
    "return self.ops.linear(x, self.w, n).float()", "y = self.norm(x)\nreturn y.mean()", "y = x[:4]\nreturn y.max()",
    "return x[self.rows]", "return x[batch.positions]", "return x[[0, 1]]", "return x[x]", "return x[None]", "return x[True]",
    "return x[n]",
    "x[:2] = y", "x[0] += y", "return sum(x)", "return max(self.norm(x))", "return float(x)", "return abs(batch.positions)",
    "for row in x:\n    pass", "return [row for row in x]", "if x:\n    pass", "return 1 if x else 2", "while x:\n    pass", "return not x",
    "return batch.positions.sum()", "return batch.seq_lens.tolist()", "return batch.token_ids + 1", "def inner():\n    return x * 2",
    "a, b = self.split(x)\nreturn b.item()", "z = y\ny = x\nreturn z.item()", "if (y := self.norm(x)).any():\n    pass",
    "return (lambda: x * 2)()",
]  # fmt: skip
GOOD = [
    "return self.ops.add_(x, y)", "return x.reshape(n, self.heads, -1)", "return x[:, : self.half]", "return x[0]", "return x[-1:]",
    "return x[..., 0]", "return x.shape[0]", "y = self.norm(x)\nreturn y.reshape(x.shape[0], self.width)",
    "if batch.taps is not None and self.name in batch.taps.names:\n    batch.taps.values[self.name] = self.ops.to_numpy(x).copy()",
    "with self.ops.arena.scope():\n    return self.mlp(x, batch)", "for layer in self.layers:\n    x = layer(x, batch)\nreturn x",
    "if self.kind == 'silu':\n    return x", "if self.bias is None:\n    return x", "if not self.gated:\n    return x",
    "first, last = self.bounds\nreturn x[first:last]", "return self.ops.take_rows(x, batch.logits_rows)",
    "return self.ops.linear(x[:n], self.w, batch.num_generated)", "return len(x)",
]  # fmt: skip


@pytest.mark.parametrize("body", BAD)
def test_the_checker_refuses(body):
    assert check(function(body))


@pytest.mark.parametrize("body", GOOD)
def test_the_checker_accepts(body):
    assert check(function(body)) == []


@pytest.mark.parametrize(
    "signature", ["self, x", "self, x: 'Array'", "self, x: Array | None", "*, x: Array", "self, *x: Array", "x: Any", "batch: ForwardBatch"]
)
def test_array_code_by_signature(signature):
    assert check(function("return self.a * 2", signature))


@pytest.mark.parametrize("signature", ["self", "config: ModelConfig", "heads: int, dim: int", "cls, c: ModelConfig"])
def test_code_on_integers_is_free(signature):
    assert check(function("return self.heads * self.dim > 3", signature)) == []


def test_constructors_may_compute_but_not_on_arrays():
    free = "class A:\n    def __init__(self, config: ModelConfig, rope: Any, ops: Ops) -> None:\n        self.n = config.heads * 2\n"
    assert check(free) == []
    assert check(free.replace("rope: Any", "rope: Array"))
