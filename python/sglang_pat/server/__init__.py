"""The engine's main process, between clients and the coordinator."""
