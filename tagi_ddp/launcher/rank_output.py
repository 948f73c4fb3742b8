"""The ranks' output on this process's stdout and stderr: whole lines that begin with the rank."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def standard_descriptors() -> Iterator[None]:
    """Open /dev/null at each of the descriptors 0 to 2 that is closed, during the block.

    Otherwise a pipe could get such a number, at which a rank has its own standard stream.
    """
    opened = []
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # It is the lowest free number.
        opened.append(descriptor)
    os.close(descriptor)
    try:
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)


class Output:
    """This process's stdout or stderr: Python's ``file``, or None if that is closed.

    All text is dropped if it is closed, and after an error, which ``error`` keeps for the launcher.
    """

    def __init__(self, file: TextIO | None) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, text: str) -> None:
        """Write text, with escapes for what the file's encoding lacks: no text may end the job."""
        if self._file is None:
            return
        try:
            try:
                self._file.write(text)
            except UnicodeEncodeError:
                encoding = getattr(self._file, "encoding", None) or "ascii"
                self._file.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except OSError as error:
            self._fail(error)

    def flush(self) -> None:
        """Flush the file."""
        try:
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        name = getattr(self._file, "name", "the output")
        text = f"what the ranks print cannot be written to {name}: {error.strerror or error}"
        self.error = OSError(error.errno, text)
        self._file = None


class Screen:
    """The terminal of all ranks; it keeps the stream of a bar on the unfinished last line."""

    def __init__(self) -> None:
        self._bar: RankStream | None = None

    def line(self, stream: RankStream, text: str) -> None:
        """Write a whole line: in place of the same stream's bar, or below another stream's bar."""
        if self._bar is stream:
            stream.file.write("\r")
        else:
            self.end_bar()
        self._bar = None
        stream.file.write(f"{stream.prefix}{text}\n")

    def bar(self, stream: RankStream, text: str) -> None:
        """Write a line that the next line of the stream replaces."""
        if self._bar is not stream:
            self.end_bar()
        self._bar = stream
        stream.file.write(f"\r{stream.prefix}{text}")

    def end_bar(self) -> None:
        """Keep the bar, if there is one, and start a new line."""
        if self._bar is not None:
            self._bar.file.write("\n")
            self._bar.file.flush()
            self._bar = None


class RankStream:
    """A rank's stdout or stderr, which is written to ``file``."""

    def __init__(self, screen: Screen, rank: int, file: Output, bars: bool = True) -> None:
        """Write to ``file``; unless ``bars``, write only the last state of a progress bar."""
        self.prefix = f"[{rank}] "
        self.file = file
        self._bars = bars
        self._screen = screen
        self._line = bytearray()  # the beginning of the next line
        self._half_end = b""  # a carriage return at the end, maybe the first half of a line end
        self._drawn: bytes | None = None
        self._in_bar = False

    def feed(self, data: bytes) -> None:
        """Write the lines that ``data`` completes; b"" is the end, and completes the last line."""
        # Split the new data only: a long line arrives in many pieces.
        *parts, tail = re.split(rb"(\r\n|\n|\r(?=[^\n]))", self._half_end + data)
        if parts:
            parts[0] = bytes(self._line) + parts[0]
            self._line.clear()
        text = tail.removesuffix(b"\r")
        self._half_end = tail[len(text) :]
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
            self._draw(bytes(self._line))  # Its line end arrives with the next state.
        self.file.flush()

    def _end_line(self, text: bytes) -> None:
        self._screen.line(self, text.decode(errors="backslashreplace"))
        self._drawn = None

    def _draw(self, text: bytes) -> None:
        if self._bars and text and text != self._drawn:
            self._screen.bar(self, text.decode(errors="backslashreplace"))
            self._drawn = text
