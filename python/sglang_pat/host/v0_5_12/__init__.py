"""What SGLang 0.5.12 and 0.5.12.post1 have in another way than 0.5.23."""
