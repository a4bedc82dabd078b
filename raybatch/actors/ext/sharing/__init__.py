"""Weight sharing between replicas of one host, and the choice of its mode (mechanisms S10, S13)."""
