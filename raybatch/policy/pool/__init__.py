"""Decisions about the replicas of a pool: steals, migrations, autoscaling and their forecasts."""
