"""The command group: which commands there are, and how their arguments are parsed.

Stateless. Not here: any command, each in a module of its own; exit codes and errors (main.py).
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Annotated, Any

import typer
import typer.core
import typer.main

import octavo
from octavo.config_sources import nearest
from octavo.errors import ConfigError

COMMANDS = ("chat", "run", "serve", "bench", "verify", "trace", "explain", "lab", "models", "doctor")
EXAMPLES = """\b
Examples:
  octavo chat
  octavo run "What is the capital of France?"
  octavo run --temperature 0 --max-tokens 20 --raw "Deep learning is"
  echo "Name three rivers." | octavo chat
  octavo doctor
"""


class LazyGroup(typer.core.TyperGroup):
    """Imports a command's module when the command is looked up."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name.startswith("-"):
            return None
        if cmd_name not in COMMANDS:
            raise ConfigError(f"there is no command {cmd_name!r}{nearest(cmd_name, COMMANDS)} (octavo --help lists them)")
        module = importlib.import_module(f"octavo.cli.{cmd_name}")
        return without_conversion(typer.main.get_command(_typer_app(cmd_name, module)))


def _typer_app(name: str, module: ModuleType) -> typer.Typer:
    """The module's `command`; or, where it has several, its `commands` by name (`octavo NAME SUBCOMMAND`) under its `SUMMARY`."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    if not hasattr(module, "commands"):
        app.command(name, epilog=module.EXAMPLES)(module.command)
        return app
    app.callback(help=module.SUMMARY, epilog=module.EXAMPLES, invoke_without_command=True)(_help_alone)
    for subcommand, function in module.commands.items():
        app.command(subcommand, epilog=module.EXAMPLES)(function)
    return app


def _help_alone(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def without_conversion(command: Any) -> Any:
    """`command`, and what is below it, with its arguments left as they were parsed: text, tuples of text, true and false.

    Typer's own conversion imports pydantic, which takes longer than all the rest of the parsing; what a flag's text means
    is for config_sources.coerce to say.
    """
    for subcommand in getattr(command, "commands", {}).values():
        without_conversion(subcommand)
    parameters = command.get_params

    def get_params(ctx: Any) -> list[Any]:
        found = list(parameters(ctx))
        for parameter in found:
            parameter.process_value = functools.partial(_as_parsed, parameter)
        return found

    command.get_params = get_params
    return command


def _as_parsed(parameter: Any, ctx: Any, value: Any) -> Any:
    if value is None and (parameter.nargs != 1 or getattr(parameter, "multiple", False)):
        value = ()
    return value if parameter.callback is None else parameter.callback(ctx, parameter, value)


def root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks and what the engine logs")] = False,
) -> None:
    """Run language models on this machine."""
    if version:
        typer.echo(f"octavo {octavo.__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def invoke(arguments: list[str]) -> int:
    """Parse and run one command line; the exit code. Raises what the command raises."""
    app = typer.Typer(cls=LazyGroup, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True, epilog=EXAMPLES)(root)
    group = without_conversion(typer.main.get_command(app))
    try:
        with group.make_context("octavo", list(arguments)) as context:
            result = group.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    return result if isinstance(result, int) else 0
