"""What is asked of torch's hooks and graph."""
