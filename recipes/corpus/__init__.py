"""Corpus recipe: fetch freely redistributable packages, turn them into clean text, split, tokenise."""
