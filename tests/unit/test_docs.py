"""The documents are in order, and the check that says so can fail."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def tool(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_docs, figures = tool("check_docs"), tool("figures")


def test_links_lead_somewhere_and_blocks_parse():
    assert check_docs.problems() == []


def test_every_figure_of_the_readme_comes_from_a_results_file():
    text = (ROOT / "README.md").read_text("utf-8")
    assert figures.BEGIN + "\n" + figures.table() + "\n" + figures.END in text


def test_the_documents_that_are_promised_are_there():
    found = {str(path.relative_to(ROOT)) for path in check_docs.documents()}
    named = ("architecture", "numerics", "add_a_model", "add_an_op")
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in named)} <= found


def test_broken_documents_are_noticed(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "b.md").write_text("# A heading, *here*\n\n## Twice\n## Twice\n")
    (tmp_path / "a.md").write_text(
        "[ok](docs/b.md) [ok](docs/b.md#a-heading-here) [ok](docs/b.md#twice-1) [ok](#end) [ok](https://example.org/x)\n"
        "[bad](docs/c.md) [bad](docs/b.md#nowhere) `src/nothing.py`\n\n"
        "```python\nx = (1\n```\n\n```text\n[not a link](nowhere.md)\n```\n\n# End\n"
    )
    problems = check_docs.problems(tmp_path)
    assert len(problems) == 4 and all(problem.startswith("a.md: ") for problem in problems)
    for words in ("docs/c.md: there is no such file", "#nowhere: there is no such heading", "src/nothing.py", "Python block 1, line 1"):
        assert any(words in problem for problem in problems), words
