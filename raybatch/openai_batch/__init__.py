"""Batch files as OpenAI defines them, run as jobs: lines in, answers and errors out.

`requests` reads what a line asks, `conversion` writes that as Parquet, `run` runs a job for each
form of requests, and `writing` makes lines of what has come out.
"""
