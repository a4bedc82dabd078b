"""Where the report of a job lies."""

REPORT_PATH = "_raybatch/report.json"
PAGE_PATH = "_raybatch/report.html"


def report_path(sink: str) -> str:
    """Return where the report of `sink` lies."""
    return f"{sink.rstrip('/')}/{REPORT_PATH}"
