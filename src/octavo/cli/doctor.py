"""`octavo doctor`: what the engine finds on this machine, what it would use, and what to do about the rest.

With --full it also measures what the machine can do at most.
Stateless. Not here: reading the machine (machine.py), the choice of a backend (ops/registry.py), measuring (bench/limits.py).
"""

from __future__ import annotations

import importlib
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import octavo
from octavo.cli import machine, terminal
from octavo.cli.options import chosen_model, engine_options
from octavo.config import EngineConfig
from octavo.config_sources import field_types, variable_name
from octavo.errors import ConfigError, OctavoError

if TYPE_CHECKING:
    from octavo.model_config import ModelConfig

PACKAGES = ("numpy", "tokenizers", "huggingface_hub", "jinja2", "torch")
#: Times of the limits, as they are shown.
CALLS = {"fork_join_s": "fork and join of all threads", "call_s": "a call from Python", "call_arrays_s": "with two arrays"}
EXAMPLES = """\b
Examples:
  octavo doctor
  octavo doctor qwen2.5-7b
  octavo doctor --json
  octavo doctor --full --output limits.json
"""


@engine_options
def command(
    config: EngineConfig,
    name: Annotated[str | None, typer.Argument(metavar="MODEL", help="short name, folder, .gguf file or Hugging Face id")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object, for programs")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="measure bandwidth, arithmetic and call costs too: a few seconds of all cores")
    ] = False,
    output: Annotated[
        str | None, typer.Option("--output", metavar="FILE.json", help="with --full: keep the figures, for the --limits of octavo bench")
    ] = None,
) -> int:
    """Say what the engine finds here. Exits with 1 if nothing could run."""
    if output is not None and not full:
        raise ConfigError("--output keeps what --full measures: give both")
    report = examine(chosen_model(config, name))
    if full:
        report["limits"] = limits_report(report["cpu"]["model"], output)
    if as_json:
        terminal.write(terminal.as_json(report))
    else:
        terminal.write("\n".join(lines(report)) + "\n")
    return 0 if report["can_run"] else 1


def examine(config: EngineConfig) -> dict[str, Any]:
    """Everything, as plain data; never raises for what it finds. Sizes in bytes."""
    found_model, model_config = model_report(config)
    backends = backend_report(model_config, config)
    report = {
        "octavo": octavo.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": machine.cpu(),
        "cores": machine.cores(),
        "memory": machine.memory(),
        "native": native_report(),
        "backends": backends,
        "model": found_model,
        "packages": {name: _version(name) for name in PACKAGES},
        "variables": {v: os.environ[v] for v in map(variable_name, field_types(EngineConfig)) if v in os.environ},
        "can_run": any(not reasons for reasons in backends.values()),
    }
    report["warnings"] = warnings(report, config)
    return report


def limits_report(cpu: str, output: str | None = None) -> dict[str, Any]:
    """What the machine can do at most (bench/limits.py), measured now; written to `output` too. Raises ConfigError without kernels."""
    from octavo.bench import limits, record
    from octavo.cli.bench_options import progress

    before = record.machine() if output is not None else None
    with progress(limits.count(), "figures") as (begin, done):
        begin()
        found = limits.measure(cpu, done).as_dict()
    if output is not None and before is not None:
        record.write(Path(output), limits.NAME, shlex.join(["octavo", *sys.argv[1:]]), limits.METHOD, before, found)
    return found


def native_report() -> dict[str, Any]:
    """The native module: whether it can be used, which instruction-set levels it could take and which it takes."""
    try:
        native = importlib.import_module("octavo._native")
    except ImportError as error:
        return {"usable": False, "reason": str(error)}
    levels = list(native.isa_levels()) if hasattr(native, "isa_levels") else []
    try:
        isa = native.isa()
    except (AttributeError, ValueError):  # ValueError: OCTAVO_CPU_ISA names a level that cannot run here
        isa = None
    return {"usable": True, "isa_levels": levels, "isa": isa, "file": native.__file__}


def backend_report(model: ModelConfig | None, config: EngineConfig) -> dict[str, list[str]]:
    """Backend -> why it cannot run this model with these settings (SmolLM2's shape where the model is not known);
    empty: it can."""
    try:
        from octavo.model_config import ModelConfig, RopeConfig
        from octavo.ops.needs import op_needs
        from octavo.ops.registry import available_backends

        model = model or ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, RopeConfig(dim=64))
        return available_backends(op_needs(model, config))
    except ConfigError as error:  # OCTAVO_CPU_ISA names a level that cannot run here: nothing starts before that is mended
        return {"cpu": [str(error)]}
    except ImportError as error:  # NumPy is broken, say: nothing can run
        return {"reference": [f"{type(error).__name__}: {error}"]}


