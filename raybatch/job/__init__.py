"""A job: its options, one run of it, the order of its output, its end."""
