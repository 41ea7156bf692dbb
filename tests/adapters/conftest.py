"""The table that the parity tests fill: framework, loss, and the largest difference of the gradients."""

from __future__ import annotations

from typing import Any

import pytest

ROWS: list[tuple[str, str, float]] = []


@pytest.fixture
def compared():
    """compared(framework, loss, difference): a row of the table; the limit is 1e-5."""

    def row(framework: str, loss: str, difference: float) -> None:
        ROWS.append((framework, loss, difference))
        assert difference < 1e-5, f"{framework}, {loss}: the gradients differ by {difference:.2g}"

    return row


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not ROWS:
        return
    terminalreporter.write_line("\nLargest difference of the gradients, over the largest entry (limit 1e-5):\n")
    names, losses = (max(len(row[column]) for row in ROWS) for column in (0, 1))
    for framework, loss, difference in ROWS:
        terminalreporter.write_line(f"  {framework:{names}}  {loss:{losses}}  {difference:.1e}")
