"""Parsed fields of a text survive a round trip through JSON."""

from hypothesis import given
from hypothesis import strategies as st

from raybatch.records.parsed_text import ParsedText, ToolCall

CALLS = st.builds(ToolCall, id=st.text(), name=st.text(), arguments=st.text())
PARSED = st.builds(
    ParsedText,
    reasoning=st.none() | st.text(),
    tool_calls=st.lists(CALLS, max_size=3).map(tuple),
    error=st.text(),
)


@given(PARSED)
def test_json_gives_back_what_it_was_made_of(parsed):
    assert ParsedText.from_json(parsed.to_json()) == parsed


def test_a_call_is_what_a_message_of_openai_has():
    call = ToolCall(id="c", name="add", arguments='{"a": 1}')
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert call.to_openai() == {"id": "c", "type": "function", "function": function}
