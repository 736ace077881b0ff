"""`octavo bench kernels`: single ops beside what this machine allows, and where those limits come from.

A table for people goes to standard output, or one JSON object with --json. Stateless. Not here: how anything is measured (bench/).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from octavo.cli import terminal
from octavo.cli.bench_options import Json, Model, Output, command_line, number, numbers, option, progress, show
from octavo.cli.options import chosen_model, engine_options
from octavo.config import EngineConfig
from octavo.errors import ConfigError

LimitsFile = Annotated[
    str | None, option("--limits", "what `octavo doctor --full --output FILE` wrote; default: measure it now", "FILE.json")
]


@engine_options
def kernels(
    config: EngineConfig,
    name: Model = None,
    rows: Annotated[str, option("--rows", "rows of the batch", "LIST")] = "1,4,8,32,512",
    shape: Annotated[str | None, option("--shape", "matrices COLUMNSxINPUTS,... instead of the model's ops", "LIST")] = None,
    layout: Annotated[str, option("--layout", "with --shape: layouts of the weights", "LIST")] = "q4_b32",
    isa: Annotated[str | None, option("--isa", "instruction-set levels, or all; default: the one in force", "LIST")] = None,
    context: Annotated[str, option("--context", "tokens of the sequences that attention reads")] = "512",
    limits: LimitsFile = None,
    plot: Annotated[str | None, option("--plot", "draw the shares of the limits (needs matplotlib)", "FILE.svg|.png")] = None,
    as_json: Json = False,
    output: Output = None,
) -> int:
    """Time single ops of the native kernels, beside what memory and arithmetic of this machine allow."""
    from octavo.bench import kernel_report, kernel_shapes, kernels, record
    from octavo.bench import plot as plots

    config = chosen_model(config, name)
    if plot is not None:
        plots.check(Path(plot))
    names = [word.strip() for word in layout.split(",") if word.strip()]
    shapes = kernel_shapes.of_text(shape, names) if shape is not None else kernel_shapes.of_model(config)
    counts = numbers("--rows", rows)
    if max(counts) > 1 << 16:
        raise ConfigError("--rows must be at most 65536")
    wanted = kernels.Wanted(shapes, counts, number("--context", context, int, 1, 1 << 20))
    levels = chosen_levels(isa)
    before = record.machine() if output is not None else None
    known = known_limits(limits)
    with progress(kernels.count(wanted) * len(levels), "ops") as (begin, done):
        begin()
        records = kernels.measure(wanted, levels, known, config.threads, done)
    figures = {"model": shapes.name, "context": wanted.context, "limits": known.as_dict(), "kernels": records}
    try:
        if before is not None:
            record.write(Path(str(output)), "kernels", command_line(), kernels.METHOD, before, figures)
        if plot is not None:
            kernel_report.save_plot(Path(plot), records, f"ops of {shapes.name}: share of the measured limit")
    finally:  # as above
        show(figures, kernel_report.tables(records), as_json)
    return 0


def chosen_levels(text: str | None) -> list[str]:
    """The levels asked for. Raises ConfigError for one that cannot run here."""
    from octavo.bench.limits import isa_levels

    here, in_force = isa_levels()
    if text is None:
        return [in_force]
    asked = here if text == "all" else [word.strip() for word in text.split(",") if word.strip()]
    for level in asked:
        if level not in here:
            raise ConfigError(f"--isa {level} cannot run on this machine; choose from: {', '.join(here)}")
    return list(dict.fromkeys(asked)) or [in_force]


def known_limits(file: str | None) -> Any:
    """What the machine can do: from a file, else measured now."""
    from octavo.bench import limits as measured
    from octavo.cli import machine

    cpu = machine.cpu()["model"]
    if file is not None:
        found = measured.load(Path(file))
        if found.cpu != cpu:
            terminal.note(f"the limits in {file} are of another processor ({found.cpu}), this is {cpu}")
        return found
    with progress(measured.count(), "limits") as (begin, done):
        begin()
        return measured.measure(cpu, done)
