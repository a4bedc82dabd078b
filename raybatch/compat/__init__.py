"""The processors of ray.data.llm, on the stages of this package."""
