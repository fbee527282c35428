"""Recordings of routing: schema, Parquet files, timelines, analysis."""
