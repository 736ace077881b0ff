"""`octavo bench scheduler`: the engine's scheduler on a trace under a virtual clock, policy beside policy; and measuring what a step costs.

Tables for people go to standard output, or one JSON object with --json; the progress bar goes to a terminal only. Exit codes: 0, 1 when a
request got no answer (the queue was full), 2 for bad usage. Stateless. Not here: the simulator (bench/simulate/).
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from octavo.cli import terminal
from octavo.cli.bench_options import Json, Model, Output, command_line, number, option, progress, show
from octavo.cli.loading_bar import LoadingBar
from octavo.cli.options import chosen_model, engine_options
from octavo.config import EngineConfig, PolicyName
from octavo.errors import ConfigError

POLICIES: tuple[str, ...] = get_args(PolicyName)
METHOD = "the engine's scheduler and KV accounting under a virtual clock; steps cost what was fitted to measured ones (docs/benchmarks.md)"


@engine_options
def scheduler(
    config: EngineConfig,
    name: Model = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="measure what steps of MODEL cost on this machine, write --costs, and stop")
    ] = False,
    costs: Annotated[
        str | None, option("--costs", "what --calibrate wrote (or is to write); default: SmolLM2 on the machine it names", "FILE.json")
    ] = None,
    policy: Annotated[str, option("--policy", f"policies, side by side: {', '.join(POLICIES)}", "LIST")] = "fcfs,fair",
    trace: Annotated[str | None, option("--trace", "requests from a file, one JSON object a line, instead of made-up ones", "FILE")] = None,
    requests: Annotated[str, option("--requests", "requests in all")] = "10000",
    rate: Annotated[str, option("--rate", "requests a second, arriving at random", "NUMBER")] = "2",
    burst: Annotated[str, option("--burst", "requests that arrive together; 0: all of them at once")] = "1",
    prompt_tokens: Annotated[
        str, option("--prompt-tokens", "N, A-B, lognormal:MEDIAN:SIGMA or zipf:EXPONENT:MOST", "LENGTHS")
    ] = "lognormal:100:0.8",
    output_tokens: Annotated[str, option("--output-tokens", "the same, of the answers", "LENGTHS")] = "lognormal:60:0.8",
    prefixes: Annotated[str, option("--prefixes", "different beginnings that prompts share; 0: none")] = "0",
    prefix_tokens: Annotated[str, option("--prefix-tokens", "tokens of each")] = "256",
    tenants: Annotated[str, option("--tenants", "tenants, the k-th asking 1/k as often as the first")] = "1",
    priorities: Annotated[str, option("--priorities", "priorities, equally often")] = "1",
    seed: Annotated[str, option("--seed", "of arrivals and lengths")] = "0",
    save_trace: Annotated[str | None, option("--save-trace", "write the requests as --trace reads them", "FILE")] = None,
    plot: Annotated[str | None, option("--plot", "draw the distributions (needs matplotlib)", "FILE.svg|.png")] = None,
    as_json: Json = False,
    output: Output = None,
) -> int:
    """Simulate the scheduler on a trace: throughput, latencies and use of the machine, policy beside policy, without a model."""
    from octavo.bench import plot as plots
    from octavo.bench import record
    from octavo.bench.simulate import costs as step_costs
    from octavo.bench.simulate import report, run
    from octavo.bench.simulate import trace as traces

    if calibrate:
        return _calibrate(chosen_model(config, name), costs, as_json)
    if name is not None:
        raise ConfigError("MODEL goes with --calibrate; a simulation takes what was measured from --costs")
    policies = _policies(policy)
    if plot is not None:
        plots.check(Path(plot))
    file = step_costs.load(Path(costs) if costs is not None else step_costs.BUILT_IN)
    if trace is not None:
        wanted = traces.read(Path(trace))
    else:
        room = min(config.max_model_len or file.max_model_len, file.max_model_len)
        wanted = traces.Synthetic(
            requests=number("--requests", requests, int, 1, traces.MAX_REQUESTS),
            rate=number("--rate", rate, float, 1e-6, 1e6),
            burst=number("--burst", burst, int, 0, traces.MAX_REQUESTS),
            prompt_tokens=traces.Lengths.parse("--prompt-tokens", prompt_tokens),
            output_tokens=traces.Lengths.parse("--output-tokens", output_tokens),
            prefixes=number("--prefixes", prefixes, int, 0, 100_000),
            prefix_tokens=number("--prefix-tokens", prefix_tokens, int, 1, traces.MAX_TOKENS),
            tenants=number("--tenants", tenants, int, 1, 100_000),
            priorities=number("--priorities", priorities, int, 1, 100_000),
            seed=number("--seed", seed, int, 0, 2**63),
            most_tokens=min(room, run.pool_blocks(config, file) * config.block_size),
        ).make()
    if save_trace is not None:
        traces.write(Path(save_trace), wanted)
    before = record.machine() if output is not None else None
    blocks, outcomes, results = run.pool_blocks(config, file), {}, {}
    begun = time.perf_counter()
    with progress(len(wanted) * len(policies), "requests") as (begin, done):
        begin()
        for one in policies:
            settings = replace(config, policy=one)
            outcome = run.simulate(wanted, file.costs, settings, blocks, file.max_model_len, done)
            results[one] = report.figures(outcome)
            if plot is not None:
                outcomes[one] = outcome
    figures = {
        "costs": {"model": file.model, "machine": file.machine},
        "trace": traces.describe(wanted),
        "blocks": blocks,
        "policies": results,
        "simulated_in_s": round(time.perf_counter() - begun, 2),
    }
    try:
        if before is not None:
            record.write(Path(str(output)), "scheduler", command_line(), METHOD, before, figures)
        if plot is not None:
            report.save_plot(Path(plot), f"{len(wanted)} requests, steps of {file.model} on {file.machine}", outcomes, results)
    finally:  # a file that cannot be written must not take the simulation with it
        if not as_json:
            terminal.note(f"steps of {file.model} on {file.machine}; simulated in {figures['simulated_in_s']} s")
        show(figures, report.tables(results), as_json)
    return int(any(run["refused"] + run["failed"] for run in results.values()))


def _policies(text: str) -> list[Any]:
    found = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for word in found:
        if word not in POLICIES:
            raise ConfigError(f"--policy {word}: there are {', '.join(POLICIES)}")
    if not found:
        raise ConfigError("--policy is empty")
    return found


def _calibrate(config: EngineConfig, path: str | None, as_json: bool) -> int:
    from octavo.bench.simulate import calibrate, report
    from octavo.bench.simulate import costs as step_costs
    from octavo.cli import machine

    rounds = calibrate.Rounds()
    with LoadingBar() as bar:
        parts = calibrate.load(config, bar.report)
    try:
        with progress(rounds.count, "measurements") as (begin, done):
            begin()
            samples = calibrate.measure(parts, config, rounds, done)
    finally:
        parts.executor.close()
    file = calibrate.cost_file(parts, config, samples, machine.cpu()["model"])
    if path is not None:
        step_costs.save(Path(path), file)
    show({"model": file.model, "machine": file.machine, **file.about}, [report.residual_table(file.about["residuals"])], as_json)
    return 0
