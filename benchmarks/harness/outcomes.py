"""A plugin of pytest: a line of JSON for each test, in a file, as soon as it is known.

The first one lists the tests that will run; the others are their outcomes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SHOWN = 3000  # characters of an error, from its end


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True, help="the file")


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist collect; all outcomes come to the process that has started them.
    worker = getattr(config, "workerinput", {}).get("workerid")
    if worker in (None, "gw0"):
        config.pluginmanager.register(Outcomes(config.getoption("outcomes"), worker is None))


class Outcomes:
    def __init__(self, path: Path, reports: bool) -> None:
        self._path = path
        self._reports = reports

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(name=report.nodeid, outcome="failed", why=report.longreprtext[-SHOWN:])

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write(tests=[item.nodeid for item in session.items])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test that passes says so at its call; one that fails or skips, wherever that is.
        if not self._reports or (report.passed and report.when != "call"):
            return
        why = report.longreprtext[-SHOWN:]
        if report.skipped and isinstance(report.longrepr, tuple):
            why = report.longrepr[2].removeprefix("Skipped: ")
        self._write(name=report.nodeid, outcome=report.outcome, seconds=report.duration, why=why)

    def _write(self, **entry: object) -> None:
        with self._path.open("a") as file:
            print(json.dumps(entry), file=file)
