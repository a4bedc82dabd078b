"""Ray shells: coordinator, replica, pool."""
