"""How engines of several processes find each other, and share memory on one host."""
