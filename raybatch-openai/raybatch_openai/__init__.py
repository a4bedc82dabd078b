"""OpenAI's API for raybatch: endpoints as engines, batch files, and a server, answered by jobs.

A separate distribution in the repository of raybatch: `pip install -e ./raybatch-openai`. raybatch
finds its backend (`endpoint`) and its `commands` by entry points.
"""
