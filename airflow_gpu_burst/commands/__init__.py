"""What `gpu-burst` does from a shell, one module for each command. Nothing is imported before its command is given."""
