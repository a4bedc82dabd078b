"""The search for a batch: layers as a graph, its critical path, saturation."""
