"""OpenAI batch files and OpenAI's Batch API, answered by raybatch jobs.

A separate distribution in the repository of raybatch: `pip install -e ./raybatch-openai`. The
command line of raybatch finds its `commands` by entry points.
"""
