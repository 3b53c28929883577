"""What one GPU does with gnomon: see __main__.py."""
