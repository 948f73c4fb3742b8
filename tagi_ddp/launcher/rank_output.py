"""The ranks' output: whole lines, on this process's streams behind the rank, or in files."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TextIO

from tagi_ddp.environment import shows_bars


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


class RankOutputs:
    """The destinations of what the ranks print: this process's streams, files, or both.

    With ``folder``, rank 3 has the file ``rank-3.log`` there, to which it appends the lines of
    both its streams. With ``tee``, the streams of this process have them, too.
    """

    def __init__(self, folder: Path | None = None, tee: bool = False) -> None:
        """Make the folder; raise OSError if that is impossible."""
        self._screen = Screen()
        self._stdout, self._stderr = Output(sys.stdout), Output(sys.stderr)
        self._folder = folder
        self._shows = tee or folder is None
        self._files: dict[int, Output] = {}
        self._open = ExitStack()
        if folder is not None:
            with _named(folder):
                folder.mkdir(parents=True, exist_ok=True)

    def of(self, rank: int) -> list[Callable[[bytes], None]]:
        """Return the functions that take the pieces of stdout and stderr of a new process."""
        log, own_screen = self._file_of(rank), Screen()
        takes: list[Callable[[bytes], None]] = []
        for output, file in ((self._stdout, sys.stdout), (self._stderr, sys.stderr)):
            streams = []
            if self._shows:
                streams.append(RankStream(self._screen, rank, output, shows_bars(file)))
            if log is not None:
                streams.append(RankStream(own_screen, rank, log, bars=False))
                streams[-1].prefix = ""
            takes.append(partial(_feed, streams))
        return takes

    def _file_of(self, rank: int) -> Output | None:
        if self._folder is not None and rank not in self._files:
            path = self._folder / f"rank-{rank}.log"
            with _named(path):
                file = path.open("a", encoding="utf-8")
            self._open.callback(file.close)
            self._files[rank] = Output(file)
        return self._files.get(rank)

    def print(self, text: str) -> None:
        """Print a line of the launcher on stderr."""
        self.end()
        self._stderr.write(f"tagi-ddp: {text}\n")
        self._stderr.flush()

    def end(self) -> None:
        """Keep the bar that is shown, if there is one, and start a new line."""
        self._screen.end_bar()

    def check(self) -> None:
        """Raise OSError if output of the ranks could not be written."""
        for output in (self._stdout, self._stderr, *self._files.values()):
            if output.error is not None:
                raise output.error

    def close(self) -> None:
        """Close the files."""
        self._open.close()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the path in an OSError of the block."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"--log-dir: {path}: {error.strerror}") from error


def _feed(streams: list[RankStream], data: bytes) -> None:
    for stream in streams:
        stream.feed(data)
