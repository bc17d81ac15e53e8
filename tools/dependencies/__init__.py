"""What depends on what: BUILD files, imports, locks, and their rules."""
