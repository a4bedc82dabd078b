"""The Files and Batches API of OpenAI over HTTP, answered by jobs.

    HTTP (Ray Serve)   writes files, requests for batches and cancellations
    runner (driver)    takes batches one after another, and writes what becomes of each

Both work on one folder, in which every file has one writer and is written at once or not at all.
So a restart of either goes on with what lies there.
"""
