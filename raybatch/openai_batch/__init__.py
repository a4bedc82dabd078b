"""Batch files as OpenAI defines them, run as jobs: lines in, answers and errors out.

`reading` and the bodies turn lines into requests, `conversion` writes those as Parquet, `run` runs
a job for each form of them, and `answering` makes lines of what has come out.
"""
