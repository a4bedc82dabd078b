"""The folders of this repository with code that users install; the first is raybatch itself."""

DISTRIBUTIONS = (
    "raybatch",
    "raybatch-extensions",
    "raybatch-openai",
    "raybatch-submit",
    "raybatch-tables",
)
