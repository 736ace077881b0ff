"""The `octavo` program: picks the command, and turns every way to fail into one line and an exit code.

0: done. 1: a failure. 2: bad usage. 130: stopped by Ctrl-C. 141: the reader of our output went away.
Stateless. Not here: any command; each lives in its own module, imported when it is called.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import traceback
from typing import Annotated, Any

import typer
import typer.core
import typer.main

import octavo
from octavo.cli import terminal
from octavo.config_sources import nearest
from octavo.errors import ConfigError, InvalidRequestError, OctavoError

COMMANDS = ("chat", "run", "models", "doctor")
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
            raise ConfigError(f"there is no command {cmd_name!r}{nearest(cmd_name, COMMANDS)}; octavo --help lists them")
        module = importlib.import_module(f"octavo.cli.{cmd_name}")
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(cmd_name, epilog=module.EXAMPLES)(module.command)
        return without_conversion(typer.main.get_command(app))


def without_conversion(command: Any) -> Any:
    """`command` with its arguments left as they were parsed: text, tuples of text, true and false.

    Typer's own conversion imports pydantic, which takes longer than all the rest of the parsing; what a flag's text means
    is for config_sources.coerce to say.
    """
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


def main(arguments: list[str] | None = None) -> int:
    """Run one command line; the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in options or os.environ.get("OCTAVO_DEBUG", "") not in ("", "0")
    terminal.tolerant_streams()
    _log_to_stderr(logging.INFO if debug else logging.WARNING)
    try:
        try:
            code = _invoke(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The interpreter flushes once more at exit; let that go nowhere, without a message.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if debug:
            traceback.print_exc()
        message, code = explain(error)
        print(f"octavo: {message}", file=sys.stderr)
        return code


def _invoke(arguments: list[str]) -> int:
    app = typer.Typer(cls=LazyGroup, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True, epilog=EXAMPLES)(root)
    group = without_conversion(typer.main.get_command(app))
    try:
        with group.make_context("octavo", list(arguments)) as context:
            result = group.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    return result if isinstance(result, int) else 0


def explain(error: Exception) -> tuple[str, int]:
    """One line for the user, and the exit code."""
    if hasattr(error, "format_message"):  # bad usage, found by typer
        context = getattr(error, "ctx", None)
        where = f" ({context.command_path} --help)" if context is not None else ""
        return _one_line(error.format_message()).rstrip(".") + where, 2
    if isinstance(error, (ConfigError, InvalidRequestError)):
        return _one_line(str(error)), 2
    if isinstance(error, OctavoError):
        return _one_line(str(error)), 1
    if isinstance(error, MemoryError):
        return "out of memory; a smaller --kv-cache-memory or model may fit", 1
    if isinstance(error, OSError) and error.strerror:
        return _one_line(f"{error.filename}: {error.strerror}" if error.filename else error.strerror), 1
    return f"internal error: {type(error).__name__}: {_one_line(str(error))} (--debug shows where)", 1


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _log_to_stderr(level: int) -> None:
    logger = logging.getLogger("octavo")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("octavo: %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(level)


if __name__ == "__main__":
    sys.exit(main())
