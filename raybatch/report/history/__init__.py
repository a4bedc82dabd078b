"""What runs of a job did: recorded while they run, read from their logs, and drawn."""
