"""What is read: sources, files and their formats, with limits for hostile ones."""
