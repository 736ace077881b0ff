"""What is asked: short questions of our own, a user's file, or text of a given length.

Stateless. Not here: chat templates and token counts, which are the server's.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from octavo.bench.client import Prompt
from octavo.errors import ConfigError

MAX_FILE_BYTES = 256 << 20

#: None is asked during a run, so that the first requests leave nothing in a prefix cache but the template.
WARM_UP = "Please count slowly from one to one hundred."

QUESTIONS = (
    "Why is the sky blue during the day and red at sunset?",
    "Write a short letter to a neighbour about a lost cat.",
    "What is the difference between weather and climate?",
    "Explain how a bicycle stays upright while it is moving.",
    "List five things to check before a long train journey.",
    "How do bees find their way back to the hive?",
    "Describe the taste of a ripe pear to someone who has never eaten one.",
    "What does a compiler do, and why are there so many of them?",
    "Tell the story of a lighthouse keeper in four sentences.",
    "How is paper made from wood?",
    "Which is heavier, a litre of water or a litre of oil, and why?",
    "Give me a simple recipe for soup with lentils and carrots.",
    "What were the main causes of the fall of the Roman Empire?",
    "Explain recursion to a ten year old child.",
    "Name three rivers in Africa and the seas they flow into.",
    "Why do cats purr?",
    "How would you plan a small vegetable garden on a balcony?",
    "What is an interest rate, and who decides about it?",
    "Write a polite refusal of an invitation to a wedding.",
    "How does a refrigerator move heat out of its inside?",
    "What makes a good password, and how should I keep it?",
    "Summarise the plot of a play about two families that hate each other.",
    "Why does bread rise in the oven?",
    "Compare a violin and a cello.",
    "What happens to the body during sleep?",
    "How do I convert a temperature from Celsius to Fahrenheit?",
    "Describe a morning at a fish market by the sea.",
    "What is the purpose of a constitution?",
    "Explain the offside rule in football.",
    "How can I remember the names of people I have just met?",
    "Write a haiku about the first snow of the year.",
    "Why is the sea salty while rivers are not?",
    "What is a prime number, and why is one not prime?",
    "Suggest a weekend trip for a family with two small children.",
    "How does a vaccine prepare the immune system?",
    "What should a beginner know before buying a used car?",
    "Explain what a database index is good for.",
    "Who built the pyramids, and how were the stones moved?",
    "How do you say thank you in six languages?",
    "What is the water cycle?",
    "Write a product description for an umbrella that never breaks.",
    "Why do leaves change their colour in autumn?",
    "How does sound travel through a wall?",
    "Give three reasons to learn to play an instrument.",
    "What is the difference between a virus and a bacterium?",
    "Describe how a canal lock lifts a boat.",
    "How do I politely ask for a higher salary?",
    "What did people do in the evening before there was electric light?",
    "Explain how maps show the height of mountains.",
    "What is the shortest way to describe what time is?",
)

#: Words that are one token each, with the space before them, in the usual English vocabularies.
_WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state", "family",
    "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system", "program", "question",
    "work", "government", "number", "night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact", "month",
    "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side", "kind", "head", "house", "service",
    "friend", "father", "power", "hour", "game", "line", "end", "member", "law", "car", "city", "community", "name", "president",
    "team", "minute", "idea", "body", "information", "back", "parent", "face", "others", "level", "office", "door", "health",
    "person", "art", "war", "history", "party", "result", "change", "morning", "reason", "research", "girl", "guy", "moment", "air",
    "teacher",
)  # fmt: skip


def of_length(tokens: int, count: int, seed: int = 0) -> list[Prompt]:
    """`count` texts of about `tokens` tokens each (a word is one), all different from their first word on."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(_WORDS, k=max(1, tokens))) for _ in range(count)]


def from_file(path: Path) -> list[Prompt]:
    """One prompt a line: text, or a JSON object with "prompt" (text) or "messages". Empty lines are nothing.

    Raises ConfigError naming the line.
    """
    with path.open("rb") as stream:
        data = stream.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is longer than {MAX_FILE_BYTES >> 20} MiB")
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not valid UTF-8") from None
    prompts = [_prompt(line.strip(), f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"{path} has no prompts")
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    if not line.startswith("{"):
        return line
    try:
        entry: dict[str, Any] = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: not valid JSON") from None
    prompt = entry.get("prompt") or entry.get("messages")
    if isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)):
        return prompt
    raise ConfigError(f'{where}: an object needs "prompt" (text) or "messages" (a list)')
