"""Model families: configuration, tensor names, dense blocks."""
