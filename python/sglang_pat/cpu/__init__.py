"""What only ranks without a GPU need."""
