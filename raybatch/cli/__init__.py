"""The command `raybatch`: flags in, jobs and commands out."""
