"""Input sources: files and their formats, with limits against malicious files."""
