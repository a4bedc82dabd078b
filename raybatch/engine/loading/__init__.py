"""From a config and a device to a model that runs: budgets, weights, graphs."""
