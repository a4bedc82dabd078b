"""The command `raybatch`."""
