"""Running raybatch jobs on a cluster: Ray's job server, and manifests for job systems.

A separate distribution in the repository of raybatch: `pip install -e ./raybatch-submit`. The
command line of raybatch finds its `commands` by entry points.
"""
