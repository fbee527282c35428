"""Pages for people: shows results, computes nothing of its own."""
