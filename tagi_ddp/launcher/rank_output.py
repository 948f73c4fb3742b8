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
            stream.write("\r")
        else:
            self.end_bar()
        self._bar = None
        stream.write(f"{stream.prefix}{text}\n")

    def bar(self, stream: RankStream, text: str) -> None:
        """Write a line that the stream's next one replaces."""
        if self._bar is not stream:
            self.end_bar()
        self._bar = stream
        stream.write(f"\r{stream.prefix}{text}")

    def end_bar(self) -> None:
        """Leave the bar as it is and go to the next line."""
        if self._bar is not None:
            self._bar.write("\n")
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
        self._line = bytearray()  # what has come of the next line
        self._half_end = b""  # a carriage return at the end of the data, maybe half of a line end
        self._drawn: bytes | None = None
        self._in_bar = False

    def feed(self, data: bytes) -> None:
        """Write the lines that are complete with ``data``; with b"", the end, all that is left."""
        # Only what is new: a long line comes in many pieces.
        *parts, rest = re.split(rb"(\r\n|\n|\r(?=[^\n]))", self._half_end + data)
        if parts:
            parts[0] = bytes(self._line) + parts[0]
            self._line.clear()
        text = rest.removesuffix(b"\r")
        self._half_end = rest[len(text) :]
        self._line += text
        for text, end in zip(parts[::2], parts[1::2], strict=True):
            self._in_bar = end == b"\r"
            if self._in_bar:
                self._draw(text)
            else:
                self._end_line(text)
        if not data and self._line:
            self._end_line(bytes(self._line))
        elif self._in_bar or self._half_end:
            self._draw(bytes(self._line))  # its line end comes only with the next state of the bar
        self.file.flush()

    def write(self, text: str) -> None:
        """Write to the file; what its encoding lacks as escapes, for no text may end the job."""
        try:
            self.file.write(text)
        except UnicodeEncodeError:
            encoding = getattr(self.file, "encoding", None) or "ascii"
            self.file.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def _end_line(self, text: bytes) -> None:
        self._screen.line(self, text.decode(errors="backslashreplace"))
        self._drawn = None

    def _draw(self, text: bytes) -> None:
        if self._bars and text and text != self._drawn:
            self._screen.bar(self, text.decode(errors="backslashreplace"))
            self._drawn = text
