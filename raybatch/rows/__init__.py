"""From a row to a request, and from a completion to columns."""
