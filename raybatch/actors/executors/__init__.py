"""Where the processes of a pool run: as actors of Ray, or on this host without it."""
