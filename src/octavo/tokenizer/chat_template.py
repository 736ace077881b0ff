"""ChatTemplate: messages to the prompt a model was trained on.

Owner: the compiled template and what two or three probe renderings found out about it; a rendering owns its Budget. One
ChatTemplate serves any number of threads.
Not here: the sandbox (sandbox.py), the checking of messages (messages.py), finding the template (loading/model_files.py).

Control tokens written in a message stay text. Before rendering, a guard word is put into each such place (and at the edge of
a text that begins or ends with part of a control token); after rendering the guards are taken out and their offsets tell
Tokenizer.encode_rendered which control tokens are not the template's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import jinja2

from octavo.errors import InvalidRequestError, TemplateError
from octavo.tokenizer import sandbox
from octavo.tokenizer.messages import Message, arguments_as_text, check_plain, checked, joined, map_strings, merge_system, shape_content
from octavo.tokenizer.tokenizer import Tokenizer

_RESERVED = (
    "messages tools chat_template tokenize add_generation_prompt continue_final_message bos_token eos_token unk_token pad_token "
    "raise_exception strftime_now return_dict return_tensors range namespace dict joiner cycler self loop"
)
_PROBE = "octavoprobe"
_PROBE_SECONDS = 0.2
#: Fields in which an assistant's own <think> or <tool_call> stay what they were; only tokens that end turns are text there.
_ANSWER_FIELDS = ("content", "reasoning_content", "reasoning")


class RenderedChat(NamedTuple):
    """A prompt, and the offsets at which a control token is only text (for Tokenizer.encode_rendered)."""

    text: str
    literal_marks: tuple[int, ...]


class ChatTemplate:
    """A jinja2 chat template bound to a tokenizer. `source` None: a model without one; every rendering then says so."""

    def __init__(self, source: str | None, tokenizer: Tokenizer, *, time_limit: float = 5.0) -> None:
        """Compiles the template; raises TemplateError. time_limit: seconds one rendering may take."""
        self.source = source
        self._tokenizer = tokenizer
        self._time_limit = time_limit
        self._template: jinja2.Template | None = None
        if source is None:
            return
        if not isinstance(source, str) or len(source) > sandbox.MAX_TEMPLATE_CHARS:
            raise TemplateError(f"the chat template must be a string of at most {sandbox.MAX_TEMPLATE_CHARS} characters")
        try:
            self._template = sandbox.TemplateEnvironment().compile_bounded(source)
        except Exception as error:  # a hostile source can make the parser or Python's own compiler raise anything
            raise TemplateError(f"cannot read the chat template: {_one_line(error)}") from error

    # ---- public

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of the prompt. The template writes BOS itself if the model wants it; none is added.

        add_generation_prompt: end with the opening of an assistant turn. continue_final_message: end with the text of the last
        message (an assistant's), to be continued. Raises TemplateError (the template's own message) or InvalidRequestError.
        """
        chat = self.render_marked(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **template_kwargs,
        )
        return self._tokenizer.encode_rendered(chat.text, chat.literal_marks)

    def render(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        """The prompt as text; options as in `encode_chat`."""
        return self.render_marked(messages, **options).text

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> RenderedChat:
        """The prompt with its marks: plain data, so that a worker process can render and another can encode."""
        if self._template is None:
            raise TemplateError("the model has no chat template: use a text completion, or pass a template")
        check_template_kwargs(template_kwargs)
        _check_tools(tools)
        chat = self._prepare(checked(messages))
        if continue_final_message:
            _check_continuation(chat, add_generation_prompt)
        guard = _unused_word("octavoguard", (messages, tools, template_kwargs))
        final = _unused_word("octavofinal", (messages, tools, template_kwargs, guard))
        chat = self._guard_messages(chat, guard)
        last = joined(chat[-1]["content"]) if continue_final_message else ""
        if continue_final_message:
            chat[-1] = chat[-1] | {"content": _append(chat[-1]["content"], final)}
        variables = self._guard_value({"tools": list(tools) if tools else None, **template_kwargs}, guard)
        text = self._run(chat, self._time_limit, add_generation_prompt=add_generation_prompt and not continue_final_message, **variables)
        return _remove_guards(_cut(text, final, last) if continue_final_message else text, guard)

    # ---- what the template understands

    @cached_property
    def _takes_text(self) -> bool:
        return _PROBE in (self._probe([{"role": "user", "content": _PROBE}]) or "")

    @cached_property
    def _takes_parts(self) -> bool:
        text = self._probe([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]) or ""
        return _PROBE in text and "'text'" not in text and '"text"' not in text

    @cached_property
    def _ignores_system(self) -> bool:
        user = {"role": "user", "content": self._probe_content("hi")}
        text = self._probe([{"role": "system", "content": self._probe_content(_PROBE)}, user])
        return text is not None and _PROBE not in text

    @cached_property
    def _prints_arguments(self) -> bool:
        """True when a mapping would come out as Python's repr: the template wants JSON text."""
        function = {"name": "f", "arguments": {_PROBE: "x"}}
        call = {"id": "call00000", "type": "function", "function": function}
        user = {"role": "user", "content": self._probe_content("hi")}
        text = self._probe([user, {"role": "assistant", "content": self._probe_content(""), "tool_calls": [call]}])
        if text is None:
            function["arguments"] = "{}"
            return self._probe([user, {"role": "assistant", "content": self._probe_content(""), "tool_calls": [call]}]) is not None
        return f"'{_PROBE}'" in text

    def _probe_content(self, text: str) -> str | list[Message]:
        return text if self._takes_text or not self._takes_parts else [{"type": "text", "text": text}]

    def _probe(self, messages: list[Message]) -> str | None:
        try:
            return self._run(messages, _PROBE_SECONDS, add_generation_prompt=False, tools=None)
        except TemplateError:
            return None

    def _prepare(self, messages: list[Message]) -> list[Message]:
        chat = merge_system(messages, knows_developer=re.search("['\"]developer['\"]", self.source or "") is not None)
        if chat[0]["role"] == "system" and chat[0]["content"] and self._ignores_system:
            raise TemplateError("this model's chat template ignores system messages: put the text into the first user message")
        if any("tool_calls" in m for m in chat) and self._prints_arguments:
            chat = arguments_as_text(chat)
        parts = any(not isinstance(m["content"], str) for m in chat) or not self._takes_text
        return shape_content(chat, takes_text=self._takes_text, takes_parts=parts and self._takes_parts)

    # ---- guards

    def _guard_messages(self, chat: list[Message], guard: str) -> list[Message]:
        result = []
        for message in chat:
            own = _ANSWER_FIELDS if message["role"] == "assistant" else ()
            result.append({k: v if k == "role" else self._guard_value(v, guard, k in own) for k, v in message.items()})
        return result

    def _guard_value(self, value: Any, guard: str, special_only: bool = False) -> Any:
        return map_strings(value, lambda text: self._guard_text(text, guard, special_only))

    def _guard_text(self, text: str, guard: str, special_only: bool) -> str:
        controls = self._tokenizer.controls
        places: set[int] = set()
        for start, end, _ in controls.find(text, special_only=special_only):
            places |= {start + 1} if end > start + 1 else {start, end}
        core = text.strip()  # templates trim, and so bring the edges of the text together with what surrounds it
        if core:
            begins, ends = controls.touches_edge(core)
            begin = len(text) - len(text.lstrip())
            places |= ({begin} if begins else set()) | ({begin + len(core)} if ends else set())
        cuts = [0, *sorted(places), len(text)]
        return guard.join(text[begin:end] for begin, end in pairwise(cuts))

    # ---- rendering

    def _run(self, messages: list[Message], seconds: float, **variables: Any) -> str:
        assert self._template is not None
        budget = sandbox.Budget(min(seconds, self._time_limit))
        given = {**self._tokenizer.special_tokens_map, **variables, "messages": messages, sandbox.BUDGET: budget}
        try:
            pieces, size = [], 0
            for piece in self._template.generate(given):
                size += len(piece)
                if size > sandbox.MAX_OUTPUT_CHARS:
                    raise sandbox.LimitError(f"the chat template writes more than {sandbox.MAX_OUTPUT_CHARS} characters")
                pieces.append(piece)
            return "".join(pieces)
        except sandbox.RaisedError as error:
            raise TemplateError(f"the chat template refused the messages: {_one_line(error)}", param="messages") from error
        except Exception as error:  # anything a template can do is the request's fault, never the server's
            raise TemplateError(f"the chat template failed: {_one_line(error)}", param="messages") from error


def _one_line(error: BaseException) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:500]


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError for names a caller may not set, and for values that are not plain data."""
    reserved = _RESERVED.split()
    for name, value in kwargs.items():
        if name in reserved or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
            raise InvalidRequestError(f"chat_template_kwargs may not set {name!r:.60}", param="chat_template_kwargs")
        check_plain(value, "chat_template_kwargs")


def _check_tools(tools: Any) -> None:
    if tools is None:
        return
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence) or not all(isinstance(t, Mapping) for t in tools):
        raise InvalidRequestError("tools must be a list of objects", param="tools")
    check_plain(tools, "tools")


def _check_continuation(chat: list[Message], add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other: set one of them to false", param="continue_final_message"
        )
    if chat[-1]["role"] != "assistant":
        raise InvalidRequestError("continue_final_message needs an assistant message at the end", param="continue_final_message")


def _unused_word(word: str, values: Any) -> str:
    """`word`, made longer until it occurs in none of the values. Letters only: it survives JSON and needs no escape."""
    texts: list[str] = []
    map_strings(values, lambda text: texts.append(text.casefold()) or text)  # type: ignore[func-returns-value]
    while any(word in text for text in texts):
        word += "x"
    return word + "z"


def _append(content: str | list[Message], word: str) -> str | list[Message]:
    if isinstance(content, str):
        return content + word
    if not content:
        return [{"type": "text", "text": word}]
    return [*content[:-1], content[-1] | {"text": content[-1]["text"] + word}]


def _cut(text: str, final: str, last: str) -> str:
    """The rendered text up to the end of the last message; white space a template trimmed from its beginning is put back."""
    end = text.rfind(final)
    if end < 0:
        raise TemplateError("the chat template leaves out the last assistant message, so it cannot be continued")
    text = text[:end]
    core = last.lstrip()
    if text.endswith(core) and not text.endswith(last):
        text = text[: len(text) - len(core)] + last
    return text


def _remove_guards(text: str, guard: str) -> RenderedChat:
    pieces = text.split(guard)
    marks, length = [], 0
    for piece in pieces[:-1]:
        length += len(piece)
        marks.append(length)
    clean = "".join(pieces)
    if guard in clean.casefold():
        raise TemplateError("the chat template changes the case of a message that holds control tokens: remove them from the message")
    return RenderedChat(clean, tuple(marks))
