"""What runs in the server's process, between clients and the coordinator."""
