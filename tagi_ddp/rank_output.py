"""The ranks' output on this process's stdout and stderr: whole lines that carry the rank."""

from __future__ import annotations

import re
from typing import TextIO


class Screen:
    """Where all ranks write; remembers whose progress bar is on the unfinished last line."""

    def __init__(self) -> None:
        """Start at the beginning of a line."""
        self._bar: RankStream | None = None
        self._bar_text = ""

    def line(self, stream: RankStream, text: str) -> None:
        """Write a whole line; it replaces the bar of the same stream and comes below another's."""
        if self._bar is stream:
            stream.file.write("\r")
        else:
            self.end_bar()
        self._bar = None
        stream.file.write(f"{stream.prefix}{text}\n")

    def bar(self, stream: RankStream, text: str) -> None:
        """Write a line that the stream's next one replaces."""
        if self._bar is not stream:
            self.end_bar()
        elif self._bar_text == text:
            return
        self._bar, self._bar_text = stream, text
        stream.file.write(f"\r{stream.prefix}{text}")

    def end_bar(self) -> None:
        """Leave the bar as it is and go to the next line."""
        if self._bar is not None:
            self._bar.file.write("\n")
            self._bar.file.flush()
            self._bar = None


class RankStream:
    """One rank's stdout or stderr on its way to ``file``."""

    def __init__(self, screen: Screen, rank: int, file: TextIO) -> None:
        """Prefix every line with the rank."""
        self.prefix = f"[{rank}] "
        self.file = file
        self._screen = screen
        self._pending = b""
        self._last_end = b"\n"

    def feed(self, data: bytes) -> None:
        """Write the lines that are complete with ``data``; with b"", the end, all that is left."""
        *parts, self._pending = re.split(rb"(\r?\n|\r)", self._pending + data)
        for raw, end in zip(parts[::2], parts[1::2], strict=True):
            text = raw.decode(errors="replace")
            if end == b"\r":
                if text:
                    self._screen.bar(self, text)
            elif text or self._last_end != b"\r":
                self._screen.line(self, text)
            else:
                self._screen.end_bar()
            self._last_end = end
        if self._pending and not data:
            self._screen.line(self, self._pending.decode(errors="replace"))
            self._pending = b""
        elif self._pending and self._last_end == b"\r":
            # A bar gets its line end only when it is redrawn: show it now.
            self._screen.bar(self, self._pending.decode(errors="replace"))
        self.file.flush()
