"""The engine of vLLM."""
