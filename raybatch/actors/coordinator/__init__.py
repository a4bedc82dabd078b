"""The coordinator of a pool: which replica has which rows, what came back, and its figures."""
