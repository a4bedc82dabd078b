"""Rendezvous of engines in several processes, and shared memory on one host."""
