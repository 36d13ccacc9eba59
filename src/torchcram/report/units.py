"""Numbers of benchmarks with as many digits as are worth reading."""

from __future__ import annotations

MEGA = 1e6


def ms(milliseconds: float) -> str:
    """Formats milliseconds with three significant digits: 0.123, 1.23, 123."""
    if milliseconds >= 100:
        return f"{milliseconds:.0f}"
    return f"{milliseconds:.{1 if milliseconds >= 10 else 2 if milliseconds >= 1 else 3}f}"


def size(count: int) -> str:
    """Formats a number of bytes in MB, small ones with more digits."""
    millions = count / MEGA
    return f"{millions:.{1 if millions >= 10 else 2 if millions >= 1 else 3}f}"


def rate(per_second: float) -> str:
    """Formats a throughput: 1.23, 12.3, 1,234."""
    return f"{per_second:,.{2 if per_second < 10 else 1 if per_second < 100 else 0}f}"


def times(ratio: float) -> str:
    """Formats a ratio: 2.31x, 12.3x."""
    return f"{ratio:.{1 if ratio >= 10 else 2}f}x"
