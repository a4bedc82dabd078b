"""The replicas of a pool: how many, on which hosts, how they are started and started again."""
