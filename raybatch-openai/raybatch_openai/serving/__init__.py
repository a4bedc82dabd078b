"""OpenAI's Files and Batches API over HTTP, answered by jobs.

    HTTP (Ray Serve)   writes files, requests for batches and cancellations
    runner (driver)    runs one batch after another, and writes their status

Both use one folder, in which each file has one writer and is written atomically, so that either of
them can restart and continue.
"""
