"""Formats numbers for people, in ASCII."""

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_PLAIN_BELOW = 10_000
# from this share of a unit on, three rounded digits reach the unit
_ROUNDS_UP = 0.9995


def full(number: float) -> str:
    return f"{round(number):,}"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: "1 row", "2,000 rows"."""
    return f"{full(number)} {noun if number == 1 else plural or noun + 's'}"


def amount(number: float) -> str:
    """Return a number as three digits with k, M, G or T; below 10,000 with all its digits."""
    if abs(number) < _PLAIN_BELOW:
        return full(number)
    size, letter = next(unit for unit in _UNITS if abs(number) >= _ROUNDS_UP * unit[0])
    scaled = abs(number) / size
    digits = 0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2
    return f"{number / size:.{digits}f} {letter}"


def tick(number: float) -> str:
    """Return a round number for an axis, as `amount` does, without zeros at the end."""
    digits, _, letter = amount(number).partition(" ")
    short = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return f"{short} {letter}".rstrip()


def percent(share: float, digits: int = 1) -> str:
    """Return a share as a percentage; a share below 1 is not rounded to 100 %."""
    value = 100 * share
    if share < 1 and round(value, digits) >= 100:
        value = 100 - 10**-digits
    return f"{value:.{digits}f} %"


def duration(seconds: float) -> str:
    """Return seconds in suitable units: "8.3 s", "5 min 2 s", "12 min", "3 h 10 min"."""
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 10:
        return f"{minutes} min {rest} s"
    if seconds < 3570:
        return f"{seconds / 60:.0f} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours} h"


def printable(line: str) -> str:
    """Escape characters that could control a terminal; row ids and prompts are user data."""
    return "".join(c if " " <= c <= "~" else ascii(c)[1:-1] for c in line)
