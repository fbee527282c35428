"""One file per page; each has `page(view)`."""
