"""`raybatch bench gpu`: correctness checks and measurements of a device, as a report."""
