"""A conversation and what can be done to it: turns, sampling settings, slash commands, making room in the context.

Owner of the messages and the settings of one chat. No input or output of its own, so that it is tested without a terminal.
Not here: prompts, streaming, Ctrl-C (chat.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from octavo.cli.options import REPEATED, SAMPLING_HELP
from octavo.config_sources import coerce, field_types, nearest
from octavo.errors import InvalidRequestError, OctavoError
from octavo.sampling_params import SamplingParams

Message = dict[str, str]

#: Of no use where one answer is shown as text.
NOT_SETTABLE = frozenset({
    "n", "logprobs", "prompt_logprobs", "logprobs_mode", "best_of", "beam_width", "length_penalty", "early_stopping",
})  # fmt: skip
#: Room kept for the answer when old turns have to go.
MAX_RESERVED_TOKENS = 512

HELP = """\
/help             this list
/clear            forget the conversation (the system message stays)
/system TEXT      set the system message; without TEXT, remove it
/set NAME VALUE   change a sampling setting, for example /set temperature 0.2; without arguments, list them
/stats            counts of this chat and of the engine
/why              where the time of the last answer went, and what would have helped
/save FILE        write the conversation as JSON
/quit             leave, as do Ctrl-D and Ctrl-C twice
A line that ends in \\ goes on; \"\"\" begins and ends a text of several lines. Write //text to send text that begins with /."""


@dataclass(slots=True)
class Totals:
    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0


class ChatSession:
    """Turns alternate user, assistant; a system message, if any, comes first and always stays."""

    def __init__(
        self, params: SamplingParams, model: str, system: str | None = None, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.params = params
        #: What the model itself sets where `params` leave a field open; only shown here.
        self.defaults = defaults
        self.model = model
        self.system = system
        self.turns: list[Message] = []
        self.totals = Totals()
        self.done = False

    @property
    def messages(self) -> list[Message]:
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def add_user(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def add_assistant(self, text: str) -> None:
        """Empty text (stopped before the first word): the question goes too, so that the turns keep alternating."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.take_back()

    def take_back(self) -> None:
        """Drop the last user message, which got no answer."""
        if self.turns and self.turns[-1]["role"] == "user":
            self.turns.pop()

    def drop_oldest(self) -> bool:
        """Drop the oldest question and answer; False where only the last question is left."""
        if len(self.turns) < 3:
            return False
        del self.turns[:2]
        return True

    def make_room(self, max_model_len: int, count: Callable[[list[Message]], int]) -> int:
        """Drop the oldest question and answer until the prompt leaves room for an answer; how many turns went.

        The last question is never dropped. If it does not fit alone the engine says so, and nothing goes for it.
        """
        reserved = min(self.params.max_tokens or MAX_RESERVED_TOKENS, MAX_RESERVED_TOKENS, max_model_len // 4)
        before = list(self.turns)
        while len(self.turns) > 2 and count(self.messages) + reserved > max_model_len:
            self.drop_oldest()
        if len(self.turns) < 3 and count(self.messages) >= max_model_len:
            self.turns = before
        return (len(before) - len(self.turns)) // 2

    def execute(self, line: str, engine_stats: Callable[[], dict[str, Any]], why: Callable[[], str] | None = None) -> str:
        """Carry out a slash command; the text to show. Raises OctavoError with the reason it could not."""
        name, _, argument = line.removeprefix("/").partition(" ")
        argument = argument.strip()
        if name in ("quit", "exit"):
            self.done = True
            return ""
        if name == "help":
            return HELP
        if name == "clear":
            self.turns.clear()
            return "cleared"
        if name == "system":
            self.system = argument or None
            return "system message set" if argument else "no system message"
        if name == "set":
            return self._set(argument)
        if name == "stats":
            return self._stats(engine_stats())
        if name == "why":
            if why is None or not self.totals.answers:
                raise OctavoError("/why explains the last answer, and there is none yet")
            return why()
        if name == "save":
            return self._save(argument)
        raise OctavoError(f"there is no command /{name}{nearest(name, _NAMES)} (/help lists them)")

    def _set(self, argument: str) -> str:
        names = [name for name in SAMPLING_HELP if name not in NOT_SETTABLE]
        if not argument:
            return "\n".join(f"{name:24} {self._shown(name):18}  {SAMPLING_HELP[name]}" for name in names)
        name, _, text = argument.partition(" ")
        name = name.replace("-", "_")
        if name not in names:
            raise OctavoError(f"there is no setting {name}{nearest(name, names)} (/set lists them)")
        if not text.strip():
            return f"{name} = {self._shown(name)}"
        change: dict[str, Any] = {}
        try:
            if text.strip().lower() in ("none", "default"):
                change[name] = next(field.default for field in fields(SamplingParams) if field.name == name)
            else:
                change[name] = text.strip() if name in REPEATED else coerce(text, field_types(SamplingParams)[name])
            self.params = replace(self.params, **change)
        except InvalidRequestError:
            raise
        except ValueError as error:
            raise OctavoError(f"{name}: {error}") from None
        return f"{name} = {self._shown(name)}"

    def _shown(self, name: str) -> str:
        """The value in force, as a person would write it."""
        value = getattr(self.params, name)
        if value is None and name in self.defaults:
            return f"{self.defaults[name]} (the model's)"
        if value in (None, ()):
            return "not set"
        if isinstance(value, Mapping):
            return ",".join(f"{key}={number}" for key, number in value.items())
        return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value).lower() if isinstance(value, bool) else str(value)

    def _stats(self, engine: dict[str, Any]) -> str:
        totals = self.totals
        rate = totals.tokens / totals.seconds if totals.seconds else 0.0
        lines = [
            f"answers {totals.answers}, tokens {totals.tokens} ({rate:.1f}/s over all), "
            f"prompt tokens {totals.prompt_tokens} ({totals.cached_tokens} from the cache)"
        ]
        lines += [f"{name}: {value}" for name, value in engine.items()]
        return "\n".join(lines)

    def _save(self, argument: str) -> str:
        if not argument:
            raise OctavoError("/save needs a file name")
        path = Path(argument).expanduser()
        sampling = {field.name: getattr(self.params, field.name) for field in fields(self.params)}
        changed = {name: value for name, value in sampling.items() if value not in (None, ()) and value != getattr(SamplingParams(), name)}
        content = json.dumps({"model": self.model, "sampling": changed, "messages": self.messages}, ensure_ascii=False, indent=2)
        try:
            with open(path, "x", encoding="utf-8") as stream:  # x: never over a file that is there
                stream.write(content + "\n")
        except FileExistsError:
            raise OctavoError(f"{path} exists; choose another name") from None
        except (OSError, ValueError) as error:
            raise OctavoError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
        return f"saved {len(self.messages)} messages to {path}"


_NAMES = ("help", "clear", "system", "set", "stats", "why", "save", "quit")
