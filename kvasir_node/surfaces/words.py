"""Numbers and foreign text made fit for a person's eyes.

It does not know what the values mean. Text that came from other peers passes through `clean` before it is shown.
"""

from __future__ import annotations


def clean(text: str, characters_max: int = 500) -> str:
    """One line of what can be printed: no peer can move our cursor, reverse our text or forge a line."""
    shown = "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text[:characters_max])
    return shown if len(text) <= characters_max else shown[:-3] + "..."


def size_text(size_bytes: float) -> str:
    """2048 -> "2.0 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def duration_text(duration_s: float) -> str:
    """Two units at most: "42s", "3m07s", "5h02m", "2d03h"."""
    seconds = int(duration_s)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds // 60 % 60:02d}m"
    return f"{seconds // 86400}d{seconds // 3600 % 24:02d}h"


def count_text(count: int) -> str:
    """12345 -> "12,345"; a million and more -> "1.2M"."""
    if count < 1_000_000:
        return f"{count:,}"
    return f"{count / 1e6:.1f}M" if count < 1_000_000_000 else f"{count / 1e9:.1f}G"


def counted(count: int, noun: str) -> str:
    """1, "peer" -> "1 peer"; of nouns that take an s."""
    return f"{count_text(count)} {noun}{'' if count == 1 else 's'}"


def short_id(identifier: str) -> str:
    """The end of a peer id or Cid: its beginning is the same for all."""
    return identifier if len(identifier) <= 10 else ".." + identifier[-8:]
