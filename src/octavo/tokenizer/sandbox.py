"""The jinja2 environment of chat templates: what they may use, and how much.

A template comes with the model or from a caller, so it is hostile until rendered: it runs in jinja2's immutable sandbox, knows a
fixed list of filters, and every loop turn, call, concatenation and output is charged to a Budget. What Python does inside one
step cannot be interrupted here; a server renders in a worker process with its own time limit as well.
Owner: the environment belongs to one ChatTemplate; a Budget to one rendering, carried in the template's context under a key no
template can spell.
Not here: messages and what to do with the result (chat_template.py).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE_CHARS = 512 * 1024
MAX_OUTPUT_CHARS = 16 * 2**20
_MAX_STEPS = 2_000_000
_MAX_STATIC_CHARS = 512 * 2**20
_MAX_INT = 10**6
_MAX_NODES = 500_000
BUDGET = "\0budget"

_FILTERS = (
    "abs capitalize count d default dictsort e escape first float groupby indent int items join last length list lower map max min "
    "reject rejectattr replace reverse round safe select selectattr sort string sum title trim truncate unique upper wordcount"
)


class LimitError(jinja2.TemplateError):
    """The template asked for too much."""


class RaisedError(jinja2.TemplateError):
    """raise_exception("...") in the template."""


class Budget:
    """What one rendering may still use."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._seconds = seconds
        self._steps = 0
        self._chars = 0
        self._static = 0

    def _spend(self, chars: int = 0, static: int = 0) -> None:
        self._steps += 1
        self._chars += chars
        self._static += static
        if self._steps > _MAX_STEPS or self._static > _MAX_STATIC_CHARS:
            raise LimitError("the chat template loops too much")
        if self._chars > MAX_OUTPUT_CHARS:
            raise LimitError(f"the chat template writes more than {MAX_OUTPUT_CHARS} characters")
        if self._steps % 64 == 0 and time.monotonic() > self._deadline:
            raise LimitError(f"the chat template took more than {self._seconds:g} s")


class _GenerationTag(Extension):
    """{% generation %} marks what a model said, for training; rendering ignores it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Immutable sandbox with budgets; compiled templates go through `_bounded`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _GenerationTag],
            optimized=False,  # nothing is computed while compiling, before there is a budget
            finalize=_finalize,
            cache_size=0,
        )
        own: dict[str, Callable[..., Any]] = {"tojson": _tojson, "\0steps": _steps, "\0concat": _concat}
        builtin = {name: self.filters[name] for name in _FILTERS.split()}
        self.filters = builtin | {"join": _join, "replace": _replace, "string": _string, "indent": _indent} | own
        self.globals = {k: v for k, v in self.globals.items() if k in ("range", "dict", "namespace", "joiner", "cycler")}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._macro_chars = 0

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Raises jinja2.TemplateError, or whatever parsing a hostile text may raise (RecursionError)."""
        tree = self.parse(source)
        self._macro_chars = max((_static_chars(m) for m in tree.find_all(nodes.Macro)), default=0)
        return self.from_string(_bounded(tree, self))

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """jinja2 would print an unsafe attribute as nothing; here the template fails at once."""
        raise SecurityError(f"access to attribute {attribute!r:.60} of {type(obj).__name__!r} is not allowed")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _budget(context)._spend()
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _budget(context)._spend(static=self._macro_chars if isinstance(obj, Macro) else 0)
        for value in (*args, *kwargs.values()):
            if isinstance(value, int) and abs(value) > _MAX_INT:
                raise LimitError("the chat template calls a function with too large a number")
        bound = getattr(obj, "__wrapped__", obj)
        text, name = getattr(bound, "__self__", None), getattr(bound, "__name__", "")
        if isinstance(text, str):
            _check_string_method(text, name, args)
        return super().call(context, obj, *args, **kwargs)


def _budget(context: Context) -> Budget:
    budget = context.get(BUDGET)
    assert isinstance(budget, Budget)
    return budget


def _static_chars(node: nodes.Node) -> int:
    return sum(len(data.data) for data in node.find_all(nodes.TemplateData))


