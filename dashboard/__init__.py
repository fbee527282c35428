"""What people look at: the report of a run as one page. Shows and calls; decides nothing of its own."""
