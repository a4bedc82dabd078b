"""Tables of Delta Lake, Iceberg and Lance, and datasets of the Hugging Face hub, for raybatch.

`publish` adds the rows of a finished output to a table, in one commit that is never made twice.
"""

from raybatch_tables.publishing import Publication, publish

__all__ = ["Publication", "publish"]
