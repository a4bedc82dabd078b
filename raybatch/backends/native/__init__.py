"""The native engine as a backend."""
