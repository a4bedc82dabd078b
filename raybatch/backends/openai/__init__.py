"""Engines behind endpoints that speak OpenAI's API."""
