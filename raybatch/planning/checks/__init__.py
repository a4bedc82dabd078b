"""What is checked of the input, and of a stored plan, before a row runs."""
