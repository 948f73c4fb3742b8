"""The check of docstrings finds what it should."""

import pytest
from support.docstrings import wrong


@pytest.mark.parametrize("word", ["What", "Who", "Whether", "Let", "Tell", "How", "Which", "Where"])
def test_a_question_is_found(word):
    source = f'def f():\n    """{word} is this."""\n'
    assert list(wrong(source)) == [(1, f"{word} is this.")]


def test_verbs_and_nouns_are_not():
    assert not list(wrong('"""Letters of ranks."""\n\n\nclass A:\n    """Return it."""\n'))
