"""Jobs: their options, runs, output order and limits."""
