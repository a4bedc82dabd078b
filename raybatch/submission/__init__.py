"""Jobs on a cluster: what is sent, to whom, what comes back, and files for job systems."""
