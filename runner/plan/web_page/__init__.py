"""Plans as one HTML page that needs no network and no scripts."""
