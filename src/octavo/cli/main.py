"""The `octavo` program: turns every way to fail into one line and an exit code.

0: done. 1: a failure. 2: bad usage. 130: stopped by Ctrl-C. 141: the reader of our output went away.
Stateless. Light to import, so that Ctrl-C is quiet from the start. Not here: the commands and their arguments (app.py).
"""

from __future__ import annotations

import logging
import os
import sys
import traceback

from octavo.cli import terminal
from octavo.errors import ConfigError, InvalidRequestError, OctavoError


def main(arguments: list[str] | None = None) -> int:
    """Run one command line; the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    _fill_standard_files()
    debug = "--debug" in options or os.environ.get("OCTAVO_DEBUG", "") not in ("", "0")
    terminal.tolerant_streams()
    _log_to_stderr(logging.INFO if debug else logging.WARNING)
    try:
        try:
            from octavo.cli.app import invoke

            code = invoke(arguments)
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


def _fill_standard_files() -> None:
    """Where 0, 1 or 2 is closed, it leads nowhere from now on: else a socket would get that number, and what is printed."""
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(file)


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
