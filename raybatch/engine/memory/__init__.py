"""KV memory: the pool on the device, the pool in host memory, and copies between them."""
