"""The report of a job, written at its end or rebuilt from the files below its sink."""

from raybatch.report.rebuild import counted_report, installed_versions, read_report, report_of
from raybatch.report.record import ErrorCount, RunReport

__all__ = [
    "ErrorCount",
    "RunReport",
    "counted_report",
    "installed_versions",
    "read_report",
    "report_of",
]
