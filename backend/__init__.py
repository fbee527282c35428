"""The live engine: policies, models, expert memory, prediction. Importing this package does not import torch."""
