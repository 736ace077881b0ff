"""Checks the documents: links between them and into the tree lead somewhere, anchors exist, Python blocks parse.

Usage: .venv/bin/python tools/check_docs.py          (`make docs`; tests/unit/test_docs.py calls `problems`)
Stateless. Not here: running what the README shows (tests/e2e/test_readme.py).
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
#: Files named in running text, in back-quotes and with a folder.
_NAMED = re.compile(r"`((?:src|tests|tools|native|docs|benchmarks|results)/[\w./-]+\.\w+)`")


def documents(root: Path = ROOT) -> list[Path]:
    """The Markdown files of the project, not those of an environment or a build."""
    skipped = {".venv", "build", ".git", "node_modules", ".pytest_cache", ".hypothesis"}
    return sorted(
        p for p in root.rglob("*.md") if not skipped & set(p.relative_to(root).parts[:-1]) and not p.parts[-2].startswith(".venv")
    )


def blocks(text: str, language: str) -> list[str]:
    """The contents of fenced blocks in one language, in order."""
    return [body for tag, body in _FENCE.findall(text) if tag == language]


def anchors(text: str) -> set[str]:
    """The anchors of the headings, made the way code hosts make them."""
    found: set[str] = set()
    for title in re.findall(r"^#{1,6} +(.+?) *#*$", _FENCE.sub("", text), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        count = sum(1 for known in found if known == anchor or re.fullmatch(re.escape(anchor) + r"-\d+", known))
        found.add(anchor if not count else f"{anchor}-{count}")
    return found


def problems(root: Path = ROOT) -> list[str]:
    """One line for each broken link, missing file or block that does not parse."""
    found = []
    for document in documents(root):
        name, text = document.relative_to(root), document.read_text("utf-8")
        prose = _FENCE.sub("", text)
        for target in _LINK.findall(prose):
            found += [f"{name}: {problem}" for problem in _link_problems(document, target)]
        for path in _NAMED.findall(prose):
            if not (root / path).exists():
                found.append(f"{name}: there is no {path}")
        for number, block in enumerate(blocks(text, "python"), 1):
            try:
                ast.parse(textwrap.dedent(block))
            except SyntaxError as error:
                found.append(f"{name}: Python block {number}, line {error.lineno}: {error.msg}")
    return found


def _link_problems(document: Path, target: str) -> list[str]:
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return []  # another site: not ours to check, and the tests stay off the network
    path, _, anchor = target.partition("#")
    goal = (document.parent / path).resolve() if path else document
    if not goal.exists():
        return [f"link to {target}: there is no such file"]
    if anchor and goal.suffix == ".md" and anchor not in anchors(goal.read_text("utf-8")):
        return [f"link to {target}: there is no such heading"]
    return []


def main() -> int:
    found = problems()
    for problem in found:
        print(problem)
    print(f"{len(documents())} documents, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
