"""Running jobs on a cluster: submission to a Ray job server, and manifests for job systems."""
