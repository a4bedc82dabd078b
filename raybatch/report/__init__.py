"""The account of a job, and how it is made again from what lies below its sink."""

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