def _bounded(tree: nodes.Template, environment: jinja2.Environment) -> nodes.Template:
    """Count the turns of every loop (and the literal text each may write), and the length of every `a ~ b`."""
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = nodes.Filter(loop.iter, "\0steps", [nodes.Const(_static_chars(loop))], [], None, None)
    for concat in list(tree.find_all(nodes.Concat)):
        concat.nodes = [nodes.Filter(nodes.List(list(concat.nodes)), "\0concat", [], [], None, None)]
    for node in tree.find_all(nodes.Node):
        node.set_environment(environment)
        node.set_lineno(node.lineno or 1)
    return tree


@jinja2.pass_context
def _steps(context: Context, items: Any, static: int) -> Iterator[Any]:
    budget = _budget(context)
    for item in items:
        budget._spend(static=static)
        yield item


@jinja2.pass_context
def _concat(context: Context, parts: list[Any]) -> str:
    texts = [_text(part) for part in parts]
    _check_length(sum(map(len, texts)))
    _budget(context)._spend()
    return "".join(texts)


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> Any:
    text = _text(value)
    _budget(context)._spend(chars=len(text))
    return text


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    _check_nodes(value)
    return str(value)


def _check_length(length: int) -> None:
    if length > MAX_OUTPUT_CHARS:
        raise LimitError(f"the chat template builds a value of more than {MAX_OUTPUT_CHARS} characters")


def _check_nodes(value: Any) -> None:
    """Refuse containers that would print as too much: sharing makes [[x, x], [x, x]] exponential."""
    stack, count, chars = [value], 0, 0
    while stack:
        item = stack.pop()
        count += 1
        chars += len(item) if isinstance(item, str) else 0
        if count > _MAX_NODES:
            raise LimitError("the chat template prints too large a structure")
        if isinstance(item, Mapping):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
    _check_length(chars)


def _check_operands(operator: str, left: Any, right: Any) -> None:
    sized = (str, list, tuple, bytes)
    if operator == "+" and isinstance(left, sized) and isinstance(right, sized):
        _check_length(len(left) + len(right))
    elif operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(many, sized) and isinstance(times, int):
                _check_length(len(many) * max(times, 0))
        if isinstance(left, int) and isinstance(right, int):
            _check_length(left.bit_length() + right.bit_length())
    elif operator == "**":
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        if not numbers or abs(right) > 64 or abs(left) > 2**64:
            raise LimitError("the chat template computes too large a power")
    elif operator == "%" and isinstance(left, str):
        _check_format(left)
        _text(right)


def _check_format(text: str) -> None:
    if re.search(r"\d{5}|\*", text):
        raise LimitError("the chat template formats with too large a width")


def _check_string_method(text: str, name: str, args: tuple[Any, ...]) -> None:
    if name in ("format", "format_map"):
        _check_format(text)
    elif name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        _check_length(len(text) + text.count(args[0]) * len(args[1]))
    elif name == "join" and args and isinstance(args[0], (list, tuple)):
        _check_length(sum(len(a) for a in args[0] if isinstance(a, str)) + len(text) * len(args[0]))
    elif name in ("translate", "expandtabs", "encode"):
        raise LimitError(f"chat templates may not call str.{name}")


def _join(value: Any, d: Any = "", attribute: str | None = None) -> str:
    items = list(value)
    if attribute is not None:
        items = [item.get(attribute, "") if isinstance(item, Mapping) else "" for item in items]
    texts = [_text(item) for item in items]
    _check_length(sum(map(len, texts)) + len(_text(d)) * len(texts))
    return _text(d).join(texts)


def _replace(value: Any, old: str, new: str, count: int | None = None) -> str:
    text, old, new = _text(value), _text(old), _text(new)
    _check_length(len(text) + text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _string(value: Any) -> str:
    return _text(value)


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    pad = " " * min(width, 256) if isinstance(width, int) else width[:256]
    lines = _text(value).split("\n")
    _check_length(sum(map(len, lines)) + len(lines) * (len(pad) + 1))
    return "\n".join(pad + line if (i or first) and (line or blank) else line for i, line in enumerate(lines))


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """As transformers has it: real characters, and no HTML escapes (jinja2's own filter would write \\u003c for <)."""
    _check_nodes(value)
    indent = min(indent, 16) if isinstance(indent, int) else None
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise RaisedError(str(message)[:500])


def _strftime_now(format: str) -> str:
    if len(format) > 100 or re.search(r"\d{3}", format):
        raise LimitError("strftime_now: the format is too long")
    return datetime.now().strftime(format)
