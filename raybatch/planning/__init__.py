"""The plan of a job: what decides its answers, its units, and where they are stored."""
