"""The plan of a job: made from its whole input, written below the sink, and followed."""
