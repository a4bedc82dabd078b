"""One model over several engines: what each rank multiplies, and how they compute a step."""
