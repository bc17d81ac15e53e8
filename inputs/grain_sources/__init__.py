"""Grain, ArrayRecord, Parquet and Hugging Face data sets as rows."""
