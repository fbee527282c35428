"""The parts of `tune`: what recordings hold, jobs and who does them, the search, and what lies around its answer."""
