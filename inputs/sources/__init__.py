"""Sources of documents and examples."""
