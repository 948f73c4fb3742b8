"""The ranks' output on this process's stdout and stderr: whole lines that carry the rank."""

from __future__ import annotations

import re
from typing import TextIO


class Screen:
    """Where all ranks write; remembers whose progress bar is on the unfinished last line."""

    def __init__(self) -> None:
        self._bar: RankStream | None = None

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
        self._bar = stream
        stream.file.write(f"\r{stream.prefix}{text}")

    def end_bar(self) -> None:
        """Leave the bar as it is and go to the next line."""
        if self._bar is not None:
            self._bar.file.write("\n")
            self._bar.file.flush()
            self._bar = None


class RankStream:
    """One rank's stdout or stderr on its way to ``file``."""

    def __init__(self, screen: Screen, rank: int, file: TextIO, bars: bool = True) -> None:
        """Write to ``file``; of bars only the last state, unless ``bars`` are seen as such."""
        self.prefix = f"[{rank}] "
        self.file = file
        self._screen = screen
        self._bars = bars
        self._pending = b""
        self._drawn: bytes | None = None
        self._in_bar = False

    def feed(self, data: bytes) -> None:
        """Write the lines that are complete with ``data``; with b"", the end, all that is left."""
        # A carriage return at the end of the data may be half of a line end.
        *parts, self._pending = re.split(rb"(\r?\n|\r(?=[^\n]))", self._pending + data)
        for text, end in zip(parts[::2], parts[1::2], strict=True):
            self._in_bar = end == b"\r"
            if self._in_bar:
                self._draw(text)
            else:
                self._end_line(text)
        text = self._pending.removesuffix(b"\r")
        if not data and text:
            self._end_line(text)
        elif self._in_bar or text != self._pending:
            self._draw(text)  # its line end comes only with the next state of the bar
        self.file.flush()

    def _end_line(self, text: bytes) -> None:
        self._screen.line(self, text.decode(errors="replace"))
        self._drawn = None

    def _draw(self, text: bytes) -> None:
        if self._bars and text and text != self._drawn:
            self._screen.bar(self, text.decode(errors="replace"))
            self._drawn = text
