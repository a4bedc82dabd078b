"""The engine of Hugging Face transformers, for models that no other engine runs."""
