"""A pool on a virtual clock: the queue, scheduler and blocks of real ones, and costs for models."""
