"""Numbers and times as traces write them, exact, or refused with a few words that say why.

The functions raise ValueError; whoever knows file and line turns it into a line for the user.
"""

from __future__ import annotations

import re
from datetime import date
from decimal import Decimal
from functools import lru_cache

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
# No model reads more; what is larger is an error of the file.
MAX_TOKENS = 10_000_000
# Nanoseconds from the epoch then fit 63 bits.
MAX_SECONDS = 8_000_000_000
_DECIMAL = re.compile(r"[+-]?[0-9]{1,30}(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,3})?")
_ISO = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[ T]([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{1,9}))?"
    r"(?:(Z)|([+-])([0-9]{2}):?([0-9]{2}))?"
)
_EPOCH = date(1970, 1, 1).toordinal()


def shown(value: object) -> str:
    """A value as a message quotes it, shortened."""
    return (
        "missing"
        if value is None or value == ""
        else repr(str(value) if isinstance(value, Decimal) else value)[:40]
    )


def tokens(value: object, least: int = 0) -> int:
    """A number of tokens from a CSV field or from JSON; 374.0 is 374, and 374.5 is no number of tokens."""
    if type(value) is str and value.isascii() and value.isdigit() and len(value) < 10:
        number = int(value)
    else:
        exact = _number(value)
        # Bounds first: arithmetic on a number with a huge exponent fails.
        if exact > MAX_TOKENS:
            raise ValueError(f"is {shown(value)}; more than {MAX_TOKENS:,} tokens are no request")
        if exact < 0 or exact != exact.to_integral_value():
            raise ValueError(f"is {shown(value)}; expected a whole number, {least} or more")
        number = int(exact)
    if number > MAX_TOKENS:
        raise ValueError(f"is {shown(value)}; more than {MAX_TOKENS:,} tokens are no request")
    if number < least:
        raise ValueError(f"is {shown(value)}; expected a whole number, {least} or more")
    return number


def since_start_ns(value: object, unit_ns: int) -> int:
    """A time since the trace's start, in units of `unit_ns`, as whole ns (half ns to even)."""
    exact = _number(value)
    if exact < 0:
        raise ValueError(f"is {shown(value)}; expected a time of 0 or later")
    if exact > MAX_SECONDS * NS_PER_S // unit_ns:
        raise ValueError(f"is {shown(value)}, which is more than 250 years; is the unit right?")
    return int((exact * unit_ns).to_integral_value())


def _number(value: object) -> Decimal:
    """The exact value of a JSON number, or of a text that is one."""
    if type(value) is int:
        return Decimal(value)
    if isinstance(value, Decimal):
        return value
    if type(value) is str and _DECIMAL.fullmatch(value):
        return Decimal(value)
    raise ValueError(f"is {shown(value)}; expected a number")


def iso_ns(text: str) -> tuple[int, bool]:
    """(ns from 1970-01-01, whether it names its zone) of a date and time; without a zone it is taken as UTC."""
    found = _ISO.fullmatch(text)
    if found is None:
        raise ValueError(
            f"is {shown(text)}; expected a date and time such as 2023-11-16 18:17:03.9799600 "
            "(up to 9 digits after the point, with or without +00:00)"
        )
    day, hour, minute, second, fraction, utc, sign, zone_hours, zone_minutes = found.groups()
    clock = int(hour), int(minute), int(second)
    if clock[0] > 23 or clock[1] > 59 or clock[2] > 59:
        raise ValueError(f"is {shown(text)}; there is no such time of day")
    seconds = _day_seconds(day) + 3600 * clock[0] + 60 * clock[1] + clock[2]
    if sign:
        offset = 3600 * int(zone_hours) + 60 * int(zone_minutes)
        seconds += offset if sign == "-" else -offset
    return seconds * NS_PER_S + int((fraction or "").ljust(9, "0")), bool(utc or sign)


@lru_cache(maxsize=64)
def _day_seconds(day: str) -> int:
    try:
        return 86_400 * (date.fromisoformat(day).toordinal() - _EPOCH)
    except ValueError:
        raise ValueError(f"has the day {day}, which there is not") from None


class SeenIds:
    """Finds an id that comes twice. Ids that rise by one at a time, as most traces number, take no memory."""

    def __init__(self) -> None:
        self._first = self._last = -1
        self._others: set[int] = set()

    def add(self, value: int) -> bool:
        """Remember it; False if it was there already."""
        if value in self:
            return False
        if self._first < 0:
            self._first = self._last = value
        elif value == self._last + 1:
            self._last = value
        else:
            self._others.add(value)
        return True

    def __contains__(self, value: int) -> bool:
        return 0 <= self._first <= value <= self._last or value in self._others
