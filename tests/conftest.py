"""What every test shares: built objects, by content; and in CI a skipped test is a failed run."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

OBJECTS = Path(__file__).parents[1] / "build" / "objects"
CXX = Path(__file__).parent / "cxx"  # a compiler that has read the system's headers
ONE_DAY_S = 24 * 60 * 60

# The run's processes fill the cores: a second thread of numpy or torch would only spin until it gets one.
for library in ("OMP", "OPENBLAS"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """The same source is built once a run, whichever of its processes wants it. Triton, which decides when it
    is imported and which torch imports too, interprets in all of them: it compiles in processes of its own.
    """
    os.environ.setdefault("OCTAVO_CACHE", str(OBJECTS))
    if shutil.which("c++") and "CXX" not in os.environ:
        os.environ |= {"CXX": str(CXX), "OCTAVO_TESTS_PRECOMPILED": str(OBJECTS / "precompiled")}
    os.environ["TRITON_INTERPRET"] = "1"
    if threading.current_thread() is threading.main_thread():
        heed_signals()
    if not hasattr(config, "workerinput"):
        for old in OBJECTS.rglob("*"):
            if old.is_file() and time.time() - old.stat().st_mtime > ONE_DAY_S:
                old.unlink(missing_ok=True)


def pytest_collection_finish() -> None:
    """What imports have left stays, and is not looked through for garbage, which takes 0.3 s each time."""
    gc.collect()
    gc.freeze()


def heed_signals() -> None:
    """A run in the background, or under nohup, has these ignored, and so would all that it starts."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    for report in terminalreporter.stats.get("passed", []):
        for totals in (value for name, value in report.user_properties if name == "totals"):
            terminalreporter.write_line(f"{report.nodeid}: {totals}")
    if _unexplained_skips(terminalreporter):
        terminalreporter.write_line("In CI a test may be skipped only for a reason that says 'needs a GPU'.")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus == 0 and reporter is not None and _unexplained_skips(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _unexplained_skips(reporter: pytest.TerminalReporter) -> list[str]:
    if not os.environ.get("CI"):
        return []
    reports = reporter.stats.get("skipped", [])
    return [r.nodeid for r in reports if "needs a GPU" not in str(r.longrepr)]
