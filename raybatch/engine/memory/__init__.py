"""The memory of KV: the cache of the device, the pool of the host, copies between them."""
