"""The word list finds what it refuses, and nothing else."""

import sys

import pytest

from scripts import words

TIC = '"""Rows go to a queue of their own."""\n'
NAME = "class Mailbox:\n    pass\n"


def found_in(text: str, name: str = "raybatch/policy/plan.py") -> list[tuple[int, str]]:
    return [(line, text) for line, text, _ in words.find_words(text, name)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TIC, [(1, "of their own")]),
        (NAME, [(1, "Mailbox")]),
        ("x = 1\n# an engine that goes\ny = 'so  many bytes'\n", [(3, "so many")]),
        ('"""A summary.\n\nThe job goes\non later.\n"""\n', [(3, "goes on")]),
        ('"""Rows of a `Mailbox` wait."""\n', [(1, "Mailbox")]),
    ],
)
def test_a_planted_word_is_found_with_its_line(text: str, expected: list[tuple[int, str]]):
    assert found_in(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        '"""Write the file beside its folder, round robin."""\n',
        "owner = copy(team)\n",
        'column = "told"\n',
        'f"{told} rows of a job"\n',
        "[`raybatch_teams_total`](teams.md) counts groups.\n",
    ],
)
def test_standard_english_and_stored_names_pass(text: str):
    name = "docs/page.md" if text.startswith("[") else "raybatch/policy/plan.py"
    assert found_in(text, name) == []


def test_a_word_passes_where_it_is_allowed():
    text = '"""Return the tiles of a product."""\n'
    assert found_in(text, "raybatch/kernels/triton/tiles.py") == []
    assert found_in(text) == [(1, "tiles")]


def test_a_replacement_is_no_refused_word():
    texts = " ".join(word.instead for word in words.WORDS)
    assert found_in(f'"""{texts}."""\n') == []


def test_the_script_ends_with_1_and_says_where_and_what(tmp_path, monkeypatch, capsys):
    path = tmp_path / "page.md"
    path.write_text("A row is told anew.\n")
    monkeypatch.setattr(sys, "argv", ["words.py", str(path)])
    assert words.main() == 1
    out = capsys.readouterr().out
    assert f"{path}:1: 'anew': write again" in out
    path.write_text("The row is reported again.\n")
    assert words.main() == 0
