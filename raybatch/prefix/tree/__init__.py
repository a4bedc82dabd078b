"""The prefix tree of all prompts, what is enlarged in it, and its groups."""
