"""Who may import whom (DESIGN.md, section 2), read from the syntax tree of every module: imports inside functions and
`importlib.import_module("...")` count too. Imports under TYPE_CHECKING are not exempt: a type ties two modules together
as much as a call does."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import octavo

SOURCE = Path(octavo.__file__).parent

#: Plain data: anything may import these.
PLAIN = {"config", "server_config", "sampling_params", "outputs", "model_config", "weight_spec", "errors"}
#: What a user of the package sees.
PUBLIC = {"octavo", "llm", "async_llm", "config_sources"}
#: Package (or top-level module) -> what it may import besides PLAIN and itself: "ops" means all of ops, "ops.api" one module.
MAY_IMPORT: dict[str, set[str]] = {
    "ops": {"_native"},
    "quantization": {"ops"},
    "distributed": {"ops"},
    "sampling": {"ops"},
    "layers": {"ops", "quantization", "distributed", "sampling"},
    "models": {"layers", "ops.api"},
    "loading": {"quantization", "ops.api"},
    "tokenizer": set(),
    "engine": {"tokenizer"},
    "worker": {"models", "loading", "sampling", "ops", "engine.scheduler_output"},
    # never what computes: worker, ops and models are in the core's process
    "server": {
        "octavo",
        "engine.async_engine",
        "engine.process_core",
        "engine.core_messages",
        "engine.metrics",
        "engine.input_processor",
        "engine.request",
        "engine.executor",
        "wiring",
    },  # fmt: skip
    "config_sources": set(),
    "wiring": {"engine", "worker", "loading", "tokenizer"},
    "core_process": {"engine", "wiring"},
    "llm": {"engine", "wiring", "config_sources"},
    "async_llm": {"engine", "wiring"},
    "octavo": {"llm", "async_llm"},
    "cli": PUBLIC | {"server", "bench", "lab", "verify", "trace"},
    # the record's plain data, nothing that runs
    "trace": {"octavo", "engine.events", "engine.scheduler_output"},
    "bench": PUBLIC,
    "lab": PUBLIC | {"ops.reference", "wiring"},
    # it wires engines with a recorder, drives the executor without one, and taps layers
    "verify": PUBLIC | {"wiring", "engine", "ops.api"},
}
#: Single imports beyond the table, each with its reason: (module, imported) -> reason.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("cli.run", "loading.source"): "whether a single argument is a short model name",
    ("cli.trace", "loading.source"): "whether the first argument is a short model name",
    ("cli.models", "loading.source"): "lists the short names and whether they are here",
    ("cli.doctor", "loading.source"): "says whether the model is here, without loading it",
    ("cli.doctor", "ops.needs"): "op_needs, the question put to the registry",
    ("cli.doctor", "ops.registry"): "shows each backend's reasons, without a model",
    ("cli.doctor", "_native"): "shows the native module's levels, or why it cannot be used",
    ("bench.peer_choice", "loading.source"): "which file the engines under comparison load",
    ("bench.peer_choice", "loading.export"): "the same weights for engines that read no GGUF",
    ("bench.peer_choice", "models.registry"): "which weights the model has",
    ("bench.limits", "_native"): "runs its probes of the machine",
    ("bench.kernels", "ops.api"): "KVSpec, to make a pool of its own",
    ("bench.kernels", "ops.cpu"): "the ops that are timed, at any level",
    ("bench.breakdown", "ops.needs"): "the names of the ops, to wrap each",
    ("bench.kernel_shapes", "ops.api"): "builds weights and batches by hand",
    ("bench.kernel_shapes", "ops.layout"): "which layouts there are, and their blocks",
    ("bench.kernel_shapes", "loading.weights"): "walks a model's weights for their shapes",
    ("bench.kernel_shapes", "models.registry"): "the name map of a model",
    ("bench.kernel_shapes", "wiring"): "finds a model's files as the engine does",
    ("bench.simulate.calibrate", "wiring"): "an engine's parts, to step a core of its own",
    ("bench.simulate.calibrate", "engine.engine_core"): "times single steps, and knows what is in them",
    ("bench.simulate.calibrate", "engine.executor"): "stands before the executor, to see each step's batch",
    ("bench.simulate.calibrate", "engine.scheduler_output"): "the batch of a step",
    ("bench.simulate.costs", "engine.scheduler_output"): "counts what a batch computes",
    ("bench.simulate.virtual", "engine.executor"): "an executor that computes nothing",
    ("bench.simulate.virtual", "engine.kv_cache_manager"): "notes how full the pool is",
    ("bench.simulate.virtual", "engine.output_processor"): "counts tokens instead of making text",
    ("bench.simulate.virtual", "engine.request"): "whose tokens are counted",
    ("bench.simulate.virtual", "engine.scheduler_output"): "what an executor is given and gives back",
    ("bench.simulate.run", "engine.engine_core"): "what is simulated is the engine's own core",
    ("bench.simulate.run", "engine.executor"): "the size of the pool",
    ("bench.simulate.run", "engine.metrics"): "the core's counters",
    ("bench.simulate.run", "engine.request"): "requests of token ids that exist only here",
    ("lab.attention.paged", "ops.api"): "builds the batch of one sequence by hand, to drive the engine's attention alone",
    ("lab.attention.paged", "ops.registry"): "the backend whose attention is measured, chosen as the engine chooses it",
    ("lab.ui.recorder", "engine.block_pool"): "BlockView: the plain data of a snapshot, which the block map keeps",
    ("lab.ui.recorder", "engine.events"): "StepEvent: the plain data of a step",
    ("lab.ui.block_map", "engine.block_pool"): "BlockView, to draw it",
    ("lab.standard.model", "ops.api"): "builds batches by hand: naive decoding has no scheduler",
}

#: Third-party package -> modules or packages that may import it. What is not listed is not a dependency.
THIRD_PARTY: dict[str, set[str]] = {
    "numpy": {"ops", "quantization", "distributed", "sampling", "loading", "worker", "bench", "lab", "verify"},
    "ml_dtypes": {"ops", "quantization", "loading"},
    # bench.peers: run by other engines' own interpreters, never by ours
    "torch": {"ops.torch", "ops.triton", "distributed", "lab", "bench.peers"},
    "transformers": {"bench.peers"},
    "vllm": {"bench.peers"},
    "llama_cpp": {"bench.peers"},
    "openvino": {"bench.peers"},
    "openvino_genai": {"bench.peers"},
    "triton": {"ops.triton"},
    "tokenizers": {"tokenizer"},
    "jinja2": {"tokenizer"},
    "safetensors": {"loading"},
    "huggingface_hub": {"loading"},
    "yaml": {"config_sources"},
    "typer": {"cli"},
    "click": {"cli"},
    "rich": {"cli", "bench"},
    "msgspec": {"engine", "server", "bench.client", "trace"},
    "zmq": {"engine", "core_process"},
    "prometheus_client": {"server", "bench"},
    "matplotlib": {"bench"},
    "fastapi": {"server"},
    "starlette": {"server"},
    "uvicorn": {"server"},
    "uvloop": {"server", "bench.serving"},
    "pydantic": {"server"},
    "httpx2": {"bench", "cli.remote", "cli.trace_client"},
    "httptools": {"bench.client", "bench.connection"},
    "streamlit": {"lab.ui"},
    "altair": {"lab.ui"},
}
#: Standard library modules that execute what they read.
FORBIDDEN = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


def modules(root: Path = SOURCE) -> dict[str, Path]:
    """Dotted name inside the package ("ops.api"; "octavo" for the top) -> file."""
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join(parts) or "octavo"] = path
    return found


def imports(name: str, source: str, is_package: bool) -> Iterator[tuple[str, int]]:
    """(absolute dotted name, line) of everything a module imports; `from a import b` gives a.b."""
    package = ["octavo", *([] if name == "octavo" else name.split("."))]
    package = package if is_package else package[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{stem}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__", "find_spec") and isinstance(node.args[0].value, str):
                yield node.args[0].value, node.lineno


def inside(name: str, allowed: set[str]) -> bool:
    """Whether a dotted name is one of `allowed` or lies in one."""
    return any(name == one or name.startswith(one + ".") for one in allowed)


def violations(name: str, source: str, is_package: bool, known: set[str]) -> list[str]:
    owner = name.split(".")[0]
    if owner in PLAIN:
        allowed = PLAIN
    elif owner in MAY_IMPORT:
        allowed = PLAIN | {owner} | MAY_IMPORT[owner]
    else:
        return [f"{name}: {owner} has no rule: add one to MAY_IMPORT"]
    found = []
    for target, line in imports(name, source, is_package):
        top, _, rest = target.partition(".")
        where = f"{name}:{line}"
        if top == "octavo":
            # `from octavo.ops import api` and `from octavo.ops.api import Ops`: the longest prefix that is a module
            parts = rest.split(".") if rest else []
            module = next((".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in known), "octavo")
            if not inside(module, allowed) and (name, module) not in EXCEPTIONS:
                found.append(f"{where} imports {module}")
        elif top in FORBIDDEN:
            found.append(f"{where} imports {top}, which runs what it reads")
        elif top == "__future__" or top in sys.stdlib_module_names:
            continue
        elif not inside(name, THIRD_PARTY.get(top, set())) and _is_import(target, source):
            found.append(f"{where} imports {top}")
    return list(dict.fromkeys(found))  # `from octavo.x import a, b` breaks one rule once


def _is_import(target: str, source: str) -> bool:
    """find_spec("torch") only looks: it is not an import."""
    return f'find_spec("{target}")' not in source


def test_every_import_is_allowed():
    known = set(modules()) | {"_native"}
    found = [
        line for name, path in modules().items() for line in violations(name, path.read_text("utf-8"), path.name == "__init__.py", known)
    ]
    assert not found, "\n".join(found)


def test_exceptions_are_used():
    for (module, target), reason in EXCEPTIONS.items():
        source = modules()[module].read_text("utf-8")
        assert reason and f"octavo.{target}" in source


KNOWN = {"octavo", "llm", "config", "errors", "ops", "ops.api", "ops.registry", "engine", "engine.scheduler_output", "engine.request",
         "engine.async_engine", "models", "loading", "loading.gguf", "lab", "_native", "worker", "server", "cli", "bench", "sampling",
         "tokenizer", "layers", "layers.norm", "quantization", "ops.torch", "ops.reference"}  # fmt: skip


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.core", "import numpy"),
        ("engine.core", "def f():\n    import torch"),
        ("engine.core", "from octavo.ops.api import Ops"),
        ("engine.core", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from octavo.worker import executor"),
        ("layers.norm", "import numpy as np"),
        ("layers.norm", "from octavo.models import llama"),
        ("layers.norm", "from ..engine import request"),
        ("models.llama", "from octavo.ops import registry"),
        ("models.llama", "from octavo.loading.gguf import GGUFFile"),
        ("worker.runner", "from octavo.engine.request import Request"),
        ("worker.runner", "from octavo.engine import request"),
        ("worker.runner", "import octavo.engine.request"),
        ("ops.cpu.x", "import torch"),
        ("ops.registry", "import importlib\nimportlib.import_module('octavo.worker')"),
        ("ops.api", "from octavo import LLM"),
        ("loading.gguf", "import gguf"),
        ("loading.gguf", "import pickle"),
        ("tokenizer.vocab", "import transformers"),
        ("cli.main", "from octavo.worker import executor"),
        ("llm", "from octavo.lab import lesson"),
        ("server.app", "from octavo.bench import latency"),
        ("config", "from octavo.ops.api import Ops"),
        ("unheard_of.x", "x = 1"),
    ],
)
def test_the_checker_refuses(module, source):
    assert len(violations(module, source, False, KNOWN)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.core", "from octavo.engine.scheduler_output import TokenKind\nfrom octavo.tokenizer import t\nimport heapq"),
        ("worker.runner", "from octavo.engine.scheduler_output import TokenKind\nfrom octavo.ops.registry import x\nimport numpy as np"),
        ("layers.norm", "from octavo.ops.api import Ops\nfrom octavo.errors import OctavoError"),
        ("ops.torch.x", "import torch\nfrom torch import Tensor\nimport numpy as np"),
        ("ops.registry", "import importlib\nimportlib.util.find_spec(\"torch\")\nimportlib.import_module('octavo._native')"),
        ("cli.lab", "from octavo.lab import lesson\nfrom octavo import LLM\nimport typer"),
        ("loading.weights", "from octavo.ops.api import PackedTensor\nfrom . import gguf"),
    ],
)
def test_the_checker_accepts(module, source):
    assert violations(module, source, False, KNOWN) == []
