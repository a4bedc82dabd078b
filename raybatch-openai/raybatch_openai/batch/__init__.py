"""OpenAI batch files, answered by jobs.

`requests` parses lines, `conversion` writes them as Parquet, `run` runs a job per form of requests,
and `writing` renders the answers. `export` and `collect` convert datasets to batch files and back.
"""
