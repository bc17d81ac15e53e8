"""What a run leaves for its user: figures, event files, progress, a report."""
