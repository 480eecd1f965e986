"""What every test shares: in CI a skipped test is a failed run."""

from __future__ import annotations

import os

import pytest


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
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
