"""The lines that the ranks' output becomes, whatever pieces it arrives in."""

import io
import itertools

from hypothesis import given
from hypothesis import strategies as st

from tagi_ddp.launcher.rank_output import Output, RankStream, Screen

TEXT = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=5)


def cut(data, places):
    """Cut bytes at the given places."""
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges) if a < b]


@given(st.lists(st.tuples(TEXT, st.sampled_from(["\n", "\r\n"]))), TEXT, st.lists(st.integers(0)))
def test_lines_do_not_depend_on_the_pieces(lines, rest, places):
    data = "".join(text + end for text, end in lines) + rest
    file = io.StringIO(newline="")
    stream = RankStream(Screen(), 3, Output(file))
    for piece in cut(data.encode(), places):
        stream.feed(piece)
    stream.feed(b"")
    expected = [f"[3] {text}" for text, _ in lines] + ([f"[3] {rest}"] if rest else [])
    shown = [line.rpartition("\r")[2] for line in file.getvalue().split("\n")]
    assert shown == [*expected, ""]


def test_a_long_line_arrives_whole():
    file = io.StringIO(newline="")
    stream = RankStream(Screen(), 0, Output(file))
    text = "é" * 100_000
    for piece in cut(f"{text}\r\n".encode(), range(0, 200_000, 1001)):
        stream.feed(piece)
    assert file.getvalue() == f"[0] {text}\n"


def test_what_the_encoding_lacks_is_escaped():
    file = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    RankStream(Screen(), 0, Output(file)).feed("é →".encode() + b" \xff\n")
    assert file.buffer.getvalue() == b"[0] \xe9 \\u2192 \\xff\n"


@given(st.lists(TEXT.filter(bool), min_size=1), st.lists(st.integers(0)))
def test_a_bar_is_redrawn_in_place_and_its_last_state_stays(states, places):
    data = "".join("\r" + state for state in states) + "\n"
    file = io.StringIO(newline="")
    stream = RankStream(Screen(), 0, Output(file))
    for piece in cut(data.encode(), places):
        stream.feed(piece)
    (line, end) = file.getvalue().split("\n")
    assert line.rpartition("\r")[2] == f"[0] {states[-1]}"
    assert end == ""


def test_a_bar_is_shown_before_its_line_ends():
    file = io.StringIO(newline="")
    RankStream(Screen(), 0, Output(file)).feed(b"\r 10%")
    assert file.getvalue() == "\r[0]  10%"


def test_another_ranks_line_comes_below_the_bar():
    file, screen = io.StringIO(newline=""), Screen()
    bar, other = RankStream(screen, 0, Output(file)), RankStream(screen, 1, Output(file))
    bar.feed(b"\r 10%")
    other.feed(b"hello\n")
    bar.feed(b"\r 20%\n")
    assert file.getvalue() == "\r[0]  10%\n[1] hello\n[0]  20%\n"


def test_bars_of_two_ranks_take_a_line_each():
    file, screen = io.StringIO(newline=""), Screen()
    for rank in range(2):
        RankStream(screen, rank, Output(file)).feed(b"\r 10%")
    screen.end_bar()
    assert file.getvalue() == "\r[0]  10%\n\r[1]  10%\n"
