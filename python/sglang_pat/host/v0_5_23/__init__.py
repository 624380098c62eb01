"""What SGLang 0.5.23 has in another way than 0.5.12.post1."""
