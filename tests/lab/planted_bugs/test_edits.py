import ast

from raybatch_lab.planted_bugs.edits import edited_lines, edits_of

SOURCE = '''"""A module."""

LIMIT = 3


def fits(size, limit=LIMIT):
    """Return whether it fits."""
    if size < 0:
        raise ValueError(f"{size + 1} is below 1")
    logger.info("%d of %d", size, 4)
    found = [size]
    found[0] += 2
    return not found[0:1] or size <= limit


def also_fits(size, limit=LIMIT):
    """Return whether it fits."""
    if size < 0:
        raise ValueError("too small")
    return size <= limit
'''


def edits(function="fits"):
    found = [edit for edit in edits_of(SOURCE) if edit.function == function]
    return [(edit.kind, SOURCE[edit.start : edit.end], edit.text) for edit in found]


def test_every_kind_of_edit_is_found_in_its_place():
    assert edits() == [
        ("branch", "size < 0", "False"),
        ("branch", "size < 0", "True"),
        ("comparison", "<", "<="),
        ("constant", "0", "1"),
        ("dropped", 'raise ValueError(f"{size + 1} is below 1")', "pass"),
        ("dropped", "found[0] += 2", "pass"),
        ("constant", "2", "3"),
        ("logic", "not found[0:1]", "found[0:1]"),
        ("slice", "0", ""),
        ("constant", "0", "1"),
        ("slice", "1", ""),
        ("constant", "1", "2"),
        ("logic", "or", "and"),
        ("comparison", "<=", "<"),
    ]


def test_texts_logs_and_what_is_outside_of_functions_are_left_alone():
    edited = {SOURCE[: edit.start].count("\n") + 1 for edit in edits_of(SOURCE)}
    assert not edited & {1, 3, 6, 7, 10}


def test_the_lines_of_an_edit_are_in_the_source_once_however_often_the_edited_line_is():
    for edit in edits_of(SOURCE):
        anchor, replacement = edited_lines(SOURCE, edit)
        assert f"\n{SOURCE}".count(f"\n{anchor}\n") == 1
        after = SOURCE.replace(anchor, replacement)
        assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(SOURCE))


def test_a_line_that_is_there_twice_comes_with_its_neighbours():
    first = next(edit for edit in edits_of(SOURCE) if edit.function == "also_fits")
    anchor, replacement = edited_lines(SOURCE, first)
    assert anchor.endswith('    if size < 0:\n        raise ValueError("too small")')
    assert replacement == anchor.replace("size < 0", "False")
