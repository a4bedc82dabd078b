"""The account of a job, and how it is made again from what lies below its sink."""

from raybatch.report.rebuild import counted_report, installed_versions, read_report, report_of
from raybatch.report.record import ErrorCount, RunReport, error_counts, report_path

__all__ = [
    "ErrorCount",
    "RunReport",
    "counted_report",
    "error_counts",
    "installed_versions",
    "read_report",
    "report_of",
    "report_path",
]
