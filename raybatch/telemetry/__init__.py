"""OpenTelemetry for those who ask for it by its environment variables; nothing is loaded else."""
