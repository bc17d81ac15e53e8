"""Dependencies: BUILD files, imports, locks, and their rules."""
