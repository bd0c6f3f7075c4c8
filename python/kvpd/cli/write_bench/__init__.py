"""What `kvpd bench write` is made of."""
