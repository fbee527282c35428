"""Units at the boundary: bytes and rates as people write them, nanoseconds as the simulator counts them.

GB means 1e9 bytes, GiB 2**30. Inside, sizes are integer bytes, simulated time is integer nanoseconds.
"""

from __future__ import annotations

import re

from foreload.errors import UsageError

_SCALE = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_QUANTITY = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*$")


def _quantity(text: str, what: str, example: str, per: str, least_bare: int) -> int:
    """`text` in bytes, with or without `per` at its end; without a unit only from `least_bare` on, or 0."""
    match = _QUANTITY.match(text.strip().removesuffix(per))
    if match is None or match.group(2).lower() not in _SCALE:
        raise UsageError(
            f"{what} {text!r} is not understood: write a number with B, kB, MB, GB, KiB, MiB or GiB, like {example}"
        )
    number, unit = match.groups()
    if not unit and 0 < float(number) < least_bare:
        raise UsageError(f"{what} {text!r} lacks a unit: write {number}GB{per}, or {number}B{per} for bytes")
    return int(float(number) * _SCALE[unit.lower()])


def parse_bytes(text: str, what: str = "size") -> int:
    """Bytes in `text` such as `8GiB` or `1500000`; UsageError otherwise, and for less than 1 MiB without a unit."""
    return _quantity(text, what, "8GiB", "", 2**20)


def parse_rate(text: str, what: str = "rate") -> int:
    """Bytes per second in `text` such as `25GB/s`; UsageError if it is not positive, or below 1 MB/s without a unit."""
    rate = _quantity(text, what, "25GB/s", "/s", 10**6)
    if rate <= 0:
        raise UsageError(f"{what} {text!r} must be above 0, like 25GB/s")
    return rate


def format_bytes(count: float) -> str:
    """`count` bytes with a binary unit, three significant digits: `9.00 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{_three_digits(size)} {unit}"
        size /= 1024
    return f"{_three_digits(size)} TiB"


def _three_digits(size: float) -> str:
    return f"{size:.0f}" if abs(size) >= 100 else f"{size:.3g}"


def us_to_ns(microseconds: float) -> int:
    """Whole nanoseconds, rounded half up."""
    return int(microseconds * 1000 + 0.5)


def copy_ns(size_bytes: int, bytes_per_second: int) -> int:
    """Nanoseconds to move `size_bytes` at `bytes_per_second`, rounded up."""
    return -(-size_bytes * 10**9 // bytes_per_second)
