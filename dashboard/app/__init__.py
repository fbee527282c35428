"""The dashboard: a Streamlit app that shows what profile, recording, simulator, tuner and a live engine say.

It computes nothing of its own. `main.py` is what Streamlit runs; `foreload dashboard` starts it.
"""
