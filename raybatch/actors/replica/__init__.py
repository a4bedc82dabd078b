"""One replica: an engine on a thread of its process, and the rows that it has."""