def model_report(config: EngineConfig) -> tuple[dict[str, Any], ModelConfig | None]:
    """Whether the model is on this machine, without fetching it."""
    try:
        from octavo.loading.source import resolve_source

        files = resolve_source(config.model, revision=config.revision, offline=True)
    except (OctavoError, ImportError, OSError) as error:
        return {"name": config.model, "local": False, "reason": " ".join(str(error).split())}, None
    size = sum(path.stat().st_size for path in files.paths)
    if files.gguf_file is not None:
        files.gguf_file.close()
    report = {
        "name": config.model,
        "local": True,
        "kind": files.kind,
        "architecture": files.config.architecture,
        "path": str(files.paths[0] if len(files.paths) == 1 else files.paths[0].parent),
        "bytes": size,
        "max_position": files.config.max_position,
    }
    return report, files.config


def warnings(report: dict[str, Any], config: EngineConfig) -> list[str]:
    """What works, but not as well as it could; each says what to do."""
    found = []
    if not report["native"]["usable"]:
        found.append("no native kernels: the slow NumPy reference computes; install a C++20 compiler and python3-dev, then reinstall")
    if not report["model"]["local"]:
        found.append(f"the model {config.model} is not here: {report['model']['reason']}")
    memory = report["memory"]
    room = min((size for size in (memory["available"], memory["cgroup_limit"]) if size), default=None)
    wanted = int(config.kv_cache_memory) + report["model"].get("bytes", 0)
    if room is not None and wanted > room:
        found.append(f"the KV cache and the model want {_size(wanted)}, {_size(room)} are available; lower --kv-cache-memory")
    usable = report["cores"]["usable"]
    if config.threads > usable:
        found.append(f"threads is {config.threads}, but only {usable} cores may be used: fewer threads are faster")
    return found


def lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    cores, memory, native, model = (report[name] for name in ("cores", "memory", "native", "model"))
    quota = "no quota" if cores["cgroup_quota"] is None else f"cgroup quota {cores['cgroup_quota']:g}"
    limit = "no cgroup limit" if memory["cgroup_limit"] is None else f"cgroup limit {_size(memory['cgroup_limit'])}"
    where = f"{model['path']} ({model['architecture']}, {_size(model['bytes'])})" if model["local"] else "not here"
    out = [
        f"octavo     {report['octavo']}, Python {report['python']}, {report['platform']}",
        f"cpu        {report['cpu']['model']}",
        f"features   {' '.join(report['cpu']['features']) or 'none known'}",
        f"cores      {cores['usable']} usable: {cores['online']} online, affinity allows {cores['affinity']}, {quota}",
        f"memory     {_size(memory['total'])}, {_size(memory['available'])} available, {limit}",
        f"native     {'levels ' + ', '.join(native['isa_levels']) if native['usable'] else 'missing: ' + native['reason']}",
    ]
    out += [f"backend    {name}: {'; '.join(reasons) or 'ready'}" for name, reasons in report["backends"].items()]
    out += [
        f"model      {model['name']}: {where}",
        f"packages   {', '.join(f'{name} {version}' for name, version in report['packages'].items() if version)}",
        *(f"variable   {name}={value}" for name, value in report["variables"].items()),
        *(f"warning    {text}" for text in report["warnings"]),
        *(limit_lines(report["limits"]) if "limits" in report else ()),
    ]
    return out if report["can_run"] else [*out, "error      no backend can run here"]


def limit_lines(limits: dict[str, Any]) -> list[str]:
    """What was measured with --full: one thread, then all of them."""
    threads = limits["threads"]

    def speeds(name: str, of: dict[str, float], unit: str) -> str:
        return f"limit      {name}: {of['one'] / 1e9:.1f} {unit} with 1 thread, {of['all'] / 1e9:.1f} with {threads}"

    out = [speeds(f"read {name}", of, "GB/s") for name, of in limits["read"].items()]
    for level, kinds in limits["compute"].items():
        out += [speeds(f"{level} {kind}", of, "GFLOP/s" if kind == "f32" else "GOP/s") for kind, of in kinds.items()]
    calls = ", ".join(f"{words} {1e6 * limits[name]:.2f} us" for name, words in CALLS.items())
    return [*out, f"limit      {calls}"]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _size(count: int | None) -> str:
    if count is None:
        return "unknown"
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
