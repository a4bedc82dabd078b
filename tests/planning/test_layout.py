import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.planning.layout_lint import MAX_EXACT_FIELDS, TemplateField, advise_layout


def value_text(field, value, length):
    """A text that shares no beginning with the texts of other values."""
    return chr(1000 + 100 * field + value) * length


def label_text(field, length):
    return chr(500 + field) * length


def counted_hit_rate(order, rows, lengths, labels, head, tail, block_size):
    """Render every prompt as a string and look its blocks up in a set; last token computed."""
    seen, cached, total = set(), 0, 0
    for row in rows:
        prompt = "^" * head
        for field in order:
            prompt += label_text(field, labels[field])
            prompt += value_text(field, row[field], lengths[field][row[field]])
        prompt += "$" * tail
        blocks = [prompt[:end] for end in range(block_size, len(prompt), block_size)]
        cached += block_size * sum(block in seen for block in blocks)
        seen.update(blocks)
        total += len(prompt)
    return cached / total


def template_fields(rows, lengths, labels):
    columns = np.array(rows, np.int64).T
    return [
        TemplateField(
            name=f"f{i}",
            value_ids=columns[i] * 7 - 3,
            num_tokens=np.array([lengths[i][v] for v in columns[i]]),
            label_tokens=labels[i],
        )
        for i in range(len(lengths))
    ]


@st.composite
def templates(draw, max_fields=4):
    num_fields = draw(st.integers(1, max_fields))
    value = st.integers(0, 3)
    row = st.lists(value, min_size=num_fields, max_size=num_fields)
    rows = draw(st.lists(row, min_size=1, max_size=14))
    # a first value of one token or more keeps every prompt from being empty
    length = st.lists(st.integers(1, 9), min_size=4, max_size=4)
    lengths = draw(st.lists(length, min_size=num_fields, max_size=num_fields))
    labels = draw(st.lists(st.integers(0, 4), min_size=num_fields, max_size=num_fields))
    return rows, lengths, labels, draw(st.integers(0, 7)), draw(st.integers(0, 7))


@settings(deadline=None)
@given(templates(), st.integers(1, 5))
def test_the_advice_is_the_best_of_all_permutations_of_real_strings(template, block_size):
    rows, lengths, labels, head, tail = template
    rates = {
        order: counted_hit_rate(order, rows, lengths, labels, head, tail, block_size)
        for order in itertools.permutations(range(len(lengths)))
    }
    advice = advise_layout(
        template_fields(rows, lengths, labels),
        head_tokens=head,
        tail_tokens=tail,
        block_size=block_size,
    )
    assert rates[tuple(range(len(lengths)))] == pytest.approx(advice.used.hit_rate)
    assert max(rates.values()) == pytest.approx(advice.best.hit_rate)
    best = tuple(int(name[1:]) for name in advice.best.fields)
    assert rates[best] == pytest.approx(advice.best.hit_rate)


def column(name, values, length, label=0):
    values = np.array(values, np.int64)
    return TemplateField(
        name=name, value_ids=values, num_tokens=np.full(len(values), length), label_tokens=label
    )


DOCUMENT = column("document", np.repeat(np.arange(10), 10), 200, label=3)
QUESTION = column("question", np.arange(100), 10, label=2)


def test_the_sentence_names_the_move_and_both_rates():
    advice = advise_layout([QUESTION, DOCUMENT], head_tokens=32)
    assert (
        "putting {document} before {question} raises the hit rate from 14 % to 88 %" == advice.text
    )


def test_the_best_order_in_use_is_kept():
    advice = advise_layout([DOCUMENT, QUESTION])
    assert advice.used == advice.best


def test_a_longer_way_to_the_best_order_lists_all_fields():
    names = column("name", np.repeat(np.arange(20), 5), 50)
    advice = advise_layout([QUESTION, names, DOCUMENT])
    assert advice.text.startswith("the order {document}, {name}, {question} raises")


def test_equal_orders_leave_the_template_as_it_is():
    fields = [column("a", [0, 0, 1, 1], 5), column("b", [0, 0, 1, 1], 5)]
    assert ("a", "b") == advise_layout(fields).best.fields


def test_sharing_is_counted_in_whole_blocks():
    fields = [column("a", [0, 0], 20), column("b", [0, 1], 20)]
    assert 16 / 80 == advise_layout(fields, block_size=16).used.hit_rate


def test_many_fields_are_ordered_greedily():
    rows = np.arange(256)
    fields = [column(f"f{i}", rows // 2**i, 10) for i in range(8)]
    assert len(fields) > MAX_EXACT_FIELDS
    assert tuple(f"f{i}" for i in range(7, -1, -1)) == advise_layout(fields).best.fields


def test_a_short_key_does_not_come_before_a_long_document():
    rows = np.arange(64)
    others = [column(f"f{i}", rows // 32, 1) for i in range(6)]
    fields = [column("id", rows, 1), *others, column("document", rows // 4 * 5 % 16, 300)]
    best = advise_layout(fields).best.fields
    assert ("document", "id") == (best[best.index("document")], best[-1])


def test_moving_one_field_back_is_said_so():
    names = column("name", np.repeat(np.arange(20), 5), 50)
    text = advise_layout([QUESTION, DOCUMENT, names]).text
    assert text.startswith("putting {question} after {name} raises")


@settings(deadline=None, max_examples=25)
@given(templates(max_fields=2))
def test_greedy_orders_are_never_worse_than_the_one_in_use(template):
    rows, lengths, labels, head, tail = template
    fields = template_fields([row * 4 for row in rows], lengths * 4, labels * 4)
    advice = advise_layout(fields, head_tokens=head, tail_tokens=tail)
    assert advice.used.hit_rate <= advice.best.hit_rate


def test_no_rows_have_no_hits():
    empty = column("a", [], 5)
    assert 0.0 == advise_layout([empty]).used.hit_rate


def test_a_template_without_fields_is_refused():
    with pytest.raises(AssertionError, match="without fields"):
        advise_layout([])
