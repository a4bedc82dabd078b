"""An engine that answers without a model, for tests and for measuring what is around engines."""
