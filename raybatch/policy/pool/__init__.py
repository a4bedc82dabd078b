"""What the engines of a pool do together: who gives rows to whom, which rows move, and where."""
