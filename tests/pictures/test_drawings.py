"""SVG and pages: well formed, labelled, and safe with user data."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from raybatch.pictures.charts import (
    ShareBar,
    draw_cards,
    draw_histogram,
    draw_icicle,
    draw_shares,
    element,
    text,
    ticks,
)
from raybatch.pictures.document import Figure, Section, Table, to_fragment, to_page, to_text
from raybatch.prefix.histogram import Histogram
from raybatch.prefix.tree import SummaryBox

EVIL = "</script></svg><img src=x onerror=alert(1)>\"'&\x00\u202e"


def box(**changes):
    values = {
        "row_start": 0,
        "row_stop": 50,
        "token_start": 0,
        "token_stop": 100,
        "level": 1,
        "num_nodes": 1,
        "saved_tokens": 4900,
        "example_row": 0,
    }
    return SummaryBox(**{**values, **changes})


def texts(svg):
    return [node.text for node in ElementTree.fromstring(svg).iter() if node.tag == "text"]


def bars(svg):
    """Return the attributes of the rectangles, as numbers where they are."""
    found = []
    for node in ElementTree.fromstring(svg).iter("rect"):
        found.append({k: v if k == "class" else float(v) for k, v in node.attrib.items()})
    return found


def test_attributes_and_text_are_escaped():
    svg = element("g", title='a"<', children=[text(0, 0, "<b>&")])
    assert svg == '<g title="a&quot;&lt;"><text x="0" y="0">&lt;b&gt;&amp;</text></g>'


def test_a_histogram_names_its_axes():
    svg = draw_histogram(Histogram.of(np.array([5, 900, 910])), x_name="prompt tokens")
    assert {"prompt tokens", "rows"} <= set(texts(svg))


def test_bars_of_a_histogram_are_as_high_as_their_counts():
    svg = draw_histogram(Histogram.of(np.array([1, 4, 4, 4])), x_name="tokens")
    low, high = bars(svg)
    assert high["height"] == pytest.approx(3 * low["height"], rel=1e-3)


def test_a_bar_is_no_wider_than_the_numbers_in_it():
    svg = draw_histogram(Histogram.of(np.full(9, 64)), x_name="tokens")
    (only,) = bars(svg)
    whole = bars(draw_histogram(Histogram.of(np.array([64, 79])), x_name="tokens"))
    assert only["width"] < whole[0]["width"] / 4
    assert "64 tokens: 9 rows" in svg


def test_bars_lie_within_the_drawing():
    svg = draw_histogram(Histogram.of(np.array([0, 1, 10**6])), x_name="tokens")
    width = float(ElementTree.fromstring(svg).get("viewBox").split()[2])
    assert all(0 <= bar["x"] and bar["x"] + bar["width"] <= width for bar in bars(svg))


def test_a_histogram_of_nothing_is_not_drawn():
    assert draw_histogram(Histogram(), x_name="tokens") == ""


@pytest.mark.parametrize(
    ("highest", "expected"), [(4, [0, 1, 2, 3, 4]), (7, [0, 2, 4, 6, 8]), (930, [0, 500, 1000])]
)
def test_ticks_are_round(highest, expected):
    assert expected == ticks(highest)


def test_bars_of_shares_are_as_long_as_their_shares():
    svg = draw_shares(
        [ShareBar(name="a", share=0.2), ShareBar(name="b", share=0.8, is_main=True)], label="rate"
    )
    short, long = bars(svg)
    assert long["width"] == pytest.approx(4 * short["width"])
    assert [short["class"], long["class"]] == ["bar other", "bar"]


def test_a_box_is_as_wide_as_its_rows_and_as_high_as_its_tokens():
    half = box(row_start=50, row_stop=100, token_start=100, token_stop=150, num_nodes=0)
    wide, narrow = bars(draw_icicle([box(row_stop=100), half], num_rows=100))
    assert wide["width"] == pytest.approx(2 * narrow["width"], rel=0.01)
    assert wide["height"] == pytest.approx(2 * narrow["height"], rel=0.02)
    assert narrow["y"] == pytest.approx(wide["y"] + wide["height"], abs=1)


def test_a_box_tells_its_rows_tokens_and_text():
    svg = draw_icicle([box(text="Once upon a time")], num_rows=100)
    (title,) = [node.text for node in ElementTree.fromstring(svg).iter("title")]
    expected = "prefix of 50 rows (50.0 %)\ntokens 0 to 100\nsharing saves 4,900 tokens"
    assert f"{expected}\nOnce upon a time" == title


def test_a_box_of_several_prefixes_says_how_many():
    svg = draw_icicle([box(num_nodes=1200)], num_rows=100)
    assert "1,200 prefixes of 50 rows" in svg
    assert "1,200 prefixes" in texts(svg)


def test_no_rows_are_not_drawn():
    assert draw_icicle([], num_rows=0) == ""


def sections():
    drawn = draw_icicle([box(text=EVIL)], num_rows=100)
    return [
        Section(
            title=EVIL,
            facts=((EVIL, EVIL),),
            table=Table(header=("a", EVIL), rows=((EVIL, "1"),)),
            notes=(EVIL,),
            figures=(Figure(title=EVIL, svg=drawn, caption=EVIL, is_wide=True),),
        )
    ]


@pytest.mark.parametrize("render", [to_page, to_fragment])
def test_user_data_is_no_markup(render):
    page = render(EVIL, sections())
    assert "<img" not in page
    assert "</script" not in page


def test_a_page_needs_nothing_from_elsewhere():
    page = to_page("title", sections())
    assert re.findall(r"<script|<link|<iframe|@import|url\(|https?:|src=x[^ ]", page) == []


def test_a_page_knows_dark_surroundings():
    assert "prefers-color-scheme:dark" in to_page("title", [])


def test_a_fragment_leaves_the_rest_of_a_notebook_alone():
    selectors = re.findall(r"(?:^|\})([^{}@]+)\{", to_fragment("t", []).split("<style>")[1])
    assert selectors
    assert all(selector.startswith((".raybatch", "@")) for selector in selectors)


def test_text_is_printable_ascii():
    shown = to_text(EVIL, sections())
    assert all(" " <= c <= "~" or c == "\n" for c in shown)


def test_text_is_aligned():
    table = Table(header=("order", "rate", "note"), rows=(("a", "9 %", "x"), ("long", "10 %", "")))
    shown = to_text("title", [Section(title="s", facts=(("name", "1"), ("b", "2")), table=table)])
    assert shown.split("\n") == [
        "title",
        "name  1",
        "b     2",
        "order  rate  note",
        "a       9 %  x",
        "long   10 %",
    ]


@pytest.mark.parametrize(("value", "kind"), [("1,000", "big"), ("1,000,000,000", "big long")])
def test_a_long_number_is_drawn_smaller(value, kind):
    drawn = draw_cards([("rows", value, None)], label="Audit")
    assert f'class="{kind}"' in drawn


def test_cards_are_drawings_of_their_own_that_take_as_many_lines_as_they_need():
    cards = [("rows", "1", None), ('l"ost', "<2>", False)]
    drawn = draw_cards(cards, label='Au"dit')
    assert drawn.count("<svg") == 2
    assert drawn.startswith('<div class="cards" role="group" aria-label="Au&quot;dit"><svg')
    assert "&lt;2&gt;" in drawn


def test_a_cell_knows_the_name_of_its_column_and_whether_it_is_long():
    table = Table(header=("class", 'a "b"'), rows=(("RenderError", "x" * 31), ("E", "y" * 30)))
    page = to_page("title", [Section(title="Errors", table=table)])
    assert '<td data-name="class">RenderError</td>' in page
    assert f'<td data-name="a &#34;b&#34;" class="long">{"x" * 31}</td>' in page
    assert f'<td data-name="a &#34;b&#34;">{"y" * 30}</td>' in page
    assert "@media (max-width:640px)" in page
