"""The plan of a job: fingerprint, order of rows, commit units, and storage."""
