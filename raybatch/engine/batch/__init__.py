"""From the schedule of a step to the index tensors of its forward batch."""
