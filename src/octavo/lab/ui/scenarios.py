"""What the block map can show: a few requests and a small pool each. Plain data. Not here: running them (recorder.py)."""

from __future__ import annotations

from octavo.lab.ui.recorder import Arrival, Scenario

_SYSTEM = (
    "You are the assistant of a small public library. You answer questions about opening hours, loans and reading rooms. You are "
    "polite and brief, you never guess, and you send people to the front desk when you do not know. The library opens at nine in the "
    "morning and closes at eight in the evening, on Sundays at noon. A book may be kept for four weeks and renewed twice. There are "
    "three reading rooms, one of them for children, and a garden that is open in summer."
)
_ARTICLE = (
    "A library is a collection of books, and possibly other materials and media, that is accessible for use by its members. It provides "
    "physical or digital materials, and may be a physical location or a virtual space. A collection usually includes printed books and "
    "other physical items in many formats, as well as access to digital content. Libraries range widely in size, from a single shelf to "
    "many millions of volumes, and they may be kept by a public body, an institution, a company or one person. Besides books they offer "
    "the services of librarians, who are trained to find, choose, circulate and organise information, and who answer the questions of "
    "readers. Quiet rooms for study, rooms for working together, and machines for printing and copying are found in most of them. "
)


def _chat(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]


SCENARIOS = {
    "prefix": Scenario(
        title="Shared system prompt",
        explanation="Three chats begin with the same system prompt. B comes while A is still answering: it finds the prompt's blocks, "
        "computes only its own question, and holds them together with A (striped). When C comes nobody holds them any more, but they "
        "are still findable, and C takes them over.",
        num_kv_blocks=32,
        arrivals=(
            Arrival("A", _chat("When do you open on Sunday?"), max_tokens=36),
            Arrival("B", _chat("May I keep a book for two months?"), step=8, max_tokens=36),
            Arrival("C", _chat("Is there a room for children?"), step=46, max_tokens=20),
        ),
    ),
    "fork": Scenario(
        title="Four answers to one prompt",
        explanation="n = 4: the prompt is computed once, then four answers fork its blocks. Full blocks stay shared to the end. The "
        "last one is only half full, and every answer writes its own words into it: each gets a copy first (copy on write).",
        num_kv_blocks=32,
        arrivals=(
            Arrival(
                "A",
                "Once upon a time there was an old librarian who lived above the reading room with her cat, and every evening, "
                "after the last reader had gone home, she would light a lamp, open a book and",
                n=4,
                max_tokens=40,
            ),
        ),
    ),  # fmt: skip
    "small": Scenario(
        title="A pool too small",
        explanation="Four requests want more blocks than there are. When a running one needs a block and none is free, the most recent "
        "one is preempted: it loses its blocks, waits, and computes again later. Its answer is the same.",
        num_kv_blocks=16,
        arrivals=tuple(
            Arrival(name, f"Write down everything you know about {topic}, in one long paragraph:", max_tokens=88)
            for name, topic in zip("ABCD", ("rivers", "mountains", "islands", "deserts"), strict=True)
        ),
    ),
    "chunks": Scenario(
        title="A long prompt in chunks",
        explanation="A step has room for 64 tokens. The long prompt B is computed a piece at a time, and A, which was there first, gets "
        "its next token in every one of these steps: nobody waits for the long prompt.",
        arrivals=(
            Arrival("A", "The best time to read is", max_tokens=48),
            Arrival("B", _ARTICLE * 4 + "In short,", step=6, max_tokens=24),
        ),
        num_kv_blocks=64,
        settings={"max_num_batched_tokens": 64},
    ),
}
