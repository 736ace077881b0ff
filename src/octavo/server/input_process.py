"""An input process: `python -m octavo.server.input_process`, started by input_pool.py only.

Reads one message after the other from standard input and answers each on standard output (prepared.py says how), until the
input ends. It runs at low priority and with bounded memory; whoever started it ends it when a job takes too long.
Owner of one tokenizer, one template and one InputProcessor. Not here: what a body may hold (prepare.py).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import traceback
from importlib import import_module
from typing import BinaryIO

import msgspec

from octavo.engine.executor import ExecutorInfo
from octavo.errors import OctavoError
from octavo.server.prepare import Intake, prepare
from octavo.server.prepared import LENGTH, Answer, Broken, Job, Loaded, Order, Outcome, Refused, SetInfo, Start, framed
from octavo.wiring import FrontParts

_log = logging.getLogger("octavo.server")
_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


def main() -> None:
    source, sink = _take_pipes()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the whole group; the starter decides
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    with contextlib.suppress(BrokenPipeError):  # nobody is left to answer
        serve(source, sink)
    os._exit(0)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The two pipes, out of the reach of anything that prints or reads standard input by mistake."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return source, sink


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer until the input ends, or until something cannot be loaded."""
    start: Start | None = None
    front: FrontParts | None = None
    intake: Intake | None = None
    while (order := _read(source)) is not None:
        answer: Answer
        try:
            if isinstance(order, Start):
                start, front = order, _load(order)
                answer = Loaded()
            elif isinstance(order, SetInfo):
                intake = _intake(start, front, order.info)
                answer = Loaded()
            else:
                assert start is not None
                answer = _work(order, intake, start.job_seconds)
        except OctavoError as error:
            answer = Broken(str(error))
        except Exception as error:
            _report(error)
            answer = Broken(f"{type(error).__name__} while loading")
        sink.write(framed(answer))
        sink.flush()
        if isinstance(answer, Broken):
            return


def _read(source: BinaryIO) -> Order | None:
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    data = source.read(length)
    return _orders.decode(data) if len(data) == length else None


def _load(start: Start) -> FrontParts:
    if not start.factory:
        front = FrontParts.load(start.config)
    else:
        module, _, name = start.factory.partition(":")
        front = getattr(import_module(module), name)(start.config)
    gc.freeze()  # what is loaded stays
    _bound_memory(start.memory)
    os.setpriority(os.PRIO_PROCESS, 0, max(start.niceness, os.getpriority(os.PRIO_PROCESS, 0)))
    return front


def _bound_memory(more: int) -> None:
    """Writable memory only: a model file that is mapped for reading does not count."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            used = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData:"))
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        most = used + more if hard == resource.RLIM_INFINITY else min(used + more, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    except (OSError, StopIteration, ValueError):
        _log.warning("the memory of input processes has no bound on this system")


def _intake(start: Start | None, front: FrontParts | None, info: ExecutorInfo) -> Intake:
    assert start is not None and front is not None
    return Intake(front.input_processor(info), start.served_names, start.max_json_depth, start.max_prompts, start.max_choices)


def _work(job: Job, intake: Intake | None, seconds: float) -> Outcome:
    assert intake is not None
    signal.setitimer(signal.ITIMER_REAL, seconds)  # the signal's default action needs no help from Python
    try:
        return prepare(job, intake)
    except MemoryError:
        return Refused(400, "the request needs too much memory to be read: shorten it", code="input_too_large")
    except Exception as error:
        _report(error)
        return Refused(500, "internal error while reading the request; the server's log says where", code="internal_error")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _report(error: Exception) -> None:
    """Where it happened and nothing of its text, which may hold a part of somebody's prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    _log.error("internal error: %s at %s", type(error).__name__, " < ".join(f"{f.filename}:{f.lineno}" for f in frames[::-1][:5]))


if __name__ == "__main__":
    main()
