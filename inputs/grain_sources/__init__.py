"""Readers of Grain, ArrayRecord, Parquet and Hugging Face data sets."""
